# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of a reward server: routes, limits, and what each error is answered with."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from omnitrl.errors import InputError
from omnitrl.rewards.contract import RewardError, RewardFunc, RewardUnavailable
from omnitrl.rewards.results import Answer

from .service import RewardService, ServiceFull
from .wire import FULL_HEADER, Request, checked_token, pack_answer, unpack_request


logger = logging.getLogger("omnitrl.rewards.remote")

_RETRY_SECONDS = 1.0
_GONE = 499  # nginx's number for a client that did not wait; nobody reads it


class _BadRequest(InputError):
    """A request that can never be answered, whatever the reward says."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


def reward_app(
    reward: RewardFunc,
    name: str | None = None,
    token: str | None = None,
    batch_size: int | None = None,
    timeout: float | None = None,
    max_requests: int = 64,
    max_concurrency: int = 8,
    max_body_bytes: int = 2**30,
    device: str | None = None,
) -> Starlette:
    """
    The ASGI application behind `omnitrl serve-reward`, for a server of one's own.

    Args:
        reward (`Callable`):
            The reward.
        name (`str`, *optional*):
            By default that of the function.
        token (`str`, *optional*):
            What clients must send as `Authorization: Bearer …`; without one, everybody may ask.
        batch_size (`int`, *optional*):
            Most rows of one call, by default that of the reward's traits. Requests that wait are joined up to it, and
            larger ones are cut. Without one, each request is a call.
        timeout (`float`, *optional*):
            Seconds that one call may take.
        max_requests (`int`, defaults to `64`):
            Requests that are held at once. More are answered with 503, and clients ask again.
        max_concurrency (`int`, defaults to `8`):
            Calls of an asynchronous reward at once; a synchronous one is called once at a time.
        max_body_bytes (`int`, defaults to `2**30`):
            Largest request.
        device (`str`, *optional*):
            Where a reward that is a model is moved.

    Returns:
        `starlette.applications.Starlette`: with `/health`, `/info` and `/score`.

    Example:

    ```python
    >>> import uvicorn  # doctest: +SKIP
    >>> uvicorn.run(reward_app(my_reward), port=8100)  # doctest: +SKIP
    ```
    """
    service = RewardService(reward, name, batch_size, timeout, max_requests, max_concurrency, device)
    return _Routes(service, token, max_body_bytes).app()


class _Routes:
    """Answers requests, with one line of the log for each."""

    def __init__(self, service: RewardService, token: str | None, max_body_bytes: int):
        if max_body_bytes <= 0:
            raise InputError(f"max_body_bytes={max_body_bytes} must be more than 0, for example {2**30}.")
        self._service = service
        self._token = None if token is None else checked_token(token)
        self._max_body_bytes = max_body_bytes
        self._info = dataclasses.asdict(service.info(max_body_bytes))

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/info", self.info),
            Route("/score", self.score, methods=["POST"]),
        ]
        handlers = {HTTPException: _wrong_route}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    async def health(self, request: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok", "requests": self._service.inside})

    async def info(self, request: HTTPRequest) -> Response:
        response = self._refused(request) or JSONResponse(self._info)
        _log(request, response, "")
        return response

    async def score(self, request: HTTPRequest) -> Response:
        start = time.perf_counter()
        notes: list[str] = []
        try:
            response = await self._score(request, notes)
        except Exception as error:
            response = _error_response(error)
        if response.status_code != 200:
            await _drain(request, self._max_body_bytes)
            notes.append(_sentence_of(response))
        _log(request, response, ", ".join([*notes, f"{time.perf_counter() - start:.3f} s"]))
        return response

    async def _score(self, request: HTTPRequest, notes: list[str]) -> Response:
        refused = self._refused(request)
        if refused is not None:
            return refused
        with self._service.room():
            body = await _body(request, self._max_body_bytes)
            asked = await asyncio.to_thread(_unpacked, body)
            notes.append(f"{asked.rows} rows, {len(body) / 1e6:.1f} MB")
            del body
            answer = await _unless_gone(request, self._service, asked)
            return Response(await asyncio.to_thread(_packed, answer), media_type="application/octet-stream")

    def _refused(self, request: HTTPRequest) -> Response | None:
        """What a request without the token gets."""
        if self._token is None:
            return None
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return _error(401, "this reward server wants a token: set OMNITRL_REWARD_TOKEN, or give RemoteReward a token.")

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._service.start()
        try:
            yield
        finally:
            await self._service.close()


async def _body(request: HTTPRequest, limit: int) -> bytes:
    parts: list[bytes] = []
    size = int(request.headers.get("content-length", 0))
    if size <= limit:
        size = 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > limit:
                break
    if size > limit:
        raise _BadRequest(
            413,
            f"the request has more than the {limit} bytes that this server takes: start it with a larger "
            f"--max_body_mb, or score smaller batches.",
        )
    return b"".join(parts)


async def _drain(request: HTTPRequest, limit: int) -> None:
    """Reads what a client is still sending, for it would take a connection that is closed before for a broken one."""
    size = 0
    with contextlib.suppress(ClientDisconnect, RuntimeError):  # it has gone, or all was read
        async for part in request.stream():
            size += len(part)
            if size > 2 * limit:
                return


async def _unless_gone(request: HTTPRequest, service: RewardService, asked: Request) -> Answer:
    """The answer, unless the client goes before it is there, as one does that gave up or was ended."""
    scoring = asyncio.ensure_future(service.score(asked))
    going = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({scoring, going}, return_when=asyncio.FIRST_COMPLETED)
        if scoring.done():
            return scoring.result()
        raise ClientDisconnect
    finally:
        scoring.cancel()
        going.cancel()


async def _gone(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _unpacked(body: bytes) -> Request:
    try:
        return unpack_request(body)
    except InputError as error:
        raise _BadRequest(400, str(error)) from error


def _packed(answer: Answer) -> bytes:
    try:
        return pack_answer(answer)
    except InputError as error:
        raise RewardError(f"log_extra of the reward: {error}") from error


def _error_response(error: Exception) -> Response:
    """
    What an exception is answered with.

    A client ends the run at 4xx, waits at 503, and asks again a few times at 500.
    """
    if isinstance(error, ClientDisconnect):
        return _error(_GONE, "the client has gone.")
    if isinstance(error, ServiceFull):
        response = _error(503, str(error), _RETRY_SECONDS)
        response.headers[FULL_HEADER] = "1"
        return response
    if isinstance(error, RewardUnavailable):
        return _error(503, str(error), error.retry_after)
    if isinstance(error, RewardError | ImportError):
        return _error(422, str(error))
    if isinstance(error, _BadRequest):
        return _error(error.status, str(error))
    logger.error("The reward failed:", exc_info=error)
    return _error(500, f"{type(error).__name__}: {error}")


async def _wrong_route(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{error.detail}: there are GET /health, GET /info and POST /score here.")


def _error(status: int, sentence: str, retry_after: float | None = None) -> Response:
    headers = {} if retry_after is None else {"Retry-After": f"{retry_after:g}"}
    return JSONResponse({"error": sentence}, status, headers)


def _sentence_of(response: Response) -> Any:
    return json.loads(bytes(response.body))["error"]


def _log(request: HTTPRequest, response: Response, what: str) -> None:
    host = request.client.host if request.client else "?"
    logger.info("%s %s %s %d: %s", host, request.method, request.url.path, response.status_code, what)

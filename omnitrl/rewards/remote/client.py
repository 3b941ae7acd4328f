# SPDX-License-Identifier: Apache-2.0
"""A reward that another machine computes."""

import asyncio
import functools
import inspect
import logging
import os
import ssl
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from omnitrl.errors import InputError
from omnitrl.rewards.contract import RUNNER_ARGUMENTS, RewardError, RewardUnavailable
from omnitrl.rewards.results import Answer

from .wire import FULL_HEADER, Request, ServerInfo, checked_token, pack_request, unpack_answer


logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "OMNITRL_REWARD_TOKEN"
"""Environment variable with the token of reward servers, for clients and servers that are given none."""

# What a proxy or a server says when it cannot answer now, and would another time.
_AWAY = (429, 502, 503, 504)
_LONGEST_PAUSE = 5.0


@dataclass
class _Link:
    """What belongs to one event loop."""

    client: httpx.AsyncClient
    turns: asyncio.Semaphore


class RemoteReward:
    """
    A reward on another machine, behind `omnitrl serve-reward`; `reward_funcs="http://host:8100"` makes one.

    It is an `async` reward: while the server works, the trainer goes on, and calls for several batches overlap. It has
    the name, the signature and the traits of the reward that is served, so that a trainer treats it as that one: the
    same columns are sent, a groupwise reward gets whole groups, and latents are not decoded for a reward of latents.
    Videos, sounds, pictures and tensors arrive as they are, bit for bit; of `trainer_state` its numbers do.

    A server that is away (nobody answers, the connection breaks) raises [`RewardUnavailable`], for which the trainer
    waits. What the server refuses raises [`RewardError`], which ends the run. An exception of the reward
    itself is one here: it is retried, and the rows are missing if that does not help.

    Args:
        url (`str`):
            Of the server, such as `"http://10.0.0.7:8100"`.
        name (`str`, *optional*):
            Used in metrics; by default the name that the reward has on the server.
        token (`str`, *optional*):
            The server's token; by default the environment variable `OMNITRL_REWARD_TOKEN`, if there is one.
        timeout (`float`, defaults to `600.0`):
            Seconds that the server may take for one call, or be full.
        max_concurrency (`int`, defaults to `8`):
            Calls at the same time.
        retries (`int`, defaults to `2`):
            Further attempts at once after a connection that could not be made or broke.
        wait (`float`, defaults to `60.0`):
            Seconds to wait here for a server that is still starting.
        png (`bool`, defaults to `False`):
            Compress pictures, without loss, for slow networks.

    Raises:
        `ValueError`: the URL is none, or a number is out of its range.
        [`RewardUnavailable`]: there is no server after `wait` seconds.
        [`RewardError`]: what is there is no reward server, or it refuses the token.

    Attributes:
        info ([`ServerInfo`]): what the server says of itself.
        traits ([`RewardTraits`]): those of the reward that is served.

    Example:

    ```python
    >>> from omnitrl.rewards import RemoteReward

    >>> reward = RemoteReward("http://10.0.0.7:8100", timeout=120)  # doctest: +SKIP
    >>> trainer = FlowGRPOTrainer(..., reward_funcs=[reward, "ocr"])  # doctest: +SKIP
    ```
    """

    def __init__(
        self,
        url: str,
        name: str | None = None,
        token: str | None = None,
        timeout: float = 600.0,
        max_concurrency: int = 8,
        retries: int = 2,
        wait: float = 60.0,
        png: bool = False,
    ):
        self.url = _checked_url(url)
        _check_numbers(timeout, max_concurrency, retries, wait)
        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        self._options: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {checked_token(token)}"} if token else {},
            "verify": _certificates(),
            "timeout": httpx.Timeout(timeout, connect=min(timeout, 10.0)),
        }
        self._timeout = timeout
        self._max_concurrency = max_concurrency
        self._retries = retries
        self._png = png
        # A client belongs to the event loop that it is first used on, and each runner has one of its own.
        self._links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Link] = weakref.WeakKeyDictionary()
        self.info = self._ask_info(wait)
        self.traits = self.info.reward_traits()
        self.__name__ = self.info.name if name is None else name
        self.__signature__ = _signature(self.info)

    def __repr__(self) -> str:
        return f"RemoteReward({self.url!r}, name={self.__name__!r})"

    async def __call__(self, **arguments: Any) -> list[float | None]:
        """Sends the rows, and returns the values of the server; NaN where the reward failed there."""
        ours = ("log_metric", "log_extra", "trainer_state")
        log_metric, log_extra, state = (arguments.pop(name, None) for name in ours)
        request = Request(arguments, state)
        try:
            body = await asyncio.to_thread(pack_request, request, self._png)  # other rewards share the event loop
        except InputError as error:
            raise RewardError(f"reward {self.__name__!r}: {error}") from error
        if len(body) > self.info.max_body_bytes:
            raise RewardError(
                f"reward {self.__name__!r}: {request.rows} rows are {len(body) / 1e6:.1f} MB, and the server at "
                f"{self.url} takes {self.info.max_body_bytes / 1e6:.1f}: start it with --max_body_mb "
                f"{len(body) // 10**6 + 1}, or score smaller batches."
            )
        answer = await self._read(await self._post(body), request.rows)
        _log(answer.metrics, answer.extras, log_metric, log_extra)
        return answer.values

    async def aclose(self) -> None:
        """Closes the connections of the event loop that this is called on."""
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.client.aclose()

    async def _post(self, body: bytes) -> httpx.Response:
        """The answer to a request; a server that is full is asked again until the time-out."""
        link, end = self._link(), time.monotonic() + self._timeout
        async with link.turns:
            while True:
                response = await self._post_once(link.client, body)
                pause = _retry_after(response) if response.headers.get(FULL_HEADER) else None
                if pause is None or time.monotonic() + pause > end:
                    return response
                await asyncio.sleep(pause)

    async def _post_once(self, client: httpx.AsyncClient, body: bytes) -> httpx.Response:
        """The answer to a request, with further attempts after a connection that could not be made or broke."""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(0.1 * 2 ** (attempt - 1))
            try:
                return await client.post(f"{self.url}/score", content=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise TimeoutError(
                    f"the reward server at {self.url} gave no answer within timeout={self._timeout} s"
                ) from error
            except httpx.TransportError as error:
                broken = error
        raise RewardUnavailable(self._away(f"{type(broken).__name__}: {broken}")) from broken

    async def _read(self, response: httpx.Response, rows: int) -> Answer:
        self._check_status(response)
        try:
            answer = await asyncio.to_thread(unpack_answer, response.content)
        except InputError as error:
            raise RuntimeError(f"the reward server at {self.url} sent no answer: {error}") from error
        lengths = {"values": len(answer.values), **{name: len(values) for name, values in answer.extras.items()}}
        for name, length in lengths.items():
            if length != rows:
                raise RewardError(
                    f"reward {self.__name__!r}: the server at {self.url} returned {length} {name} for {rows} rows: a "
                    "reward must return one per row."
                )
        return answer

    def _check_status(self, response: httpx.Response) -> None:
        """
        Raises what an answer other than 200 means.

        A status of 4xx says that the same request would fail again, so that the run ends with the server's sentence.
        """
        status = response.status_code
        if status == 200:
            return
        sentence = _sentence(response)
        if status in _AWAY:
            raise RewardUnavailable(self._away(f"status {status}, {sentence}"), _retry_after(response))
        if 300 <= status < 500:
            raise RewardError(f"the reward server at {self.url} answers {status}: {sentence}")
        raise RuntimeError(f"the reward server at {self.url} answers {status}: {sentence}")

    def _away(self, what: str) -> str:
        return f"the reward server at {self.url} is away ({what}): start it with `omnitrl serve-reward`"

    def _link(self) -> _Link:
        loop = asyncio.get_running_loop()
        if loop not in self._links:
            limits = httpx.Limits(max_connections=self._max_concurrency)
            client = httpx.AsyncClient(limits=limits, **self._options)
            self._links[loop] = _Link(client, asyncio.Semaphore(self._max_concurrency))
        return self._links[loop]

    def _ask_info(self, wait: float) -> ServerInfo:
        """What the server says of itself, waiting for one that is not there yet."""
        end = time.monotonic() + wait
        pause = 0.25
        while True:
            try:
                response = httpx.get(f"{self.url}/info", **{**self._options, "timeout": 10.0})
                self._check_status(response)
                return ServerInfo.from_json(response.json())
            except (httpx.TransportError, RewardUnavailable) as error:
                if time.monotonic() + pause > end:
                    what = error if isinstance(error, RewardUnavailable) else self._away(f"{error}")
                    raise RewardUnavailable(f"{what}; waited for it for wait={wait} s") from error
                if pause == 0.25:
                    logger.warning("Waiting up to %s s for the reward server at %s (%s).", wait, self.url, error)
            except ValueError as error:  # which is what JSON that is none raises, too
                raise RewardError(
                    f"what answers at {self.url} is no reward server of `omnitrl serve-reward`: {error}"
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """What https is checked with; it takes 40 ms to read, which each client would do."""
    return httpx.create_ssl_context()


def _log(
    metrics: dict[str, list[float]],
    extras: dict[str, list[Any]],
    log_metric: Callable[..., None] | None,
    log_extra: Callable[..., None] | None,
) -> None:
    """Records here what the reward recorded there."""
    for name, values in metrics.items():
        for value in values:
            if log_metric is not None:
                log_metric(name, value)
    for column, rows in extras.items():
        if log_extra is not None:
            log_extra(column, rows)


def _checked_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InputError(f"url={url!r} is no URL ({error}): give for example 'http://127.0.0.1:8100'.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"url={url!r} is no URL of a reward server: give for example 'http://127.0.0.1:8100'.")
    return url.rstrip("/")


def _check_numbers(timeout: float, max_concurrency: int, retries: int, wait: float) -> None:
    if timeout <= 0:
        raise InputError(f"timeout={timeout} must be more than 0 seconds, for example 600.")
    if max_concurrency < 1:
        raise InputError(f"max_concurrency={max_concurrency} must be at least 1, for example 8.")
    if retries < 0:
        raise InputError(f"retries={retries} must be at least 0, for example 2.")
    if wait < 0:
        raise InputError(f"wait={wait} must be at least 0 seconds, for example 60.")


def _signature(info: ServerInfo) -> inspect.Signature:
    """
    That of the reward which is served, and what the client needs itself: the prompts, and where to record things.

    A runner passes what a signature has, and says which column is missing that it requires.
    """
    kinds = inspect.Parameter
    theirs = [*RUNNER_ARGUMENTS, *info.requires] if info.accepts is None else info.accepts
    parameters = [
        kinds(name, kinds.KEYWORD_ONLY, default=kinds.empty if name in info.requires else None)
        for name in dict.fromkeys(["prompts", "log_metric", "log_extra", *theirs])
    ]
    if info.accepts is None:
        parameters.append(kinds("columns", kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _sentence(response: httpx.Response) -> str:
    """What an error says: the server's own sentence, or the beginning of what something else sent."""
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"{response.text[:200]!r}"


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):  # it may be a date
        return None

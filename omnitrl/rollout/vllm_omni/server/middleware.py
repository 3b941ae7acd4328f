# SPDX-License-Identifier: Apache-2.0
"""The door to HTTP: `vllm serve --omni --middleware omnitrl.rollout.vllm_omni.server.middleware.RolloutMiddleware`, or
`….ThinkerMiddleware` for models that write text."""

from __future__ import annotations

import asyncio
from typing import Any

from omnitrl.rollout.vllm_omni.server.calls import CallService
from omnitrl.rollout.vllm_omni.transport import GENERATE
from omnitrl.rollout.vllm_omni.wire import PREFIX


class RolloutMiddleware:
    """
    An ASGI middleware that answers the calls under `/rollout` with the engine of the server that it is in.

    Args:
        app (`Callable`):
            What answers all other calls.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._service: CallService | None = None

    def _make_service(self, engine: Any) -> CallService:
        from omnitrl.rollout.vllm_omni.server.service import RolloutService

        return RolloutService(engine)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(f"{PREFIX}/"):
            await self._app(scope, receive, send)
            return
        if self._service is None:
            self._service = self._make_service(scope["app"].state.engine_client)
        body = await _body(receive)
        if body is None:
            return
        call = asyncio.create_task(self._service.handle(scope["path"], None if scope["method"] == "GET" else body))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                await _answer(send, *call.result(), binary=scope["path"] == GENERATE)
        finally:
            gone.cancel()
            if scope["path"] == GENERATE:
                call.cancel()  # its caller may have gone, and nobody will take the sample


class ThinkerMiddleware(RolloutMiddleware):
    """The same for the engine of a model that writes text."""

    def _make_service(self, engine: Any) -> CallService:
        from omnitrl.rollout.vllm_omni.server.thinker_service import ThinkerService

        return ThinkerService(engine)


async def _body(receive: Any) -> bytes | None:
    """The whole body, `None` if the caller goes before it is there."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Any, status: int, body: bytes, binary: bool) -> None:
    kind = b"application/octet-stream" if binary and status == 200 else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

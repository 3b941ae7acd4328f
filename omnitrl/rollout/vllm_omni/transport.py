# SPDX-License-Identifier: Apache-2.0
"""How a message gets to a server and back: over HTTP, or by a call in the same process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from omnitrl.errors import InputError
from omnitrl.rollout.vllm_omni.wire import PREFIX


INFO, GENERATE, ADAPTER, WEIGHTS = (f"{PREFIX}/{name}" for name in ("info", "generate", "adapter", "weights"))
JOIN, SLEEP, WAKE = f"{PREFIX}/join", f"{PREFIX}/sleep", f"{PREFIX}/wake"
LONGEST_END = 60.0
"""Seconds that the end of a transport is waited for; an engine in this process takes its time."""


class Away(Exception):
    """The server cannot be reached, went away in the midst of a call, or has lost its engine."""


class TooSlow(Exception):
    """The server took the call and did not answer in time."""


class Refused(Exception):
    """
    The server answered that it cannot do what it was asked for.

    Args:
        status (`int`):
            Of HTTP.
        kind (`str`):
            `"input"`, `"stale"`, `"internal"`, or `"hooks"` for a server that does not know the routes of rollouts.
        sentence (`str`):
            The server's own words.
    """

    def __init__(self, status: int, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.kind, self.sentence = status, kind, sentence


class Transport(Protocol):
    """Carries one call after the other, or many at the same time, on one event loop."""

    name: str
    """What the server is called in sentences for people."""

    async def call(self, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        """Status and body of the answer; without a `body` it is a GET. Raises [`Away`] or [`TooSlow`]."""
        ...

    async def close(self) -> None:
        """Ends the connections."""
        ...


class HttpTransport:
    """
    Calls over HTTP.

    Args:
        url (`str`):
            Base URL of the server, such as `"http://localhost:8000"`.
    """

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        # One transport for each call that is on its way: a pool of many connections looks through all of them at each
        # call, and what a client adds to its transport (cookies, redirects, proxies) is of no use here. Together they
        # took as much time as everything else.
        self._idle: list[Any] = []

    async def call(self, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        import httpx

        carrier = self._idle.pop() if self._idle else self._carrier()
        request = httpx.Request(
            "GET" if body is None else "POST",
            self.name + path,
            content=body,
            extensions={"timeout": httpx.Timeout(timeout).as_dict()},
        )
        well = False
        try:
            async with asyncio.timeout(timeout):  # httpx counts from one byte to the next
                answer = await carrier.handle_async_request(request)
                content = await answer.aread()
            well = True
        except (httpx.ConnectTimeout, httpx.ConnectError) as error:
            raise Away(f"it cannot be connected to: {_words(error)}") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise TooSlow(f"it did not answer within {timeout:g} s") from error
        except httpx.HTTPError as error:
            raise Away(f"the connection broke: {_words(error)}") from error
        finally:
            if well:
                self._idle.append(carrier)
            else:
                await carrier.aclose()
        return answer.status_code, content

    def _carrier(self) -> Any:
        import httpx

        # Servers end idle connections after 5 s, and a call on one that has just been ended is lost.
        limits = httpx.Limits(keepalive_expiry=2.0)
        encrypted = self.name.lower().startswith("https")  # reading certificates takes 0.07 s
        return httpx.AsyncHTTPTransport(verify=encrypted, limits=limits)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


def check_url(url: str) -> str:
    """
    A base URL without a slash at its end.

    Raises:
        [`~omnitrl.errors.InputError`]: it is none.
    """
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    more = parts.path.removeprefix("/") or parts.query or parts.fragment or parts.username
    with contextlib.suppress(ValueError):
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not more:
            return f"{parts.scheme}://{parts.netloc}"
    raise InputError(
        f"vllm_server_base_url={url!r} is no address of a server: use one like 'http://localhost:8000', with no path "
        "and no user."
    )


def check_urls(given: str | Sequence[str]) -> list[str]:
    """
    Base URLs without a slash at their ends, of one server or of several.

    Raises:
        [`~omnitrl.errors.InputError`]: one is none, or is there twice.
    """
    urls = [check_url(url) for url in ([given] if isinstance(given, str) else given)]
    if len(set(urls)) < len(urls):
        raise InputError(f"vllm_server_base_url={given} names a server twice: name each once.")
    return urls


def checked_answer(status: int, body: bytes) -> bytes:
    """
    The body of an answer that is one.

    Raises:
        [`Refused`]: the server says why it is none.
        [`Away`]: its engine has died, or a gateway in front of it does not reach it.
    """
    if status == 200:
        return body
    try:
        content = json.loads(body)
        kind, sentence = str(content["kind"]), str(content["error"])
    except (ValueError, KeyError, TypeError):  # not of our hooks
        words = body[:500].decode(errors="replace").strip()
        if status in (502, 503):
            raise Away(f"a gateway answered in its place (HTTP status {status}): {words}") from None
        kind, sentence = "hooks" if status in (404, 405) else "internal", words or f"HTTP status {status}"
    if kind == "away":
        raise Away(sentence)
    raise Refused(status, kind, sentence)


class InProcessTransport:
    """
    Calls of the server's own handlers in this process.

    Args:
        handle (`Callable`):
            Takes a path and a body, and gives a status and a body.
        close (`Callable`):
            Ends the engine.
    """

    name = "the engine in this process"

    def __init__(
        self, handle: Callable[[str, bytes | None], Awaitable[tuple[int, bytes]]], close: Callable[[], None]
    ) -> None:
        self._handle, self._close = handle, close

    async def call(self, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout):
                return await self._handle(path, body)
        except TimeoutError as error:
            raise TooSlow(f"it did not answer within {timeout:g} s") from error

    async def close(self) -> None:
        self._close()


class LoopThread:
    """An event loop in a daemon thread, which runs while the trainer's own thread computes."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begins a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancels what still runs, runs `last`, and ends the thread, which may be the one that calls this."""
        if self._last is None:
            self._last = last
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # garbage is collected in any thread
            self._thread.join(timeout=LONGEST_END)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        try:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            if self._last is not None:
                self._loop.run_until_complete(self._last())
        finally:
            self._loop.close()


def _words(error: Exception) -> str:
    """What an exception says, or its name where it says nothing."""
    return str(error) or type(error).__name__

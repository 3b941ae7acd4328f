# SPDX-License-Identifier: Apache-2.0
"""Where rewards run: a daemon thread for each synchronous one, one event loop for the asynchronous ones.

`concurrent.futures.ThreadPoolExecutor` is not used because the interpreter waits for its threads at exit: a reward
that hangs would keep a run from ending after Ctrl-C.
"""

import asyncio
import queue
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from .contract import Reward


class Lane(Protocol):
    """Runs the calls of one reward."""

    def start(self, reward: Reward, arguments: dict[str, Any]) -> "Future[Any]":
        """Begins a call and returns at once."""

    def abandon(self) -> None:
        """Gives up the call that is running: its result is not wanted any more."""

    def close(self) -> None:
        """Ends the lane. It may be called more than once."""


class ThreadLane:
    """
    Runs a synchronous reward in one daemon thread, so that it never runs beside itself.

    A thread cannot be stopped from outside. The thread of an abandoned call ends by itself after that call, and the
    next call gets a new one.
    """

    def __init__(self, name: str):
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Reward, dict[str, Any]] | None] | None = None

    def start(self, reward: Reward, arguments: dict[str, Any]) -> "Future[Any]":
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._queue,), name=f"reward-{self._name}", daemon=True).start()
        future: Future[Any] = Future()
        self._queue.put((future, reward, arguments))
        return future

    def abandon(self) -> None:
        calls, self._queue = self._queue, None  # in one step: close() comes from another thread
        if calls is not None:
            calls.put(None)

    def close(self) -> None:
        self.abandon()


class AsyncLane:
    """Runs an asynchronous reward on an event loop that it shares with others. Its calls may overlap."""

    def __init__(self, loop: "LoopThread"):
        self._loop = loop

    def start(self, reward: Reward, arguments: dict[str, Any]) -> "Future[Any]":
        return self._loop.run(_awaited(reward, arguments))

    def abandon(self) -> None:
        """Nothing to do: cancelling the future of a call cancels its coroutine."""

    def close(self) -> None:
        self._loop.close()


class LoopThread:
    """An asyncio event loop in a daemon thread, started when it is first needed."""

    def __init__(self, name: str):
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name=self._name, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    torch.set_grad_enabled(False)  # the setting is per thread
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _work(calls: "queue.SimpleQueue[tuple[Future[Any], Reward, dict[str, Any]] | None]") -> None:
    torch.set_grad_enabled(False)  # the setting is per thread
    while (call := calls.get()) is not None:
        future, reward, arguments = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = reward.call(arguments)
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # sys.exit() in a reward must not end the thread that others wait for
            future.set_exception(_as_exception(error))
        else:
            future.set_result(result)
        # The images and the result must not live on while the thread waits for the next call.
        del call, future, arguments
        result = None


async def _awaited(reward: Reward, arguments: dict[str, Any]) -> Any:
    try:
        return await reward.call(arguments)
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
        raise _as_exception(error) from error


def _as_exception(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"the reward raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped

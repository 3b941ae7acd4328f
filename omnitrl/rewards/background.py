# SPDX-License-Identifier: Apache-2.0
"""Where rewards run: a daemon thread for each synchronous one, one event loop for the asynchronous ones.

`concurrent.futures.ThreadPoolExecutor` is not used because the interpreter waits for its threads at exit: a reward
that hangs would keep a run from ending after Ctrl-C.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from .contract import Reward
from .results import Answer, ask, ask_async


# Threads of calls that were given up and have not ended, beyond which a reward gets no new one.
_MOST_ABANDONED = 8

# Seconds that a process of its own has to import a reward.
_START_SECONDS = 300.0


class Seat(Protocol):
    """Where one call of a reward runs."""

    ready: "Future[None]"
    """Done when a call can begin; time before that is not the reward's."""

    def start(self, arguments: dict[str, Any], count: int) -> "Future[Answer]":
        """Begins a call for `count` rows and returns at once."""


class Lane(Protocol):
    """Runs the calls of one reward."""

    capacity: int | None
    """Calls that may run at a time; `None` for any number."""

    def reserve(self) -> Seat:
        """A seat for one call; there are never more than `capacity`."""

    def release(self, seat: Any, abandoned: bool) -> None:
        """Gives a seat back; the result of a call that is `abandoned` is not wanted any more."""

    def close(self) -> None:
        """Ends the lane. It may be called more than once."""


async def call_in(lane: Lane, arguments: dict[str, Any], count: int, timeout: float | None) -> Answer:
    """
    One call of a reward in a seat of its own.

    Args:
        lane ([`Lane`]):
            Where it runs.
        arguments (`dict`), count (`int`):
            What the reward is called with, and for how many rows.
        timeout (`float`, *optional*):
            Seconds after which the call is given up; the start of a process is not among them.

    Raises:
        `TimeoutError`: there is no answer.
        `Exception`: of the reward.
    """
    seat, finished = lane.reserve(), False
    try:
        if not seat.ready.done():
            await asyncio.wait_for(asyncio.wrap_future(seat.ready), _START_SECONDS)
        seat.ready.result()
        future = asyncio.wrap_future(seat.start(arguments, count))
        try:
            await asyncio.wait({future}, timeout=timeout)
            finished = future.done()
            if not finished:
                raise TimeoutError(f"no answer within timeout={timeout} s")
            if future.cancelled():
                raise RuntimeError("the call was cancelled from within")
            return future.result()
        finally:
            if not finished:
                future.cancel()
    finally:
        lane.release(seat, abandoned=not finished)


def done() -> "Future[None]":
    """A future that has nothing to wait for."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class ThreadLane:
    """
    Runs a synchronous reward in one daemon thread, so that it never runs beside itself. The lane is its own seat.

    A thread cannot be stopped from outside. The thread of an abandoned call ends by itself after that call, and the
    next call gets a new one, unless `_MOST_ABANDONED` are still at it, with the media that they hold.
    """

    capacity: int | None = 1

    def __init__(self, reward: Reward):
        self.ready = done()
        self._reward = reward
        self._queue: queue.SimpleQueue[tuple[Future[Answer], dict[str, Any], int] | None] | None = None
        self._thread: threading.Thread | None = None
        self._abandoned: list[threading.Thread] = []

    def reserve(self) -> "ThreadLane":
        return self

    def start(self, arguments: dict[str, Any], count: int) -> "Future[Answer]":
        future: Future[Answer] = Future()
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= _MOST_ABANDONED:
            future.set_exception(
                RuntimeError(
                    f"{_MOST_ABANDONED} calls that took longer than the time-out are still running, so no other is "
                    "begun until one of them ends: give what the reward waits for a time-out of its own"
                )
            )
            return future
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            name = f"reward-{self._reward.name}"
            self._thread = threading.Thread(target=_work, args=(self._reward, self._queue), name=name, daemon=True)
            self._thread.start()
        self._queue.put((future, arguments, count))
        return future

    def release(self, seat: Any, abandoned: bool) -> None:
        if abandoned:
            if self._thread is not None:
                self._abandoned.append(self._thread)
            self.close()

    def close(self) -> None:
        calls, self._queue = self._queue, None  # in one step: close() comes from another thread
        if calls is not None:
            calls.put(None)


class AsyncLane:
    """Runs an asynchronous reward on an event loop that it shares with others. Its calls may overlap."""

    capacity: int | None = None

    def __init__(self, reward: Reward, loop: "LoopThread"):
        self.ready = done()
        self._reward = reward
        self._loop = loop

    def reserve(self) -> "AsyncLane":
        return self

    def start(self, arguments: dict[str, Any], count: int) -> "Future[Answer]":
        return self._loop.run(_awaited(self._reward, arguments, count))

    def release(self, seat: Any, abandoned: bool) -> None:
        """Nothing to do: cancelling the future of a call cancels its coroutine."""

    def close(self) -> None:
        self._loop.close()


class LoopThread:
    """An asyncio event loop in a daemon thread, started when it is first needed."""

    def __init__(self, name: str):
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Runs a coroutine there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function there, after those that were given before."""
        self._started().call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name=self._name, daemon=True).start()
        return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    torch.set_grad_enabled(False)  # the setting is per thread
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _work(reward: Reward, calls: "queue.SimpleQueue[tuple[Future[Answer], dict[str, Any], int] | None]") -> None:
    torch.set_grad_enabled(False)  # the setting is per thread
    while (call := calls.get()) is not None:
        future, arguments, count = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            answer = ask(reward, arguments, count)
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # sys.exit() in a reward must not end the thread that others wait for
            future.set_exception(as_exception(error))
        else:
            future.set_result(answer)
            del answer
        # The images and the result must not live on while the thread waits for the next call.
        del call, future, arguments


async def _awaited(reward: Reward, arguments: dict[str, Any], count: int) -> Answer:
    try:
        return await ask_async(reward, arguments, count)
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
        raise as_exception(error) from error


def as_exception(error: BaseException) -> RuntimeError:
    """An exception that ends no thread and no process, in the place of one that would."""
    wrapped = RuntimeError(f"the reward raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped

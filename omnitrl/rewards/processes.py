# SPDX-License-Identifier: Apache-2.0
"""Rewards in processes of their own, which can be stopped.

`concurrent.futures.ProcessPoolExecutor` is not used because one process that is killed breaks the whole pool, and
because the interpreter waits for it at exit: a reward that hangs would keep a run from ending.
"""

import contextlib
import multiprocessing
import pickle
import queue
import signal
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import torch

from omnitrl.errors import InputError

from .background import AsyncLane, Lane, LoopThread, ThreadLane, as_exception
from .contract import Reward, RewardError
from .results import Answer, ask


def lane_of(reward: Reward, loop: LoopThread, num_processes: int) -> Lane:
    """The lane that suits a reward: `loop` for an asynchronous one, processes of its own, or a thread."""
    if reward.is_async:
        return AsyncLane(reward, loop)
    return ProcessLane(reward, num_processes) if reward.traits.in_process else ThreadLane(reward)


class ProcessLane:
    """
    Runs a synchronous reward in up to `count` processes at a time, which are started when they are needed.

    A process whose call is abandoned is killed. Arguments and answers go through pickles, which only these processes
    write and read.

    Args:
        reward ([`Reward`]):
            One that other processes can import.
        count (`int`):
            Most processes.

    Raises:
        [`~omnitrl.errors.InputError`]: the reward cannot be handed to another process.
    """

    def __init__(self, reward: Reward, count: int) -> None:
        self.capacity: int | None = count
        self._reward = reward
        try:
            self._pickled = pickle.dumps(reward)
        except Exception as error:
            raise InputError(
                f"reward {reward.name!r} cannot go to a process of its own ({error}): define it at the top of a "
                "module that can be imported, or use in_process=False."
            ) from error
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    def reserve(self) -> "_Worker":
        worker = self._idle.pop() if self._idle else _Worker(self._reward.name, self._pickled)
        self._busy.add(worker)
        return worker

    def release(self, seat: "_Worker", abandoned: bool) -> None:
        self._busy.discard(seat)
        if abandoned or not seat.alive:
            seat.kill()
        else:
            self._idle.append(seat)

    def close(self) -> None:
        for worker in [*self._idle, *self._busy]:
            worker.kill()
        self._idle, self._busy = [], set()


class _Worker:
    """One process, and the thread that talks to it; a seat."""

    def __init__(self, name: str, pickled: bytes) -> None:
        self.ready: Future[None] = Future()
        self._calls: queue.SimpleQueue[tuple[Future[Answer], dict[str, Any], int] | None] = queue.SimpleQueue()
        self._name = name
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads and devices may hang
        self._connection, far_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(far_end, pickled), name=f"reward-{name}", daemon=True
        )  # a daemon ends with its parent
        self._process.start()
        far_end.close()  # or the pipe would stay open when the process has died
        threading.Thread(target=self._talk, name=f"reward-{name}-process", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether another call may come."""
        return self._process.is_alive()

    def start(self, arguments: dict[str, Any], count: int) -> "Future[Answer]":
        future: Future[Answer] = Future()
        self._calls.put((future, arguments, count))
        return future

    def kill(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._calls.put(None)

    def _talk(self) -> None:
        """Hands calls over one at a time, and answers back."""
        self._hear(self.ready)
        while (call := self._calls.get()) is not None:
            future, arguments, count = call
            if future.set_running_or_notify_cancel() and self._say(future, (arguments, count)):
                self._hear(future)
            del call, future, arguments  # the media must not live on while the thread waits
        self._process.join()
        self._connection.close()

    def _say(self, future: "Future[Answer]", content: Any) -> bool:
        """Sends a call; `False` where that cannot be."""
        try:
            message = pickle.dumps(content)
        except Exception as error:
            future.set_exception(
                RewardError(
                    f"reward {self._name!r} runs in a process of its own, and its arguments cannot be sent there "
                    f"({error}): leave the column out, or use in_process=False."
                )
            )
            return False
        with contextlib.suppress(OSError):  # of a process that has died, which the answer says
            self._connection.send_bytes(message)
        return True

    def _hear(self, future: "Future[Any]") -> None:
        """Waits for one message and puts it into `future`."""
        try:
            succeeded, content = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            succeeded, content = False, self._death(starting=future is self.ready)
        except Exception as error:  # an exception of the reward's own class that cannot be read here
            succeeded, content = False, RuntimeError(f"its answer cannot be read: {error}")
        if future.cancelled():
            return
        with contextlib.suppress(Exception):  # it may be cancelled at this moment
            if succeeded:
                future.set_result(content)
            else:
                future.set_exception(content)

    def _death(self, starting: bool) -> Exception:
        code = self._process.exitcode
        if starting:
            return RewardError(
                f"the process of reward {self._name!r} ended while it started (exit code {code}; what it printed is "
                "above): a script that trains must begin with `if __name__ == '__main__':`, as the process imports it."
            )
        return RuntimeError(f"the process of reward {self._name!r} died (exit code {code})")


def _serve(connection: Connection, pickled: bytes) -> None:
    """The other side: reads calls and answers them until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this process
    torch.set_grad_enabled(False)
    try:
        reward: Reward = pickle.loads(pickled)
    except BaseException as error:
        _send(connection, False, RewardError(f"a reward cannot be imported in a process of its own: {error!r}"))
        return
    _send(connection, True, None)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            arguments, count = pickle.loads(message)
            answer = ask(reward, arguments, count)
        except Exception as error:
            _send(connection, False, error)
        except BaseException as error:
            _send(connection, False, as_exception(error))
        else:
            _send(connection, True, answer)


def _send(connection: Connection, succeeded: bool, content: Any) -> None:
    try:
        message = pickle.dumps((succeeded, content))
        if not succeeded:
            pickle.loads(message)  # some exceptions can be written and not read
    except Exception as error:
        what = f"{type(content).__name__}: {content}" if isinstance(content, Exception) else str(error)
        message = pickle.dumps((False, RuntimeError(what)))
    connection.send_bytes(message)

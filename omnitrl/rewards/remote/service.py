# SPDX-License-Identifier: Apache-2.0
"""Scores what several clients ask for: requests that wait are joined, and one that is too large is cut."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omnitrl.errors import InputError, RunError
from omnitrl.rewards.background import LoopThread, call_in
from omnitrl.rewards.contract import RUNNER_ARGUMENTS, Reward, RewardFunc, RewardUnavailable, callable_name
from omnitrl.rewards.processes import lane_of
from omnitrl.rewards.results import Answer
from omnitrl.version import __version__

from .wire import PROTOCOL, Request, ServerInfo, traits_to_send


class ServiceFull(RunError):
    """There are as many requests inside as there may be."""


@dataclass(eq=False)
class _Job:
    """A request and where its answer goes; cancelled when the client has gone."""

    request: Request
    done: "asyncio.Future[Answer]"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What requests must have in common to be one call."""
        return tuple(self.request.arguments), self.request.trainer_state


class RewardService:
    """
    A reward that is asked by several clients at once.

    A synchronous reward is called in one thread, never beside itself; an asynchronous one, and one that wants
    processes of its own, `max_concurrency` times at once.

    Args:
        function (`Callable`):
            The reward.
        name (`str`, *optional*):
            By default that of the function.
        batch_size (`int`, *optional*):
            Most rows of one call, by default that of the reward's traits. Smaller requests that wait are joined up to
            it. Without one, each request is a call.
        timeout (`float`, *optional*):
            Seconds that one call may take.
        max_requests (`int`, defaults to `64`):
            Requests that are inside at once; there is no room for more.
        max_concurrency (`int`, defaults to `8`):
            Calls at once of a reward that is not called in one thread.
        device (`str`, *optional*):
            Where a reward that is a model is moved.

    Attributes:
        inside (`int`): requests that are being served or wait.

    Raises:
        `ValueError`: a number is out of its range, there is no such device, or the reward is called with whole groups
        and not with batches.
    """

    def __init__(
        self,
        function: RewardFunc,
        name: str | None = None,
        batch_size: int | None = None,
        timeout: float | None = None,
        max_requests: int = 64,
        max_concurrency: int = 8,
        device: str | None = None,
    ):
        for option, number in (
            ("batch_size", batch_size),
            ("timeout", timeout),
            ("max_requests", max_requests),
            ("max_concurrency", max_concurrency),
        ):
            if number is not None and number <= 0:
                raise InputError(f"{option}={number} must be more than 0, for example 8.")
        self._reward = Reward.from_callable(function, name or callable_name(function))
        if device is not None:
            self._reward.move(device)
        if self._reward.traits.groupwise and batch_size is not None:
            raise InputError(f"the reward {self.name!r} is called with whole groups: leave batch_size out.")
        self._batch_size = batch_size or self._reward.traits.batch_size
        self._timeout = timeout
        self._max_requests = max_requests
        self._lane = lane_of(self._reward, LoopThread(f"reward-{self.name}"), max_concurrency)
        self._workers = self._lane.capacity or max_concurrency
        self.inside = 0
        self._waiting: deque[_Job] = deque()
        self._arrived = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """Of the reward."""
        return self._reward.name

    def info(self, max_body_bytes: int) -> ServerInfo:
        """What clients are told of the reward."""
        accepts = None if self._reward.accepts is None else sorted(self._reward.accepts)
        traits = {**traits_to_send(self._reward.traits), "batch_size": self._batch_size}
        return ServerInfo(
            PROTOCOL, __version__, self.name, traits, accepts, sorted(self._reward.requires), max_body_bytes
        )

    def start(self) -> None:
        """Begins to work, on the event loop that this is called on."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]

    async def close(self) -> None:
        """Gives up what waits, and ends the threads. Does not wait for a reward that hangs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lane.close()

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """
        Room for one request, from before it is read until it is answered.

        Raises:
            [`ServiceFull`]: there is none.
        """
        if self.inside >= self._max_requests:
            raise ServiceFull(f"{self.inside} requests are being served or wait, which is as many as may: ask again.")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def score(self, request: Request) -> Answer:
        """
        Waits for the request's turn and for its answer; a request whose waiting is cancelled is not begun.

        Raises:
            [`RewardError`]: the reward broke the contract, or requires what the request has not.
            `Exception`: whatever the reward raised.
        """
        self._reward.check({*request.arguments, *RUNNER_ARGUMENTS})
        job = _Job(request, asyncio.get_running_loop().create_future())
        async with self._arrived:
            self._waiting.append(job)
            self._arrived.notify()
        return await job.done

    async def _work(self) -> None:
        while True:
            async with self._arrived:
                await self._arrived.wait_for(lambda: self._waiting)
                jobs = self._take()
            await self._answer(jobs)

    def _take(self) -> list[_Job]:
        """The first that waits, and those behind it that fit into the same call."""
        jobs: list[_Job] = []
        rows = 0
        while self._waiting:
            job = self._waiting[0]
            joins = self._batch_size is not None and rows + job.request.rows <= self._batch_size
            if jobs and not (joins and job.kind == jobs[0].kind):
                break
            self._waiting.popleft()
            if not job.done.cancelled():
                jobs.append(job)
                rows += job.request.rows
        return jobs

    async def _answer(self, jobs: Sequence[_Job]) -> None:
        try:
            answers = await self._scored([job.request for job in jobs])
        except Exception as error:
            if len(jobs) > 1 and not isinstance(error, RewardUnavailable):
                for job in jobs:  # the fault is that of one of them
                    await self._answer([job])
                return
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)
        else:
            for job, answer in zip(jobs, answers, strict=True):
                if not job.done.done():
                    job.done.set_result(answer)

    async def _scored(self, requests: Sequence[Request]) -> list[Answer]:
        """Scores requests of one kind as if they were one, in calls of at most `batch_size` rows."""
        if not requests:
            return []
        names = requests[0].arguments
        columns = {name: [value for request in requests for value in request.arguments[name]] for name in names}
        total = sum(request.rows for request in requests)
        step = self._batch_size or max(total, 1)
        whole = Answer([])
        for start in range(0, max(total, 1), step):
            piece = {name: values[start : start + step] for name, values in columns.items()}
            await self._call(piece, requests[0].trainer_state, min(step, total - start), whole)
        starts = [sum(request.rows for request in requests[:i]) for i in range(len(requests))]
        return [_part(whole, start, request.rows) for start, request in zip(starts, requests, strict=True)]

    async def _call(self, columns: dict[str, list[Any]], state: Any, count: int, whole: Answer) -> None:
        """Calls the reward once, and adds what it says to the answer so far."""
        arguments = {"prompts": [""] * count, **columns, "trainer_state": state}
        answer = await call_in(self._lane, arguments, count, self._timeout)
        before = len(whole.values)
        whole.values.extend(answer.values)
        for name, numbers in answer.metrics.items():
            whole.metrics.setdefault(name, []).extend(numbers)
        for name in {**whole.extras, **answer.extras}:
            whole.extras.setdefault(name, [None] * before).extend(answer.extras.get(name, [None] * count))


def _part(whole: Answer, start: int, rows: int) -> Answer:
    """The answer to one of several requests; what was recorded of all of them belongs to each."""
    rows_of = slice(start, start + rows)
    extras = {name: values[rows_of] for name, values in whole.extras.items()}
    return Answer(whole.values[rows_of], whole.metrics, extras)

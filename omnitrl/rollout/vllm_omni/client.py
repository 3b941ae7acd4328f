# SPDX-License-Identifier: Apache-2.0
"""The client of one or several rollout servers: each sample is made once, wherever there is a server to make it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from omnitrl.errors import InputError, RunError
from omnitrl.rollout.trajectory import WeightReport
from omnitrl.rollout.vllm_omni.replica import Replica, WeightUpdate
from omnitrl.rollout.vllm_omni.transport import GENERATE, Away, LoopThread, Refused, TooSlow, Transport
from omnitrl.rollout.vllm_omni.wire import ServerInfo


logger = logging.getLogger(__name__)

MOST_TRIES = {"broken": 3, "away": 8}
"""Tries of one sample: those that a server answers badly or too late, and those that were lost with a server."""
POLL = 0.25
"""Seconds between two looks at which servers are there."""


def _do_nothing() -> None:
    return None


def _any_server(info: ServerInfo, name: str) -> None:
    return None


class BadAnswer(Exception):
    """An answer that says nothing or the wrong thing, which another try may mend."""


@dataclass(frozen=True)
class Jobs:
    """
    Samples that are to be made.

    Args:
        groups (`Sequence[Hashable]`):
            What each of them belongs to; those of one group go to one server, which then encodes their prompt once.
        pack (`Callable[[int], bytes]`):
            Gives the message that asks for a sample, by its number.
        accept (`Callable[[int, bytes], Any]`):
            Gives what is made of the answer; raises [`BadAnswer`] to ask again.
        at_once (`int`, *optional*):
            How many one server is asked for at the same time, where the client was given no number.
    """

    groups: Sequence[Hashable]
    pack: Callable[[int], bytes]
    accept: Callable[[int, bytes], Any]
    at_once: int | None = None


class RolloutClient:
    """
    Asks servers for samples, from a thread of its own.

    A sample is a pure function of its request, so asking twice gives the same one, and what was lost with its server
    is asked of another. A server that goes away is left out with a warning; when it is back it gets the current
    weights, and after that its share of the samples again.

    Args:
        transports (`Sequence[Transport]`):
            The way to each server.
        concurrency (`int`, *optional*):
            Samples that one server is asked for at the same time; by default twice as many as it makes at once.
        patience (`float`, defaults to 240):
            Seconds to wait for a server while there is none.
        sample_timeout (`float`, defaults to 600):
            Seconds that a sample may take.
        check (`Callable[[ServerInfo, str], None]`, *optional*):
            Raises [`~omnitrl.errors.InputError`] for a server that is the wrong one.
        on_wait (`Callable[[], None]`, *optional*):
            Called while the caller waits, several times a second; may raise to interrupt.
        for_others (`bool`, defaults to `False`):
            Whether other processes rely on this one to bring weights to servers that have lost them. Otherwise it does
            so while it makes samples, and leaves servers to other trainers at other times.
        collective_from (`torch.device`, *optional*):
            Device from which whole networks go to servers by a collective, rather than over HTTP.

    Example:

    ```python
    >>> client = RolloutClient([HttpTransport("http://a:8000"), HttpTransport("http://b:8000")])
    >>> client.connect()
    >>> for number, message in client.stream(Jobs(groups, pack, lambda number, message: message)):
    ...     ...
    ```
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        concurrency: int | None = None,
        patience: float = 240.0,
        sample_timeout: float = 600.0,
        check: Callable[[ServerInfo, str], None] = _any_server,
        on_wait: Callable[[], None] = _do_nothing,
        for_others: bool = False,
        collective_from: torch.device | None = None,
    ) -> None:
        self.replicas = [Replica(transport, check, patience, collective_from) for transport in transports]
        self.retries = 0
        """Samples that were asked for again, so far."""
        self.busy = 0.0
        """CPU seconds of the client's thread so far."""
        self._concurrency = concurrency
        self._patience = patience
        self._sample_timeout = sample_timeout
        self._on_wait = on_wait
        self._wanted: WeightUpdate | None = None
        self._for_others = for_others
        self._in_use = 0  # calls that make samples
        self._loop = LoopThread("rollout-client")

    # For the caller's thread

    def connect(self) -> list[ServerInfo]:
        """
        Waits for all servers, or for one of them once `patience` is over.

        Raises:
            [`~omnitrl.errors.InputError`]: a server is the wrong one.
            [`~omnitrl.errors.RunError`]: there is none.
        """
        return self._wait(self._loop.start(self._connect()))

    def stream(self, jobs: Jobs) -> Iterator[tuple[int, Any]]:
        """
        Yields number and sample of each job as soon as it is made.

        Raises:
            [`~omnitrl.errors.InputError`]: a server says that a request can never work.
            [`~omnitrl.errors.RunError`]: there is no server any more, or none that can make a sample.
        """
        made: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        future = self._loop.start(self._make(jobs, made))
        future.add_done_callback(lambda _: made.put(None))
        try:
            while (item := self._next(made)) is not None:
                yield item
            future.result()
        finally:
            future.cancel()

    def of_each(self, body: bytes, accept: Callable[[bytes], Any]) -> dict[str, Any]:
        """The same sample of every server that is there, by the name of the server."""
        return self._wait(self._loop.start(self._of_each(body, accept)))

    def update(self, update: WeightUpdate) -> WeightReport | None:
        """
        Brings weights to every server that is there, and later to those that come back.

        Returns:
            `WeightReport`: of one of the servers, `None` where another process brings the weights.

        Raises:
            [`~omnitrl.errors.InputError`]: a server says that it can never take them.
            [`~omnitrl.errors.RunError`]: they do not fit, or there is no server.
        """
        return self._wait(self._loop.start(self._update(update)))

    def forget_weights(self) -> None:
        """Frees the memory of the last update, when another one is about to come."""
        self._wanted = None

    def tell(self, path: str) -> None:
        """An empty call of every server that is there."""
        self._wait(self._loop.start(self._tell(path)))

    @property
    def alive(self) -> int:
        """Servers that are there."""
        return sum(replica.up for replica in self.replicas)

    @property
    def starts(self) -> int:
        """How often a server came that had been started, the first time included."""
        return sum(replica.starts for replica in self.replicas)

    def describe_outage(self) -> str:
        """Why there is no server, in the servers' own words."""
        return "; ".join(f"{replica.name}: {replica.reason.rstrip('.')}" for replica in self.replicas)

    def close(self) -> None:
        """Ends the connections and the thread."""
        self._loop.close(self._disconnect)

    def _wait(self, future: Future[Any]) -> Any:
        try:
            while not future.done():
                self._on_wait()
                wait([future], timeout=POLL)
            return future.result()
        finally:
            future.cancel()

    def _next(self, made: SimpleQueue[tuple[int, Any] | None]) -> tuple[int, Any] | None:
        while True:
            self._on_wait()
            try:
                return made.get(timeout=POLL)
            except Empty:
                continue

    # On the loop

    async def _connect(self) -> list[ServerInfo]:
        self._keepers = [asyncio.create_task(replica.keep(self._needed)) for replica in self.replicas]
        started, told = time.monotonic(), False
        while self.alive < len(self.replicas):
            for replica in self.replicas:
                if replica.wrong is not None:
                    raise replica.wrong
            waited = time.monotonic() - started
            if waited > 1 and not told:
                told = True
                away = "; ".join(f"{r.name}: {r.reason}" for r in self.replicas if not r.up)
                logger.warning(
                    "Waiting up to %g s (vllm_server_timeout) for rollout servers. %s.", self._patience, away
                )
            if waited > self._patience:
                break
            await asyncio.sleep(0.02 if waited < 1 else POLL)
        if not self.alive:
            raise self._no_server()
        for replica in self.replicas:
            replica.awaited = False
        return [replica.info for replica in self.replicas if replica.up and replica.info is not None]

    def _needed(self) -> WeightUpdate | None:
        """The weights that servers should have now, if somebody needs them there."""
        return self._wanted if self._in_use or self._for_others else None

    @contextmanager
    def _using(self) -> Iterator[None]:
        self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1

    def _no_server(self) -> RunError:
        return RunError(
            f"No rollout server has been there for {self._patience:g} s (vllm_server_timeout). "
            f"{self.describe_outage()}. Start one with `omnitrl vllm-serve MODEL`, or correct vllm_server_base_url."
        )

    async def _disconnect(self) -> None:
        for replica in self.replicas:
            await replica.transport.close()

    async def _some_server(self) -> None:
        """Waits until there is a server, as long as patience lasts."""
        started = time.monotonic()
        while not self.alive:
            if time.monotonic() - started > self._patience:
                raise self._no_server()
            await asyncio.sleep(POLL / 5)

    async def _back(self, replica: Replica) -> None:
        """Waits a little for a server that is only to be given its weights."""
        started = time.monotonic()
        while not replica.up and time.monotonic() - started < min(self._patience, 30.0):
            await asyncio.sleep(POLL / 5)

    async def _update(self, update: WeightUpdate) -> WeightReport | None:
        self._wanted = update
        if update.messages is None:
            for replica in self.replicas:
                replica.has(update.version)
            return None
        while True:
            await self._some_server()
            there = [replica for replica in self.replicas if replica.up]
            outcomes = await asyncio.gather(
                *(replica.give(lambda: self._wanted) for replica in there), return_exceptions=True
            )
            for replica, outcome in zip(there, outcomes, strict=True):
                if isinstance(outcome, Away | TooSlow):
                    replica.drop(str(outcome))
                elif isinstance(outcome, Refused):
                    raise self._said(replica, outcome)
                elif isinstance(outcome, BaseException):
                    raise outcome
            reports = [outcome for outcome in outcomes if isinstance(outcome, WeightReport)]
            if reports or self.alive:
                return reports[0] if reports else None

    async def _tell(self, path: str) -> None:
        await self._some_server()
        for replica in self.replicas:
            if replica.up:
                try:
                    await replica.call(path, b"", self._patience)
                except (Away, TooSlow) as error:
                    replica.drop(str(error))
                except Refused as error:
                    raise self._said(replica, error) from error

    async def _of_each(self, body: bytes, accept: Callable[[bytes], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        tries = _Round(Jobs([], lambda _: body, lambda _, message: accept(message)))
        with self._using():
            while not found or any(replica.up and replica.name not in found for replica in self.replicas):
                await self._some_server()
                for number, replica in enumerate(self.replicas):
                    if replica.up and replica.name not in found:
                        await self._of_one(number, tries, found)
        return found

    async def _of_one(self, number: int, tries: _Round, found: dict[str, Any]) -> None:
        replica = self.replicas[number]
        try:
            found[replica.name] = await self._ask(tries.jobs, number, replica)
        except Exception as error:
            self._failed(tries, number, replica, error)
            if isinstance(error, Refused):
                await self._back(replica)

    @staticmethod
    def _said(replica: Replica, error: Refused) -> InputError | RunError:
        kind = InputError if error.kind == "input" else RunError
        return kind(f"{replica.name} refused (HTTP status {error.status}): {error.sentence}")

    async def _make(self, jobs: Jobs, made: SimpleQueue[tuple[int, Any] | None]) -> None:
        with self._using():
            await self._make_all(jobs, made)

    async def _make_all(self, jobs: Jobs, made: SimpleQueue[tuple[int, Any] | None]) -> None:
        started = time.thread_time()
        round_ = _Round(jobs)
        running: dict[asyncio.Task[Any], tuple[int, Replica]] = {}
        try:
            while running or round_.left:
                self._start(round_, running)
                if not running:
                    await self._some_server()
                    await asyncio.sleep(POLL / 5)  # those that are there are all busy with another stream
                    continue
                done, _ = await asyncio.wait(running, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number, replica = running.pop(task)
                    replica.running -= 1
                    if not self._failed(round_, number, replica, task.exception()):
                        made.put((number, task.result()))
                self.busy, started = self.busy + time.thread_time() - started, time.thread_time()
        finally:
            for task, (_, replica) in running.items():
                replica.running -= 1
                task.cancel()

    def _start(self, round_: _Round, running: dict[asyncio.Task[Any], tuple[int, Replica]]) -> None:
        """Fills the servers that are there, and takes back what those that are not have been asked for."""
        for task, (number, replica) in list(running.items()):
            if not replica.up and not task.done():
                task.cancel()
                del running[task]
                replica.running -= 1
                self._again(round_, number, replica, "away", replica.reason)
        for replica in self.replicas:
            if not replica.up:
                round_.take_back(replica)
        free = [replica for replica in self.replicas if replica.up]
        alone = len(free) == 1
        while free:
            replica = min(free, key=lambda replica: replica.running)
            following = round_.take(replica, alone) if replica.running < self._bound(replica, round_.jobs) else None
            if following is None:
                free.remove(replica)
                continue
            task = asyncio.create_task(self._ask(round_.jobs, following, replica))
            running[task] = (following, replica)
            replica.running += 1

    def _bound(self, replica: Replica, jobs: Jobs) -> int:
        at_once = replica.info.max_num_seqs if replica.info is not None else 1
        return self._concurrency or jobs.at_once or max(2 * at_once, 4)

    async def _ask(self, jobs: Jobs, number: int, replica: Replica) -> Any:
        return jobs.accept(number, await replica.call(GENERATE, jobs.pack(number), self._sample_timeout))

    def _failed(self, round_: _Round, number: int, replica: Replica, error: BaseException | None) -> bool:
        """Whether a sample was not made, and is to be tried again; raises where that is of no use."""
        if error is None:
            return False
        if isinstance(error, Away):
            replica.drop(str(error))
            self._again(round_, number, replica, "away", str(error))
        elif isinstance(error, Refused) and error.kind == "stale":
            replica.drop(_stale(error))
            self._again(round_, number, replica, "away", error.sentence)
        elif isinstance(error, TooSlow):
            self._again(round_, number, replica, "broken", f"{error} (vllm_request_timeout)")
        elif isinstance(error, BadAnswer) or (isinstance(error, Refused) and error.kind == "internal"):
            self._again(round_, number, replica, "broken", str(error))
        elif isinstance(error, Refused):
            raise self._said(replica, error)
        else:
            raise error
        return True

    def _again(self, round_: _Round, number: int, replica: Replica, kind: str, words: str) -> None:
        self.retries += 1
        tries = round_.count(number, kind)
        if tries >= MOST_TRIES[kind]:
            raise RunError(f"A sample could not be made in {tries} tries; the last was of {replica.name}: {words}")
        if kind == "broken":
            logger.warning("%s failed to make a sample, which is asked for again: %s", replica.name, words)
        round_.give_back([number], avoid=replica)


def _stale(error: Refused) -> str:
    return f"it has other weights than those of this step ({error.sentence.rstrip('.')})"


@dataclass(eq=False)
class _Unit:
    """Samples that go to one server, one after the other, and a server that rather does not get them."""

    numbers: deque[int]
    avoid: Replica | None = None


@dataclass
class _Round:
    """What is still to be asked for, in the order of the samples, so that the first ones are there first."""

    jobs: Jobs
    _waiting: deque[_Unit] = field(default_factory=deque)
    _of: dict[Replica, deque[int]] = field(default_factory=dict)
    _tries: Counter[tuple[int, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        groups: dict[Hashable, list[int]] = {}
        for number, group in enumerate(self.jobs.groups):
            groups.setdefault(group, []).append(number)
        self._waiting.extend(_Unit(deque(numbers)) for numbers in groups.values())

    @property
    def left(self) -> bool:
        """Whether a sample has no server yet."""
        return bool(self._waiting) or any(self._of.values())

    def take(self, replica: Replica, alone: bool) -> int | None:
        """
        The next sample for this server: of the group that it has, or of one that none has begun.

        Where all are begun, it takes half of what another server has not been asked for yet: a prompt that is encoded
        twice costs less than a server that is idle.
        """
        mine = self._of.setdefault(replica, deque())
        if not mine:
            unit = next((unit for unit in self._waiting if alone or unit.avoid is not replica), None)
            if unit is not None:
                self._waiting.remove(unit)
                mine.extend(unit.numbers)
        if not mine:
            longest = max(self._of.values(), key=len)
            mine.extendleft(longest.pop() for _ in range(-(-len(longest) // 2)))
        return mine.popleft() if mine else None

    def give_back(self, numbers: Sequence[int], avoid: Replica | None = None) -> None:
        """Puts samples where they are taken from next."""
        self._waiting.appendleft(_Unit(deque(numbers), avoid))

    def take_back(self, replica: Replica) -> None:
        """What a server was to be asked for and was not."""
        rest = self._of.pop(replica, None)
        if rest:
            self.give_back(list(rest))

    def count(self, number: int, kind: str) -> int:
        """Counts a try of a sample, and says how many there were of this kind."""
        self._tries[number, kind] += 1
        return self._tries[number, kind]

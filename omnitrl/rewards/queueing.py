# SPDX-License-Identifier: Apache-2.0
"""The samples that wait for one reward, and how they become calls."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from .background import Lane, call_in
from .breaker import Breaker
from .cache import RewardCache, content_key, digest
from .contract import Reward, RewardError
from .media import is_broken
from .results import Answer, Failure, Scores


@dataclass(eq=False)
class Chunk:
    """
    Rows that were submitted together.

    Args:
        rows (`list[dict]`):
            Dataset rows.
        columns (`list[str]`):
            Names of the columns that any of them has, but for the prompt.
        state (`Any`):
            The trainer's.
        groups (`list`, *optional*):
            The group of each row.
        group_size (`int`, *optional*):
            Members of a group; `None` where a group is complete when all has been submitted.
    """

    rows: Sequence[dict[str, Any]]
    columns: Sequence[str]
    state: Any
    groups: Sequence[Hashable] | None = None
    group_size: int | None = None
    jobs: list["Job"] = field(default_factory=list)
    digests: dict[int, bytes | None] = field(default_factory=dict)

    def digest(self, medium: Any) -> bytes | None:
        """Hash of a medium, made once for all that are shown it: of one row, some see a video and some its sound."""
        if id(medium) not in self.digests:  # all media of a chunk exist before the first is let go
            self.digests[id(medium)] = digest(medium)
        return self.digests[id(medium)]


@dataclass(eq=False)
class Entry:
    """One row for one reward; `key` is what its value is kept under."""

    job: "Job"
    position: int
    medium: Any
    key: bytes | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The dataset row."""
        return self.job.chunk.rows[self.position]


class Job:
    """
    What one reward owes one chunk.

    Args:
        chunk ([`Chunk`]):
            The rows.
        media (`list`):
            What the reward is shown of each; broken ones count as failed and are not shown.
        what (`str`):
            What they are, for the sentence about broken ones.
    """

    def __init__(self, chunk: Chunk, media: Sequence[Any], what: str) -> None:
        self.chunk = chunk
        self.scores = Scores()
        self.finished: Future[None] = Future()
        self.finished.set_running_or_notify_cancel()
        self.cancelled = False
        self.parked = 0
        """Rows that wait for other members of their group."""
        broken = [position for position, medium in enumerate(media) if is_broken(medium)]
        if broken:
            self.scores.failures.append(Failure(broken, f"the {what} was None or not finite"))
        self.entries = [Entry(self, i, medium) for i, medium in enumerate(media) if i not in set(broken)]
        self._left = len(self.entries)
        if not self._left:
            self.finished.set_result(None)

    @property
    def active(self) -> int:
        """Rows that are being scored or could be."""
        return self._left - self.parked

    def settle(self, entry: Entry) -> None:
        """One row less to score; its medium is let go."""
        entry.medium = None
        self._left -= 1
        if not self._left and not self.finished.done():
            self.finished.set_result(None)

    def break_off(self, error: Exception) -> None:
        """Ends the round of scoring with an error."""
        if not self.finished.done():
            self.finished.set_exception(error)


@dataclass(eq=False)
class _Call:
    """Rows that a reward is called with; `fresh` until its first attempt has ended."""

    entries: list[Entry]
    fresh: bool = True
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _Group:
    """Members of a group that have come so far, broken ones counted."""

    size: int | None
    entries: list[Entry] = field(default_factory=list)
    count: int = 0


class RewardQueue:
    """
    Calls one reward: cuts and joins chunks, completes groups, and repeats what failed. It lives in one event loop.

    Rows wait here and become a call no sooner than it can begin, so that small chunks that wait are joined.

    Args:
        reward ([`Reward`]):
            The reward.
        lane ([`Lane`]):
            Runs its calls.
        breaker ([`Breaker`]):
            Repeats them.
        timeout (`float`, *optional*):
            Seconds that one attempt may take.
        cache ([`RewardCache`], *optional*):
            Keeps its values.
        on_change (`Callable`):
            Called when rows have been scored.
    """

    def __init__(
        self,
        reward: Reward,
        lane: Lane,
        breaker: Breaker,
        timeout: float | None,
        cache: RewardCache | None,
        on_change: Callable[[], None],
    ) -> None:
        self.reward = reward
        self.lane = lane
        self.cache = cache
        self._breaker = breaker
        self._timeout = timeout
        self._on_change = on_change
        self._slots = None if lane.capacity is None else asyncio.Semaphore(lane.capacity)
        self._pending: deque[list[Entry]] = deque()  # rows that stay together, unless there is a batch size
        self._groups: dict[Hashable, _Group] = {}
        self._calls: set[_Call] = set()
        self._look_ups: set[asyncio.Task[None]] = set()
        self._fresh = 0

    # What comes in

    def add(self, job: Job) -> None:
        """Takes the rows of a chunk."""
        if self.cache is None:
            self._admit(job, job.entries)
            return
        task = asyncio.get_running_loop().create_task(self._look_up(job, self.cache))
        self._look_ups.add(task)
        task.add_done_callback(self._look_ups.discard)

    def finish(self) -> None:
        """All has been submitted: groups of no stated size are complete, and others must be."""
        for name, group in list(self._groups.items()):
            if group.size is None:
                self._complete(name)
                continue
            error = RewardError(
                f"reward {self.reward.name!r} compares the members of a group, but of group {name!r} there came "
                f"{group.count} of {group.size}: submit all members before collect()."
            )
            for entry in group.entries:
                entry.job.break_off(error)
            del self._groups[name]
        self._begin_calls()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Gives up chunks: what waits is dropped, and calls that run for none but them are ended."""
        for job in jobs:
            job.cancelled = True
        waiting = [[entry for entry in unit if not entry.job.cancelled] for unit in self._pending]
        self._pending = deque(unit for unit in waiting if unit)
        for name, group in list(self._groups.items()):
            group.entries = [entry for entry in group.entries if not entry.job.cancelled]
            if not group.entries:
                del self._groups[name]
        for call in list(self._calls):
            if call.task is not None and all(entry.job.cancelled for entry in call.entries):
                call.task.cancel()

    async def _look_up(self, job: Job, cache: RewardCache) -> None:
        """Scores the rows whose value is known, and takes the others."""
        try:
            async with cache.turn:
                await asyncio.to_thread(self._make_keys, job)
        except Exception as error:  # nobody waits for this task, but all wait for the job
            job.break_off(error)
        if job.cancelled or job.finished.done():
            return
        unknown = []
        for entry in job.entries:
            known = cache.get(entry.key)
            if known is None:
                unknown.append(entry)
            else:
                job.scores.add(entry.position, *known)
                job.scores.cached += 1
                job.settle(entry)
        self._admit(job, unknown)
        self._on_change()

    def _make_keys(self, job: Job) -> None:
        for entry in job.entries:
            row = {name: entry.row.get(name) for name in ("prompt", *job.chunk.columns)}
            entry.key = content_key(self.reward, job.chunk.digest(entry.medium), row)

    def _admit(self, job: Job, entries: Sequence[Entry]) -> None:
        if self.reward.traits.groupwise:
            self._add_to_groups(job)
        elif self.reward.traits.batch_size is not None:
            self._pending.extend([entry] for entry in entries)
        elif entries:
            self._pending.append(list(entries))
        self._begin_calls()

    def _add_to_groups(self, job: Job) -> None:
        chunk, shown = job.chunk, {entry.position: entry for entry in job.entries}
        assert chunk.groups is not None
        for position, name in enumerate(chunk.groups):
            group = self._groups.setdefault(name, _Group(chunk.group_size))
            group.count += 1
            if position in shown:
                group.entries.append(shown[position])
                job.parked += 1
            if group.count == group.size:
                self._complete(name)
        self._on_change()

    def _complete(self, name: Hashable) -> None:
        """A group has all of its members: those that can be shown become a call."""
        entries = self._groups.pop(name).entries
        for entry in entries:
            entry.job.parked -= 1
        if entries:
            self._pending.append(entries)

    # Calls

    def _begin_calls(self) -> None:
        """Makes calls of what waits, as many as can begin now."""
        capacity = self.lane.capacity
        while self._pending and (capacity is None or self._fresh < capacity):
            call = _Call(self._next_entries())
            self._fresh += 1
            self._calls.add(call)
            call.task = asyncio.get_running_loop().create_task(self._serve(call))
            # Not in a `finally` of the task, which one that is cancelled before it has begun would not come to.
            call.task.add_done_callback(functools.partial(self._end, call))

    def _next_entries(self) -> list[Entry]:
        entries, most = list(self._pending.popleft()), self.reward.traits.batch_size
        while most is not None and self._pending and len(entries) < most:
            entries += self._pending.popleft()
        return entries

    async def _serve(self, call: _Call) -> None:
        """Calls the reward until it answers or the attempts are used up, and hands the answer out."""
        try:
            answer = await self._breaker.run(lambda: self._attempt(call))
        except (RewardError, ImportError) as error:
            self._break_off(call, error)
        except Exception as error:
            self._fail(call, error)
        else:
            self._hand_out(call, answer)

    def _end(self, call: _Call, task: asyncio.Task[None]) -> None:
        """Nothing more is to be done for a call, whatever came of it."""
        self._calls.discard(call)
        self._tried(call)
        self._on_change()

    async def _attempt(self, call: _Call) -> Answer:
        try:
            async with self._slots or contextlib.nullcontext():
                return await call_in(self.lane, self._arguments(call.entries), len(call.entries), self._timeout)
        finally:
            self._tried(call)

    def _arguments(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Columns of the rows, in lists of their own: a reward that sorts or pops them does so to no other's."""
        names = dict.fromkeys(name for entry in entries for name in entry.job.chunk.columns)
        return {
            "prompts": [entry.row["prompt"] for entry in entries],
            "completions": [entry.medium for entry in entries],
            "trainer_state": entries[-1].job.chunk.state,
            **{name: [entry.row.get(name) for entry in entries] for name in names},
        }

    def _tried(self, call: _Call) -> None:
        """Lets the next call be made when the first attempt of this one has ended."""
        if call.fresh:
            call.fresh = False
            self._fresh -= 1
            self._begin_calls()

    # What comes out

    def _hand_out(self, call: _Call, answer: Answer) -> None:
        call.entries[0].job.scores.record(answer.metrics)
        for i, (entry, value) in enumerate(zip(call.entries, answer.values, strict=True)):
            extras = {name: values[i] for name, values in answer.extras.items()}
            entry.job.scores.add(entry.position, value, extras)
            # What was said of the whole call cannot be said again of one of its rows.
            if self.cache is not None and entry.key is not None and not answer.metrics:
                self._keep(self.cache, entry.key, value, extras)
            entry.job.settle(entry)

    @staticmethod
    def _keep(cache: RewardCache, key: bytes, value: float | None, extras: dict[str, Any]) -> None:
        if value is None or abs(value) < float("inf"):  # which NaN is not
            cache.put(key, value, extras)

    def _fail(self, call: _Call, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}".rstrip(". ") + ","
        for job in dict.fromkeys(entry.job for entry in call.entries):
            mine = [entry for entry in call.entries if entry.job is job]
            job.scores.failures.append(Failure([entry.position for entry in mine], what, error))
            for entry in mine:
                job.settle(entry)

    def _break_off(self, call: _Call, error: Exception) -> None:
        if isinstance(error, ImportError):
            cause, error = error, RewardError(f"reward {self.reward.name!r} cannot be used: {error}")
            error.__cause__ = cause
        for entry in call.entries:
            entry.job.break_off(error)

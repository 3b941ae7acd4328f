# SPDX-License-Identifier: Apache-2.0
"""Calls the rewards beside the rollouts, and turns what comes back into one table."""

import math
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch

from omnitrl.errors import InputError

from .background import LoopThread
from .breaker import Breaker
from .cache import RewardCache
from .contract import RUNNER_ARGUMENTS, Reward, RewardError, RewardFunc, unique_names
from .kinds import shown_media
from .processes import lane_of
from .queueing import Chunk, Job, RewardQueue
from .registry import get_reward
from .results import RewardBatch, RewardTable
from .weights import check_weights


# A wait without an end cannot be interrupted by Ctrl-C on every platform.
_POLL_SECONDS = 0.2


class RewardRunner:
    """
    Calls reward functions in the background and collects their values in order.

    `submit` hands over a chunk of rows as soon as their media exist and returns at once; `collect` waits for all
    chunks since the last `collect`. Each synchronous reward has one thread of its own, so that it never runs beside
    itself; asynchronous ones share an event loop, where calls for several chunks overlap; those that ask for it run in
    processes of their own. All run without gradients. How a reward wants to be called is in its [`RewardTraits`].

    An exception and a time-out are retried with growing waits. What still fails is missing (NaN), never 0, and is
    counted in `rewards/{name}/failed`. A reward that is away ([`RewardUnavailable`]) is waited for. A broken contract
    (wrong number of values, something that is no number, media that the reward does not take, a missing package) is
    not retried and ends the run, for a reward of weight 0 too: it would be broken at every step.

    Args:
        reward_funcs (`Callable`, `str`, or a list of them):
            The rewards; see [`get_reward`] for what a string may be. The list is not modified.
        weights (`list[float]`, *optional*):
            One per reward, default 1.0 each. A reward of weight 0 is watched only: its values are returned, and its
            failures are reported as warnings.
        max_retries (`int`, *optional*, defaults to `2`):
            Further attempts after an exception or a time-out.
        retry_wait (`float`, *optional*, defaults to `0.5`):
            Seconds before the first further attempt; doubled for each one after it.
        timeout (`float`, *optional*):
            Seconds that one attempt may take. An asynchronous call is cancelled and a process killed; a synchronous
            call cannot be stopped: it goes on in its thread, and its result is thrown away.
        max_failed_fraction (`float`, *optional*, defaults to `0.5`):
            [`RewardError`] is raised when more than this share of the rows of one `collect` failed for a reward whose
            weight is not 0.
        max_wait (`float`, *optional*, defaults to `0.0`):
            Seconds to wait for a reward that is away, from when it was first missed; 0 for the retries only.
        max_pending (`int`, *optional*):
            Rows that may wait for a reward; `submit` waits while there are as many. `None` for no bound.
        cache_size (`int`, *optional*, defaults to `0`):
            Values of deterministic rewards that are kept and used again for the same media and columns; 0 for none.
        num_processes (`int`, *optional*, defaults to `1`):
            Processes of each reward that runs in processes of its own.
        device (`str` or `torch.device`, *optional*):
            Where rewards that are models are moved, by their method `to` or their attribute `device`; they stay where
            they are by default.
        final_weights (`list[float]`, *optional*):
            The weights that `weights` will become. A reward is watched only if it has weight 0 in both.

    Attributes:
        names (`list[str]`): unique names, used in metrics.
        weights (`list[float]`): the weights, which may be changed between two rounds.
        initial_weights, final_weights (`list[float]`): what they are at first and in the end.
        watched (`list[bool]`): which rewards have weight 0 for good.

    Example:

    ```python
    >>> from omnitrl.rewards import RewardRunner


    >>> def length(prompts, **kwargs):
    ...     return [len(prompt) for prompt in prompts]


    >>> with RewardRunner(length) as runner:
    ...     runner.submit([{"prompt": "a cat"}, {"prompt": "a dog!"}], completions=["media 0", "media 1"])
    ...     batch = runner.collect()
    >>> batch.rewards[:, 0].tolist()
    [5.0, 6.0]
    ```
    """

    def __init__(
        self,
        reward_funcs: "RewardFunc | str | Sequence[RewardFunc | str]",
        weights: Sequence[float] | None = None,
        max_retries: int = 2,
        retry_wait: float = 0.5,
        timeout: float | None = None,
        max_failed_fraction: float = 0.5,
        max_wait: float = 0.0,
        max_pending: int | None = None,
        cache_size: int = 0,
        num_processes: int = 1,
        device: str | torch.device | None = None,
        final_weights: Sequence[float] | None = None,
    ):
        given: list[Any] = [reward_funcs]
        if isinstance(reward_funcs, Sequence) and not (isinstance(reward_funcs, str) or callable(reward_funcs)):
            given = list(reward_funcs)
        if not given:
            raise InputError("reward_funcs is empty: give at least one reward, for example 'ocr'.")
        functions = [get_reward(spec) for spec in given]
        self.names = unique_names(functions)
        self.initial_weights = check_weights(weights, self.names)
        self.final_weights = check_weights(weights if final_weights is None else final_weights, self.names)
        self.weights = list(self.initial_weights)
        self.watched = [
            not (first or last) for first, last in zip(self.initial_weights, self.final_weights, strict=True)
        ]
        _check_limits(max_retries, retry_wait, timeout, max_failed_fraction)
        _check_room(max_wait, max_pending, cache_size, num_processes)
        self.max_failed_fraction = max_failed_fraction
        self.max_pending = max_pending
        self._rewards = [Reward.from_callable(*named) for named in zip(functions, self.names, strict=True)]
        if device is not None:
            for reward in self._rewards:
                reward.move(device)
        # Two loops: an async reward that blocks its loop must not hold up the others, nor its own time-out.
        self._control = LoopThread("reward-runner")
        loop = LoopThread("reward-async")
        cache = RewardCache(cache_size) if cache_size else None
        self._room = threading.Condition()
        self._queues = [
            RewardQueue(
                reward,
                lane_of(reward, loop, num_processes),
                Breaker(reward.name, max_retries, retry_wait, max_wait),
                timeout,
                cache if reward.traits.deterministic and not reward.traits.groupwise else None,
                self._notify,
            )
            for reward in self._rewards
        ]
        self._chunks: list[Chunk] = []
        self._closed = False

    @property
    def needs_latents(self) -> bool:
        """Whether some reward looks at the clean latents."""
        return any(map(_of_latents, self._rewards))

    @property
    def needs_media(self) -> bool:
        """Whether some reward looks at what is decoded."""
        return not all(map(_of_latents, self._rewards))

    @property
    def groupwise(self) -> list[str]:
        """Names of the rewards that compare the members of a group."""
        return [reward.name for reward in self._rewards if reward.traits.groupwise]

    def submit(
        self,
        rows: Sequence[dict[str, Any]],
        completions: Sequence[Any] | None,
        trainer_state: Any = None,
        latents: Sequence[Any] | None = None,
        groups: Sequence[Hashable] | None = None,
        group_size: int | None = None,
    ) -> None:
        """
        Starts scoring a chunk and returns at once, or as soon as there is room (`max_pending`).

        Args:
            rows (`list[dict]`):
                Dataset rows, each with `"prompt"`. A column that only some of the rows have is `None` in the others.
            completions (`list`, *optional*):
                The media, one per row. A row whose media is `None` or a tensor with NaN is not shown to the rewards
                and counts as failed. `None` in the place of the list if nothing was decoded, which is enough for
                rewards of latents.
            trainer_state (`transformers.TrainerState`, *optional*):
                Passed on to the rewards.
            latents (`list[torch.Tensor]`, *optional*):
                The clean latents, one per row, for rewards that look at them.
            groups (`list`, *optional*):
                The group of each row, for rewards that compare its members. A group may lie in several chunks, and is
                scored when it is complete.
            group_size (`int`, *optional*):
                Members of a group. Without it groups are complete at `collect`.

        Raises:
            `ValueError`: if the lengths differ, a row has no prompt, or a column has the name of a runner's argument.
            [`RewardError`]: if a reward requires a column that is not there, or looks at something else than there is,
                or one submitted before broke the contract.
        """
        if self._closed:
            raise RuntimeError("this RewardRunner is closed: make a new one.")
        self._raise_early()
        for name, given in (("completions", completions), ("latents", latents), ("groups", groups)):
            if given is not None and len(given) != len(rows):
                raise InputError(
                    f"got {len(rows)} rows and {len(given)} {name}: give one {name.removesuffix('s')} per row."
                )
        if groups is not None and not all(isinstance(group, Hashable) for group in groups):
            raise InputError(f"got groups {list(groups)[:2]!r:.80}: name each by a number or a text, for example 0.")
        chunk = Chunk(rows, _columns(rows), trainer_state, groups, group_size)
        for reward in self._rewards:
            reward.check({*chunk.columns, *RUNNER_ARGUMENTS})
        jobs = [_job(reward, chunk, completions, latents) for reward in self._rewards]
        self._wait_for_room(len(rows))
        chunk.jobs = jobs
        self._chunks.append(chunk)
        for queue, job in zip(self._queues, jobs, strict=True):
            self._control.call(queue.add, job)

    def collect(self) -> RewardBatch:
        """
        Waits for everything that was submitted since the last call.

        Ctrl-C ends the wait: what has not started is cancelled, and the runner is empty and can be used again.

        Returns:
            [`RewardBatch`]: rows in the order of submission.

        Raises:
            [`RewardError`]: if a reward broke the contract or failed for too many rows.
        """
        chunks, self._chunks = self._chunks, []
        try:
            for queue in self._queues if chunks else []:
                self._control.call(queue.finish)
            for chunk in chunks:
                for job in chunk.jobs:
                    _wait(job)
        except BaseException:
            self._cancel(chunks)
            raise
        return self._assemble(chunks)

    def total(self, rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
        """
        Weighted sum over the rewards, missing ones left out as in TRL.

        Args:
            rewards (`torch.Tensor`):
                Shape (N, F), NaN where missing; possibly gathered from all ranks.
            weights (`list[float]`, *optional*):
                One per reward; the current ones by default.

        Returns:
            `torch.Tensor` of shape (N,): NaN for a row that has no value of any reward that is not watched only.
        """
        if rewards.ndim != 2 or rewards.shape[1] != len(self.names):
            raise InputError(
                f"expected rewards of shape (N, {len(self.names)}), one column for each of {', '.join(self.names)}, "
                f"got {tuple(rewards.shape)}."
            )
        counts = ~torch.tensor(self.watched, device=rewards.device)
        factors = torch.tensor(
            self.weights if weights is None else weights, dtype=rewards.dtype, device=rewards.device
        )
        counted = rewards[:, counts]  # (N, F')
        total = (counted * factors[counts]).nansum(dim=1)
        return total.masked_fill(counted.isnan().all(dim=1), math.nan)

    def discard(self) -> None:
        """Gives up everything that was submitted since the last `collect`, as after a rollout that was broken off."""
        chunks, self._chunks = self._chunks, []
        self._cancel(chunks)

    def close(self) -> None:
        """Gives up what is running and ends the threads and processes. Does not wait for a reward that hangs."""
        self.discard()
        self._closed = True
        for queue in self._queues:
            queue.lane.close()
        self._control.close()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait_for_room(self, count: int) -> None:
        """Waits while more rows than `max_pending` would wait for a reward."""
        if self.max_pending is None:
            return
        with self._room:
            while 0 < (active := self._active()) and active + count > self.max_pending:
                self._raise_early()
                self._room.wait(_POLL_SECONDS)

    def _active(self) -> int:
        """Rows that wait for the reward that has most of them; those that wait for their group are not among them."""
        return max(sum(chunk.jobs[i].active for chunk in self._chunks) for i in range(len(self._queues)))

    def _notify(self) -> None:
        with self._room:
            self._room.notify_all()

    def _raise_early(self) -> None:
        """A broken contract ends the rollout at its next chunk rather than at its end."""
        for chunk in self._chunks:
            for job in chunk.jobs:
                if job.finished.done() and (error := job.finished.exception()) is not None:
                    self.discard()
                    raise error

    def _cancel(self, chunks: Sequence[Chunk]) -> None:
        for i, queue in enumerate(self._queues):
            if chunks:
                self._control.call(queue.cancel, [chunk.jobs[i] for chunk in chunks])

    def _assemble(self, chunks: Sequence[Chunk]) -> RewardBatch:
        table = RewardTable(self.names, [str(row["prompt"]) for chunk in chunks for row in chunk.rows])
        start = 0
        for chunk in chunks:
            for column, job in enumerate(chunk.jobs):
                table.add(start, column, job.scores)
            start += len(chunk.rows)
        table.check(self.watched, self.max_failed_fraction)
        return table.batch([queue.cache is not None for queue in self._queues])


def _of_latents(reward: Reward) -> bool:
    return reward.traits.media == ("latents",)


def _job(reward: Reward, chunk: Chunk, completions: Sequence[Any] | None, latents: Sequence[Any] | None) -> Job:
    """What a reward owes a chunk; raises where it looks at something that is not there."""
    if reward.traits.groupwise and chunk.groups is None:
        raise RewardError(
            f"reward {reward.name!r} compares the members of a group, but nobody said which rows belong together: "
            "give submit(..., groups=[0, 0, 1, 1]), the group of each row."
        )
    if _of_latents(reward):
        if latents is None:
            raise RewardError(
                f"reward {reward.name!r} looks at clean latents, but there are none: give submit(..., latents=[...]), "
                "or sample with keep_clean=True."
            )
        return Job(chunk, list(latents), "latents")
    if completions is None:
        raise RewardError(
            f"reward {reward.name!r} looks at decoded media, but nothing was decoded: give submit(..., "
            "completions=[...]), or sample with decode=True."
        )
    return Job(chunk, shown_media(reward, completions), "media")


def _check_limits(max_retries: int, retry_wait: float, timeout: float | None, max_failed_fraction: float) -> None:
    if max_retries < 0:
        raise InputError(f"max_retries={max_retries} must be at least 0, for example 2.")
    if retry_wait < 0:
        raise InputError(f"retry_wait={retry_wait} must be at least 0 seconds, for example 0.5.")
    if timeout is not None and timeout <= 0:
        raise InputError(f"timeout={timeout} must be more than 0 seconds, for example 60, or None for no limit.")
    if not 0 <= max_failed_fraction <= 1:
        raise InputError(f"max_failed_fraction={max_failed_fraction} must be between 0 and 1, for example 0.5.")


def _check_room(max_wait: float, max_pending: int | None, cache_size: int, num_processes: int) -> None:
    if not 0 <= max_wait < math.inf:
        raise InputError(f"max_wait={max_wait} must be at least 0 seconds and have an end, for example 600.")
    if max_pending is not None and max_pending < 1:
        raise InputError(f"max_pending={max_pending} must be at least 1, for example 256, or None for no bound.")
    if cache_size < 0:
        raise InputError(f"cache_size={cache_size} must be at least 0, for example 4096, or 0 for no cache.")
    if num_processes < 1:
        raise InputError(f"num_processes={num_processes} must be at least 1, for example 4.")


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the columns of the rows but for the prompt, in their order."""
    names = dict.fromkeys(key for row in rows for key in row)
    taken = [name for name in names if name in RUNNER_ARGUMENTS]
    if taken:
        raise InputError(
            f"the dataset column {taken[0]!r} has the name of an argument that every reward gets: rename it, for "
            f"example to '{taken[0]}_column'."
        )
    without = [i for i, row in enumerate(rows) if "prompt" not in row]
    if without:
        raise InputError(
            f"row {without[0]} has no column 'prompt' (it has: {', '.join(rows[without[0]]) or 'none'}): rename the "
            f"column that holds the prompt."
        )
    return [name for name in names if name != "prompt"]


def _wait(job: Job) -> None:
    while True:
        try:
            return job.finished.result(timeout=_POLL_SECONDS)
        except FutureTimeoutError:
            # The same class as the built-in TimeoutError: a finished future has raised its own.
            if job.finished.done():
                return job.finished.result()

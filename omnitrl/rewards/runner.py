# SPDX-License-Identifier: Apache-2.0
"""Calls the rewards beside the rollouts, and turns what comes back into one table."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import torch

from omnitrl.errors import InputError

from .background import AsyncLane, Lane, LoopThread, ThreadLane
from .contract import RUNNER_ARGUMENTS, Reward, RewardError, RewardFunc, unique_names
from .media import is_broken
from .registry import get_reward


logger = logging.getLogger(__name__)

# A wait without an end cannot be interrupted by Ctrl-C on every platform.
_POLL_SECONDS = 0.2


@dataclass
class RewardBatch:
    """
    What the rewards said about N rows.

    Args:
        rewards (`torch.Tensor`):
            Shape (N, F), `float64`, rows in the order of submission, columns in the order of the reward functions. NaN
            where a reward is missing.
        metrics (`dict[str, float]`):
            Means of the values recorded with `log_metric`, NaN left out, and `rewards/{name}/failed`, the number of
            rows for which the reward failed. Sorted by name.
        extras (`dict[str, list]`):
            Columns recorded with `log_extra`, N values each, `None` where nothing was recorded. Sorted by name.
        failed (`torch.Tensor`):
            Shape (N, F), `bool`: where a reward is missing because it failed, rather than because it returned `None`.
        failures (`dict[str, int]`):
            Number of failed rows of each reward, 0 included. An explicit `None` is no failure.
    """

    rewards: torch.Tensor
    metrics: dict[str, float]
    extras: dict[str, list[Any]]
    failed: torch.Tensor
    failures: dict[str, int]


class _Log:
    """What one call of a reward records. It counts only if the call succeeds."""

    def __init__(self, name: str, count: int):
        self._name = name
        self._count = count
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        try:
            self.metrics.setdefault(name, []).append(float(value))
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"reward {self._name!r}: log_metric({name!r}, ...) needs a number, got {value!r:.80}."
            ) from error

    def extra(self, column: str, values: Sequence[Any]) -> None:
        values = list(values)
        if len(values) != self._count:
            raise RewardError(
                f"reward {self._name!r}: log_extra({column!r}, ...) got {len(values)} values for {self._count} rows: "
                f"give one per row, and None where there is nothing to say."
            )
        self.extras[column] = values


@dataclass
class _Scores:
    """Outcome of one reward for one chunk: values, or the last failure."""

    values: list[float | None] | None
    log: _Log
    error: Exception | None = None


@dataclass
class _Chunk:
    """Rows that were submitted together. `scored` are the positions of those whose media could be decoded."""

    size: int
    scored: list[int]
    futures: list["Future[_Scores]"] = field(default_factory=list)


@dataclass
class _Failures:
    """Failed rows of one reward in one `collect`."""

    rows: int = 0
    first: str = ""
    error: Exception | None = None

    def add(self, rows: int, what: str, error: Exception | None = None) -> None:
        if rows and not self.rows:
            self.first, self.error = what, error
        self.rows += rows


class RewardRunner:
    """
    Calls reward functions in the background and collects their values in order.

    `submit` hands over a chunk of rows as soon as their media exist and returns at once; `collect` waits for all
    chunks since the last `collect`. Each synchronous reward has one thread of its own, so that it never runs beside
    itself; asynchronous ones share an event loop, where calls for several chunks overlap. All run without gradients.

    An exception and a time-out are retried with growing waits. What still fails is missing (NaN), never 0, and is
    counted in `rewards/{name}/failed`. A broken contract (wrong number of values, something that is no number, a
    missing package) is not retried and ends the run, for a reward of weight 0 too: it would be broken at every step.

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
            Seconds that one attempt may take. An asynchronous call is cancelled; a synchronous one cannot be stopped:
            it goes on in its thread, and its result is thrown away.
        max_failed_fraction (`float`, *optional*, defaults to `0.5`):
            [`RewardError`] is raised when more than this share of the rows of one `collect` failed for a reward whose
            weight is not 0.

    Attributes:
        names (`list[str]`): unique names, used in metrics.
        weights (`list[float]`): the weights.

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
    ):
        given: list[Any] = [reward_funcs]
        if isinstance(reward_funcs, Sequence) and not (isinstance(reward_funcs, str) or callable(reward_funcs)):
            given = list(reward_funcs)
        if not given:
            raise InputError("reward_funcs is empty: give at least one reward, for example 'ocr'.")
        functions = [get_reward(spec) for spec in given]
        self.names = unique_names(functions)
        self.weights = _check_weights(weights, self.names)
        _check_limits(max_retries, retry_wait, timeout, max_failed_fraction)
        self.max_retries = max_retries
        self.retry_wait = retry_wait
        self.timeout = timeout
        self.max_failed_fraction = max_failed_fraction

        self._rewards = [Reward.from_callable(*named) for named in zip(functions, self.names, strict=True)]
        # Two loops: an async reward that blocks its loop must not hold up the others, nor its own time-out.
        self._control = LoopThread("reward-runner")
        loop = LoopThread("reward-async")
        self._lanes: list[Lane] = [AsyncLane(loop) if r.is_async else ThreadLane(r.name) for r in self._rewards]
        self._turns = [contextlib.nullcontext() if r.is_async else asyncio.Lock() for r in self._rewards]
        self._chunks: list[_Chunk] = []
        self._closed = False

    def submit(self, rows: Sequence[dict[str, Any]], completions: Sequence[Any], trainer_state: Any = None) -> None:
        """
        Starts scoring a chunk and returns at once.

        Args:
            rows (`list[dict]`):
                Dataset rows, each with `"prompt"`. A column that only some of the rows have is `None` in the others.
            completions (`list`):
                The media, one per row. A row whose media is `None` or a tensor with NaN is not shown to the rewards
                and counts as failed.
            trainer_state (`transformers.TrainerState`, *optional*):
                Passed on to the rewards.

        Raises:
            `ValueError`: if the lengths differ, a row has no prompt, or a column has the name of a runner's argument.
            [`RewardError`]: if a reward requires a column that is not there, or one submitted before broke the
            contract.
        """
        if self._closed:
            raise RuntimeError("this RewardRunner is closed: make a new one.")
        self._raise_early()
        if len(rows) != len(completions):
            raise InputError(f"got {len(rows)} rows and {len(completions)} completions: give one completion per row.")
        scored = [i for i, completion in enumerate(completions) if not is_broken(completion)]
        columns = _columns(rows, scored)
        shared = {
            "prompts": columns.pop("prompt"),
            "completions": [completions[i] for i in scored],
            "trainer_state": trainer_state,
            **columns,
        }
        for reward in self._rewards:
            reward.check({*shared, *RUNNER_ARGUMENTS})
        chunk = _Chunk(len(rows), scored)
        if scored:
            chunk.futures = [
                self._control.run(self._score(column, shared, len(scored))) for column in range(len(self._rewards))
            ]
        self._chunks.append(chunk)

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
            results = [[_wait(future) for future in chunk.futures] for chunk in chunks]
        except BaseException:
            _cancel(chunks)
            raise
        return self._assemble(chunks, results)

    def total(self, rewards: torch.Tensor) -> torch.Tensor:
        """
        Weighted sum over the rewards, missing ones left out as in TRL.

        Args:
            rewards (`torch.Tensor`):
                Shape (N, F), NaN where missing; possibly gathered from all ranks.

        Returns:
            `torch.Tensor` of shape (N,): NaN for a row that has no value of any reward whose weight is not 0.
        """
        if rewards.ndim != 2 or rewards.shape[1] != len(self.names):
            raise InputError(
                f"expected rewards of shape (N, {len(self.names)}), one column for each of {', '.join(self.names)}, "
                f"got {tuple(rewards.shape)}."
            )
        weights = torch.tensor(self.weights, dtype=rewards.dtype, device=rewards.device)
        counted = rewards[:, weights != 0]  # (N, F')
        total = (counted * weights[weights != 0]).nansum(dim=1)
        return total.masked_fill(counted.isnan().all(dim=1), math.nan)

    def discard(self) -> None:
        """Gives up everything that was submitted since the last `collect`, as after a rollout that was broken off."""
        _cancel(self._chunks)
        self._chunks = []

    def close(self) -> None:
        """Gives up what is running and ends the threads. Does not wait for a reward that hangs."""
        _cancel(self._chunks)
        self._chunks = []
        self._closed = True
        for lane in self._lanes:
            lane.close()
        self._control.close()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _raise_early(self) -> None:
        """A broken contract ends the rollout at its next chunk rather than at its end."""
        for chunk in self._chunks:
            for future in chunk.futures:
                if future.done() and (error := future.exception()) is not None:
                    _cancel(self._chunks)
                    self._chunks = []
                    raise error

    async def _score(self, column: int, shared: dict[str, Any], count: int) -> _Scores:
        """Calls one reward for one chunk until it answers or the attempts are used up."""
        reward = self._rewards[column]
        failure: Exception | None = None
        for attempt in range(self.max_retries + 1):
            if attempt:
                await asyncio.sleep(self.retry_wait * 2 ** (attempt - 1))
            # Each attempt has its own log: a late one that was given up must not write into the one that counts.
            log = _Log(reward.name, count)
            try:
                async with self._turns[column]:
                    returned = await self._attempt(column, reward.arguments(_with_log(shared, log)))
            except RewardError:
                raise
            except ImportError as error:
                raise RewardError(f"reward {reward.name!r} cannot be used: {error}") from error
            except Exception as error:
                failure = error
            else:
                return _Scores(reward.values(returned, count), log)
        return _Scores(None, _Log(reward.name, count), failure)

    async def _attempt(self, column: int, arguments: dict[str, Any]) -> Any:
        lane = self._lanes[column]
        future = asyncio.wrap_future(lane.start(self._rewards[column], arguments))
        try:
            await asyncio.wait({future}, timeout=self.timeout)
            if not future.done():
                raise TimeoutError(f"no answer within timeout={self.timeout} s")
            if future.cancelled():
                raise RuntimeError("the call was cancelled from within")
            return future.result()
        finally:
            if not future.done():
                future.cancel()
                lane.abandon()

    def _assemble(self, chunks: list[_Chunk], results: list[list[_Scores]]) -> RewardBatch:
        total = sum(chunk.size for chunk in chunks)
        rewards = torch.full((total, len(self.names)), math.nan, dtype=torch.float64)
        failed = torch.zeros(rewards.shape, dtype=torch.bool)
        failures = [_Failures() for _ in self.names]
        metrics: dict[str, list[float]] = {}
        extras: dict[str, list[Any]] = {}
        start = 0
        for chunk, scores in zip(chunks, results, strict=True):
            rows = [start + i for i in chunk.scored]
            failed[start : start + chunk.size] = True
            failed[rows] = False
            for failure in failures:
                failure.add(chunk.size - len(rows), "the media was None or not finite")
            for column, score in enumerate(scores):
                _fill(rewards[:, column], failed[:, column], rows, score, failures[column])
                for name, values in score.log.metrics.items():
                    metrics.setdefault(name, []).extend(values)
                for name, values in score.log.extras.items():
                    target = extras.setdefault(name, [None] * total)
                    for row, value in zip(rows, values, strict=True):
                        target[row] = value
            start += chunk.size
        self._judge(failures, total)
        counts = {name: failure.rows for name, failure in zip(self.names, failures, strict=True)}
        means = {name: _nanmean(values) for name, values in metrics.items()}
        means |= {f"rewards/{name}/failed": float(count) for name, count in counts.items()}
        return RewardBatch(rewards, dict(sorted(means.items())), dict(sorted(extras.items())), failed, counts)

    def _judge(self, failures: list[_Failures], total: int) -> None:
        """Warns of failures, once for each reward, and raises where there are too many."""
        for name, weight, failure in zip(self.names, self.weights, failures, strict=True):
            if not failure.rows:
                continue
            summary = f"reward {name!r} failed for {failure.rows} of {total} rows"
            if weight != 0 and failure.rows > self.max_failed_fraction * total:
                raise RewardError(
                    f"{summary}, more than max_failed_fraction={self.max_failed_fraction} allows; the first failure: "
                    f"{failure.first}. Repair the reward, or give it weight 0 to watch it only."
                ) from failure.error
            logger.warning("%s, which are missing, not 0; the first failure: %s", summary, failure.first)


def _check_weights(weights: Sequence[float] | None, names: list[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(names)
    if len(weights) != len(names):
        raise InputError(
            f"got {len(weights)} reward weights for {len(names)} reward functions ({', '.join(names)}): give "
            f"one each, for example {[1.0] * len(names)}."
        )
    checked = [float(weight) for weight in weights]
    if not all(math.isfinite(weight) for weight in checked) or not any(checked):
        raise InputError(
            f"got reward weights {checked}: they must be finite and at least one of them not 0, for example "
            f"{[1.0] * len(names)}."
        )
    return checked


def _check_limits(max_retries: int, retry_wait: float, timeout: float | None, max_failed_fraction: float) -> None:
    if max_retries < 0:
        raise InputError(f"max_retries={max_retries} must be at least 0, for example 2.")
    if retry_wait < 0:
        raise InputError(f"retry_wait={retry_wait} must be at least 0 seconds, for example 0.5.")
    if timeout is not None and timeout <= 0:
        raise InputError(f"timeout={timeout} must be more than 0 seconds, for example 60, or None for no limit.")
    if not 0 <= max_failed_fraction <= 1:
        raise InputError(f"max_failed_fraction={max_failed_fraction} must be between 0 and 1, for example 0.5.")


def _columns(rows: Sequence[dict[str, Any]], scored: list[int]) -> dict[str, list[Any]]:
    """Turns rows into columns, over the rows `scored`."""
    names = dict.fromkeys(key for row in rows for key in row)  # keeps the order
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
    return {"prompt": [], **{name: [rows[i].get(name) for i in scored] for name in names}}


def _with_log(shared: dict[str, Any], log: _Log) -> dict[str, Any]:
    # Fresh lists for each call: a reward that sorts or pops its arguments must not do so to another's.
    copies = {key: list(value) if isinstance(value, list) else value for key, value in shared.items()}
    return {**copies, "log_metric": log.metric, "log_extra": log.extra}


def _wait(future: "Future[_Scores]") -> _Scores:
    while True:
        try:
            return future.result(timeout=_POLL_SECONDS)
        except FutureTimeoutError:
            # The same class as the built-in TimeoutError: a finished future has raised its own.
            if future.done():
                return future.result()


def _cancel(chunks: list[_Chunk]) -> None:
    for chunk in reversed(chunks):  # the last first: a call that is given up lets the next one of its reward begin
        for future in chunk.futures:
            future.cancel()


def _fill(rewards: torch.Tensor, failed: torch.Tensor, rows: list[int], score: _Scores, failure: _Failures) -> None:
    """Writes one reward's values for one chunk into its column (N,), and marks and counts what failed."""
    if score.values is None:
        error = score.error
        failed[rows] = True
        failure.add(len(rows), f"{type(error).__name__}: {error}", error)
        return
    for row, value in zip(rows, score.values, strict=True):
        if value is None:
            continue
        if math.isfinite(value):
            rewards[row] = value
        else:
            failed[row] = True
            failure.add(1, f"it returned {value} for row {row}")


def _nanmean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan

# SPDX-License-Identifier: Apache-2.0
"""What rewards record and answer, and the table that becomes of it."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .contract import Reward, RewardError, quoted_prompts


logger = logging.getLogger(__name__)


@dataclass
class RewardBatch:
    """
    What the rewards said about N rows.

    Args:
        rewards (`torch.Tensor`):
            Shape (N, F), `float64`, rows in the order of submission, columns in the order of the reward functions. NaN
            where a reward is missing.
        metrics (`dict[str, float]`):
            Means of the values recorded with `log_metric`, NaN left out; `rewards/{name}/failed`, the number of rows
            for which the reward failed; and, for rewards whose values are kept, `rewards/{name}/cached`, the number of
            those whose value was known already. Sorted by name.
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


class RewardLog:
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
class Answer:
    """What one call of a reward came to: a value per row, and what it recorded."""

    values: list[float | None]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)


def ask(reward: Reward, arguments: dict[str, Any], count: int) -> Answer:
    """Calls a synchronous reward for `count` rows; each call has a log of its own, as a late one must not count."""
    log = RewardLog(reward.name, count)
    return _read(reward, reward.call(_with_log(reward, arguments, log)), count, arguments, log)


async def ask_async(reward: Reward, arguments: dict[str, Any], count: int) -> Answer:
    """The same of an asynchronous one."""
    log = RewardLog(reward.name, count)
    return _read(reward, await reward.call(_with_log(reward, arguments, log)), count, arguments, log)


def _with_log(reward: Reward, arguments: dict[str, Any], log: RewardLog) -> dict[str, Any]:
    return reward.arguments({**arguments, "log_metric": log.metric, "log_extra": log.extra})


def _read(reward: Reward, returned: Any, count: int, arguments: dict[str, Any], log: RewardLog) -> Answer:
    return Answer(reward.values(returned, count, arguments["prompts"]), log.metrics, log.extras)


@dataclass
class Failure:
    """Rows, by their position, for which a reward failed in the same way."""

    positions: list[int]
    what: str
    error: Exception | None = None


@dataclass
class Scores:
    """What one reward said of the rows of one chunk, by their position."""

    values: dict[int, float | None] = field(default_factory=dict)
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    cached: int = 0

    def add(self, position: int, value: float | None, extras: dict[str, Any]) -> None:
        """The value of a row; one that is not finite is a failure."""
        if value is None or math.isfinite(value):
            self.values[position] = value
        else:
            self.failures.append(Failure([position], f"it returned {value}"))
        if extras:
            self.extras[position] = extras

    def record(self, metrics: dict[str, list[float]]) -> None:
        """What a call recorded beside its values."""
        for name, values in metrics.items():
            self.metrics.setdefault(name, []).extend(values)


class RewardTable:
    """
    Puts the scores of several chunks together.

    Args:
        names (`list[str]`):
            Of the rewards.
        prompts (`list[str]`):
            Of the rows of all chunks.
    """

    def __init__(self, names: Sequence[str], prompts: Sequence[str]) -> None:
        self._names = names
        self._prompts = prompts
        self._rewards = torch.full((len(prompts), len(names)), math.nan, dtype=torch.float64)
        self._failed = torch.zeros(self._rewards.shape, dtype=torch.bool)
        self._failures: list[list[Failure]] = [[] for _ in names]
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[Any]] = {}
        self._cached = [0] * len(names)

    def add(self, start: int, column: int, scores: Scores) -> None:
        """The scores that a reward gave to the chunk whose rows begin at `start`."""
        for position, value in scores.values.items():
            if value is not None:
                self._rewards[start + position, column] = value
        for failure in scores.failures:
            rows = [start + position for position in failure.positions]
            self._failed[rows, column] = True
            self._failures[column].append(Failure(rows, failure.what, failure.error))
        for position, extras in scores.extras.items():
            for name, value in extras.items():
                self._extras.setdefault(name, [None] * len(self._prompts))[start + position] = value
        for name, values in scores.metrics.items():
            self._metrics.setdefault(name, []).extend(values)
        self._cached[column] += scores.cached

    def check(self, watched: Sequence[bool], max_failed_fraction: float) -> None:
        """
        Warns of failures, once for each reward.

        Args:
            watched (`list[bool]`):
                Which rewards only warn, whatever they do.
            max_failed_fraction (`float`):
                Share of the rows that may fail.

        Raises:
            [`RewardError`]: a reward failed for more.
        """
        total = len(self._prompts)
        for name, only_watched, failures in zip(self._names, watched, self._failures, strict=True):
            rows = sum(len(failure.positions) for failure in failures)
            if not rows:
                continue
            first = min(failures, key=lambda failure: failure.positions[0])
            sentence = self._sentence(first)
            summary = f"reward {name!r} failed for {rows} of {total} rows"
            if not only_watched and rows > max_failed_fraction * total:
                raise RewardError(
                    f"{summary}, more than max_failed_fraction={max_failed_fraction} allows; the first failure: "
                    f"{sentence}. Repair the reward, or give it weight 0 to watch it only."
                ) from first.error
            logger.warning("%s, which are missing, not 0; the first failure: %s", summary, sentence)

    def batch(self, cached: Sequence[bool]) -> RewardBatch:
        """The table; `cached` says for which rewards the values are kept, and counted."""
        counts = self._failed.sum(dim=0).tolist()
        means = {name: _nanmean(values) for name, values in self._metrics.items()}
        means |= {f"rewards/{name}/failed": float(count) for name, count in zip(self._names, counts, strict=True)}
        for name, count, kept in zip(self._names, self._cached, cached, strict=True):
            if kept:
                means[f"rewards/{name}/cached"] = float(count)
        extras = dict(sorted(self._extras.items()))
        failures = dict(zip(self._names, counts, strict=True))
        return RewardBatch(self._rewards, dict(sorted(means.items())), extras, self._failed, failures)

    def _sentence(self, failure: Failure) -> str:
        """What happened to which rows, counted over all chunks."""
        rows = sorted(failure.positions)
        some = f"row {rows[0]}" if len(rows) == 1 else f"rows {', '.join(map(str, rows[:8]))}"
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        return f"{failure.what} for {some}{more} ({quoted_prompts([self._prompts[row] for row in rows])})"


def _nanmean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan

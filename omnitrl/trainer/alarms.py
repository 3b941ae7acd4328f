# SPDX-License-Identifier: Apache-2.0
"""When a figure that is watched during a run has moved too far, and how to say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from omnitrl.errors import InputError


class Figure(NamedTuple):
    """
    A figure at one moment of a run.

    Attributes:
        step (`int`): the optimizer step in whose course it was measured, as in the log.
        mean (`float`): what was measured.
        error (`float`): standard error of the mean over samples; 0 where there is no chance in it.
    """

    step: int
    mean: float
    error: float


def figure(step: int, values: Tensor) -> Figure | None:
    """The mean of values (N,) and its standard error, NaN left out; `None` where nothing is left."""
    values = values[~values.isnan()].double()
    if not len(values):
        return None
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Figure(step, float(values.mean()), error)


class Limit(NamedTuple):
    """
    How far a figure may move, as a share of the size of what it is compared with; `None` for any distance.

    Attributes:
        fall (`float`, *optional*): 0.5 allows a fall by half.
        rise (`float`, *optional*): 1.0 allows twice the figure.
    """

    fall: float | None = None
    rise: float | None = None

    @classmethod
    def of(cls, name: str, given: float | Sequence[float | None] | None) -> Limit:
        """
        The limit of a figure, from a number that bounds its fall, or a pair of bounds.

        Raises:
            [`~omnitrl.errors.InputError`]: it is neither, or a bound is not above 0.
        """
        pair = tuple(given) if isinstance(given, Sequence) else (given, None)
        numbers = [bound for bound in pair if bound is not None]
        if len(pair) != 2 or any(isinstance(bound, str) or not bound > 0 for bound in numbers):
            raise InputError(
                f"The limit of {name!r} is {given!r}, but it is a share above 0 by which the figure may fall, such as "
                "0.5, or a pair for fall and rise, such as (0.5, 1.0), with None where any distance is fine."
            )
        return cls(*pair)


def first_mean(history: Sequence[Figure], count: int) -> Figure | None:
    """Mean of the first `count` figures."""
    return mean_of(history[:count]) if len(history) >= count else None


def best_mean(history: Sequence[Figure], count: int) -> Figure | None:
    """The highest mean of `count` figures in a row."""
    windows = [mean_of(history[end - count : end]) for end in range(count, len(history) + 1)]
    return max(windows, key=lambda window: window.mean, default=None)


def last(history: Sequence[Figure], count: int) -> Figure | None:
    """The last figure."""
    return history[-1] if history else None


def mean_of(figures: Sequence[Figure]) -> Figure:
    """Their mean, as of the last of them."""
    count = len(figures)
    error = math.sqrt(math.fsum(one.error**2 for one in figures)) / count
    return Figure(figures[-1].step, math.fsum(one.mean for one in figures) / count, error)


# What a figure may be compared with: a function of those before it, and what it is called in a sentence.
REFERENCES: dict[str, tuple[Callable[[Sequence[Figure], int], Figure | None], str]] = {
    "first": (first_mean, "the start"),
    "best": (best_mean, "its best"),
    "last": (last, "the one before"),
}


@dataclass(frozen=True)
class Rule:
    """
    When a figure has moved too far.

    A move counts if it is larger than the limit and than twice its standard error, so that a figure near 0 does not
    sound an alarm by chance.

    Args:
        name (`str`):
            Of the figure.
        limit ([`Limit`]):
            How far it may move.
        reference (`str`):
            What it is compared with, of `REFERENCES`.
        count (`int`):
            Figures that a reference is the mean of.
        patience (`int`):
            Figures in a row that must have moved too far.
    """

    name: str
    limit: Limit
    reference: str = "first"
    count: int = 1
    patience: int = 1

    def reference_of(self, history: Sequence[Figure]) -> Figure | None:
        """What the next figure is compared with; `None` as long as there are too few."""
        return REFERENCES[self.reference][0](history, self.count)

    def is_broken(self, history: Sequence[Figure]) -> bool:
        """Whether the last figure has moved too far."""
        reference = self.reference_of(history[:-1])
        if reference is None:
            return False
        now, size = history[-1], abs(reference.mean)
        move = now.mean - reference.mean
        if abs(move) <= 2 * math.hypot(now.error, reference.error):
            return False
        fall, rise = self.limit
        return (fall is not None and move < -fall * size) or (rise is not None and move > rise * size)

    def broken_for(self, history: Sequence[Figure]) -> int:
        """How many of the last figures, in a row, have moved too far, counted up to one more than `patience`."""
        count = 0
        while count <= self.patience and count < len(history) and self.is_broken(history[: len(history) - count]):
            count += 1
        return count

    def describe(self, history: Sequence[Figure]) -> str:
        """What has happened to the figure, in a sentence without its full stop."""
        now, reference = history[-1], self.reference_of(history[:-1])
        assert reference is not None
        move = now.mean - reference.mean
        share = f"{abs(move) / abs(reference.mean):.0%} " if reference.mean else ""
        since = f"{REFERENCES[self.reference][1]}, {reference.mean:.4g}"
        times = f" for the {self.patience}th time in a row" if self.patience > 3 else _TIMES[self.patience - 1]
        side = "below" if move < 0 else "above"
        return f"{self.name} is {now.mean:.4g} at step {now.step},{times} {share}{side} {since}"


_TIMES = ("", " for the second time in a row", " for the third time in a row")

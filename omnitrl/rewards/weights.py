# SPDX-License-Identifier: Apache-2.0
"""Weights of rewards, and how they change in the course of a run."""

import math
from collections.abc import Callable, Sequence

from omnitrl.errors import InputError


WEIGHT_SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "late": lambda progress: progress**2,
    "early": lambda progress: 1 - (1 - progress) ** 2,
}
"""Share of the way from the first weights to the last, as a function of the share of the run that is done."""


def check_weights(weights: Sequence[float] | None, names: Sequence[str]) -> list[float]:
    """
    One weight for each reward.

    Args:
        weights (`list[float]`, *optional*):
            As given; 1.0 each by default.
        names (`list[str]`):
            Of the rewards.

    Raises:
        [`~omnitrl.errors.InputError`]: another number of weights, one that is not finite, or nothing but 0.
    """
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


def scheduled_weights(
    first: Sequence[float], last: Sequence[float], schedule: str, step: int, num_steps: int
) -> list[float]:
    """
    Weights at an optimizer step, from its number alone, so that a run that is resumed goes on with the same.

    Args:
        first, last (`list[float]`):
            Weights of the first and of the last step.
        schedule (`str`):
            A key of `WEIGHT_SCHEDULES`.
        step (`int`):
            Optimizer steps so far, from 0.
        num_steps (`int`):
            Optimizer steps of the run.

    Example:

    ```python
    >>> scheduled_weights([1.0, 0.0], [0.0, 1.0], "linear", step=5, num_steps=11)
    [0.5, 0.5]
    ```
    """
    progress = min(step / max(num_steps - 1, 1), 1.0)
    share = WEIGHT_SCHEDULES[schedule](progress)
    return [before + share * (after - before) for before, after in zip(first, last, strict=True)]

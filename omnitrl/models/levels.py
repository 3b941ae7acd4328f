# SPDX-License-Identifier: Apache-2.0
"""Noise levels as stock pipelines ask their scheduler for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def even_levels(num_steps: int) -> Any:
    """The levels 1 to 1 / T that many pipelines give their scheduler; `None` for no steps, which it refuses itself."""
    return np.linspace(1.0, 1 / num_steps, num_steps) if num_steps > 0 else None


def shift_by_tokens(
    config: Any,
    calculate_shift: Callable[..., float],
    num_tokens: int,
    *,
    base_tokens: int = 256,
    shifts: tuple[float, float] = (0.5, 1.15),
) -> float:
    """
    The scheduler's `mu` for a number of tokens, as stock pipelines compute it.

    Args:
        config (`FrozenDict`):
            Of the scheduler.
        calculate_shift (`Callable`):
            The pipeline's own function.
        num_tokens (`int`):
            Tokens of the media that the network sees.
        base_tokens (`int`, defaults to 256):
            The pipeline's fewest tokens where the config has none.
        shifts (`tuple[float, float]`, defaults to `(0.5, 1.15)`):
            The pipeline's shifts for the fewest and the most tokens where the config has none.
    """
    return calculate_shift(
        num_tokens,
        config.get("base_image_seq_len", base_tokens),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", shifts[0]),
        config.get("max_shift", shifts[1]),
    )

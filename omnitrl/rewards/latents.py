# SPDX-License-Identifier: Apache-2.0
"""Rewards of clean latents, which need no decoder."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .contract import RewardError
from .traits import reward_traits


_SMALLEST_SPREAD = 1e-6


@reward_traits(media="latents", deterministic=True)
def latent_scale_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""
    Penalises latents of another spread than that of encoded pictures: \\( -|\ln s| \\) of their standard deviation.

    Most models are trained on latents that are shifted and scaled to a standard deviation of about 1. Flat pictures
    have less, and a policy that runs off has more. Range \\( (-\infty, 0] \\): half and double the spread are -0.69,
    and the spread counts as at least 1e-6. Most useful with weight 0, or a small one.

    Args:
        completions (`list[Tensor]`):
            Clean latents, one tensor per row, of any shape.
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per row.

    Raises:
        [`RewardError`]: for what are no latents.

    Example:

    ```python
    >>> import torch
    >>> from omnitrl.rewards import latent_scale_reward

    >>> latent_scale_reward([torch.tensor([-1.0, 1.0])])
    [0.0]
    ```
    """
    return [_scale(row, latents) for row, latents in enumerate(completions)]


def _scale(row: int, latents: Any) -> float:
    if not isinstance(latents, Tensor) or not latents.is_floating_point():
        what = f"{latents.dtype} values" if isinstance(latents, Tensor) else type(latents).__name__
        raise RewardError(f"completions[{row}]: expected latents, a floating point tensor, got {what}.")
    spread = float(latents.to(torch.float64).std(correction=0))
    return -abs(math.log(max(spread, _SMALLEST_SPREAD))) + 0.0  # no minus in front of a zero

# SPDX-License-Identifier: Apache-2.0
"""Importance weights of samples that another engine drew than the one that is trained."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


IMPORTANCE_MODES = ("step_truncate", "step_mask", "sequence_truncate", "sequence_mask")
"""By what a ratio is taken, a step or all steps of a sample, and what is done with one that is out of bounds."""


class ImportanceWeights(NamedTuple):
    """
    Weights of the steps of samples.

    Args:
        weights (`Tensor` of shape `(N, K)`, float32):
            Factor of the loss of each step.
        bounded (`Tensor` of shape `(N, K)`, bool):
            Where the ratio was out of bounds.
    """

    weights: Tensor
    bounded: Tensor


def importance_weights(
    log_probs: Tensor,
    engine_log_probs: Tensor,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> ImportanceWeights:
    r"""
    Bounded importance weights \\( \pi_\text{trainer} / \pi_\text{engine} \\) of recorded steps.

    Samples come from the engine, whose kernels and precision are not the trainer's, so that an expectation under the
    trainer's policy needs them. Truncated weights are those of
    [TIS](https://fengyao.notion.site/off-policy-rl), masked ones those of MIS; both are what TRL has for tokens, with
    the steps of a sampler in the place of tokens. The ratio of a sequence is the product of those of its steps.

    Args:
        log_probs (`Tensor` of shape `(N, K)`):
            Of K steps of N samples under the trainer's networks with the weights that the engine had.
        engine_log_probs (`Tensor` of shape `(N, K)`):
            As the engine recorded them, in the same reduction.
        mode (`str`, defaults to `"sequence_mask"`):
            One of `IMPORTANCE_MODES`: `"..._truncate"` clamps a ratio to the bounds, `"..._mask"` gives 0 to one that
            is beyond them.
        clip_max, clip_min (`float`, *optional*):
            The bounds; `None` for none.

    Returns:
        [`ImportanceWeights`]

    Raises:
        `ValueError`: unknown mode, unequal shapes, or bounds that are none.

    Example:

    ```python
    >>> mine, theirs = torch.tensor([[0.0, 0.0]]), torch.tensor([[-2.0, 0.5]])
    >>> importance_weights(mine, theirs, "step_truncate", clip_max=3.0).weights.tolist()
    [[3.0, 0.6065306663513184]]
    ```
    """
    check_importance(mode, clip_max, clip_min)
    if log_probs.shape != engine_log_probs.shape or log_probs.ndim != 2:
        raise ValueError(
            f"Log-probs have the shapes {tuple(log_probs.shape)} and {tuple(engine_log_probs.shape)}: both must be "
            "(samples, steps)."
        )
    log_ratio = log_probs.float() - engine_log_probs.float()
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.exp()
    low, high = clip_min or 0.0, math.inf if clip_max is None else clip_max
    bounded = (ratio < low) | (ratio > high)
    weights = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(bounded, 0.0)
    return ImportanceWeights(torch.nan_to_num(weights, nan=0.0), bounded | ratio.isnan())


def check_importance(mode: str, clip_max: float | None, clip_min: float | None) -> None:
    """Raises a `ValueError` for an unknown mode, or bounds between which 1 does not lie."""
    if mode not in IMPORTANCE_MODES:
        raise ValueError(f"mode={mode!r} is unknown: use one of {', '.join(map(repr, IMPORTANCE_MODES))}.")
    if clip_max is not None and not clip_max > 1:
        raise ValueError(f"clip_max={clip_max} must be above 1, the ratio of equal policies: use 3.0.")
    if clip_min is not None and not 0 <= clip_min < 1:
        raise ValueError(f"clip_min={clip_min} must be in [0, 1): use 0.3, or None for no bound.")

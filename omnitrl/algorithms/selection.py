# SPDX-License-Identifier: Apache-2.0
"""
Which samples of a scored batch are trained on: the best and worst of each group, or one pair of it.

Every rank that holds the gathered scores picks the same samples, ties included, and every batch of one shape gives
outputs of one shape, so that ranks never wait for a micro-batch that another one does not have.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from omnitrl.algorithms.advantages import check_samples, rank_in_group


class PreferencePairs(NamedTuple):
    """
    One pair of samples per group, in ascending order of the group ids. All of shape `(P,)`.

    Attributes:
        chosen (`Tensor`, int64):
            Index of the preferred sample.
        rejected (`Tensor`, int64):
            Index of the other one, always a different sample of the same group.
        valid (`Tensor`, bool):
            The scores tell the two apart. Where it is `False` the pair must have no weight in the loss.
    """

    chosen: Tensor
    rejected: Tensor
    valid: Tensor


def _descending(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(N,)` minus the scores with infinity where missing, `(N,)` position of the group, `(P,)` size of the groups."""
    check_samples("scores", scores, group_ids)
    # On the CPU in float64 for the reasons given in `advantages._group`.
    scores = scores.detach().to("cpu", torch.float64)
    _, group_of, size = torch.unique(group_ids.cpu(), return_inverse=True, return_counts=True)
    return (-scores).nan_to_num(torch.inf), group_of, size


def best_and_worst(scores: Tensor, group_ids: Tensor, count: int) -> Tensor:
    """
    Keep the `count // 2` best members of each group and `count - count // 2` of the worst: the best-of-n filter of
    [DanceGRPO](https://huggingface.co/papers/2505.07818), which trains on 8 videos of 24.

    Take the advantages of the *whole* group first, then select.

    Args:
        scores (`Tensor` of shape `(N,)`):
            One score per sample, such as its reward or its advantage, NaN where it is missing. A sample without a
            score is only chosen where its group has too few others.
        group_ids (`Tensor` of shape `(N,)`, int64):
            The group of each sample, any integers.
        count (`int`):
            Members to keep of each group, from 2 to the size of the smallest group.

    Returns:
        `Tensor` of shape `(P * count,)`, int64, on the device of `scores`: indices of the samples of `P` groups,
        ascending. Of equal scores the first samples are taken.

    Raises:
        `ValueError`: `count` is not in 2 to the size of the smallest group, or the shapes differ, ids are not
        integers, or a score is infinite.

    Example:

    ```python
    >>> best_and_worst(torch.tensor([0.3, 0.9, 0.1, 0.5]), torch.zeros(4, dtype=torch.long), count=2)
    tensor([1, 2])
    ```
    """
    keys, group_of, size = _descending(scores, group_ids)
    smallest = int(size.min()) if size.numel() else 0
    if not 2 <= count <= smallest:
        raise ValueError(
            f"count={count} members of each group cannot be kept, the smallest group has {smallest}: use "
            f"{'2 generations per prompt or more' if smallest < 2 else f'a number from 2 to {smallest}'}."
        )
    best = rank_in_group(keys, group_of) < count // 2
    # The worst are looked for among the others, where those without a score still come last.
    others = (~best).nonzero().flatten()
    ascending = torch.where(keys[others].isinf(), torch.inf, -keys[others])
    worst = others[rank_in_group(ascending, group_of[others]) < count - count // 2]
    return torch.cat([best.nonzero().flatten(), worst]).sort().values.to(scores.device)


def preference_pairs(scores: Tensor, group_ids: Tensor, margin: float = 0.0) -> PreferencePairs:
    """
    Pair the best with the worst member of each group, as online Diffusion-DPO does.

    There is one pair per group whatever the scores are, and `valid` says which of them to learn from. The public code
    bases train on pairs of equal scores too, in which the preference is arbitrary.

    Args:
        scores (`Tensor` of shape `(N,)`):
            One score per sample, NaN where it is missing.
        group_ids (`Tensor` of shape `(N,)`, int64):
            The group of each sample, any integers. Each group has two members or more.
        margin (`float`, defaults to 0.0):
            The smallest gap of the two scores that counts as a preference. Equal scores never do.

    Returns:
        [`PreferencePairs`] of `P` groups, on the device of `scores`. Not valid where the scores are equal or nearer
        than `margin`, or fewer than two members have one. Of equal scores the first sample is taken.

    Raises:
        `ValueError`: A group of one member, a negative `margin`, or the shapes differ, ids are not integers, or a
        score is infinite.

    Example:

    ```python
    >>> pairs = preference_pairs(torch.tensor([0.1, 0.7, 0.4, 0.5, 0.5, 0.5]), torch.tensor([0, 0, 0, 1, 1, 1]))
    >>> pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.valid.tolist()
    ([1, 3], [0, 4], [True, False])
    ```
    """
    if not margin >= 0:
        raise ValueError(f"margin={margin} must be at least 0: use 0.0.")
    keys, group_of, size = _descending(scores, group_ids)
    if (size < 2).any():
        raise ValueError(
            "A pair needs two members of a group, got a group of one: use num_generations=2 or more, and pass whole "
            "groups."
        )
    indices = best_and_worst(scores, group_ids, 2).cpu() if size.numel() else group_of
    group, place = group_of[indices], rank_in_group(keys[indices], group_of[indices])
    # Two per group, the better one first.
    pairs = indices.new_empty(size.shape[0], 2)
    pairs[group, place] = indices
    gap = keys[pairs[:, 1]] - keys[pairs[:, 0]]
    # A missing score is infinity here: the gap is infinite or not a number.
    valid = gap.isfinite() & (gap > 0) & (gap >= margin)
    return PreferencePairs(*(column.to(scores.device) for column in (pairs[:, 0], pairs[:, 1], valid)))

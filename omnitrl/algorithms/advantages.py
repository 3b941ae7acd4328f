# SPDX-License-Identifier: Apache-2.0
"""
From rewards to advantages, with explicit groups.

A reward of NaN is *missing*: it takes part in no mean and no std, and its sample gets an advantage of 0. A group whose
rewards are all equal has nothing to teach and gets exactly 0, whatever the options.

Who does what, where the public code bases differ:

| option | Flow-GRPO, DiffusionNFT | verl-omni | Flow-Factory | DanceGRPO, MixGRPO | TRL |
|---|---|---|---|---|---|
| `scale` | `"batch"` | `"batch"` | `"batch"` | `"group"` | `"group"` |
| `ddof` | 0 | 1 | 0 | 1 | 1 |
| `eps` | 1e-4, added | 1e-4, added | 1e-6, a floor | 1e-8, added | 1e-4, added |
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Groups(NamedTuple):
    """One reward of a batch, sorted out by group. Everything is float64 and on the CPU, see `_group`."""

    rewards: Tensor  # (N,), 0 where missing
    valid: Tensor  # (N,) bool
    group_of: Tensor  # (N,) position of the group, 0..P-1
    members: Tensor  # (P,) valid members
    mean: Tensor  # (P,)
    constant: Tensor  # (P,) bool: less than two different valid rewards

    @property
    def centred(self) -> Tensor:
        """`(N,)` reward minus group mean, 0 where it is missing."""
        return torch.where(self.valid, self.rewards - self.mean[self.group_of], 0.0)

    def sum(self, values: Tensor) -> Tensor:
        """`(N,)` to `(P,)`: sum over the members of each group."""
        return torch.zeros_like(self.mean).index_add_(0, self.group_of, values)


def _group(rewards: Tensor, group_ids: Tensor) -> _Groups:
    """Check rewards and ids, and take the statistics that all options share."""
    if rewards.ndim != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"`rewards` and `group_ids` have one value per sample, got shapes {tuple(rewards.shape)} and "
            f"{tuple(group_ids.shape)}: pass two tensors of one length, like (16,) and (16,)."
        )
    if group_ids.is_floating_point():
        raise ValueError(
            f"`group_ids` must be integers, got {group_ids.dtype}, in which large ids fall together: pass torch.int64."
        )
    # A few thousand numbers: on the CPU the sums have one order, so that every rank gets the same bits, and there is
    # float64, which some accelerators lack.
    rewards = rewards.detach().to("cpu", torch.float64)
    valid = ~rewards.isnan()
    if rewards.isinf().any():
        at = int(rewards.isinf().nonzero()[0])
        raise ValueError(
            f"Rewards must be finite, got {rewards[at].item()} for sample {at}: return None for a missing reward."
        )
    ids, index = torch.unique(group_ids.cpu(), return_inverse=True)
    rewards = rewards.nan_to_num(0.0)
    zeros = rewards.new_zeros(ids.shape[0])
    count = zeros.index_add(0, index, valid.to(rewards))
    mean = zeros.index_add(0, index, rewards) / count.clamp(min=1)
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(0, index[valid], rewards[valid], "amin")
    highest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, index[valid], rewards[valid], "amax")
    # Compared by extremes: a std of equal numbers is not always 0, and 1e-17 / eps is not always small.
    return _Groups(rewards, valid, index, count, mean, lowest >= highest)


def _std_of_group(groups: _Groups, ddof: int) -> Tensor:
    """`(P,)` std within each group, 0 where there are not more than `ddof` valid members."""
    return (groups.sum(groups.centred.square()) / (groups.members - ddof).clamp(min=1)).sqrt()


def _group_scale(groups: _Groups, ddof: int, eps: float) -> Tensor:
    """The std of the sample's own group: GRPO, DanceGRPO, MixGRPO, and the default of TRL."""
    return _std_of_group(groups, ddof)[groups.group_of] + eps


def _batch_scale(groups: _Groups, ddof: int, eps: float) -> Tensor:
    """One std for all samples, of all rewards about their common mean: Flow-GRPO's `global_std`."""
    return _std(groups.rewards[groups.valid], ddof) + eps


def _no_scale(groups: _Groups, ddof: int, eps: float) -> Tensor:
    """No division, as in [Dr. GRPO](https://huggingface.co/papers/2503.20783)."""
    return torch.ones((), dtype=torch.float64)


SCALES: dict[str, Callable[[_Groups, int, float], Tensor]] = {
    "group": _group_scale,
    "batch": _batch_scale,
    "none": _no_scale,
}


def _std(values: Tensor, ddof: int) -> Tensor:
    """Std of all values; 0, not NaN, for as many as `ddof` or fewer."""
    return values.std(correction=ddof) if values.numel() > ddof else values.new_zeros(())


def _check_options(scale: str, ddof: int, eps: float) -> None:
    """Raise a `ValueError` for an unknown scale or a divisor that cannot be."""
    if scale not in SCALES:
        raise ValueError(f"scale_rewards={scale!r} is not known: use one of {', '.join(map(repr, SCALES))}.")
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof} must be 0 (population std) or 1 (sample std): use 0.")
    if eps < 0:
        raise ValueError(f"eps={eps} must be at least 0: use 1e-4.")


def _normalize(groups: _Groups, scale: str, ddof: int, eps: float) -> Tensor:
    """`(N,)` float64 advantages of one reward."""
    scaled = groups.centred / SCALES[scale](groups, ddof, eps)
    # `where`, not a product: with eps=0 the other branch is 0/0.
    return torch.where(groups.valid & ~groups.constant[groups.group_of], scaled, 0.0)


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    clip: float | None = None,
) -> Tensor:
    r"""
    Group-relative advantages of one reward, \\( A_i = (R_i - \mathrm{mean}_g) / (\mathrm{std} + \epsilon) \\)
    ([GRPO](https://huggingface.co/papers/2402.03300)).

    Pass the rewards of the *whole* rollout batch, gathered over all ranks. Members of a group need not be neighbours,
    and groups need not be of one size.

    Args:
        rewards (`Tensor` of shape `(N,)`):
            One reward per sample, NaN where it is missing.
        group_ids (`Tensor` of shape `(N,)`, int64):
            The group of each sample, any integers.
        scale (`str`, defaults to `"group"`):
            A key of `SCALES`: divide by the std of the sample's `"group"`, of the whole `"batch"`, or by nothing
            (`"none"`).
        ddof (`int`, defaults to 0):
            0 for the population std, 1 for the sample std.
        eps (`float`, defaults to 1e-4):
            Added to the std.
        clip (`float`, *optional*):
            Bound of the absolute advantage.

    Returns:
        `Tensor` of shape `(N,)`, float32, on the device of `rewards`. Exactly 0 for missing rewards, for groups whose
        rewards are all equal, and for groups with one valid reward. Computed in float64.

    Raises:
        `ValueError`: Shapes that differ, ids that are not integers, an infinite reward, or an option that is unknown.

    Example:

    ```python
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    tensor([ 1.7317, -0.5772, -0.5772, -0.5772])
    ```
    """
    _check_options(scale, ddof, eps)
    advantages = _normalize(_group(rewards, group_ids), scale, ddof, eps)
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return advantages.to(rewards.device, torch.float32)


def _check_matrix(rewards: Tensor, weights: Tensor) -> None:
    """Raise a `ValueError` unless there is one weight per column."""
    if rewards.ndim != 2 or weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"`rewards` has one column per reward function and `weights` one value per column, got shapes "
            f"{tuple(rewards.shape)} and {tuple(weights.shape)}: two functions need (N, 2) and (2,)."
        )


def combine_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """
    Weighted sum of the rewards of each sample.

    As in TRL, a missing reward adds nothing to the sum of the others, which fits rewards that apply to some samples
    only. Where rewards *fail* now and then, `"normalize_then_sum"` (see [`reward_advantages`]) is safer: there a
    missing value counts as average for its group rather than as a total that is lower.

    Args:
        rewards (`Tensor` of shape `(N, F)`):
            One column per reward function, NaN where missing.
        weights (`Tensor` of shape `(F,)`):
            Weight of each function.

    Returns:
        `Tensor` of shape `(N,)`, float64. NaN where all rewards of a sample are missing.

    Raises:
        `ValueError`: The shapes do not fit.

    Example:

    ```python
    >>> combine_rewards(torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), torch.tensor([1.0, 0.5]))
    tensor([2., 3.], dtype=torch.float64)
    ```
    """
    _check_matrix(rewards, weights)
    # On the CPU for the reason given in `_group`.
    values, factors = rewards.detach().to("cpu", torch.float64), weights.detach().to("cpu", torch.float64)
    total = (values.nan_to_num(0.0, torch.inf, -torch.inf) * factors).sum(1)
    return torch.where(values.isnan().all(1), torch.nan, total).to(rewards.device)


def sum_then_normalize_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    scale: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
) -> Tensor:
    """
    Advantages of the weighted sum of several rewards: [`combine_rewards`], then [`group_advantages`].

    The reward with the widest range decides most. Flow-GRPO, Flow-Factory's `sum`, and the default of TRL.

    Args:
        rewards (`Tensor` of shape `(N, F)`):
            One column per reward function, NaN where missing.
        weights (`Tensor` of shape `(F,)`):
            Weight of each function.
        group_ids (`Tensor` of shape `(N,)`, int64):
            The group of each sample.
        scale (`str`, defaults to `"group"`):
            See [`group_advantages`].
        ddof (`int`, defaults to 0):
            See [`group_advantages`].
        eps (`float`, defaults to 1e-4):
            See [`group_advantages`].

    Returns:
        `Tensor` of shape `(N,)`, float32.

    Raises:
        `ValueError`: As [`combine_rewards`] and [`group_advantages`].
    """
    return group_advantages(combine_rewards(rewards, weights), group_ids, scale, ddof, eps)


def normalize_then_sum_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    scale: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    batch_normalize: bool = True,
) -> Tensor:
    """
    Advantages of several rewards, each normalised on its own before they are weighted and added
    ([GDPO](https://huggingface.co/papers/2601.05242)).

    Every reward speaks as loud as its weight, whatever its range. A missing reward counts as average for its group.

    Args:
        rewards (`Tensor` of shape `(N, F)`):
            One column per reward function, NaN where missing.
        weights (`Tensor` of shape `(F,)`):
            Weight of each function.
        group_ids (`Tensor` of shape `(N,)`, int64):
            The group of each sample.
        scale (`str`, defaults to `"group"`):
            Scope of the std of each reward, see [`group_advantages`].
        ddof (`int`, defaults to 0):
            For the std of each reward and for that of the batch.
        eps (`float`, defaults to 1e-4):
            Added to both.
        batch_normalize (`bool`, defaults to `True`):
            Divide the sum by its std over the batch, as GDPO, TRL and Flow-Factory do. MixGRPO and DanceGRPO's
            advantage aggregation do not (and divide the weights by their sum).

    Returns:
        `Tensor` of shape `(N,)`, float32. Exactly 0 where every reward is missing or constant in its group.

    Raises:
        `ValueError`: As [`combine_rewards`] and [`group_advantages`].

    Example:

    ```python
    >>> rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 10.0], [1.0, 10.0]])
    >>> ids = torch.zeros(4, dtype=torch.long)
    >>> normalize_then_sum_advantages(rewards, torch.ones(2), ids, eps=0.0, batch_normalize=False)
    tensor([-2.,  0.,  0.,  2.])
    ```
    """
    _check_matrix(rewards, weights)
    _check_options(scale, ddof, eps)
    columns = [_normalize(_group(column, group_ids), scale, ddof, eps) for column in rewards.unbind(1)]
    advantages = torch.stack(columns, 1) @ weights.detach().to("cpu", torch.float64)
    if batch_normalize:
        scorable = ~rewards.detach().cpu().isnan().all(1)
        # Not centred again: each column sums to 0 over each group, so the mean of the sum is 0 up to a rounding, and
        # taking that away would give groups of equal rewards an advantage of 1e-8.
        scaled = advantages / (_std(advantages[scorable], ddof) + eps)
        advantages = torch.where(advantages == 0, 0.0, scaled)
    return advantages.to(rewards.device, torch.float32)


AGGREGATIONS: dict[str, Callable[..., Tensor]] = {
    "sum_then_normalize": sum_then_normalize_advantages,
    "normalize_then_sum": normalize_then_sum_advantages,
}


def reward_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    aggregation: str = "sum_then_normalize",
    scale: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
) -> Tensor:
    """
    Advantages of a rollout batch with one or several rewards.

    Args:
        rewards (`Tensor` of shape `(N, F)`):
            One column per reward function, NaN where missing.
        weights (`Tensor` of shape `(F,)`):
            Weight of each function.
        group_ids (`Tensor` of shape `(N,)`, int64):
            The group of each sample.
        aggregation (`str`, defaults to `"sum_then_normalize"`):
            A key of `AGGREGATIONS`: [`sum_then_normalize_advantages`] or [`normalize_then_sum_advantages`].
        scale (`str`, defaults to `"group"`):
            A key of `SCALES`, see [`group_advantages`].
        ddof (`int`, defaults to 0):
            0 for the population std, 1 for the sample std.
        eps (`float`, defaults to 1e-4):
            Added to the std.

    Returns:
        `Tensor` of shape `(N,)`, float32, on the device of `rewards`.

    Raises:
        `ValueError`: An unknown option, shapes that do not fit, or an infinite reward.

    Example:

    ```python
    >>> rewards = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    >>> reward_advantages(rewards, torch.ones(1), torch.zeros(4, dtype=torch.long))
    tensor([ 1.7317, -0.5772, -0.5772, -0.5772])
    ```
    """
    if aggregation not in AGGREGATIONS:
        known = ", ".join(map(repr, AGGREGATIONS))
        raise ValueError(f"multi_objective_aggregation={aggregation!r} is not known: use one of {known}.")
    return AGGREGATIONS[aggregation](rewards, weights, group_ids, scale=scale, ddof=ddof, eps=eps)


def zero_std_fraction(rewards: Tensor, group_ids: Tensor) -> float:
    """
    Share of the groups that teach nothing: all their valid rewards are equal, or fewer than two are valid.

    Args:
        rewards (`Tensor` of shape `(N,)`):
            One reward per sample, NaN where it is missing.
        group_ids (`Tensor` of shape `(N,)`, int64):
            The group of each sample.

    Returns:
        `float`: In `[0, 1]`; NaN without samples.

    Raises:
        `ValueError`: As [`group_advantages`].
    """
    return _group(rewards, group_ids).constant.double().mean().item()


def group_std_mean(rewards: Tensor, group_ids: Tensor, ddof: int = 0) -> float:
    """
    Mean over the groups of the std of their rewards.

    Args:
        rewards (`Tensor` of shape `(N,)`):
            One reward per sample, NaN where it is missing.
        group_ids (`Tensor` of shape `(N,)`, int64):
            The group of each sample.
        ddof (`int`, defaults to 0):
            0 for the population std, 1 for the sample std.

    Returns:
        `float`: At least 0. Groups without a valid reward are left out; NaN if there is no other.

    Raises:
        `ValueError`: As [`group_advantages`].
    """
    groups = _group(rewards, group_ids)
    return _std_of_group(groups, ddof)[groups.members > 0].mean().item()

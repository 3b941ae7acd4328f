# SPDX-License-Identifier: Apache-2.0
"""
From rewards to advantages, with explicit groups.

A reward of NaN is *missing*: it takes part in no mean and no std, and its sample gets an advantage of 0. Equal rewards
have nothing to teach and give exactly 0, whatever the options: those of a group, or, where the baseline is not that of
the group, those of the batch.

Who does what, where the public code bases differ:

| option | Flow-GRPO, DiffusionNFT | verl-omni | Flow-Factory | DanceGRPO, MixGRPO | DDPO | TRL |
|---|---|---|---|---|---|---|
| `baseline` | `"group"` | `"group"` | `"group"` | `"group"` | `"batch"` | `"group"` |
| `scale` | `"batch"` | `"batch"` | `"batch"` | `"group"` | `"batch"` | `"group"` |
| `ddof` | 0 | 1 | 0 | 1 | 0 | 1 |
| `eps` | 1e-4, added | 1e-4, added | 1e-6, a floor | 1e-8, added | 1e-8, added | 1e-4, added |

`trim` with `trim_tails="low"` is MixGRPO's `trimmed_ratio`, and `"both"` the trimmed mean of statistics, as in UniRL.
DDPO is listed as it runs without per-prompt statistics.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class _Options(NamedTuple):
    """How one reward becomes an advantage, see `group_advantages`."""

    scale: str = "group"
    ddof: int = 0
    eps: float = 1e-4
    baseline: str = "group"
    trim: float = 0.0
    trim_tails: str = "low"


class _Groups(NamedTuple):
    """One reward of a batch, sorted out by group. Everything is float64 and on the CPU, see `_group`."""

    rewards: Tensor  # (N,), 0 where missing
    valid: Tensor  # (N,) bool
    kept: Tensor  # (N,) bool: valid and not trimmed, so it takes part in mean and std
    group_of: Tensor  # (N,) position of the group, 0..P-1
    members: Tensor  # (P,) kept members
    mean: Tensor  # (P,) of the kept members
    constant: Tensor  # (P,) bool: less than two different valid rewards

    def sum(self, values: Tensor) -> Tensor:
        """`(N,)` to `(P,)`: sum over the kept members of each group."""
        return torch.zeros_like(self.mean).index_add_(0, self.group_of, torch.where(self.kept, values, 0.0))


def check_samples(name: str, values: Tensor, group_ids: Tensor) -> None:
    """Raise a `ValueError` unless there is one finite or missing value, and one integer id, per sample."""
    if values.ndim != 1 or group_ids.shape != values.shape:
        raise ValueError(
            f"`{name}` and `group_ids` have one value per sample, got shapes {tuple(values.shape)} and "
            f"{tuple(group_ids.shape)}: pass two tensors of one length, like (16,) and (16,)."
        )
    if group_ids.is_floating_point():
        raise ValueError(
            f"`group_ids` must be integers, got {group_ids.dtype}, in which large ids fall together: pass torch.int64."
        )
    if values.isinf().any():
        at = int(values.isinf().nonzero()[0])
        raise ValueError(
            f"{name.capitalize()} must be finite, got {values[at].item()} for sample {at}: return None for a missing "
            f"reward."
        )


def rank_in_group(values: Tensor, group_of: Tensor) -> Tensor:
    """`(N,)` number of members of its group that come before each sample, by value and, where equal, by position."""
    order = values.argsort(stable=True)
    order = order[group_of[order].argsort(stable=True)]
    size = torch.bincount(group_of)
    start = size.cumsum(0) - size
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.shape[0]) - start[group_of[order]]
    return ranks


def _tail(members: Tensor, trim: float) -> Tensor:
    """`(P,)` whole members in a share `trim` of each group. The slack is for `10 * 0.3`-like products just below."""
    return (members * trim + 1e-9).floor()


def _keep_low(members: Tensor, trim: float) -> tuple[Tensor, Tensor]:
    """`(P,)` ranks of the first member kept and of the one after the last: without the lowest, MixGRPO."""
    return torch.minimum(_tail(members, trim), (members - 1).clamp(min=0)), members


def _keep_both(members: Tensor, trim: float) -> tuple[Tensor, Tensor]:
    """`(P,)` ranks of the first member kept and of the one after the last: without either end."""
    tail = torch.minimum(_tail(members, trim), ((members - 1) / 2).floor().clamp(min=0))
    return tail, members - tail


TRIM_TAILS: dict[str, Callable[[Tensor, float], tuple[Tensor, Tensor]]] = {"low": _keep_low, "both": _keep_both}


def _flat_groups(rewards: Tensor, mask: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """`(P,)` bool: the group has less than two different rewards among those of `mask`."""
    # Compared by extremes: a std of equal numbers is not always 0, and 1e-17 / eps is not always small.
    bound = rewards.new_full((num_groups,), torch.inf)
    lowest = bound.scatter_reduce(0, index[mask], rewards[mask], "amin")
    highest = (-bound).scatter_reduce(0, index[mask], rewards[mask], "amax")
    return lowest >= highest


def _is_flat(values: Tensor) -> Tensor:
    """0-d bool: less than two different values."""
    return _flat_groups(values, torch.ones_like(values, dtype=torch.bool), values.new_zeros(values.shape).long(), 1)[0]


def _group(rewards: Tensor, group_ids: Tensor, trim: float = 0.0, trim_tails: str = "low") -> _Groups:
    """Check rewards and ids, and take the statistics that all options share."""
    check_samples("rewards", rewards, group_ids)
    # A few thousand numbers: on the CPU the sums have one order, so that every rank gets the same bits, and there is
    # float64, which some accelerators lack.
    rewards = rewards.detach().to("cpu", torch.float64)
    valid = ~rewards.isnan()
    ids, index = torch.unique(group_ids.cpu(), return_inverse=True)
    zeros = rewards.new_zeros(ids.shape[0])
    kept = valid
    if trim > 0:
        first, end = TRIM_TAILS[trim_tails](zeros.index_add(0, index, valid.to(rewards)), trim)
        rank = rank_in_group(rewards.nan_to_num(torch.inf), index)
        kept = (rank >= first[index]) & (rank < end[index])
    rewards = rewards.nan_to_num(0.0)
    members = zeros.index_add(0, index, kept.to(rewards))
    mean = zeros.index_add(0, index, torch.where(kept, rewards, 0.0)) / members.clamp(min=1)
    return _Groups(rewards, valid, kept, index, members, mean, _flat_groups(rewards, valid, index, ids.shape[0]))


def _group_baseline(groups: _Groups) -> tuple[Tensor, Tensor]:
    """Mean of the sample's own group, and where it has nothing to compare: GRPO and all that follows it."""
    return groups.mean[groups.group_of], groups.constant[groups.group_of]


def _batch_baseline(groups: _Groups) -> tuple[Tensor, Tensor]:
    """One mean for all samples, so that easy prompts count as good samples: DDPO, and batches without groups."""
    return groups.rewards[groups.kept].sum() / groups.kept.sum().clamp(min=1), _is_flat(groups.rewards[groups.valid])


def _no_baseline(groups: _Groups) -> tuple[Tensor, Tensor]:
    """The reward as it is: REINFORCE, and rewards that are centred already."""
    return torch.zeros((), dtype=torch.float64), _is_flat(groups.rewards[groups.valid])


BASELINES: dict[str, Callable[[_Groups], tuple[Tensor, Tensor]]] = {
    "group": _group_baseline,
    "batch": _batch_baseline,
    "none": _no_baseline,
}


def _std_of_group(groups: _Groups, ddof: int) -> Tensor:
    """`(P,)` std within each group, 0 where there are not more than `ddof` kept members."""
    centred = groups.rewards - groups.mean[groups.group_of]
    return (groups.sum(centred.square()) / (groups.members - ddof).clamp(min=1)).sqrt()


def _group_scale(groups: _Groups, ddof: int, eps: float) -> tuple[Tensor, Tensor]:
    """The std of the sample's own group, and where it is none: GRPO, DanceGRPO, MixGRPO, and the default of TRL."""
    flat = _flat_groups(groups.rewards, groups.kept, groups.group_of, groups.mean.shape[0])
    return (_std_of_group(groups, ddof) + eps)[groups.group_of], flat[groups.group_of]


def _batch_scale(groups: _Groups, ddof: int, eps: float) -> tuple[Tensor, Tensor]:
    """One std for all samples, of all rewards about their common mean: Flow-GRPO's `global_std`."""
    rewards = groups.rewards[groups.kept]
    return _std(rewards, ddof) + eps, _is_flat(rewards)


def _no_scale(groups: _Groups, ddof: int, eps: float) -> tuple[Tensor, Tensor]:
    """No division, as in [Dr. GRPO](https://huggingface.co/papers/2503.20783)."""
    return torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.bool)


SCALES: dict[str, Callable[[_Groups, int, float], tuple[Tensor, Tensor]]] = {
    "group": _group_scale,
    "batch": _batch_scale,
    "none": _no_scale,
}


def _std(values: Tensor, ddof: int) -> Tensor:
    """Std of all values; 0, not NaN, for as many as `ddof` or fewer."""
    return values.std(correction=ddof) if values.numel() > ddof else values.new_zeros(())


def _check_options(options: _Options) -> None:
    """Raise a `ValueError` for an unknown name, a divisor that cannot be, or a trim that leaves nobody."""
    if options.scale not in SCALES:
        raise ValueError(f"scale_rewards={options.scale!r} is not known: use one of {', '.join(map(repr, SCALES))}.")
    if options.baseline not in BASELINES:
        raise ValueError(f"baseline={options.baseline!r} is not known: use one of {', '.join(map(repr, BASELINES))}.")
    if options.trim_tails not in TRIM_TAILS:
        known = ", ".join(map(repr, TRIM_TAILS))
        raise ValueError(f"trim_tails={options.trim_tails!r} is not known: use one of {known}.")
    if options.ddof not in (0, 1):
        raise ValueError(f"ddof={options.ddof} must be 0 (population std) or 1 (sample std): use 0.")
    if not options.eps >= 0:
        raise ValueError(f"eps={options.eps} must be at least 0: use 1e-4.")
    limit = 0.5 if options.trim_tails == "both" else 1
    if not 0 <= options.trim < limit:
        raise ValueError(
            f"trim={options.trim} must be at least 0 and below {limit} for trim_tails={options.trim_tails!r}, or "
            f"nobody is left: use 0.25."
        )


def _normalize(rewards: Tensor, group_ids: Tensor, options: _Options) -> Tensor:
    """`(N,)` float64 advantages of one reward."""
    groups = _group(rewards, group_ids, options.trim, options.trim_tails)
    offset, nothing_to_compare = BASELINES[options.baseline](groups)
    divisor, nothing_to_divide_by = SCALES[options.scale](groups, options.ddof, options.eps)
    # `where`, not a product: with eps=0 the other branch is 0/0.
    usable = groups.valid & ~nothing_to_compare & ~nothing_to_divide_by
    return torch.where(usable, (groups.rewards - offset) / divisor, 0.0)


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    clip: float | None = None,
    baseline: str = "group",
    trim: float = 0.0,
    trim_tails: str = "low",
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
        baseline (`str`, defaults to `"group"`):
            A key of `BASELINES`: subtract the mean of the sample's `"group"`, of the whole `"batch"`
            ([DDPO](https://huggingface.co/papers/2305.13301)), or nothing (`"none"`).
        trim (`float`, defaults to 0.0):
            Share of the members of each group that mean and std leave out, rounded down to whole members; one at least
            stays. The members that are left out get advantages too.
        trim_tails (`str`, defaults to `"low"`):
            A key of `TRIM_TAILS`. `"low"` leaves out the lowest rewards
            ([MixGRPO](https://huggingface.co/papers/2507.21802)), `"both"` that share at each end, which must then be
            below 0.5.

    Returns:
        `Tensor` of shape `(N,)`, float32, on the device of `rewards`. Computed in float64. Exactly 0 for missing
        rewards, for groups whose rewards are all equal, and for groups with one valid reward; with another `baseline`
        for batches of that kind, and for groups of that kind where `scale` is their std.

    Raises:
        `ValueError`: Shapes that differ, ids that are not integers, an infinite reward, or an option that is unknown.

    Example:

    ```python
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    tensor([ 1.7317, -0.5772, -0.5772, -0.5772])
    ```
    """
    options = _Options(scale, ddof, eps, baseline, trim, trim_tails)
    _check_options(options)
    advantages = _normalize(rewards, group_ids, options)
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
    baseline: str = "group",
    trim: float = 0.0,
    trim_tails: str = "low",
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
        baseline (`str`, defaults to `"group"`):
            See [`group_advantages`].
        trim (`float`, defaults to 0.0):
            See [`group_advantages`].
        trim_tails (`str`, defaults to `"low"`):
            See [`group_advantages`].

    Returns:
        `Tensor` of shape `(N,)`, float32.

    Raises:
        `ValueError`: As [`combine_rewards`] and [`group_advantages`].
    """
    total = combine_rewards(rewards, weights)
    return group_advantages(total, group_ids, scale, ddof, eps, baseline=baseline, trim=trim, trim_tails=trim_tails)


def normalize_then_sum_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    scale: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    batch_normalize: bool = True,
    baseline: str = "group",
    trim: float = 0.0,
    trim_tails: str = "low",
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
        baseline (`str`, defaults to `"group"`):
            See [`group_advantages`].
        trim (`float`, defaults to 0.0):
            See [`group_advantages`].
        trim_tails (`str`, defaults to `"low"`):
            See [`group_advantages`].

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
    options = _Options(scale, ddof, eps, baseline, trim, trim_tails)
    _check_options(options)
    columns = [_normalize(column, group_ids, options) for column in rewards.unbind(1)]
    advantages = torch.stack(columns, 1) @ weights.detach().to("cpu", torch.float64)
    if batch_normalize:
        scorable = ~rewards.detach().cpu().isnan().all(1)
        # Not centred again: with the mean of the group, each column sums to 0 over each group, so the mean of the sum
        # is 0 up to a rounding, and taking that away would give groups of equal rewards an advantage of 1e-8. With
        # another baseline it would bring in the mean of the batch, which was not asked for.
        scaled = advantages / (_std(advantages[scorable], ddof) + eps)
        advantages = torch.where(advantages == 0, 0.0, scaled)
    return advantages.to(rewards.device, torch.float32)


AGGREGATIONS: dict[str, Callable[..., Tensor]] = {
    "sum_then_normalize": sum_then_normalize_advantages,
    "normalize_then_sum": normalize_then_sum_advantages,
    "normalize_each": partial(normalize_then_sum_advantages, batch_normalize=False),
}


def reward_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    aggregation: str = "sum_then_normalize",
    scale: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    baseline: str = "group",
    trim: float = 0.0,
    trim_tails: str = "low",
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
            A key of `AGGREGATIONS`: [`sum_then_normalize_advantages`], [`normalize_then_sum_advantages`] (GDPO), or
            `"normalize_each"`, the latter without its division by the std of the batch (MixGRPO, DanceGRPO's video).
        scale (`str`, defaults to `"group"`):
            A key of `SCALES`, see [`group_advantages`].
        ddof (`int`, defaults to 0):
            0 for the population std, 1 for the sample std.
        eps (`float`, defaults to 1e-4):
            Added to the std.
        baseline (`str`, defaults to `"group"`):
            See [`group_advantages`].
        trim (`float`, defaults to 0.0):
            See [`group_advantages`].
        trim_tails (`str`, defaults to `"low"`):
            See [`group_advantages`].

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
    options = _Options(scale, ddof, eps, baseline, trim, trim_tails)
    return AGGREGATIONS[aggregation](rewards, weights, group_ids, **options._asdict())


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

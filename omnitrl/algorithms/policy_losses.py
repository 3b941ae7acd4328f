# SPDX-License-Identifier: Apache-2.0
"""
Policy losses that do more than clip the ratio of one transition: GRPO-Guard, Flow-DPPO and GSPO.

As in [`clipped_policy_loss`], the loss is per row, and the mean over rows is the trainer's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from omnitrl.algorithms._tensors import at_least_float32, check_same_shape, per_row, sample_mean
from omnitrl.algorithms.losses import PolicyLoss, clipped_surrogate, exact_kl, stochastic_std


class DivergencePolicyLoss(NamedTuple):
    """
    A policy loss that is masked by a divergence, and what is worth a log line. All of shape `(B,)`.

    Attributes:
        loss (`Tensor`):
            Loss of each row, with gradient; 0 without gradient where it is dropped.
        ratio (`Tensor`):
            Probability ratio of the policy to the one that made the rollout, detached.
        dropped (`Tensor`, bool):
            The row is too far from the old policy, and its gradient would lead farther away.
        kl (`Tensor`):
            Exact KL from the old policy per latent element, detached.
        approx_kl (`Tensor`):
            `0.5 * log_ratio²`, detached.
    """

    loss: Tensor
    ratio: Tensor
    dropped: Tensor
    kl: Tensor
    approx_kl: Tensor


def guard_log_ratio(sample: Tensor, mean: Tensor, mean_old: Tensor, std: Tensor | float) -> Tensor:
    r"""
    The normalised log-ratio (RatioNorm) of [GRPO-Guard](https://huggingface.co/papers/2510.22319).

    The plain log-ratio of a transition is \\( \mathrm{mean}(z d)/s - \mathrm{mean}(d^2)/(2 s^2) \\) with the noise
    \\( z = (x' - \mu_{old})/s \\) and the shift \\( d = \mu - \mu_{old} \\): below 0 on average, and of a spread
    that follows the `std` of the step, so that one clip range fits no two steps. RatioNorm takes the second term away
    and multiplies by `s`, which leaves \\( \mathrm{mean}(z d) \\): 0 on average and of one scale on all steps. It
    is computed in that form, per row, so a batch may mix timesteps, and holds for every Gaussian transition.

    Args:
        sample (`Tensor` of shape `(B, ...)`):
            The latents that were drawn. Detached.
        mean (`Tensor` of shape `(B, ...)`):
            Mean of the step under the policy that is trained.
        mean_old (`Tensor` of shape `(B, ...)`):
            Mean of the step when the sample was drawn. Detached.
        std (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`):
            Total std of the step.

    Returns:
        `Tensor` of shape `(B,)`, float32 (float64 if an input has it). Exactly 0 where the means are equal.

    Raises:
        `ValueError`: The shapes differ, or a step is deterministic.

    Example:

    ```python
    >>> mean_old = torch.zeros(1, 4)
    >>> guard_log_ratio(mean_old + 0.5, mean_old + 0.1, mean_old, 0.5)
    tensor([0.1000])
    ```
    """
    check_same_shape(sample=sample, mean=mean, mean_old=mean_old)
    sample, mean, mean_old = at_least_float32(sample.detach(), mean, mean_old.detach())
    std = stochastic_std(std, mean, "noise to normalise a ratio with, got {}: train stochastic steps only")
    # The division is by one number per row, so it can wait until after the mean.
    return sample_mean((sample - mean_old) * (mean - mean_old)) / std


def guard_policy_loss(
    sample: Tensor,
    mean: Tensor,
    mean_old: Tensor,
    std: Tensor | float,
    advantages: Tensor,
    epsilon: float = 2e-6,
    epsilon_high: float | None = None,
    advantage_clip: float | None = 5.0,
    weight: Tensor | float | None = None,
) -> PolicyLoss:
    """
    The clipped loss of [GRPO-Guard](https://huggingface.co/papers/2510.22319): [`clipped_policy_loss`] of the
    normalised ratio, see [`guard_log_ratio`], times a weight per row.

    The gradient of the ratio with respect to the velocity is the noise times the velocity coefficient `c` of the step.
    A `weight` of `1 / |c|` makes it equal on all steps of every transition. `1 / |dt|`, verl-omni's choice, does the
    same for `flow_sde` up to a constant, except on a step that starts at sigma 1. Flow-Factory has no weight.

    Args:
        sample (`Tensor` of shape `(B, ...)`):
            The latents that were drawn. Detached.
        mean (`Tensor` of shape `(B, ...)`):
            Mean of the step under the policy that is trained.
        mean_old (`Tensor` of shape `(B, ...)`):
            Mean of the step when the sample was drawn. Detached.
        std (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`):
            Total std of the step.
        advantages (`Tensor` of shape `(B,)`):
            Advantage of each row's sample. Detached.
        epsilon (`float`, defaults to 2e-6):
            Lower clip range of the normalised ratio. The default is verl-omni's for Qwen-Image at 512²; the spread of
            the ratio falls with the root of the number of latent elements.
        epsilon_high (`float`, *optional*):
            Upper clip range. Defaults to `epsilon`.
        advantage_clip (`float`, *optional*, defaults to 5.0):
            Bound of the absolute advantage; `None` for no bound.
        weight (`Tensor` of shape `(B,)`, `(B, 1, ..., 1)` or of one element, or `float`, *optional*):
            Multiplies the loss of each row. Detached. Defaults to 1.

    Returns:
        [`PolicyLoss`] in float32 (float64 if an input has it). `ratio`, the clip flags and `approx_kl` are those of
        the normalised ratio.

    Raises:
        `ValueError`: The shapes differ, or a step is deterministic.

    Example:

    ```python
    >>> mean_old = torch.zeros(2, 4)
    >>> out = guard_policy_loss(mean_old + 0.5, mean_old + 0.1, mean_old, 0.5, torch.tensor([1.0, -1.0]), epsilon=0.05)
    >>> out.loss, out.clipped_high
    (tensor([-1.0500,  1.1052]), tensor([ True, False]))
    ```
    """
    log_ratio = guard_log_ratio(sample, mean, mean_old, std)
    out = clipped_surrogate(log_ratio, advantages, epsilon, epsilon_high, advantage_clip)
    if weight is None:
        return out
    return out._replace(loss=out.loss * per_row(weight, out.loss, "weight").detach())


def dppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mean: Tensor,
    mean_old: Tensor,
    std: Tensor | float,
    advantages: Tensor,
    kl_threshold: float = 1e-5,
    advantage_clip: float | None = None,
) -> DivergencePolicyLoss:
    r"""
    The loss of [Flow-DPPO](https://huggingface.co/papers/2606.11025): the plain surrogate \\( -A r \\), and a mask by
    the exact divergence from the old policy in the place of a clip of the ratio.

    A row is dropped if its KL reaches `kl_threshold` *and* its gradient leads away from the old policy, that is if the
    ratio is above 1 and the advantage positive, or below 1 and negative. Rows that lead back stay. A dropped row has a
    loss of 0 and still counts in the mean over rows.

    Args:
        log_probs (`Tensor` of shape `(B,)`):
            Log-probs of the transitions under the policy that is trained.
        old_log_probs (`Tensor` of shape `(B,)`):
            Log-probs of the same transitions when they were drawn. Detached.
        mean (`Tensor` of shape `(B, ...)`):
            Mean of the step under the policy that is trained. Detached: it only decides what is dropped.
        mean_old (`Tensor` of shape `(B, ...)`):
            Mean of the step when the sample was drawn. Detached.
        std (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`):
            Total std of the step. 1 compares the bare squared distance of the means, as verl-omni does with
            `add_kl_coefficient=False`.
        advantages (`Tensor` of shape `(B,)`):
            Advantage of each row's sample. Detached.
        kl_threshold (`float`, defaults to 1e-5):
            KL per latent element from which on a row may be dropped. The KL of the paper is that of the whole latent,
            which is as many times larger as there are elements.
        advantage_clip (`float`, *optional*):
            Bound of the absolute advantage. None by default, as in the public code bases.

    Returns:
        [`DivergencePolicyLoss`] in float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ, or a step is deterministic.

    Example:

    ```python
    >>> log_probs, mean_old = torch.tensor([0.01, 0.01]), torch.zeros(2, 4)
    >>> out = dppo_policy_loss(log_probs, torch.zeros(2), mean_old + 0.1, mean_old, 0.5, torch.tensor([1.0, -1.0]))
    >>> out.loss, out.dropped
    (tensor([0.0000, 1.0101]), tensor([ True, False]))
    ```
    """
    check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    kl = exact_kl(mean.detach(), mean_old.detach(), std)
    check_same_shape(log_probs=log_probs, mean_of_each_row=kl)
    log_probs, old, advantages = at_least_float32(log_probs, old_log_probs.detach(), advantages.detach())
    if advantage_clip is not None:
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    log_ratio = log_probs - old
    away = log_ratio.detach() * advantages > 0
    dropped = (kl >= kl_threshold) & away
    # Replaced before the exponential too: the gradient of an infinite ratio times 0 is not 0 but NaN.
    surrogate = -advantages * torch.where(dropped, 0.0, log_ratio).exp()
    return DivergencePolicyLoss(
        loss=torch.where(dropped, 0.0, surrogate),
        ratio=log_ratio.detach().exp(),
        dropped=dropped,
        kl=kl,
        approx_kl=0.5 * log_ratio.detach().square(),
    )


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """`(B, T)` to `(B,)`: mean over the steps of `mask`, 0 where there is none."""
    if mask is None:
        return values.mean(1)
    # `where`, not a product: padding may hold infinities.
    return torch.where(mask.bool(), values, 0.0).sum(1) / mask.bool().sum(1).clamp(min=1)


def _check_sequences(log_probs: Tensor, mask: Tensor | None, **others: Tensor) -> None:
    """Raise a `ValueError` unless everything has one value per row and step."""
    check_same_shape(log_probs=log_probs, **others, **({} if mask is None else {"mask": mask}))
    if log_probs.ndim != 2:
        raise ValueError(
            f"`log_probs` has one row per sequence and one column per step, got shape {tuple(log_probs.shape)}: pass "
            f"(B, T), or (B, 1) for one step."
        )


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""
    Log of the sequence-level ratio of [GSPO](https://huggingface.co/papers/2507.18071), the geometric mean of the
    ratios of the steps: \\( \frac{1}{|S|} \sum_{j \in S} (\log p_j - \log p_j^{old}) \\).

    The steps are the trained steps of a diffusion sample, or the tokens of a completion.

    Args:
        log_probs (`Tensor` of shape `(B, T)`):
            Log-probs of the steps under the policy that is trained.
        old_log_probs (`Tensor` of shape `(B, T)`):
            Log-probs of the same steps when they were drawn. Detached.
        mask (`Tensor` of shape `(B, T)`, *optional*):
            True (or 1) for the steps that count. All by default.

    Returns:
        `Tensor` of shape `(B,)`, float32 (float64 if an input has it). 0 without gradient for a row without steps.

    Raises:
        `ValueError`: The shapes differ, or are not `(B, T)`.

    Example:

    ```python
    >>> log_probs, mask = torch.tensor([[0.1, 0.3, 9.0]]), torch.tensor([[1, 1, 0]])
    >>> sequence_log_ratio(log_probs, torch.zeros(1, 3), mask)
    tensor([0.2000])
    ```
    """
    _check_sequences(log_probs, mask, old_log_probs=old_log_probs)
    log_probs, old_log_probs = at_least_float32(log_probs, old_log_probs.detach())
    return _masked_mean(log_probs - old_log_probs, mask)


def sequence_level_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """
    The token form of [`sequence_log_ratio`] (GSPO-token): each step has the *value* of the ratio of its sequence, and
    the gradient of its own log-prob.

    For losses that keep one term per step, such as those that divide by the number of tokens in the batch: pass it to
    [`clipped_policy_loss`] as `log_probs` with zeros as `old_log_probs`. The mean over the steps of a row has the
    value and the gradient of [`sequence_policy_loss`].

    Args:
        log_probs (`Tensor` of shape `(B, T)`):
            Log-probs of the steps under the policy that is trained.
        old_log_probs (`Tensor` of shape `(B, T)`):
            Log-probs of the same steps when they were drawn. Detached.
        mask (`Tensor` of shape `(B, T)`, *optional*):
            True (or 1) for the steps that count. All by default.

    Returns:
        `Tensor` of shape `(B, T)`, float32 (float64 if an input has it), 0 without gradient outside the mask.

    Raises:
        `ValueError`: The shapes differ, or are not `(B, T)`.

    Example:

    ```python
    >>> sequence_level_log_ratio(torch.tensor([[0.1, 0.3]]), torch.zeros(1, 2))
    tensor([[0.2000, 0.2000]])
    ```
    """
    whole = sequence_log_ratio(log_probs.detach(), old_log_probs, mask)
    token = log_probs.to(whole) - log_probs.detach().to(whole) + whole.unsqueeze(1)
    return token if mask is None else torch.where(mask.bool(), token, 0.0)


def sequence_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    epsilon: float = 1e-4,
    epsilon_high: float | None = None,
    advantage_clip: float | None = 5.0,
    delta: float | None = None,
    log_ratio: Tensor | None = None,
) -> PolicyLoss:
    """
    The clipped loss of [GSPO](https://huggingface.co/papers/2507.18071): one ratio and one clip per sequence, see
    [`sequence_log_ratio`].

    The mean over rows is TRL's `loss_type="grpo"` with `importance_sampling_level="sequence"`, and verl's
    `seq-mean-token-mean`. With one step per sequence it is [`clipped_policy_loss`].

    A sequence whose steps do not fit in one backward pass is split by columns: take `log_ratio` of the whole sequence
    without gradient first, and pass it with each part. The mean over parts, weighted by their steps, has the gradient
    of the whole.

    Args:
        log_probs (`Tensor` of shape `(B, T)`):
            Log-probs of the steps under the policy that is trained.
        old_log_probs (`Tensor` of shape `(B, T)`):
            Log-probs of the same steps when they were drawn. Detached.
        advantages (`Tensor` of shape `(B,)`):
            Advantage of each sequence. Detached.
        mask (`Tensor` of shape `(B, T)`, *optional*):
            True (or 1) for the steps that count. All by default.
        epsilon (`float`, defaults to 1e-4):
            Lower clip range of the ratio. The default is Flow-GRPO's, for log-probs that are means over the latent
            elements. The paper has 3e-4 for text.
        epsilon_high (`float`, *optional*):
            Upper clip range, 4e-4 in the paper. Defaults to `epsilon`.
        advantage_clip (`float`, *optional*, defaults to 5.0):
            Bound of the absolute advantage; `None`, which is usual for text, for no bound.
        delta (`float`, *optional*):
            Bound of the unclipped ratio: TRL's `delta`, and the `c` of a dual clip. Above `1 + epsilon_high` it acts
            where the advantage is negative, for there the clip leaves the ratio free to grow.
        log_ratio (`Tensor` of shape `(B,)`, *optional*):
            Log-ratio of the whole sequences, if the columns here are a part of them. Detached.

    Returns:
        [`PolicyLoss`] of shape `(B,)`, in float32 (float64 if an input has it). A row without steps has no gradient.

    Raises:
        `ValueError`: The shapes differ, or `log_probs` is not `(B, T)`.

    Example:

    ```python
    >>> log_probs = torch.tensor([[0.1, 0.3], [0.0, 0.0]])
    >>> sequence_policy_loss(log_probs, torch.zeros(2, 2), torch.tensor([1.0, 1.0]), epsilon=0.2).loss
    tensor([-1.2000, -1.0000])
    ```
    """
    if log_ratio is None:
        log_ratio = sequence_log_ratio(log_probs, old_log_probs, mask)
    else:
        _check_sequences(log_probs, mask, old_log_probs=old_log_probs)
        check_same_shape(log_ratio=log_ratio, advantages=advantages)
        log_probs, log_ratio = at_least_float32(log_probs, log_ratio.detach())
        # 0 in value, so that every part sees one and the same ratio, bit for bit.
        log_ratio = log_ratio + _masked_mean(log_probs - log_probs.detach(), mask)
    return clipped_surrogate(log_ratio, advantages, epsilon, epsilon_high, advantage_clip, delta)

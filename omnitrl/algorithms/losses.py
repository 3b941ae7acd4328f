# SPDX-License-Identifier: Apache-2.0
"""Losses per row of a batch. The trainer takes the mean over rows, trained steps and ranks."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from omnitrl.algorithms._tensors import at_least_float32, check_same_shape, per_row, sample_mean


class PolicyLoss(NamedTuple):
    """
    A clipped policy loss, and what is worth a log line. All of the shape of the log-ratios, `(B,)` for most losses.

    Attributes:
        loss (`Tensor`):
            Loss of each row, with gradient.
        ratio (`Tensor`):
            Probability ratio of the policy to the one that made the rollout, detached. In [`guard_policy_loss`] the
            normalised ratio, in [`sequence_policy_loss`] that of the sequence.
        clipped_low (`Tensor`, bool):
            The ratio is below `1 - epsilon` and the advantage negative: the clip cuts the gradient.
        clipped_high (`Tensor`, bool):
            The ratio is above `1 + epsilon_high` and the advantage positive: the clip cuts the gradient.
        approx_kl (`Tensor`):
            `0.5 * log_ratio²`, an estimate of the divergence from the policy that made the rollout, detached.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    approx_kl: Tensor


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    epsilon: float,
    epsilon_high: float | None,
    advantage_clip: float | None,
    delta: float | None = None,
) -> PolicyLoss:
    """The clipped loss of any log-ratio. The gradient flows through `log_ratio` alone."""
    check_same_shape(log_ratio=log_ratio, advantages=advantages)
    log_ratio, advantages = at_least_float32(log_ratio, advantages.detach())
    if advantage_clip is not None:
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    ratio = log_ratio.exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = torch.maximum(-advantages * bounded, -advantages * ratio.clamp(low, high))
    ratio = ratio.detach()
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=(ratio < low) & (advantages < 0),
        clipped_high=(ratio > high) & (advantages > 0),
        approx_kl=0.5 * log_ratio.detach().square(),
    )


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    epsilon: float = 1e-4,
    epsilon_high: float | None = None,
    advantage_clip: float | None = 5.0,
) -> PolicyLoss:
    r"""
    The clipped surrogate of [PPO](https://huggingface.co/papers/1707.06347) as
    [Flow-GRPO](https://huggingface.co/papers/2505.05470) uses it, one term per transition:
    \\( \max(-A r, -A \, \mathrm{clip}(r, 1 - \epsilon, 1 + \epsilon_{high})) \\).

    Args:
        log_probs (`Tensor` of shape `(B,)`):
            Log-probs of the transitions under the policy that is trained.
        old_log_probs (`Tensor` of shape `(B,)`):
            Log-probs of the same transitions when they were drawn. Detached.
        advantages (`Tensor` of shape `(B,)`):
            Advantage of each row's sample. Detached.
        epsilon (`float`, defaults to 1e-4):
            Lower clip range of the ratio. Small, for log-probs are means over the latent elements.
        epsilon_high (`float`, *optional*):
            Upper clip range. Defaults to `epsilon`.
        advantage_clip (`float`, *optional*, defaults to 5.0):
            Bound of the absolute advantage; `None` for no bound.

    Returns:
        [`PolicyLoss`] in float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ.

    Example:

    ```python
    >>> log_probs = torch.zeros(2, requires_grad=True)
    >>> clipped_policy_loss(log_probs, torch.zeros(2), torch.tensor([1.0, -1.0])).loss.tolist()
    [-1.0, 1.0]
    ```
    """
    check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_probs, old_log_probs, advantages = at_least_float32(log_probs, old_log_probs.detach(), advantages)
    return clipped_surrogate(log_probs - old_log_probs, advantages, epsilon, epsilon_high, advantage_clip)


def stochastic_std(std: Tensor | float, like: Tensor, consequence: str) -> Tensor:
    """`(B,)` or `(1,)` std that is above 0 for every row."""
    std = per_row(std, like, "std")
    if not (std > 0).all():
        raise ValueError(f"A deterministic step has no {consequence.format(f'std={std.min().item():g}')}.")
    return std


def _mean_gap(mean: Tensor, mean_ref: Tensor, std: Tensor | float) -> tuple[Tensor, Tensor]:
    """`(B,)` mean squared gap of the two means, and the variance beside it."""
    check_same_shape(mean=mean, mean_ref=mean_ref)
    mean, mean_ref = at_least_float32(mean, mean_ref)
    std = stochastic_std(std, mean, "finite KL, got {}: use stochastic steps, or kl_form='velocity'")
    return sample_mean((mean - mean_ref).square()), std.square()


def exact_kl(mean: Tensor, mean_ref: Tensor, std: Tensor | float) -> Tensor:
    """
    KL of the two Gaussian transitions, per latent element: `mean_D((mean - mean_ref)²) / (2 std²)`.

    With `cps` this is also what the public code bases compute under the name of Flow-GRPO's KL, because the std that
    they keep for `cps` is the total one.

    Args:
        mean (`Tensor` of shape `(B, ...)`):
            Mean of the step under the policy.
        mean_ref (`Tensor` of shape `(B, ...)`):
            Mean of the step under the reference.
        std (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`):
            Total std of the step.

    Returns:
        `Tensor` of shape `(B,)`.
    """
    gap, variance = _mean_gap(mean, mean_ref, std)
    return gap / (2 * variance)


def flow_grpo_kl(mean: Tensor, mean_ref: Tensor, std: Tensor | float, dt: Tensor | float) -> Tensor:
    """
    The KL of Flow-GRPO and verl-omni, which divides by the diffusion coefficient without the step size: [`exact_kl`]
    times `|dt|`, so short steps weigh less.

    It does so for every transition, `cps` included (there the public code bases divide by the total std, see
    [`exact_kl`]).

    Args:
        mean (`Tensor` of shape `(B, ...)`):
            Mean of the step under the policy.
        mean_ref (`Tensor` of shape `(B, ...)`):
            Mean of the step under the reference.
        std (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`):
            Total std of the step.
        dt (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`):
            `sigma_next - sigma`; the sign does not matter.

    Returns:
        `Tensor` of shape `(B,)`.
    """
    gap, variance = _mean_gap(mean, mean_ref, std)
    return gap * per_row(dt, gap, "dt").abs() / (2 * variance)


def velocity_kl(velocity: Tensor, velocity_ref: Tensor) -> Tensor:
    """
    Squared distance of the velocities, per latent element: `mean_D((velocity - velocity_ref)²)`. No KL in the strict
    sense, but defined on every step and of one scale on all. Flow-Factory's "v-based" form, AWM, DiffusionNFT.

    Args:
        velocity (`Tensor` of shape `(B, ...)`):
            Velocity of the policy.
        velocity_ref (`Tensor` of shape `(B, ...)`):
            Velocity of the reference.

    Returns:
        `Tensor` of shape `(B,)`.
    """
    check_same_shape(velocity=velocity, velocity_ref=velocity_ref)
    velocity, velocity_ref = at_least_float32(velocity, velocity_ref)
    return sample_mean((velocity - velocity_ref).square())


KL_FORMS: dict[str, Callable[..., Tensor]] = {
    "exact": exact_kl,
    "flow_grpo": flow_grpo_kl,
    "velocity": velocity_kl,
}


def reference_kl(
    form: str,
    *,
    mean: Tensor | None = None,
    mean_ref: Tensor | None = None,
    velocity: Tensor | None = None,
    velocity_ref: Tensor | None = None,
    std: Tensor | float | None = None,
    dt: Tensor | float | None = None,
) -> Tensor:
    """
    Divergence of one transition from that of the reference model, in a named form.

    The forms have different scales, so a `beta` does not carry over from one to another. Each takes what it needs of
    the keywords and ignores the rest.

    Args:
        form (`str`):
            A key of `KL_FORMS`: `"exact"` ([`exact_kl`]), `"flow_grpo"` ([`flow_grpo_kl`]) or `"velocity"`
            ([`velocity_kl`]).
        mean (`Tensor` of shape `(B, ...)`, *optional*):
            Mean of the step under the policy.
        mean_ref (`Tensor` of shape `(B, ...)`, *optional*):
            Mean of the step under the reference.
        velocity (`Tensor` of shape `(B, ...)`, *optional*):
            Velocity of the policy.
        velocity_ref (`Tensor` of shape `(B, ...)`, *optional*):
            Velocity of the reference.
        std (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`, *optional*):
            Total std of the step.
        dt (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`, *optional*):
            `sigma_next - sigma`.

    Returns:
        `Tensor` of shape `(B,)`, float32 (float64 if an input has it), at least 0.

    Raises:
        `ValueError`: An unknown form, a keyword that the form needs and did not get, or a deterministic step where the
        form divides by the std.

    Example:

    ```python
    >>> reference_kl("velocity", velocity=torch.full((1, 4), 0.1), velocity_ref=torch.zeros(1, 4))
    tensor([0.0100])
    ```
    """
    if form not in KL_FORMS:
        raise ValueError(f"kl_form={form!r} is not known: use one of {', '.join(map(repr, KL_FORMS))}.")
    given = {
        "mean": mean,
        "mean_ref": mean_ref,
        "velocity": velocity,
        "velocity_ref": velocity_ref,
        "std": std,
        "dt": dt,
    }
    inputs = {name: given[name] for name in inspect.signature(KL_FORMS[form]).parameters}
    missing = [name for name, value in inputs.items() if value is None]
    if missing:
        needed, absent = ", ".join(inputs), ", ".join(missing)
        raise ValueError(f"kl_form={form!r} needs {needed}, but got no {absent}: pass them all.")
    return KL_FORMS[form](**inputs)

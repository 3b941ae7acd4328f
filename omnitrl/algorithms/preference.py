# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs, a sample that is preferred and one that is not."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from omnitrl.algorithms._tensors import at_least_float32, check_same_shape


DPO_FORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": lambda margins, beta: -functional.logsigmoid(margins),
    "ipo": lambda margins, beta: (margins / beta - 1 / (2 * beta)).square(),
    "hinge": lambda margins, beta: torch.relu(1 - margins),
}


class DPOLoss(NamedTuple):
    """
    The loss of a batch of pairs, and what is worth a log line. All of shape `(B,)`.

    Attributes:
        loss (`Tensor`):
            Loss of each pair, with gradient.
        chosen_rewards (`Tensor`):
            Implicit reward of the preferred samples, detached. Below 0 where the policy fits them worse than the
            reference does.
        rejected_rewards (`Tensor`):
            Implicit reward of the others, detached. Watch both: a loss may fall because the policy gets worse on the
            rejected samples alone.
        margins (`Tensor`):
            `chosen_rewards - rejected_rewards`, detached.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    margins: Tensor


def diffusion_dpo_loss(
    error_chosen: Tensor,
    error_rejected: Tensor,
    ref_error_chosen: Tensor,
    ref_error_rejected: Tensor,
    beta: float,
    form: str = "sigmoid",
) -> DPOLoss:
    r"""
    The preference loss of [Diffusion-DPO](https://huggingface.co/papers/2311.12908), one term per pair.

    The errors are those of [`matching_error`], at the *same* noise and noise level for the four of a pair. A sample's
    implicit reward is \\( -\frac{\beta}{2} (e - e_{ref}) \\), and \\( m \\) the reward of the chosen one less that of
    the rejected one. The mean over pairs is taken outside the log-sigmoid, that is, by the caller.

    | form | loss | at the reference, and its slope in \\( m \\) there |
    |---|---|---|
    | `"sigmoid"` | \\( -\log \sigma(m) \\) | \\( \log 2 \\), \\( -1/2 \\) |
    | `"ipo"` | \\( (m / \beta - 1 / (2 \beta))^2 \\) | \\( 1 / (4 \beta^2) \\), \\( -1 / \beta^2 \\) |
    | `"hinge"` | \\( \max(0, 1 - m) \\) | 1, \\( -1 \\) |

    The forms have different scales. `"hinge"` is the one of [SLiC](https://huggingface.co/papers/2305.10425). `"ipo"`
    is that of [IPO](https://huggingface.co/papers/2310.12036) and TRL, with \\( m / \beta \\) in the place of the
    difference of log-ratios: its best margin is 1/2 at any `beta`, and its gradient falls with `beta` where that of
    the others rises.

    Args:
        error_chosen (`Tensor` of shape `(B,)`):
            Error of the policy on the preferred samples.
        error_rejected (`Tensor` of shape `(B,)`):
            Error of the policy on the other samples.
        ref_error_chosen (`Tensor` of shape `(B,)`):
            Error of the reference on the preferred samples. Detached.
        ref_error_rejected (`Tensor` of shape `(B,)`):
            Error of the reference on the other samples. Detached.
        beta (`float`):
            Strength of the tie to the reference, above 0. It multiplies a *mean* over latent elements, hence its
            size: 2000 to 5000 for Stable Diffusion 1.5 and XL, 100 for LoRA on Stable Diffusion 3.5.
        form (`str`, defaults to `"sigmoid"`):
            A key of `DPO_FORMS`.

    Returns:
        [`DPOLoss`] in float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ, `beta` is not above 0, or an unknown form.

    Example:

    ```python
    >>> error, better = torch.tensor([0.5]), torch.tensor([0.48])
    >>> diffusion_dpo_loss(better, error, error, error, beta=100.0).margins
    tensor([1.0000])
    ```
    """
    if form not in DPO_FORMS:
        raise ValueError(f"dpo_form={form!r} is not known: use one of {', '.join(map(repr, DPO_FORMS))}.")
    if not beta > 0:
        raise ValueError(f"beta={beta:g} scales the implicit rewards and must be above 0: use 100.0 or 2000.0.")
    check_same_shape(
        error_chosen=error_chosen,
        error_rejected=error_rejected,
        ref_error_chosen=ref_error_chosen,
        ref_error_rejected=ref_error_rejected,
    )
    error_chosen, error_rejected, ref_error_chosen, ref_error_rejected = at_least_float32(
        error_chosen, error_rejected, ref_error_chosen.detach(), ref_error_rejected.detach()
    )
    chosen_rewards = -beta / 2 * (error_chosen - ref_error_chosen)
    rejected_rewards = -beta / 2 * (error_rejected - ref_error_rejected)
    margins = chosen_rewards - rejected_rewards
    return DPOLoss(
        loss=DPO_FORMS[form](margins, beta),
        chosen_rewards=chosen_rewards.detach(),
        rejected_rewards=rejected_rewards.detach(),
        margins=margins.detach(),
    )

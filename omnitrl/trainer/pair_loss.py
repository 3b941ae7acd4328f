# SPDX-License-Identifier: Apache-2.0
"""The preference loss of noised pairs, which offline and online Diffusion-DPO share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from omnitrl.algorithms import DPO_FORMS, diffusion_dpo_loss, matching_error, velocity_target
from omnitrl.trainer.base_config import check_choice, check_positive
from omnitrl.trainer.noising import NoisedBatch


DPO_PAPER = {
    "title": "Diffusion Model Alignment Using Direct Preference Optimization",
    "id": "2311.12908",
    "citation": (
        "@article{wallace2023diffusiondpo,\n"
        "    title  = {Diffusion Model Alignment Using Direct Preference Optimization},\n"
        "    author = {Bram Wallace and Meihua Dang and Rafael Rafailov and Linqi Zhou and Aaron Lou and "
        "Senthil Purushwalkam and Stefano Ermon and Caiming Xiong and Shafiq Joty and Nikhil Naik},\n"
        "    year   = {2023},\n"
        "    eprint = {arXiv:2311.12908},\n"
        "}"
    ),
}


def check_pair_loss(args: Any) -> None:
    """Raises unless `loss_type` and `beta` are ones that [`pair_loss`] takes."""
    check_choice("loss_type", args.loss_type, DPO_FORMS)
    check_positive(args, "100.0", "beta")


class PairLoss(NamedTuple):
    """
    The loss of a batch of pairs.

    Args:
        rows (`Tensor`):
            (R,) loss of each row, with gradient: that of its pair, for the two of a pair.
        metrics (`dict[str, Tensor]`):
            (R / 2,) what is worth a log line, NaN for pairs of weight 0.
    """

    rows: Tensor
    metrics: dict[str, Tensor]


def pair_loss(velocity: Tensor, reference: Tensor, batch: NoisedBatch, beta: float, loss_type: str) -> PairLoss:
    """
    The loss of Diffusion-DPO for rows that alternate between the chosen and the rejected sample of a pair.

    A pair of weight 0 has a loss and a gradient of 0 and still counts in the mean over rows.

    Args:
        velocity, reference (`Tensor`):
            (R, ...) what the policy and the reference predict.
        batch ([`NoisedBatch`]):
            The rows. The two of a pair have the same noise and noise level; `advantages` are the weights of the pairs.
        beta (`float`), loss_type (`str`):
            See [`~omnitrl.algorithms.diffusion_dpo_loss`].

    Returns:
        [`PairLoss`].
    """
    target = velocity_target(batch.clean_latents, batch.noise)
    error, reference_error = matching_error(velocity, target), matching_error(reference, target)
    weights = batch.advantages[::2]
    dpo = diffusion_dpo_loss(
        error[::2], error[1::2], reference_error[::2], reference_error[1::2], beta=beta, form=loss_type
    )
    metrics = {
        "rewards/chosen": dpo.chosen_rewards,
        "rewards/rejected": dpo.rejected_rewards,
        "rewards/accuracies": (dpo.margins > 0).float(),
        "rewards/margins": dpo.margins,
        "error/chosen": error[::2].detach(),
        "error/rejected": error[1::2].detach(),
    }
    return PairLoss(
        rows=(weights * dpo.loss).repeat_interleave(2),
        metrics={name: value.masked_fill(weights == 0, math.nan) for name, value in metrics.items()},
    )

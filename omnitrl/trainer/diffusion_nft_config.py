# SPDX-License-Identifier: Apache-2.0
"""Options of DiffusionNFT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from omnitrl.algorithms import NFT_MODES, OLD_POLICY_SCHEDULES
from omnitrl.errors import InputError
from omnitrl.trainer.base_config import check_choice, check_positive
from omnitrl.trainer.matching_config import MatchingConfig


@dataclass
class DiffusionNFTConfig(MatchingConfig):
    """
    Options of [`DiffusionNFTTrainer`]; see [`MatchingConfig`] for those of rollouts.

    Defaults are those of the authors' recipes for GenEval and preference rewards (https://arxiv.org/abs/2509.16117):
    rollouts of 10 steps of a second-order solver without guidance, every step of its grid but the last trained, one
    std of rewards for the whole rollout. Their recipe for text rendering has `mix_beta=0.1` and
    `old_policy_schedule="delayed"`.

    Example:

    ```python
    >>> args = DiffusionNFTConfig(output_dir="sd35-ocr", mix_beta=0.1, old_policy_schedule="delayed")
    ```
    """

    _at_least: ClassVar[dict[str, float]] = {**MatchingConfig._at_least, "beta": 0}

    guidance_scale: float | None = field(
        default=1.0,
        metadata={"help": "Classifier-free guidance in rollouts and evaluation; 1 is none; None for the family's."},
    )
    ode_solver: str = field(
        default="dpmpp_2m",
        metadata={"help": "Solver of rollouts: 'euler' or 'dpmpp_2m' (DPM-Solver++(2M), second order)."},
    )
    timesteps_per_sample: int | None = field(
        default=None,
        metadata={
            "help": "Noise levels at which each sample is trained; None for all that a 'grid' has in the range."
        },
    )
    scale_rewards: str = field(
        default="batch", metadata={"help": "Advantages are divided by the std of 'group', 'batch' or 'none'."}
    )
    beta: float = field(
        default=1e-4, metadata={"help": "Weight of the squared velocity difference from the reference; 0 for none."}
    )
    mix_beta: float = field(
        default=1.0,
        metadata={"help": "How far the two policies lie from the old one, towards the trained one and away from it."},
    )
    nft_mode: str = field(
        default="all",
        metadata={
            "help": "What is taken of the advantages: 'all', 'positive_only', 'negative_only', 'one_only' or 'binary'."
        },
    )
    adaptive_weights: bool = field(
        default=True, metadata={"help": "Divide each error by the mean absolute error of its sample."}
    )
    old_policy_schedule: str = field(
        default="linear",
        metadata={
            "help": "How the old policy, which makes the rollouts, follows the trained one: 'copy', 'linear', "
            "'delayed' or 'awm'."
        },
    )
    old_policy_decay: float | None = field(
        default=None, metadata={"help": "Upper bound of the schedule's decay, beside the schedule's own."}
    )

    def _check_choices(self) -> None:
        super()._check_choices()
        check_choice("nft_mode", self.nft_mode, NFT_MODES)
        check_choice("old_policy_schedule", self.old_policy_schedule, OLD_POLICY_SCHEDULES)

    def _check_ranges(self) -> None:
        super()._check_ranges()
        check_positive(self, "1.0, or 0.1 to lead further", "mix_beta")
        if self.advantage_clip is None:
            raise InputError(
                "advantage_clip=None leaves no scale to make probabilities of advantages with: use advantage_clip=5.0."
            )
        if self.old_policy_decay is not None and not 0 <= self.old_policy_decay <= 1:
            raise InputError(
                f"old_policy_decay={self.old_policy_decay} is a share of the old weights in 0..1: use 0.5, or None "
                "for the schedule's own bound."
            )

# SPDX-License-Identifier: Apache-2.0
"""Options of online Diffusion-DPO."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from omnitrl.errors import InputError
from omnitrl.trainer.matching_config import MatchingConfig
from omnitrl.trainer.pair_loss import check_pair_loss


# What normalises advantages: a pair only asks which of two scores is higher.
_WITHOUT_EFFECT = (
    "multi_objective_aggregation",
    "scale_rewards",
    "advantage_ddof",
    "advantage_eps",
    "advantage_baseline",
    "advantage_trim",
    "advantage_trim_tails",
    "advantage_clip",
)


@dataclass
class OnlineDiffusionDPOConfig(MatchingConfig):
    """
    Options of [`OnlineDiffusionDPOTrainer`]; see [`MatchingConfig`] for those of rollouts and noise levels.

    A group of `num_generations` samples gives one pair, and `per_device_train_batch_size` counts pairs: 4 prompts of
    8 samples are 4 pairs, that is, 8 of the 32 samples are trained. Pairs are made from the weighted sum of the
    rewards, and the options that normalise advantages are refused.

    Defaults follow the recipes that are public for flow matching: `beta` 100, noise levels as Stable Diffusion 3 was
    trained, no guidance in training.

    Example:

    ```python
    >>> args = OnlineDiffusionDPOConfig(output_dir="sd35", num_generations=24, per_device_train_batch_size=4)
    ```
    """

    _at_least: ClassVar[dict[str, float]] = {
        **MatchingConfig._at_least,
        "preference_margin": 0,
        "ref_update_steps": 1,
    }

    sigma_sampling: str = field(
        default="logit_normal",
        metadata={
            "help": "Where noise levels come from: 'logit_normal', 'uniform', or 'grid' (the rollout's own, without "
            "replacement)."
        },
    )
    timestep_range: list[float] = field(
        default_factory=lambda: [0.0, 1.0],
        metadata={"help": "Part of the way from noise (0) to data (1) that is trained."},
    )
    beta: float = field(
        default=100.0, metadata={"help": "Strength of the tie to the reference, on errors that are means."}
    )
    loss_type: str = field(default="sigmoid", metadata={"help": "Form of the loss: 'sigmoid', 'ipo' or 'hinge'."})
    preference_margin: float = field(
        default=0.0,
        metadata={"help": "Smallest gap of two rewards that counts as a preference; equal ones never do."},
    )
    ref_update_steps: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps after which the policy becomes the reference; None keeps the first reference."
        },
    )

    @property
    def units_per_group(self) -> int:
        """One pair."""
        return 1

    def _check_choices(self) -> None:
        super()._check_choices()
        check_pair_loss(self)
        defaults = {option.name: option.default for option in dataclasses.fields(self)}
        for name in _WITHOUT_EFFECT:
            value = getattr(self, name)
            if value != defaults[name]:
                raise InputError(
                    f"{name}={value!r} has no effect on pairs, which only say which of two samples has the higher "
                    "weighted sum of rewards: leave it out, or weigh rewards with reward_weights=[1.0, 0.5]."
                )

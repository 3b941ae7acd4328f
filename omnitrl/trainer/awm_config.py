# SPDX-License-Identifier: Apache-2.0
"""Options of Advantage Weighted Matching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from omnitrl.algorithms import AWM_WEIGHTINGS
from omnitrl.trainer.base_config import check_choice, check_positive
from omnitrl.trainer.matching_config import MatchingConfig


@dataclass
class AWMConfig(MatchingConfig):
    """
    Options of [`AWMTrainer`]; see [`MatchingConfig`] for those of rollouts.

    Defaults are those of the authors' recipes for GenEval and text rendering (https://arxiv.org/abs/2509.25050):
    rollouts of 14 steps without guidance, 6 of them trained for each sample, out of the first 90 % without the first
    one, one std of rewards for the whole rollout, and a clip range of 1, which is as good as none: what keeps the
    policy in place is its own average (`ema_beta`), and that each rollout is used for one update.

    Example:

    ```python
    >>> args = AWMConfig(output_dir="sd35-ocr", num_generations=24, per_device_train_batch_size=9)
    ```
    """

    _at_least: ClassVar[dict[str, float]] = {**MatchingConfig._at_least, "beta": 0, "ema_beta": 0}

    guidance_scale: float | None = field(
        default=1.0,
        metadata={"help": "Classifier-free guidance in rollouts and evaluation; 1 is none; None for the family's."},
    )
    num_inference_steps: int = field(default=14, metadata={"help": "Sampler steps T in rollouts."})
    timesteps_per_sample: int | None = field(
        default=6,
        metadata={
            "help": "Noise levels at which each sample is trained; None for all that a 'grid' has in the range."
        },
    )
    timestep_range: list[float] = field(
        default_factory=lambda: [0.08, 0.9],
        metadata={
            "help": "Part of the way from noise (0) to data (1) that is trained; 0.08 0.9 of 14 steps leaves out the "
            "first and the last two."
        },
    )
    scale_rewards: str = field(
        default="batch", metadata={"help": "Advantages are divided by the std of 'group', 'batch' or 'none'."}
    )
    epsilon: float = field(
        default=1.0,
        metadata={"help": "Clip range of the ratio; 1 hardly ever acts. Without `ema_beta` take about 1e-5."},
    )
    beta: float = field(
        default=3e-3, metadata={"help": "Weight of the squared velocity difference from the reference; 0 for none."}
    )
    ema_beta: float = field(
        default=1.0,
        metadata={
            "help": "Weight of the squared velocity difference from the average of the trained weights; 0 for none."
        },
    )
    awm_weighting: str = field(
        default="ghuber",
        metadata={"help": "Weight of the error at each noise level: 'uniform', 't', 't2', 'huber' or 'ghuber'."},
    )
    ghuber_power: float = field(default=0.25, metadata={"help": "The power in the 'ghuber' weighting."})

    def _check_choices(self) -> None:
        super()._check_choices()
        check_choice("awm_weighting", self.awm_weighting, AWM_WEIGHTINGS)

    def _check_ranges(self) -> None:
        super()._check_ranges()
        check_positive(self, "1.0 for none, or 1e-5", "epsilon")
        check_positive(self, "0.25", "ghuber_power")

# SPDX-License-Identifier: Apache-2.0
"""Options of Diffusion-DPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from omnitrl.errors import InputError
from omnitrl.trainer.base_config import BaseConfig
from omnitrl.trainer.matching_config import check_noise_levels
from omnitrl.trainer.pair_loss import check_pair_loss


@dataclass
class DiffusionDPOConfig(BaseConfig):
    """
    Options of [`DiffusionDPOTrainer`]; see [`BaseConfig`] for those that all trainers share.

    `per_device_train_batch_size` counts pairs: a micro-batch is twice as many pictures. Defaults follow the recipes
    that are public for flow matching: `beta` 100, one noise level for each pair, drawn as Stable Diffusion 3 was
    trained. The paper (https://arxiv.org/abs/2311.12908) used 2000 to 5000, for networks that predict noise.
    The best checkpoint is that of the lowest `eval_loss` unless `metric_for_best_model` names another metric.

    Example:

    ```python
    >>> args = DiffusionDPOConfig(output_dir="sd35-dpo", per_device_train_batch_size=4, beta=100.0)
    ```
    """

    _at_least: ClassVar[dict[str, float]] = {
        **BaseConfig._at_least,
        "timesteps_per_sample": 1,
        "timesteps_per_forward": 1,
    }

    beta: float = field(
        default=100.0, metadata={"help": "Strength of the tie to the reference, on errors that are means."}
    )
    loss_type: str = field(default="sigmoid", metadata={"help": "Form of the loss: 'sigmoid', 'ipo' or 'hinge'."})
    timesteps_per_sample: int = field(default=1, metadata={"help": "Noise levels at which each pair is trained."})
    timesteps_per_forward: int = field(
        default=1, metadata={"help": "Noise levels of a micro-batch in one network call; more is faster, and larger."}
    )
    sigma_sampling: str = field(
        default="logit_normal", metadata={"help": "Where noise levels come from: 'logit_normal' or 'uniform'."}
    )
    timestep_range: list[float] = field(
        default_factory=lambda: [0.0, 1.0],
        metadata={"help": "Part of the way from noise (0) to data (1) that is trained."},
    )
    shuffle_preferences: bool = field(
        default=False,
        metadata={"help": "Control experiment: half of the pairs are swapped, so that nothing should be learnt."},
    )

    def __post_init__(self) -> None:
        if (self.load_best_model_at_end or self.save_strategy == "best") and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"  # there may be no rewards
        super().__post_init__()

    def _check_choices(self) -> None:
        super()._check_choices()
        check_pair_loss(self)
        check_noise_levels(self)
        if self.sigma_sampling == "grid":
            raise InputError(
                "sigma_sampling='grid' is the grid of a rollout, which training on pairs of a dataset does not have: "
                "use 'logit_normal' or 'uniform'."
            )

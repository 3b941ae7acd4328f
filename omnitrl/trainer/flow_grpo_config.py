# SPDX-License-Identifier: Apache-2.0
"""Options of Flow-GRPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnitrl.algorithms import KL_FORMS
from omnitrl.errors import InputError
from omnitrl.trainer.rollout_config import RolloutConfig, check_choice


@dataclass
class FlowGRPOConfig(RolloutConfig):
    """
    Options of [`FlowGRPOTrainer`]; see [`RolloutConfig`] for those that all trainers share.

    Defaults are the paper's (https://arxiv.org/abs/2505.05470) where it gives one value: Flow-SDE with noise 0.7,
    10 sampler steps in rollouts and 40 in evaluation, clip range 1e-4, KL weight 0.04 in the authors' form. The clip
    range is small because log-probs are means, not sums, over latent elements: with D elements, 1e-4 on the mean is
    `1e-4 · D` on the sum.

    Example:

    ```python
    >>> args = FlowGRPOConfig(output_dir="sd35-ocr", num_generations=16, per_device_train_batch_size=8)
    ```
    """

    beta: float = field(default=0.04, metadata={"help": "Weight of the KL to the reference policy; 0 for none."})
    kl_form: str = field(
        default="flow_grpo",
        metadata={
            "help": "Form of the KL: 'flow_grpo' (the authors', without the step size), 'exact' (of the two "
            "Gaussians, per latent element) or 'velocity' (squared velocity difference). Weights do not carry over."
        },
    )
    epsilon: float = field(default=1e-4, metadata={"help": "Clip range of the ratio, on the mean log-prob."})
    epsilon_high: float | None = field(default=None, metadata={"help": "Upper clip range, `epsilon` by default."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kl_form", self.kl_form, KL_FORMS)
        if self.beta < 0:
            raise InputError(f"beta={self.beta} must not be negative: use 0 for no KL.")
        for name in ("epsilon", "epsilon_high"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"{name}={value} must be above 0: use 1e-4, or a large value for no clipping.")

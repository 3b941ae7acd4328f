# SPDX-License-Identifier: Apache-2.0
"""Options of Flow-GRPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnitrl.trainer.replay_config import ClippedPolicyConfig


@dataclass
class FlowGRPOConfig(ClippedPolicyConfig):
    """
    Options of [`FlowGRPOTrainer`]; see [`ReplayConfig`] for those of rollouts.

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

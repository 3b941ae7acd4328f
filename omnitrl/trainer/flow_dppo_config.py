# SPDX-License-Identifier: Apache-2.0
"""Options of Flow-DPPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnitrl.trainer.base_config import check_positive
from omnitrl.trainer.replay_config import PolicyGradientConfig


@dataclass
class FlowDPPOConfig(PolicyGradientConfig):
    """
    Options of [`FlowDPPOTrainer`]; see [`ReplayConfig`] for those of rollouts.

    The threshold is of the KL per latent element; the whole latent has D times that, D being their number. A policy
    that moved evenly reaches it when the log-ratios of its steps, summed over elements (`ratio/sum_log_std`), have a
    spread of `sqrt(2 D kl_threshold)`. Advantages are not bounded, as in the public code bases.

    Example:

    ```python
    >>> args = FlowDPPOConfig(output_dir="sd35-ocr", num_generations=16, per_device_train_batch_size=8)
    ```
    """

    kl_threshold: float = field(
        default=1e-5,
        metadata={
            "help": "KL from the old policy, per latent element, from which on steps that lead away are dropped."
        },
    )
    advantage_clip: float | None = field(
        default=None, metadata={"help": "Advantages are clamped to plus or minus this; None for no bound."}
    )

    def _check_ranges(self) -> None:
        super()._check_ranges()
        check_positive(self, "1e-5, or a large value to drop nothing", "kl_threshold")

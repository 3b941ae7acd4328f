# SPDX-License-Identifier: Apache-2.0
"""Options of GRPO-Guard."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnitrl.errors import InputError
from omnitrl.trainer.replay_config import ClippedPolicyConfig


@dataclass
class GRPOGuardConfig(ClippedPolicyConfig):
    """
    Options of [`GRPOGuardTrainer`]; see [`ReplayConfig`] for those of rollouts.

    The clip range is that of the *normalised* ratio, which is the std of the step times closer to 1 than the plain
    one, and whose spread falls as pictures grow: 2e-6 is verl-omni's value for Qwen-Image. There is no KL by default,
    as the paper (https://arxiv.org/abs/2510.22319) wants to do without.

    Example:

    ```python
    >>> args = GRPOGuardConfig(output_dir="sd35-ocr", num_generations=16, per_device_train_batch_size=8)
    ```
    """

    epsilon: float = field(default=2e-6, metadata={"help": "Clip range of the normalised ratio."})
    reweight: bool = field(
        default=True,
        metadata={"help": "Weight the loss of each step so that all steps pull equally hard at the velocity."},
    )

    def _check_choices(self) -> None:
        super()._check_choices()
        for name, default in (("log_prob_form", "gaussian"), ("log_prob_reduction", "mean")):
            if getattr(self, name) != default:
                raise InputError(
                    f"{name}={getattr(self, name)!r} would change nothing, because GRPO-Guard's ratio is of means and "
                    f"not of log-probs: use {default!r}."
                )

    # Derived

    @property
    def reachable_steps(self) -> tuple[int, ...]:
        """Steps that are stochastic in some rollout of the run: a window that moves comes to all of its range."""
        if self.sde_window_strategy == "first":
            return self.window(0)
        low, high = self.sde_window_range or (0, self.num_inference_steps - 1)
        return tuple(range(low, min(high, self.num_inference_steps - 1)))

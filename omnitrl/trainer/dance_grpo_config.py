# SPDX-License-Identifier: Apache-2.0
"""Options of DanceGRPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from omnitrl.errors import InputError
from omnitrl.trainer.replay_config import ClippedPolicyConfig


@dataclass
class DanceGRPOConfig(ClippedPolicyConfig):
    """
    Options of [`DanceGRPOTrainer`]; see [`ReplayConfig`] for those of rollouts.

    Defaults are those of the authors' FLUX recipe (https://arxiv.org/abs/2505.07818): an SDE with the constant noise
    0.3, 12 members of a group that start from one noise, 16 sampler steps of which 0.6 are trained, advantages by the
    sample std of the group, clip range 1e-4, no KL.

    With `best_of_n`, `per_device_train_batch_size` counts samples that are trained, and each group lies on one device.

    Example:

    ```python
    >>> args = DanceGRPOConfig(output_dir="dance", num_generations=24, best_of_n=8)
    >>> args.generation_batch_size, args.units_per_group, args.steps_per_generation
    (24, 8, 1)
    ```
    """

    plan_options: ClassVar[tuple[str, ...]] = ("best_of_n",)

    sde_type: str = field(
        default="dance_sde", metadata={"help": "Transition of stochastic steps: 'flow_sde', 'dance_sde' or 'cps'."}
    )
    noise_level: float | None = field(default=0.3, metadata={"help": "The papers' `a` (flow_sde) or `eta`."})
    num_inference_steps: int = field(default=16, metadata={"help": "Sampler steps T in rollouts."})
    timestep_fraction: float = field(default=0.6, metadata={"help": "Share of the stochastic steps that is trained."})
    same_init_noise: bool = field(default=True, metadata={"help": "One start noise for all members of a group."})
    num_generations: int = field(default=12, metadata={"help": "Samples per prompt, the group size G."})
    advantage_ddof: int = field(
        default=1, metadata={"help": "Std of rewards: 0 population (Flow-GRPO), 1 sample (DanceGRPO, TRL)."}
    )
    advantage_eps: float = field(default=1e-8, metadata={"help": "Added to the std of rewards."})

    best_of_n: int | None = field(
        default=None,
        metadata={
            "help": "Train this many members of each group, half of them the best and half the worst; an even number. "
            "Advantages are those of the whole group. All members by default."
        },
    )
    per_reward_loss: bool = field(
        default=False,
        metadata={
            "help": "Normalise each reward by itself and take a clipped loss of each, weighted by `reward_weights`, "
            "instead of one of all rewards together."
        },
    )

    @property
    def units_per_group(self) -> int:
        """Samples of a group that are trained."""
        return self.num_generations if self.best_of_n is None else self.best_of_n

    def _check_ranges(self) -> None:
        super()._check_ranges()
        kept, size = self.best_of_n, self.num_generations
        if kept is not None and (kept % 2 or not 2 <= kept <= size):
            raise InputError(
                f"best_of_n={kept} must be an even number from 2 to num_generations={size}, half of them the best and "
                f"half the worst: use {min(max(kept // 2 * 2, 2), size // 2 * 2)}, or None to train all."
            )
        if self.per_reward_loss and self.multi_objective_aggregation != "sum_then_normalize":
            raise InputError(
                "per_reward_loss=True normalises each reward by itself and puts none of them together, so "
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} would do nothing: leave one "
                "of them out."
            )

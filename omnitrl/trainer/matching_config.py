# SPDX-License-Identifier: Apache-2.0
"""The options of trainers that add noise to clean samples and match velocities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omnitrl.algorithms import SIGMA_SAMPLINGS, grid_steps
from omnitrl.errors import InputError
from omnitrl.trainer.base_config import check_choice
from omnitrl.trainer.rollout_config import RolloutConfig


def check_noise_levels(args: Any) -> None:
    """Raises unless the options that say at which noise levels is trained go together."""
    check_choice("sigma_sampling", args.sigma_sampling, SIGMA_SAMPLINGS)
    bounds = args.timestep_range
    if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= 1:
        raise InputError(
            f"timestep_range={bounds} must be two rising numbers in [0, 1]: use 0.0 1.0 for the whole way."
        )


@dataclass
class MatchingConfig(RolloutConfig):
    """
    Options of trainers that learn from clean samples of their rollouts: noise is added to them anew, at noise levels
    that need not be the sampler's. Rollouts are deterministic, with any solver.

    See [`RolloutConfig`] for the rest. Training calls are not guided unless `guidance_scale_train` says so, whatever
    the guidance of the rollout.
    """

    _at_least: ClassVar[dict[str, float]] = {
        **RolloutConfig._at_least,
        "timesteps_per_sample": 1,
        "timesteps_per_forward": 1,
    }

    timesteps_per_sample: int | None = field(
        default=4,
        metadata={
            "help": "Noise levels at which each sample is trained; None for all that a 'grid' has in the range."
        },
    )
    timesteps_per_forward: int = field(
        default=1, metadata={"help": "Noise levels of a micro-batch in one network call; more is faster, and larger."}
    )
    sigma_sampling: str = field(
        default="grid",
        metadata={
            "help": "Where noise levels come from: 'grid' (the rollout's own, without replacement), 'uniform' or "
            "'logit_normal'."
        },
    )
    timestep_range: list[float] = field(
        default_factory=lambda: [0.0, 0.99],
        metadata={
            "help": "Part of the way from noise (0) to data (1) that is trained; 0.0 0.99 of a grid leaves out its "
            "last step."
        },
    )

    # Derived

    @property
    def num_noise_levels(self) -> int:
        """Noise levels at which each sample is trained."""
        if self.timesteps_per_sample is not None:
            return self.timesteps_per_sample
        return len(grid_steps(self.num_inference_steps, self.timestep_range[0], self.timestep_range[1]))

    # Checks

    def _check_choices(self) -> None:
        super()._check_choices()
        check_noise_levels(self)

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if self.sigma_sampling == "grid":
            low, high = self.timestep_range
            if not grid_steps(self.num_inference_steps, low, high):
                raise InputError(
                    f"timestep_range={self.timestep_range} holds none of the num_inference_steps="
                    f"{self.num_inference_steps} steps: use 0.0 0.99 for all but the last."
                )
        elif self.timesteps_per_sample is None:
            raise InputError(
                f"timesteps_per_sample=None trains each step of a grid, which sigma_sampling={self.sigma_sampling!r} "
                "does not have: use timesteps_per_sample=4, or sigma_sampling='grid'."
            )

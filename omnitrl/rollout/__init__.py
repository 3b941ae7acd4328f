# SPDX-License-Identifier: Apache-2.0
"""Rollouts: what is asked, what comes back, and the engines in between."""

from omnitrl.rollout.local import LocalEngine
from omnitrl.rollout.noise import SampleNoise, stable_seed
from omnitrl.rollout.trajectory import RolloutEngine, SampleRequest, SamplingParams, Trajectory, WeightReport


# Name in `rollout_engine` -> class. An engine takes (model, policy, batch_size, autocast, on_step).
ENGINES = {"local": LocalEngine}

__all__ = [
    "ENGINES",
    "LocalEngine",
    "RolloutEngine",
    "SampleNoise",
    "SampleRequest",
    "SamplingParams",
    "Trajectory",
    "WeightReport",
    "stable_seed",
]

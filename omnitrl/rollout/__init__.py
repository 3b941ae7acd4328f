# SPDX-License-Identifier: Apache-2.0
"""Rollouts: what is asked, what comes back, and the engines in between."""

from importlib import import_module
from typing import Any

from omnitrl.rollout.context import EngineContext
from omnitrl.rollout.local import LocalEngine
from omnitrl.rollout.noise import SampleNoise, stable_seed
from omnitrl.rollout.trajectory import RolloutEngine, SampleRequest, SamplingParams, Trajectory, WeightReport


# Name in `rollout_engine` -> module and class, imported when it is asked for.
ENGINES: dict[str, tuple[str, str]] = {
    "local": ("omnitrl.rollout.local", "LocalEngine"),
    "vllm_omni": ("omnitrl.rollout.vllm_omni.engine", "VLLMOmniEngine"),
}


def make_engine(name: str, context: EngineContext) -> RolloutEngine:
    """
    The engine of a trainer.

    Args:
        name (`str`):
            A key of `ENGINES`; each of its classes has a `from_trainer(context)`.
        context ([`EngineContext`]):
            What the trainer gives to it.
    """
    module, cls = ENGINES[name]
    engine_class: Any = getattr(import_module(module), cls)
    return engine_class.from_trainer(context)


__all__ = [
    "ENGINES",
    "EngineContext",
    "LocalEngine",
    "RolloutEngine",
    "SampleNoise",
    "SampleRequest",
    "SamplingParams",
    "Trajectory",
    "WeightReport",
    "make_engine",
    "stable_seed",
]

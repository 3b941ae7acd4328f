# SPDX-License-Identifier: Apache-2.0
"""One trainer and one config per algorithm, and the thin bases that they share; imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omnitrl.errors import InputError, did_you_mean


if TYPE_CHECKING:
    from omnitrl.trainer.sampling_trainer import SamplingTrainer

TRAINERS: dict[str, str] = {
    "flow_grpo": "FlowGRPOTrainer",
    "mix_grpo": "MixGRPOTrainer",
}
"""Name on the command line → class. Tests run over these, so that a new trainer is tested by being listed."""

# The classes of an algorithm `x` are in `x_trainer.py` and `x_config.py`.
_LAZY: dict[str, str] = {
    "BaseConfig": "base_config",
    "RolloutConfig": "rollout_config",
    "ReplayConfig": "replay_config",
    "MatchingConfig": "matching_config",
    "SamplingTrainer": "sampling_trainer",
    "RolloutTrainer": "rollout_trainer",
    "ReplayTrainer": "replay_trainer",
    "PolicyGradientTrainer": "replay_trainer",
    "MatchingTrainer": "matching_trainer",
    **{trainer: f"{name}_trainer" for name, trainer in TRAINERS.items()},
    **{trainer.removesuffix("Trainer") + "Config": f"{name}_config" for name, trainer in TRAINERS.items()},
}

__all__ = ["TRAINERS", "get_trainer", *_LAZY]


def get_trainer(name: str) -> type["SamplingTrainer"]:
    """
    The trainer class of an algorithm.

    Args:
        name (`str`):
            A key of `TRAINERS`.

    Raises:
        [`~omnitrl.errors.InputError`]: there is none of that name; the message lists them.

    Example:

    ```python
    >>> get_trainer("flow_grpo").__name__
    'FlowGRPOTrainer'
    ```
    """
    if name not in TRAINERS:
        raise InputError(f"There is no algorithm {name!r}, but {', '.join(TRAINERS)}.{did_you_mean(name, TRAINERS)}")
    return __getattr__(TRAINERS[name])


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'omnitrl.trainer' has no attribute {name!r}")
    value = getattr(import_module(f"omnitrl.trainer.{_LAZY[name]}"), name)
    globals()[name] = value
    return value

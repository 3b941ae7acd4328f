# SPDX-License-Identifier: Apache-2.0
"""One trainer and one config per algorithm, and the thin base that they share; imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omnitrl.errors import InputError, did_you_mean


if TYPE_CHECKING:
    from omnitrl.trainer.flow_grpo_config import FlowGRPOConfig
    from omnitrl.trainer.flow_grpo_trainer import FlowGRPOTrainer
    from omnitrl.trainer.rollout_config import RolloutConfig
    from omnitrl.trainer.rollout_trainer import RolloutTrainer

_LAZY = {
    "FlowGRPOConfig": "omnitrl.trainer.flow_grpo_config",
    "FlowGRPOTrainer": "omnitrl.trainer.flow_grpo_trainer",
    "RolloutConfig": "omnitrl.trainer.rollout_config",
    "RolloutTrainer": "omnitrl.trainer.rollout_trainer",
}

TRAINERS: dict[str, str] = {"flow_grpo": "FlowGRPOTrainer"}
"""Name on the command line → class. Tests run over these, so that a new trainer is tested by being listed."""

__all__ = ["TRAINERS", "FlowGRPOConfig", "FlowGRPOTrainer", "RolloutConfig", "RolloutTrainer", "get_trainer"]


def get_trainer(name: str) -> type["RolloutTrainer"]:
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
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value

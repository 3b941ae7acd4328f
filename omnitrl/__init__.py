# SPDX-License-Identifier: Apache-2.0
"""RL post-training of diffusion models: a trainer and a config for each algorithm, any Python callable as a reward.

The names below are imported when they are first used (PEP 562), so that `import omnitrl` stays quick: it imports
neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omnitrl.version import __version__


if TYPE_CHECKING:
    from omnitrl.data import load_prompts
    from omnitrl.models import FlowModel, load_flow_model
    from omnitrl.trainer.flow_grpo_config import FlowGRPOConfig
    from omnitrl.trainer.flow_grpo_trainer import FlowGRPOTrainer

_LAZY = {
    "FlowGRPOConfig": "omnitrl.trainer.flow_grpo_config",
    "FlowGRPOTrainer": "omnitrl.trainer.flow_grpo_trainer",
    "FlowModel": "omnitrl.models",
    "load_flow_model": "omnitrl.models",
    "load_prompts": "omnitrl.data",
}

__all__ = ["FlowGRPOConfig", "FlowGRPOTrainer", "FlowModel", "__version__", "load_flow_model", "load_prompts"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'omnitrl' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}.")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # the next access does not come here again
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

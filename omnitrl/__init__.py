# SPDX-License-Identifier: Apache-2.0
"""RL post-training of diffusion and omni-modality models: a trainer and a config for each, any callable as a reward.

The names below are imported when they are first used (PEP 562), so that `import omnitrl` stays quick: it imports
neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omnitrl.version import __version__


if TYPE_CHECKING:
    from omnitrl.data import load_preferences, load_prompts
    from omnitrl.models import FlowModel, load_flow_model
    from omnitrl.trainer.awm_config import AWMConfig
    from omnitrl.trainer.awm_trainer import AWMTrainer
    from omnitrl.trainer.dance_grpo_config import DanceGRPOConfig
    from omnitrl.trainer.dance_grpo_trainer import DanceGRPOTrainer
    from omnitrl.trainer.diffusion_dpo_config import DiffusionDPOConfig
    from omnitrl.trainer.diffusion_dpo_trainer import DiffusionDPOTrainer
    from omnitrl.trainer.diffusion_nft_config import DiffusionNFTConfig
    from omnitrl.trainer.diffusion_nft_trainer import DiffusionNFTTrainer
    from omnitrl.trainer.diffusion_opd_config import DiffusionOPDConfig
    from omnitrl.trainer.diffusion_opd_trainer import DiffusionOPDTrainer
    from omnitrl.trainer.flow_dppo_config import FlowDPPOConfig
    from omnitrl.trainer.flow_dppo_trainer import FlowDPPOTrainer
    from omnitrl.trainer.flow_grpo_config import FlowGRPOConfig
    from omnitrl.trainer.flow_grpo_trainer import FlowGRPOTrainer
    from omnitrl.trainer.grpo_guard_config import GRPOGuardConfig
    from omnitrl.trainer.grpo_guard_trainer import GRPOGuardTrainer
    from omnitrl.trainer.gspo_config import GSPOConfig
    from omnitrl.trainer.gspo_trainer import GSPOTrainer
    from omnitrl.trainer.mix_grpo_config import MixGRPOConfig
    from omnitrl.trainer.mix_grpo_trainer import MixGRPOTrainer
    from omnitrl.trainer.omni_dpo_config import OmniDPOConfig
    from omnitrl.trainer.omni_dpo_trainer import OmniDPOTrainer
    from omnitrl.trainer.online_diffusion_dpo_config import OnlineDiffusionDPOConfig
    from omnitrl.trainer.online_diffusion_dpo_trainer import OnlineDiffusionDPOTrainer
    from omnitrl.trainer.over_optimization import OverOptimizationCallback
    from omnitrl.trainer.srpo_config import SRPOConfig
    from omnitrl.trainer.srpo_trainer import SRPOTrainer

_LAZY = {
    "AWMConfig": "omnitrl.trainer.awm_config",
    "AWMTrainer": "omnitrl.trainer.awm_trainer",
    "DanceGRPOConfig": "omnitrl.trainer.dance_grpo_config",
    "DanceGRPOTrainer": "omnitrl.trainer.dance_grpo_trainer",
    "DiffusionDPOConfig": "omnitrl.trainer.diffusion_dpo_config",
    "DiffusionDPOTrainer": "omnitrl.trainer.diffusion_dpo_trainer",
    "DiffusionNFTConfig": "omnitrl.trainer.diffusion_nft_config",
    "DiffusionNFTTrainer": "omnitrl.trainer.diffusion_nft_trainer",
    "DiffusionOPDConfig": "omnitrl.trainer.diffusion_opd_config",
    "DiffusionOPDTrainer": "omnitrl.trainer.diffusion_opd_trainer",
    "FlowDPPOConfig": "omnitrl.trainer.flow_dppo_config",
    "FlowDPPOTrainer": "omnitrl.trainer.flow_dppo_trainer",
    "FlowGRPOConfig": "omnitrl.trainer.flow_grpo_config",
    "FlowGRPOTrainer": "omnitrl.trainer.flow_grpo_trainer",
    "FlowModel": "omnitrl.models",
    "GRPOGuardConfig": "omnitrl.trainer.grpo_guard_config",
    "GRPOGuardTrainer": "omnitrl.trainer.grpo_guard_trainer",
    "GSPOConfig": "omnitrl.trainer.gspo_config",
    "GSPOTrainer": "omnitrl.trainer.gspo_trainer",
    "MixGRPOConfig": "omnitrl.trainer.mix_grpo_config",
    "MixGRPOTrainer": "omnitrl.trainer.mix_grpo_trainer",
    "OmniDPOConfig": "omnitrl.trainer.omni_dpo_config",
    "OmniDPOTrainer": "omnitrl.trainer.omni_dpo_trainer",
    "OnlineDiffusionDPOConfig": "omnitrl.trainer.online_diffusion_dpo_config",
    "OnlineDiffusionDPOTrainer": "omnitrl.trainer.online_diffusion_dpo_trainer",
    "OverOptimizationCallback": "omnitrl.trainer.over_optimization",
    "SRPOConfig": "omnitrl.trainer.srpo_config",
    "SRPOTrainer": "omnitrl.trainer.srpo_trainer",
    "load_flow_model": "omnitrl.models",
    "load_preferences": "omnitrl.data",
    "load_prompts": "omnitrl.data",
}

__all__ = [
    "AWMConfig",
    "AWMTrainer",
    "DanceGRPOConfig",
    "DanceGRPOTrainer",
    "DiffusionDPOConfig",
    "DiffusionDPOTrainer",
    "DiffusionNFTConfig",
    "DiffusionNFTTrainer",
    "DiffusionOPDConfig",
    "DiffusionOPDTrainer",
    "FlowDPPOConfig",
    "FlowDPPOTrainer",
    "FlowGRPOConfig",
    "FlowGRPOTrainer",
    "FlowModel",
    "GRPOGuardConfig",
    "GRPOGuardTrainer",
    "GSPOConfig",
    "GSPOTrainer",
    "MixGRPOConfig",
    "MixGRPOTrainer",
    "OmniDPOConfig",
    "OmniDPOTrainer",
    "OnlineDiffusionDPOConfig",
    "OnlineDiffusionDPOTrainer",
    "OverOptimizationCallback",
    "SRPOConfig",
    "SRPOTrainer",
    "__version__",
    "load_flow_model",
    "load_preferences",
    "load_prompts",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'omnitrl' has no attribute {name!r}; it has {', '.join(sorted(_LAZY))}.")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # the next access does not come here again
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

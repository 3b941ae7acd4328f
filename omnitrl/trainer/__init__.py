# SPDX-License-Identifier: Apache-2.0
"""One trainer and one config per algorithm, and the thin bases that they share; imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omnitrl.errors import InputError, did_you_mean


if TYPE_CHECKING:  # names that static checkers see; a test holds them to those of `_LAZY`
    from omnitrl.trainer.awm_config import AWMConfig as AWMConfig
    from omnitrl.trainer.awm_trainer import AWMTrainer as AWMTrainer
    from omnitrl.trainer.base_config import BaseConfig as BaseConfig
    from omnitrl.trainer.dance_grpo_config import DanceGRPOConfig as DanceGRPOConfig
    from omnitrl.trainer.dance_grpo_trainer import DanceGRPOTrainer as DanceGRPOTrainer
    from omnitrl.trainer.diffusion_dpo_config import DiffusionDPOConfig as DiffusionDPOConfig
    from omnitrl.trainer.diffusion_dpo_trainer import DiffusionDPOTrainer as DiffusionDPOTrainer
    from omnitrl.trainer.diffusion_nft_config import DiffusionNFTConfig as DiffusionNFTConfig
    from omnitrl.trainer.diffusion_nft_trainer import DiffusionNFTTrainer as DiffusionNFTTrainer
    from omnitrl.trainer.diffusion_opd_config import DiffusionOPDConfig as DiffusionOPDConfig
    from omnitrl.trainer.diffusion_opd_trainer import DiffusionOPDTrainer as DiffusionOPDTrainer
    from omnitrl.trainer.flow_dppo_config import FlowDPPOConfig as FlowDPPOConfig
    from omnitrl.trainer.flow_dppo_trainer import FlowDPPOTrainer as FlowDPPOTrainer
    from omnitrl.trainer.flow_grpo_config import FlowGRPOConfig as FlowGRPOConfig
    from omnitrl.trainer.flow_grpo_trainer import FlowGRPOTrainer as FlowGRPOTrainer
    from omnitrl.trainer.grpo_guard_config import GRPOGuardConfig as GRPOGuardConfig
    from omnitrl.trainer.grpo_guard_trainer import GRPOGuardTrainer as GRPOGuardTrainer
    from omnitrl.trainer.gspo_config import GSPOConfig as GSPOConfig
    from omnitrl.trainer.gspo_trainer import GSPOTrainer as GSPOTrainer
    from omnitrl.trainer.matching_config import MatchingConfig as MatchingConfig
    from omnitrl.trainer.matching_trainer import AveragingTrainer as AveragingTrainer
    from omnitrl.trainer.matching_trainer import MatchingTrainer as MatchingTrainer
    from omnitrl.trainer.mix_grpo_config import MixGRPOConfig as MixGRPOConfig
    from omnitrl.trainer.mix_grpo_trainer import MixGRPOTrainer as MixGRPOTrainer
    from omnitrl.trainer.omni_dpo_config import OmniDPOConfig as OmniDPOConfig
    from omnitrl.trainer.omni_dpo_trainer import OmniDPOTrainer as OmniDPOTrainer
    from omnitrl.trainer.online_diffusion_dpo_config import OnlineDiffusionDPOConfig as OnlineDiffusionDPOConfig
    from omnitrl.trainer.online_diffusion_dpo_trainer import OnlineDiffusionDPOTrainer as OnlineDiffusionDPOTrainer
    from omnitrl.trainer.over_optimization import OverOptimizationCallback as OverOptimizationCallback
    from omnitrl.trainer.replay_config import ClippedPolicyConfig as ClippedPolicyConfig
    from omnitrl.trainer.replay_config import PolicyGradientConfig as PolicyGradientConfig
    from omnitrl.trainer.replay_config import ReplayConfig as ReplayConfig
    from omnitrl.trainer.replay_trainer import ClippedPolicyTrainer as ClippedPolicyTrainer
    from omnitrl.trainer.replay_trainer import PolicyGradientTrainer as PolicyGradientTrainer
    from omnitrl.trainer.replay_trainer import ReplayTrainer as ReplayTrainer
    from omnitrl.trainer.rollout_config import RolloutConfig as RolloutConfig
    from omnitrl.trainer.rollout_trainer import RolloutTrainer as RolloutTrainer
    from omnitrl.trainer.sampling_trainer import SamplingTrainer as SamplingTrainer
    from omnitrl.trainer.srpo_config import SRPOConfig as SRPOConfig
    from omnitrl.trainer.srpo_trainer import SRPOTrainer as SRPOTrainer

TRAINERS: dict[str, str] = {
    "flow_grpo": "FlowGRPOTrainer",
    "diffusion_nft": "DiffusionNFTTrainer",
    "awm": "AWMTrainer",
    "mix_grpo": "MixGRPOTrainer",
    "grpo_guard": "GRPOGuardTrainer",
    "flow_dppo": "FlowDPPOTrainer",
    "dance_grpo": "DanceGRPOTrainer",
    "diffusion_dpo": "DiffusionDPOTrainer",
    "online_diffusion_dpo": "OnlineDiffusionDPOTrainer",
    "srpo": "SRPOTrainer",
    "diffusion_opd": "DiffusionOPDTrainer",
}
"""Name on the command line → class. Tests run over these, so that a new trainer is tested by being listed."""

OMNI_TRAINERS: dict[str, str] = {
    "gspo": "GSPOTrainer",
    "omni_dpo": "OmniDPOTrainer",
}
"""The same of trainers whose models write text; they are built on those of TRL."""

ALL_TRAINERS: dict[str, str] = {**TRAINERS, **OMNI_TRAINERS}

# The classes of an algorithm `x` are in `x_trainer.py` and `x_config.py`.
_LAZY: dict[str, str] = {
    "BaseConfig": "base_config",
    "RolloutConfig": "rollout_config",
    "ReplayConfig": "replay_config",
    "PolicyGradientConfig": "replay_config",
    "ClippedPolicyConfig": "replay_config",
    "MatchingConfig": "matching_config",
    "SamplingTrainer": "sampling_trainer",
    "RolloutTrainer": "rollout_trainer",
    "ReplayTrainer": "replay_trainer",
    "PolicyGradientTrainer": "replay_trainer",
    "ClippedPolicyTrainer": "replay_trainer",
    "MatchingTrainer": "matching_trainer",
    "AveragingTrainer": "matching_trainer",
    "OverOptimizationCallback": "over_optimization",
    **{trainer: f"{name}_trainer" for name, trainer in ALL_TRAINERS.items()},
    **{trainer.removesuffix("Trainer") + "Config": f"{name}_config" for name, trainer in ALL_TRAINERS.items()},
}

__all__ = ["ALL_TRAINERS", "OMNI_TRAINERS", "TRAINERS", "get_trainer", *_LAZY]


def get_trainer(name: str) -> Any:
    """
    The trainer class of an algorithm.

    Args:
        name (`str`):
            A key of `TRAINERS` or `OMNI_TRAINERS`.

    Raises:
        [`~omnitrl.errors.InputError`]: there is none of that name; the message lists them.

    Example:

    ```python
    >>> get_trainer("flow_grpo").__name__
    'FlowGRPOTrainer'
    ```
    """
    if name not in ALL_TRAINERS:
        raise InputError(
            f"There is no algorithm {name!r}, but {', '.join(ALL_TRAINERS)}.{did_you_mean(name, ALL_TRAINERS)}"
        )
    return __getattr__(ALL_TRAINERS[name])


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'omnitrl.trainer' has no attribute {name!r}")
    value = getattr(import_module(f"omnitrl.trainer.{_LAZY[name]}"), name)
    globals()[name] = value
    return value

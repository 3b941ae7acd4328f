# SPDX-License-Identifier: Apache-2.0
"""One trainer and one config per algorithm, and the thin base that they share."""

from omnitrl.trainer.flow_grpo_config import FlowGRPOConfig
from omnitrl.trainer.flow_grpo_trainer import FlowGRPOTrainer
from omnitrl.trainer.rollout_config import RolloutConfig
from omnitrl.trainer.rollout_trainer import RolloutTrainer


# Name on the command line -> trainer. Tests run over these.
TRAINERS = {"flow_grpo": FlowGRPOTrainer}

__all__ = ["TRAINERS", "FlowGRPOConfig", "FlowGRPOTrainer", "RolloutConfig", "RolloutTrainer"]

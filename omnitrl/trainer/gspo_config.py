# SPDX-License-Identifier: Apache-2.0
"""The options of GSPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig

from omnitrl.errors import InputError
from omnitrl.trainer.base_config import check_choice, check_positive


# Losses of TRL that are a mean over sequences of clipped ratios, as GSPO's is, or go well with a ratio per sequence.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@dataclass
class GSPOConfig(GRPOConfig):
    """
    Options of [`GSPOTrainer`]: those of [`~trl.GRPOConfig`] with the values of
    [GSPO](https://huggingface.co/papers/2507.18071), and a few of omnitrl.

    A rollout is used for four updates, `steps_per_generation = 4 × gradient_accumulation_steps`, as in the paper.
    """

    # GSPO
    importance_sampling_level: str = field(
        default="sequence",
        metadata={"help": "Ratio of a whole 'sequence' to the power of 1 / length (GSPO), or of each 'token' (GRPO)."},
    )
    loss_type: str = field(
        default="grpo", metadata={"help": "How TRL takes the mean; 'grpo' is over sequences, as in GSPO."}
    )
    epsilon: float = field(default=3e-4, metadata={"help": "Lower clip range of the ratio."})
    epsilon_high: float | None = field(default=4e-4, metadata={"help": "Upper clip range of the ratio."})

    # Mixture of experts
    freeze_router: bool = field(
        default=True, metadata={"help": "Do not train what sends tokens to experts, nor adapters on it."}
    )
    router_aux_loss_coef: float | None = field(
        default=0.0,
        metadata={"help": "Weight of the load-balancing loss of a mixture of experts; None for the checkpoint's own."},
    )

    # Media
    video_fps: float | None = field(
        default=2.0, metadata={"help": "Frames per second of a video that the model is shown; None for all frames."}
    )
    video_max_frames: int | None = field(
        default=64, metadata={"help": "The most frames of a video, whatever its length; None for no bound."}
    )

    # Rewards
    reward_timeout: float | None = field(
        default=None, metadata={"help": "Seconds that a reward may take for a batch before it counts as failed."}
    )
    reward_max_retries: int = field(default=2, metadata={"help": "Times that a failed reward call is repeated."})
    reward_max_failed_fraction: float = field(
        default=0.5, metadata={"help": "Share of failed scores in a rollout that stops the run."}
    )
    reward_max_wait: float = field(
        default=0.0, metadata={"help": "Seconds to wait for a reward whose service is away; 0 for the retries only."}
    )
    reward_num_processes: int = field(
        default=1, metadata={"help": "Processes of each reward that asks to be called in processes of its own."}
    )
    shuffle_advantages: bool = field(
        default=False,
        metadata={"help": "Control experiment: advantages go to other samples, so that nothing should be learnt."},
    )

    def __post_init__(self) -> None:
        check_choice("importance_sampling_level", self.importance_sampling_level, ("sequence", "token"))
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_positive(self, "3e-4", "epsilon", "epsilon_high")
        if self.steps_per_generation is None and self.generation_batch_size is None:
            self.steps_per_generation = 4 * self.gradient_accumulation_steps
        super().__post_init__()
        if self.router_aux_loss_coef is not None and self.router_aux_loss_coef < 0:
            raise InputError(
                f"router_aux_loss_coef={self.router_aux_loss_coef} must be at least 0: use 0.001, or 0.0."
            )

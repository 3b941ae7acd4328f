# SPDX-License-Identifier: Apache-2.0
"""The options of GSPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from omnitrl.errors import InputError
from omnitrl.rollout.vllm_omni.transport import check_urls
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

    # Rollouts
    rollout_engine: str = field(
        default="local",
        metadata={"help": "Where answers are written: 'local' in this process, or 'vllm_omni' by vLLM-Omni servers."},
    )
    vllm_server_base_url: list[str] | None = field(  # type: ignore[assignment] # TRL knows one
        default=None,
        metadata={"help": "URL of the server, or of several that share the work; http://localhost:8000 by default."},
    )
    vllm_request_timeout: float = field(
        default=3600.0,
        metadata={"help": "Seconds that a server may take for the answers to a prompt, before they are asked again."},
    )
    vllm_max_concurrency: int | None = field(
        default=None,
        metadata={"help": "Prompts that a process asks one server for at once; an equal share of all by default."},
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
        check_positive(self, "1.0", "temperature")  # log-probs are those of logits that are divided by it
        if self.steps_per_generation is None and self.generation_batch_size is None:
            self.steps_per_generation = 4 * self.gradient_accumulation_steps
        super().__post_init__()
        self._check_servers()
        if self.router_aux_loss_coef is not None and self.router_aux_loss_coef < 0:
            raise InputError(
                f"router_aux_loss_coef={self.router_aux_loss_coef} must be at least 0: use 0.001, or 0.0."
            )

    @property
    def server_urls(self) -> list[str]:
        """Where the vLLM-Omni servers are."""
        return list(self.vllm_server_base_url or ["http://localhost:8000"])

    def _check_servers(self) -> None:
        """Raises for settings of servers that do not go together; a single address may be given without a list."""
        check_choice("rollout_engine", self.rollout_engine, ("local", "vllm_omni"))
        check_positive(self, "3600", "vllm_request_timeout")
        check_positive(self, "8, or None", "vllm_max_concurrency")
        given: Any = self.vllm_server_base_url
        urls = [given] if isinstance(given, str) else list(given or ())
        if self.rollout_engine == "local":
            if len(urls) > 1:
                raise InputError(
                    f"vllm_server_base_url={given} has several servers, which rollout_engine='vllm_omni' can use: set "
                    "it, or give one address."
                )
            self.vllm_server_base_url = urls[0] if urls else None  # type: ignore[assignment] # as TRL has it
            return
        if self.use_vllm:
            raise InputError(
                "use_vllm=True is TRL's own engine and rollout_engine='vllm_omni' is another: leave out one of them."
            )
        if self.max_completion_length is None:
            raise InputError("rollout_engine='vllm_omni' needs max_completion_length: use for example 1024.")
        self.vllm_server_base_url = check_urls(urls) or None

# SPDX-License-Identifier: Apache-2.0
"""The options that every trainer shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import SchedulerType, TrainingArguments

from omnitrl.errors import InputError, did_you_mean
from omnitrl.models import MediaSize
from omnitrl.rollout import ENGINES
from omnitrl.rollout.vllm_omni.transport import check_urls


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises unless `value` is one of `choices`, listing them."""
    if value not in choices:
        raise InputError(
            f"{name}={value!r} is unknown: use one of {', '.join(map(repr, choices))}."
            f"{did_you_mean(str(value), list(choices))}"
        )


def check_positive(args: Any, example: str, *names: str) -> None:
    """Raises unless each of these options is above 0 or None; `example` is a value that works."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise InputError(f"{name}={value} must be above 0: use {example}.")


def check_share(args: Any, example: str, *names: str) -> None:
    """Raises unless each of these options lies in [0, 1) or is None; `example` says what works."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 <= value < 1:
            raise InputError(f"{name}={value} must be in [0, 1): use {example}.")


@dataclass
class BaseConfig(TrainingArguments):
    """
    Options of every trainer; a superset of [`~transformers.TrainingArguments`].

    Every field has its help in its metadata, which is also what `--help` prints. Fields of `TrainingArguments` keep
    their meaning; `logging_steps` (1), `learning_rate` (3e-4), `lr_scheduler_type` (constant), `weight_decay` (1e-4),
    `remove_unused_columns` (False) and `logging_nan_inf_filter` (False: a NaN loss stops the run) have other defaults.
    The best checkpoint is that of the highest `eval_reward` unless `metric_for_best_model` names another metric.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    # Smallest value that each option can have; a subclass adds its own.
    _at_least: ClassVar[dict[str, float]] = {
        "num_generations_eval": 1,
        "num_inference_steps_eval": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "rollout_batch_size": 1,
        "vllm_max_concurrency": 1,
        "max_sequence_length": 1,
        "guidance_scale": 0,
        "guidance_scale_train": 0,
        "guidance_scale_2": 0,
        "num_samples_to_save": 0,
        "reward_max_wait": 0,
        "reward_max_pending": 1,
        "reward_cache_size": 0,
        "reward_num_processes": 1,
        "seed": 0,
    }

    learning_rate: float = field(default=3e-4, metadata={"help": "Initial learning rate of AdamW."})
    lr_scheduler_type: SchedulerType | str = field(
        default="constant", metadata={"help": "Schedule of the learning rate, 'constant' by default."}
    )
    weight_decay: float = field(default=1e-4, metadata={"help": "Weight decay of AdamW."})
    logging_steps: float = field(default=1, metadata={"help": "Log every so many optimizer steps."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Keep False: rewards are given every column of the dataset."}
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Keep False: a NaN loss stops the run."})

    # Model
    model_init_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Arguments of `from_pretrained` when `model` is a Hub id or a folder."}
    )
    trainable_networks: list[str] | None = field(
        default=None,
        metadata={
            "help": "Networks that are trained, of models that have several, such as transformer_2; all of them."
        },
    )
    max_sequence_length: int | None = field(
        default=None,
        metadata={"help": "Token length that prompts are padded to; the stock pipeline's own by default."},
    )
    height: int | None = field(default=None, metadata={"help": "Media height in pixels; the checkpoint's own."})
    width: int | None = field(default=None, metadata={"help": "Media width in pixels; the checkpoint's own."})
    num_frames: int | None = field(default=None, metadata={"help": "Frames of a video; the checkpoint's own."})
    audio_length: float | None = field(
        default=None, metadata={"help": "Seconds of a sound that is made alone; the checkpoint's own."}
    )

    # Sampling
    num_inference_steps_eval: int = field(default=40, metadata={"help": "Sampler steps in evaluation (ODE)."})
    num_generations_eval: int = field(default=1, metadata={"help": "Samples per prompt in evaluation."})
    guidance_scale: float | None = field(
        default=None,
        metadata={"help": "Classifier-free guidance in rollouts and evaluation; 1 is none; the family's by default."},
    )
    guidance_scale_train: float | None = field(
        default=None,
        metadata={"help": "Guidance of the network calls that are trained; the trainer's page says what None means."},
    )
    guidance_scale_2: float | None = field(
        default=None,
        metadata={
            "help": "Guidance of the second of two networks (Wan2.2 A14B) wherever there is guidance; that of the "
            "first by default."
        },
    )
    rollout_engine: str = field(
        default="local",
        metadata={"help": "Where samples are made: 'local' in this process, or 'vllm_omni' by vLLM-Omni."},
    )
    vllm_mode: str = field(
        default="server",
        metadata={
            "help": "Where vLLM-Omni runs: in a 'server' that `omnitrl vllm-serve` started, or 'colocate', in this "
            "process."
        },
    )
    vllm_server_base_url: list[str] | None = field(
        default=None,
        metadata={"help": "URL of the server, or of several that share the work; http://localhost:8000 by default."},
    )
    vllm_server_timeout: float = field(
        default=240.0,
        metadata={"help": "Seconds to wait for a server, at the start and when the last one went away."},
    )
    vllm_request_timeout: float = field(
        default=600.0,
        metadata={"help": "Seconds that a server may take for one sample, before it is asked for again."},
    )
    vllm_max_concurrency: int | None = field(
        default=None,
        metadata={
            "help": "Samples that a process asks one server for at once; twice what it makes at once, 4 at least."
        },
    )
    vllm_weight_transport: str = field(
        default="host",
        metadata={
            "help": "How whole networks get to servers: over HTTP from the 'host', or by a 'collective' of the "
            "trainer and the server's workers. Adapters always go over HTTP."
        },
    )
    vllm_check_tolerance: float | None = field(
        default=None,
        metadata={
            "help": "Relative difference between a server's sample and the trainer's own that ends the run; by "
            "default 1e-3 in float32, and in half precision a warning above 0.1."
        },
    )
    rollout_batch_size: int | None = field(
        default=None,
        metadata={"help": "Samples per network call in rollouts; `per_device_train_batch_size` by default."},
    )
    shuffle_dataset: bool = field(default=True, metadata={"help": "Shuffle prompts; each is used equally often."})

    # Rewards
    reward_weights: list[float] | None = field(default=None, metadata={"help": "Weight per reward, 1 by default."})
    reward_timeout: float | None = field(
        default=None, metadata={"help": "Seconds that a reward may take for a batch before it counts as failed."}
    )
    reward_max_retries: int = field(default=2, metadata={"help": "Times that a failed reward call is repeated."})
    reward_max_failed_fraction: float = field(
        default=0.5, metadata={"help": "Share of failed scores in a rollout that stops the run."}
    )
    reward_max_wait: float = field(
        default=0.0,
        metadata={"help": "Seconds to wait for a reward whose service is away; 0 for the retries only."},
    )
    reward_max_pending: int | None = field(
        default=256,
        metadata={"help": "Samples of a process that may wait for a reward before rollouts wait; None for no bound."},
    )
    reward_cache_size: int = field(
        default=0,
        metadata={"help": "Values of deterministic rewards that are kept for equal media and columns; 0 for none."},
    )
    reward_num_processes: int = field(
        default=1, metadata={"help": "Processes of each reward that asks to be called in processes of its own."}
    )
    reward_device: str | None = field(
        default=None,
        metadata={"help": "Device that rewards which are models are moved to; they stay where they are by default."},
    )

    # Averages, evaluation, report
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "Average of the trained weights for evaluation and saving: min(this, (1+n)/(10+n))."},
    )
    save_report: bool = field(
        default=True,
        metadata={"help": "Write pictures, curves and report.html; metrics.jsonl is written in any case."},
    )
    num_samples_to_save: int = field(default=16, metadata={"help": "Samples in the picture grids and the report."})

    @property
    def media_size(self) -> MediaSize:
        """Size of the media, as far as it is given."""
        return MediaSize(self.height, self.width, self.num_frames, self.audio_length)

    @property
    def server_urls(self) -> list[str]:
        """Addresses of the rollout servers."""
        return list(self.vllm_server_base_url or ["http://localhost:8000"])

    def __post_init__(self) -> None:
        if (self.load_best_model_at_end or self.save_strategy == "best") and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"  # the Trainer's own default is a loss, which evaluation has not
        super().__post_init__()
        self._check_choices()
        self._check_ranges()

    def _check_choices(self) -> None:
        """Raises for an option that is a name and not a known one; subclasses add theirs."""
        check_choice("rollout_engine", self.rollout_engine, ENGINES)
        check_choice("vllm_mode", self.vllm_mode, ("server", "colocate"))
        check_choice("vllm_weight_transport", self.vllm_weight_transport, ("host", "collective"))
        self._check_servers()

    def _check_servers(self) -> None:
        """Raises for addresses of servers that are none or for nothing; a single one may be given without a list."""
        given = self.vllm_server_base_url
        if given and (self.rollout_engine, self.vllm_mode) != ("vllm_omni", "server"):
            raise InputError(
                f"vllm_server_base_url={given!r} is for rollout_engine='vllm_omni' with vllm_mode='server', but they "
                f"are {self.rollout_engine!r} and {self.vllm_mode!r}: set these, or leave the address out."
            )
        if self.vllm_weight_transport == "collective" and self.vllm_mode == "colocate":
            raise InputError(
                "vllm_weight_transport='collective' is for servers, and vllm_mode='colocate' has none: use 'host'."
            )
        if given is not None:
            self.vllm_server_base_url = check_urls(given)

    def _check_ranges(self) -> None:
        """Raises for a number that is out of range; subclasses add theirs."""
        for name, least in self._at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                why = " (a group of one has no baseline to compare with)" if name == "num_generations" else ""
                raise InputError(f"{name}={value} must be at least {least}{why}: use {name}={least}.")
        if self.max_steps < 1 and (self.max_steps != -1 or not self.num_train_epochs > 0):
            raise InputError(
                f"max_steps={self.max_steps} with num_train_epochs={self.num_train_epochs} says of no length how long "
                "to train: use max_steps=100, or max_steps=-1 and num_train_epochs=1."
            )
        check_share(self, "0.9, or None for no average", "ema_decay")
        if self.world_size > 1 and self.reward_max_wait >= self.ddp_timeout:
            raise InputError(
                f"reward_max_wait={self.reward_max_wait:g} is no less than ddp_timeout={self.ddp_timeout}, after "
                f"which processes give each other up: use reward_max_wait={self.ddp_timeout / 2:g}, or a larger "
                "ddp_timeout."
            )
        check_positive(self, "240", "vllm_server_timeout", "vllm_request_timeout")
        check_positive(self, "0.01, or None", "vllm_check_tolerance")
        if self.auto_find_batch_size:
            raise InputError("auto_find_batch_size would change the groups: set per_device_train_batch_size yourself.")

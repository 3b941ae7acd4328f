# SPDX-License-Identifier: Apache-2.0
"""The options that every trainer with rollouts shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any

from transformers import SchedulerType, TrainingArguments

from omnitrl.algorithms import (
    AGGREGATIONS,
    LOG_PROB_FORMS,
    SCALES,
    SDE_TYPES,
    WINDOW_STRATEGIES,
    sde_window,
    trained_steps,
)
from omnitrl.errors import InputError, did_you_mean
from omnitrl.rollout import ENGINES


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises unless `value` is one of `choices`, listing them."""
    if value not in choices:
        raise InputError(
            f"{name}={value!r} is unknown: use one of {', '.join(map(repr, choices))}."
            f"{did_you_mean(str(value), list(choices))}"
        )


# Smallest value that each option can have.
AT_LEAST = {
    "num_generations": 2,
    "num_generations_eval": 1,
    "num_inference_steps": 2,
    "num_inference_steps_eval": 1,
    "num_iterations": 1,
    "timesteps_per_forward": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "rollout_batch_size": 1,
    "max_sequence_length": 1,
    "guidance_scale": 0,
    "guidance_scale_train": 0,
    "advantage_eps": 0,
    "num_samples_to_save": 0,
    "seed": 0,
}


@dataclass
class RolloutConfig(TrainingArguments):
    """
    Options of trainers that learn from their own samples; a superset of [`~transformers.TrainingArguments`].

    A *rollout* is `generation_batch_size` samples: `num_generations` of each of its prompts. It is used for
    `steps_per_generation × num_iterations` micro-batches of `per_device_train_batch_size` samples a device:

    ```
                          one rollout, 2 prompts × 4 generations, 1 device, per_device_train_batch_size=2
    samples               a0 a1 a2 a3 b0 b1 b2 b3     (shuffled before they are cut into micro-batches)
    micro-batches         |--1--|--2--|--3--|--4--|   steps_per_generation = 4
    optimizer steps       |-----1-----|-----2-----|   gradient_accumulation_steps = 2
    ```

    Every field has its help in its metadata, which is also what `--help` prints. Fields of `TrainingArguments` keep
    their meaning; `logging_steps` (1), `learning_rate` (3e-4), `lr_scheduler_type` (constant), `weight_decay` (1e-4),
    `remove_unused_columns` (False) and `logging_nan_inf_filter` (False: a NaN loss stops the run) have other defaults.
    The best checkpoint is that of the highest `eval_reward` unless `metric_for_best_model` names another metric.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

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
    max_sequence_length: int | None = field(
        default=None,
        metadata={"help": "Token length that prompts are padded to; the stock pipeline's own by default."},
    )
    height: int | None = field(default=None, metadata={"help": "Media height in pixels; the checkpoint's own."})
    width: int | None = field(default=None, metadata={"help": "Media width in pixels; the checkpoint's own."})

    # Sampling
    num_inference_steps: int = field(default=10, metadata={"help": "Sampler steps T in rollouts."})
    num_inference_steps_eval: int = field(default=40, metadata={"help": "Sampler steps in evaluation (ODE)."})
    guidance_scale: float | None = field(
        default=None,
        metadata={"help": "Classifier-free guidance in rollouts and evaluation; 1 is none; the family's by default."},
    )
    guidance_scale_train: float | None = field(
        default=None,
        metadata={
            "help": "Guidance in the replay, `guidance_scale` by default. Another value trains that guided (or, at 1, "
            "unguided) policy on the samples: old log-probs are then recomputed with it before the first update."
        },
    )
    rollout_engine: str = field(default="local", metadata={"help": "Where rollouts are made: 'local'."})
    rollout_batch_size: int | None = field(
        default=None,
        metadata={"help": "Samples per network call in rollouts; `per_device_train_batch_size` by default."},
    )

    # Which steps are stochastic, and which are trained
    sde_type: str = field(
        default="flow_sde", metadata={"help": "Transition of stochastic steps: 'flow_sde', 'dance_sde' or 'cps'."}
    )
    noise_level: float = field(default=0.7, metadata={"help": "The papers' `a` (flow_sde) or `eta`."})
    log_prob_form: str = field(
        default="gaussian",
        metadata={"help": "'gaussian', or 'squared_error': without variance and normaliser, as CPS code bases use."},
    )
    sde_window_strategy: str = field(
        default="all", metadata={"help": "How stochastic steps are chosen: 'all', 'first', 'random', 'progressive'."}
    )
    sde_window_size: int | None = field(default=None, metadata={"help": "Stochastic steps in a window."})
    sde_window_range: list[int] | None = field(
        default=None, metadata={"help": "Start (in) and end (out) of the steps that a window may cover."}
    )
    timestep_fraction: float = field(default=1.0, metadata={"help": "Share of the stochastic steps that is trained."})
    timesteps_per_forward: int = field(
        default=1, metadata={"help": "Trained steps of a micro-batch in one network call; more is faster, and larger."}
    )
    same_init_noise: bool = field(default=False, metadata={"help": "One start noise for all members of a group."})

    # Groups
    num_generations: int = field(default=8, metadata={"help": "Samples per prompt, the group size G."})
    num_generations_eval: int = field(default=1, metadata={"help": "Samples per prompt in evaluation."})
    generation_batch_size: int | None = field(
        default=None, metadata={"help": "Samples in a rollout over all devices; excludes `steps_per_generation`."}
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Micro-batches in a rollout; by default the smallest multiple of `gradient_accumulation_steps` "
            "that makes whole groups."
        },
    )
    num_iterations: int = field(default=1, metadata={"help": "Times that a rollout is gone through."})
    shuffle_dataset: bool = field(default=True, metadata={"help": "Shuffle prompts; each is used equally often."})

    # Rewards and advantages
    reward_weights: list[float] | None = field(default=None, metadata={"help": "Weight per reward, 1 by default."})
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={"help": "'sum_then_normalize' rewards, or 'normalize_then_sum' them (GDPO)."},
    )
    scale_rewards: str = field(
        default="group", metadata={"help": "Advantages are divided by the std of 'group', 'batch' or 'none'."}
    )
    advantage_ddof: int = field(
        default=0, metadata={"help": "Std of rewards: 0 population (Flow-GRPO), 1 sample (DanceGRPO, TRL)."}
    )
    advantage_eps: float = field(default=1e-4, metadata={"help": "Added to the std of rewards."})
    shuffle_advantages: bool = field(
        default=False,
        metadata={"help": "Control experiment: advantages go to other samples, so that nothing should be learnt."},
    )
    advantage_clip: float = field(default=5.0, metadata={"help": "Advantages are clamped to plus or minus this."})
    reward_timeout: float | None = field(
        default=None, metadata={"help": "Seconds that a reward may take for a batch before it counts as failed."}
    )
    reward_max_retries: int = field(default=2, metadata={"help": "Times that a failed reward call is repeated."})
    reward_max_failed_fraction: float = field(
        default=0.5, metadata={"help": "Share of failed scores in a rollout that stops the run."}
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
    num_samples_to_save: int = field(
        default=16, metadata={"help": "Evaluation samples in the picture grids and the report."}
    )

    def __post_init__(self) -> None:
        if (self.load_best_model_at_end or self.save_strategy == "best") and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"  # the Trainer's own default is a loss, which evaluation has not
        super().__post_init__()
        self._check_choices()
        self._check_ranges()
        self._resolve_batches()
        self._check_window()

    # Derived

    @property
    def micro_steps_per_rollout(self) -> int:
        """Micro-batches that a rollout is used for, all iterations together."""
        return (self.steps_per_generation or 1) * self.num_iterations

    @property
    def updates_per_rollout(self) -> float:
        """Optimizer steps per rollout; below 1 when several rollouts make one update."""
        return self.micro_steps_per_rollout / self.gradient_accumulation_steps

    @property
    def prompts_per_rollout(self) -> int:
        """Groups in a rollout."""
        return (self.generation_batch_size or 0) // self.num_generations

    def window(self, rollout: int) -> tuple[int, ...]:
        """The stochastic steps of a rollout, a function of the seed and its number only."""
        bounds = None if self.sde_window_range is None else (self.sde_window_range[0], self.sde_window_range[1])
        return sde_window(
            self.sde_window_strategy, self.num_inference_steps, self.sde_window_size, bounds, self.seed, rollout
        )

    def trained_steps(self, rollout: int) -> tuple[int, ...]:
        """Those of the rollout's stochastic steps that are trained."""
        return trained_steps(self.window(rollout), self.timestep_fraction, self.seed, rollout)

    # Checks

    def _check_choices(self) -> None:
        check_choice("rollout_engine", self.rollout_engine, ENGINES)
        check_choice("sde_type", self.sde_type, [name for name in SDE_TYPES if name != "ode"])
        check_choice("log_prob_form", self.log_prob_form, LOG_PROB_FORMS)
        check_choice("sde_window_strategy", self.sde_window_strategy, WINDOW_STRATEGIES)
        check_choice("scale_rewards", self.scale_rewards, SCALES)
        check_choice("multi_objective_aggregation", self.multi_objective_aggregation, AGGREGATIONS)

    def _check_window(self) -> None:
        try:
            self.trained_steps(0)
        except ValueError as error:
            raise InputError(str(error)) from None

    def _check_ranges(self) -> None:
        for name, least in AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                why = " (a group of one has no baseline to compare with)" if name == "num_generations" else ""
                raise InputError(f"{name}={value} must be at least {least}{why}: use {name}={least}.")
        if not 0 <= self.advantage_ddof < self.num_generations:
            raise InputError(f"advantage_ddof={self.advantage_ddof} must be 0 (population) or 1 (sample): use 0.")
        if not self.advantage_clip > 0:
            raise InputError(f"advantage_clip={self.advantage_clip} must be above 0: use 5.0.")
        if self.max_steps < 1 and (self.max_steps != -1 or not self.num_train_epochs > 0):
            raise InputError(
                f"max_steps={self.max_steps} with num_train_epochs={self.num_train_epochs} says of no length how long "
                "to train: use max_steps=100, or max_steps=-1 and num_train_epochs=1."
            )
        if self.sde_window_range is not None and len(self.sde_window_range) != 2:
            raise InputError(f"sde_window_range={self.sde_window_range} must be a start and an end: use 0 5.")
        if not 0 < self.timestep_fraction <= 1:
            raise InputError(f"timestep_fraction={self.timestep_fraction} must be in (0, 1]: use 1.0 to train all.")
        if not self.noise_level > 0:
            raise InputError(
                f"noise_level={self.noise_level} makes rollouts deterministic, so there is no log-prob to train: "
                "use a value above 0, such as 0.7."
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise InputError(f"ema_decay={self.ema_decay} must be in [0, 1): use 0.9, or None for no average.")
        if self.auto_find_batch_size:
            raise InputError("auto_find_batch_size would change the groups: set per_device_train_batch_size yourself.")

    def _resolve_batches(self) -> None:
        """Derives `steps_per_generation` and `generation_batch_size` from each other and checks that groups fit."""
        per_step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is None:
            if self.steps_per_generation is None:
                self.steps_per_generation = self._smallest_steps_per_generation(per_step)
            self.generation_batch_size = per_step * self.steps_per_generation
        size, groups = self.generation_batch_size, self.num_generations
        if size % groups:
            below, above = size // groups * groups, -(-size // groups) * groups
            works = " or ".join(str(n) for n in (below, above) if n)
            divisor = next(d for d in range(groups, 0, -1) if size % d == 0)
            other = f", or num_generations={divisor}" if divisor > 1 else ""
            raise InputError(
                f"num_generations={groups} needs a rollout batch that is a multiple of {groups}, got {size} "
                f"({per_step} samples a micro-batch on {self.world_size} device(s)): use {works}{other}."
            )
        if size % per_step:
            raise InputError(
                f"generation_batch_size={size} must be a multiple of per_device_train_batch_size × devices = "
                f"{self.per_device_train_batch_size} × {self.world_size} = {per_step}: use "
                f"{-(-size // per_step) * per_step}."
            )
        steps = size // per_step
        if self.steps_per_generation not in (None, steps):
            raise InputError(
                f"steps_per_generation={self.steps_per_generation} and generation_batch_size={size} disagree "
                f"(the latter means {steps}): give one of them."
            )
        self.steps_per_generation = steps
        self._check_accumulation()

    def _smallest_steps_per_generation(self, per_step: int) -> int:
        whole_groups = self.num_generations // gcd(per_step, self.num_generations)
        accumulation = self.gradient_accumulation_steps
        return whole_groups * accumulation // gcd(whole_groups, accumulation)

    def _check_accumulation(self) -> None:
        micro, accumulation = self.micro_steps_per_rollout, self.gradient_accumulation_steps
        if micro % accumulation and accumulation % micro:
            raise InputError(
                f"gradient_accumulation_steps={accumulation} must divide, or be a multiple of, "
                f"steps_per_generation × num_iterations = {micro}, so that no update mixes parts of two rollouts: use "
                f"{gcd(micro, accumulation)}."
            )

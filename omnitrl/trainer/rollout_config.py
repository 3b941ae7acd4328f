# SPDX-License-Identifier: Apache-2.0
"""The options that every trainer with rollouts shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import ClassVar

from omnitrl.algorithms import AGGREGATIONS, BASELINES, ODE_SOLVERS, SCALES, TRIM_TAILS
from omnitrl.errors import InputError
from omnitrl.trainer.base_config import BaseConfig, check_choice


@dataclass
class RolloutConfig(BaseConfig):
    """
    Options of trainers that learn from their own samples; see [`BaseConfig`] for those that all trainers share.

    A *rollout* is `generation_batch_size` samples: `num_generations` of each of its prompts. It is used for
    `steps_per_generation × num_iterations` micro-batches of `per_device_train_batch_size` samples a device:

    ```
                          one rollout, 2 prompts × 4 generations, 1 device, per_device_train_batch_size=2
    samples               a0 a1 a2 a3 b0 b1 b2 b3     (shuffled before they are cut into micro-batches)
    micro-batches         |--1--|--2--|--3--|--4--|   steps_per_generation = 4
    optimizer steps       |-----1-----|-----2-----|   gradient_accumulation_steps = 2
    ```

    Some trainers learn from a part of the samples only, or from pairs of them: then `per_device_train_batch_size`
    counts what is trained, and [`~RolloutConfig.units_per_group`] says how many of them a group gives.
    """

    _at_least: ClassVar[dict[str, float]] = {
        **BaseConfig._at_least,
        "num_generations": 2,
        "num_inference_steps": 2,
        "num_iterations": 1,
        "steps_per_generation": 1,
        "generation_batch_size": 1,
        "advantage_eps": 0,
    }

    # Sampling
    num_inference_steps: int = field(default=10, metadata={"help": "Sampler steps T in rollouts."})
    ode_solver: str = field(
        default="euler",
        metadata={"help": "Solver of the deterministic steps in rollouts: 'euler' or 'dpmpp_2m' (DPM-Solver++(2M))."},
    )
    same_init_noise: bool = field(default=False, metadata={"help": "One start noise for all members of a group."})

    # Groups
    num_generations: int = field(default=8, metadata={"help": "Samples per prompt, the group size G."})
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

    # Advantages
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
    advantage_baseline: str = field(
        default="group",
        metadata={"help": "Rewards are compared with the mean of their 'group', the 'batch', or 'none'."},
    )
    advantage_trim: float = field(
        default=0.0, metadata={"help": "Share of rewards that is left out of mean and std (MixGRPO's trimmed_ratio)."}
    )
    advantage_trim_tails: str = field(
        default="low", metadata={"help": "Which rewards `advantage_trim` leaves out: the 'low' ones, or 'both' ends."}
    )
    shuffle_advantages: bool = field(
        default=False,
        metadata={"help": "Control experiment: advantages go to other samples, so that nothing should be learnt."},
    )
    advantage_clip: float | None = field(
        default=5.0, metadata={"help": "Advantages are clamped to plus or minus this; None for no bound."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._resolve_batches()

    # Derived

    @property
    def units_per_group(self) -> int:
        """What a group gives to train on, in the unit of `per_device_train_batch_size`: its samples, by default."""
        return self.num_generations

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

    # Checks

    def _check_choices(self) -> None:
        super()._check_choices()
        check_choice("ode_solver", self.ode_solver, ODE_SOLVERS)
        check_choice("scale_rewards", self.scale_rewards, SCALES)
        check_choice("advantage_baseline", self.advantage_baseline, BASELINES)
        check_choice("advantage_trim_tails", self.advantage_trim_tails, TRIM_TAILS)
        check_choice("multi_objective_aggregation", self.multi_objective_aggregation, AGGREGATIONS)

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if not 0 <= self.advantage_ddof < max(self.num_generations, 2):
            raise InputError(f"advantage_ddof={self.advantage_ddof} must be 0 (population) or 1 (sample): use 0.")
        if not 0 <= self.advantage_trim < (1 if self.advantage_trim_tails == "low" else 0.5):
            raise InputError(
                f"advantage_trim={self.advantage_trim} leaves no reward to compare with: use 0.0 for all, or 0.25."
            )
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise InputError(f"advantage_clip={self.advantage_clip} must be above 0: use 5.0.")

    def _resolve_batches(self) -> None:
        """
        Derives `steps_per_generation` and `generation_batch_size` from each other and checks that groups fit.

        The units of a rollout are cut into micro-batches. Where a unit is not a sample, groups must lie within a
        device, because its members are compared there.
        """
        size, units = self.num_generations, self.units_per_group
        per_step = self.per_device_train_batch_size * self.world_size  # units
        if self.generation_batch_size is None:
            if self.steps_per_generation is None:
                self.steps_per_generation = self._smallest_steps_per_generation(per_step)
            self.generation_batch_size = self._samples_of(per_step * self.steps_per_generation)
        self._check_whole_groups(per_step)
        samples = self.generation_batch_size
        trained = samples // size * units
        whole = per_step if units == size else max(per_step, self.world_size * units)
        if trained % per_step or (units != size and samples % (size * self.world_size)):
            fits = self._samples_of(-(-trained // whole) * whole)
            raise InputError(
                f"generation_batch_size={samples}{self._unit_count(trained)} must be a multiple of "
                f"per_device_train_batch_size × devices = {self.per_device_train_batch_size} × {self.world_size} = "
                f"{per_step}: use {fits}."
            )
        steps = trained // per_step
        if self.steps_per_generation not in (None, steps):
            raise InputError(
                f"steps_per_generation={self.steps_per_generation} and generation_batch_size={samples} disagree "
                f"(the latter means {steps}): give one of them."
            )
        self.steps_per_generation = steps
        self._check_accumulation()

    def _samples_of(self, units: int) -> int:
        """Samples that it takes to train on so many units; not rounded where a unit is a sample."""
        if self.units_per_group == self.num_generations:
            return units
        return -(-units // self.units_per_group) * self.num_generations

    def _unit_count(self, trained: int) -> str:
        if self.units_per_group == self.num_generations:
            return ""
        return f" (of which {trained} are trained, {self.units_per_group} of each {self.num_generations})"

    def _check_whole_groups(self, per_step: int) -> None:
        size, groups = self.generation_batch_size or 0, self.num_generations
        if size % groups:
            below, above = size // groups * groups, -(-size // groups) * groups
            works = " or ".join(str(n) for n in (below, above) if n)
            divisor = next(d for d in range(groups, 0, -1) if size % d == 0)
            other = f", or num_generations={divisor}" if divisor > 1 else ""
            raise InputError(
                f"num_generations={groups} needs a rollout batch that is a multiple of {groups}, got {size} "
                f"({per_step} samples a micro-batch on {self.world_size} device(s)): use {works}{other}."
            )

    def _smallest_steps_per_generation(self, per_step: int) -> int:
        whole_groups = self.units_per_group // gcd(per_step, self.units_per_group)
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

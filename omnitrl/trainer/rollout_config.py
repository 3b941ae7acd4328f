# SPDX-License-Identifier: Apache-2.0
"""The options that every trainer with rollouts shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import gcd, lcm
from typing import ClassVar

from omnitrl.algorithms import AGGREGATIONS, BASELINES, ODE_SOLVERS, SCALES, TRIM_TAILS
from omnitrl.errors import InputError
from omnitrl.rewards.weights import WEIGHT_SCHEDULES
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

    plan_options: ClassVar[tuple[str, ...]] = ()
    """Options of a subclass that decide which samples are trained, so that a run must go on with them."""

    # Sampling
    num_inference_steps: int = field(default=10, metadata={"help": "Sampler steps T in rollouts."})
    ode_solver: str = field(
        default="euler",
        metadata={"help": "Solver of the deterministic steps in rollouts: 'euler' or 'dpmpp_2m' (DPM-Solver++(2M))."},
    )
    merge_adapters: bool = field(
        default=False,
        metadata={
            "help": "Merge LoRA into the weights while samples are made, which saves its products; in float32 only, "
            "where a replay's ratio stays 1 within 1e-6."
        },
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
    reward_weights_end: list[float] | None = field(
        default=None,
        metadata={"help": "Weights that the rewards have at the last step, to which they go from `reward_weights`."},
    )
    reward_weights_schedule: str = field(
        default="linear",
        metadata={"help": "The way there: 'linear', 'cosine', or most of it 'early' or 'late' in the run."},
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={
            "help": "'sum_then_normalize' rewards, 'normalize_then_sum' them (GDPO), or 'normalize_each' and add "
            "(MixGRPO)."
        },
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

    # Report
    log_completions: bool = field(
        default=False,
        metadata={"help": "Write samples of training every `logging_steps`: pictures and a table of rewards."},
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
        check_choice("reward_weights_schedule", self.reward_weights_schedule, WEIGHT_SCHEDULES)

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
        per_step = self._units_per_step
        whole = self._smallest_groups(per_step)
        if self.generation_batch_size is None:
            self.generation_batch_size = self._samples_of_steps(per_step, whole * self.units_per_group // per_step)
        self._check_whole_groups(per_step)
        samples = self.generation_batch_size
        groups = samples // self.num_generations
        if groups % whole:
            fits = -(-groups // whole) * whole * self.num_generations
            raise InputError(f"generation_batch_size={samples} {self._why_not(groups, per_step)}: use {fits}.")
        steps = groups * self.units_per_group // per_step
        if self.steps_per_generation not in (None, steps):
            raise InputError(
                f"steps_per_generation={self.steps_per_generation} and generation_batch_size={samples} disagree "
                f"(the latter means {steps}): give one of them."
            )
        self.steps_per_generation = steps
        self._check_accumulation()

    def _smallest_groups(self, per_step: int) -> int:
        """Groups in the smallest rollout that can be cut into micro-batches."""
        units, batch = self.units_per_group, self.per_device_train_batch_size
        if units == self.num_generations:
            return per_step // gcd(per_step, units)
        return self.world_size * (batch // gcd(batch, units))

    def _samples_of_steps(self, per_step: int, whole: int) -> int:
        """Samples in a rollout of `steps_per_generation`, set here if it is not; `whole` of them are the fewest."""
        steps = self.steps_per_generation or lcm(whole, self.gradient_accumulation_steps)
        self.steps_per_generation = steps
        if self.units_per_group == self.num_generations:
            return per_step * steps
        if steps % whole:
            raise InputError(
                f"steps_per_generation={steps} with per_device_train_batch_size={self.per_device_train_batch_size} "
                f"makes no whole groups on each of {self.world_size} device(s), each of which gives "
                f"{self.units_per_group} to train on: use {-(-steps // whole) * whole}."
            )
        return per_step * steps // self.units_per_group * self.num_generations

    def _why_not(self, groups: int, per_step: int) -> str:
        """What is wrong with a rollout of so many groups."""
        batch, world, units = self.per_device_train_batch_size, self.world_size, self.units_per_group
        if units == self.num_generations:
            return f"must be a multiple of per_device_train_batch_size × devices = {batch} × {world} = {per_step}"
        return (
            f"makes {groups} group(s), of which each gives {units} to train on, but they must be whole on each of "
            f"{world} device(s) and fill micro-batches of per_device_train_batch_size={batch}"
        )

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

    def check_whole_groups_on_devices(self, names: Sequence[str]) -> None:
        """
        Raises unless each device makes whole groups, which rewards need that compare the members of one.

        Args:
            names (`list[str]`):
                Of these rewards; nothing is checked if there are none.
        """
        groups, world, per_step = self.prompts_per_rollout, self.world_size, self._units_per_step
        if not names or groups % world == 0:
            return
        step = lcm(world, self._smallest_groups(per_step))
        fits = next(
            number
            for number in count(-(-groups // step) * step, step)
            if self._fits_accumulation(number * self.units_per_group // per_step * self.num_iterations)
        )
        raise InputError(
            f"reward {names[0]!r} compares the members of a group, which must then be made by one device, but "
            f"generation_batch_size={self.generation_batch_size} is {groups} group(s) of {self.num_generations} for "
            f"{world} devices: use generation_batch_size={fits * self.num_generations}."
        )

    @property
    def _units_per_step(self) -> int:
        return self.per_device_train_batch_size * self.world_size

    def _fits_accumulation(self, micro_steps: int) -> bool:
        accumulation = self.gradient_accumulation_steps
        return micro_steps % accumulation == 0 or accumulation % micro_steps == 0

    def _check_accumulation(self) -> None:
        micro, accumulation = self.micro_steps_per_rollout, self.gradient_accumulation_steps
        if not self._fits_accumulation(micro):
            raise InputError(
                f"gradient_accumulation_steps={accumulation} must divide, or be a multiple of, "
                f"steps_per_generation × num_iterations = {micro}, so that no update mixes parts of two rollouts: use "
                f"{gcd(micro, accumulation)}."
            )

# SPDX-License-Identifier: Apache-2.0
"""Trainers that learn from their own samples: rollouts, rewards, advantages."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from omnitrl.algorithms import (
    SigmaTable,
    TransitionTable,
    group_std_mean,
    reward_advantages,
    transition_table,
    zero_std_fraction,
)
from omnitrl.data import BucketStream, PromptFeed, StoredFeed, StoredRows, StreamedPrompts, StreamFeed, naming
from omnitrl.data.streamed import SHUFFLE_BUFFER
from omnitrl.errors import InputError, RunError
from omnitrl.models import MediaSize
from omnitrl.rewards import RewardBatch, RewardRunner
from omnitrl.rewards.weights import scheduled_weights
from omnitrl.rollout import SampleRequest, SamplingParams, Trajectory, stable_seed
from omnitrl.trainer.base_config import BaseConfig
from omnitrl.trainer.checkpoints import check_prompts, check_same, plan_of
from omnitrl.trainer.completions import Completions
from omnitrl.trainer.merging import check_merging, merged_adapters
from omnitrl.trainer.metrics import gather_list
from omnitrl.trainer.prompt_rows import size_of_row
from omnitrl.trainer.rollout_config import RolloutConfig
from omnitrl.trainer.rollouts import RolloutBuffer, RolloutPlan, Units
from omnitrl.trainer.sampling_trainer import MicroBatch, SamplingTrainer
from omnitrl.trainer.scoring import Scoring, make_runner


logger = logging.getLogger(__name__)

# Where a rollout keeps the rewards (N,) of its samples.
_REWARDS = "rewards"
EQUAL_ROLLOUTS = 3
"""Rollouts in a row without any difference within groups after which a warning says so."""


class RolloutTrainer(SamplingTrainer):
    """
    The loop that on-policy trainers share; see [`SamplingTrainer`] for the arguments.

    A subclass says which rows are trained (`cut`), what their loss is (`compute_row_losses`) and, where the ODE does
    not make the samples, how they are made (`sampling_params`, `tables`).
    """

    args: RolloutConfig
    makes_rollouts = True
    scores_rollouts = True
    """Whether the samples of rollouts are decoded and scored; otherwise their advantages are 0."""

    _buffer: RolloutBuffer | None = None
    _equal_rollouts = 0
    _shown_step = -math.inf
    """Optimizer steps before the rollout whose samples were last shown."""
    _completions: Completions | None = None
    """Keeps what is shown of the rollout that is being made."""

    # Set-up

    def _load_rewards(self, reward_funcs: Any, args: BaseConfig) -> RewardRunner | None:
        if reward_funcs is None and not self.needs_rewards:
            return None
        assert isinstance(args, RolloutConfig)
        rewards = make_runner(reward_funcs, args, args.reward_weights, args.reward_weights_end)
        args.check_whole_groups_on_devices(rewards.groupwise)
        return rewards

    @cached_property
    def _plan(self) -> RolloutPlan:
        """Which samples each rollout is made of."""
        args = self.args
        return RolloutPlan(
            self._feed(),
            args.num_generations,
            args.seed,
            args.same_init_noise,
            args.process_index,
            args.world_size,
        )

    def _feed(self) -> PromptFeed:
        """Which rows each rollout takes."""
        args, rows = self.args, self.train_rows
        if isinstance(rows, StreamedPrompts):
            prompts = rows.shuffled(args.seed) if args.shuffle_dataset else rows
            return StreamFeed(prompts, args.prompts_per_rollout, self._size_of_streamed)
        stream = BucketStream(self.row_sizes, args.prompts_per_rollout, args.seed, args.shuffle_dataset)
        return StoredFeed(StoredRows(rows, "train_dataset"), stream)

    def _size_of_streamed(self, row: dict[str, Any]) -> MediaSize:
        return size_of_row(self.flow_model, row, self.args.media_size)

    def micro_steps_per_epoch(self) -> int:
        """Of a stream, whose length is not known, an epoch is the whole run."""
        accumulation = self.args.gradient_accumulation_steps
        feed = self._plan.feed
        if not isinstance(feed, StoredFeed):
            return self.args.max_steps * accumulation
        steps = feed.stream.rollouts_per_epoch * self.args.micro_steps_per_rollout
        return math.ceil(steps / accumulation) * accumulation

    def check_other_prompts(self) -> None:
        """Raises unless there are two rows of each size, which a control needs that mixes up prompts."""
        if isinstance(self.train_rows, StreamedPrompts):
            fewest, what = self.args.prompts_per_rollout, "a rollout of a stream has {} prompt(s)"
        else:
            fewest, what = min(Counter(self.row_sizes).values()), "train_dataset has {} row(s)"
            what += " of one of its sizes" if len(self.sizes) > 1 else ""
        if fewest < 2:
            raise InputError(
                f"shuffle_prompts=True needs other prompts, but {what.format(fewest)}: give it 2 at least, or use "
                "shuffle_prompts=False."
            )

    def _begin(self) -> None:
        self._buffer = None
        super()._begin()

    def describe_run(self) -> str:
        args = self.args
        return (
            f"{args.generation_batch_size} samples a rollout = {args.prompts_per_rollout} prompts × "
            f"{args.num_generations}, {args.updates_per_rollout:g} optimizer step(s) each{self._describe_feed()}"
        )

    def _describe_feed(self) -> str:
        if isinstance(self.train_rows, StreamedPrompts):
            shuffled = f"shuffled among {SHUFFLE_BUFFER} rows" if self.args.shuffle_dataset else "in its order"
            return f", prompts from a stream {shuffled}"
        return f", each rollout of one of {len(self.sizes)} media sizes" if len(self.sizes) > 1 else ""

    def _check_model(self) -> None:
        super()._check_model()
        if self.args.merge_adapters:
            check_merging(self.flow_model, self.is_sharded, autocast=self.accelerator.mixed_precision != "no")

    # What a subclass states

    def sampling_params(self, rollout: int) -> SamplingParams:
        """How the samples of a rollout are made: by the ODE, keeping the final latents."""
        args = self.args
        return SamplingParams(
            num_inference_steps=args.num_inference_steps,
            guidance_scale=self.guidance_scale,
            size=self.size_of(rollout),
            ode_solver=args.ode_solver,
            keep_clean=True,
            decode=self.scores_rollouts,
        )

    def size_of(self, rollout: int) -> MediaSize:
        """Size of the media of a rollout, which is one for all of its samples."""
        return self.size if self.train_dataset is None else self._plan.size(rollout)

    def tables(self, rollout: int) -> tuple[SigmaTable, TransitionTable]:
        """The sigma table and the transition table of a rollout, on the device."""
        table = self.flow_model.sigmas(self.args.num_inference_steps, self.size_of(rollout))
        return self.on_device(table, transition_table(table.sigmas, "ode"))

    def on_device(self, table: SigmaTable, transitions: TransitionTable) -> tuple[SigmaTable, TransitionTable]:
        """The tables where the networks are."""
        device = self.args.device
        return SigmaTable(*(t.to(device) for t in table)), TransitionTable(*(t.to(device) for t in transitions))

    @abstractmethod
    def cut(self, buffer: RolloutBuffer, samples: list[int]) -> MicroBatch:
        """The network calls for some samples of a rollout."""

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """
        Advantages of the samples of all ranks from their rewards.

        Args:
            rewards (`Tensor`):
                (N, F) in sample order, NaN where missing; those that are only watched left out.

        Returns:
            `Tensor`: (N,), or (N, A) for a subclass with several losses.
        """
        return self.advantages_of(rewards, torch.tensor(self.trained_reward_weights))

    def advantages_of(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """Advantages (N,) of rewards (N, F) of these weights (F,), by the options of the config."""
        args = self.args
        return reward_advantages(
            rewards,
            weights,
            self._plan.group_ids(),
            aggregation=args.multi_objective_aggregation,
            scale=args.scale_rewards,
            ddof=args.advantage_ddof,
            eps=args.advantage_eps,
            baseline=args.advantage_baseline,
            trim=args.advantage_trim,
            trim_tails=args.advantage_trim_tails,
        )

    def select(self, advantages: Tensor) -> tuple[Units, Tensor]:
        """
        What of this rank's samples is trained: units of sample numbers, and the advantages of all samples.

        Args:
            advantages (`Tensor`):
                (n,) or (n, A) of this rank's samples; whole groups where `units_per_group` is not the group size.
        """
        return [(i,) for i in range(len(advantages))], advantages

    def prepare(self, buffer: RolloutBuffer) -> None:
        """What is computed once of a rollout, before the first update."""

    def rollout_weights(self) -> AbstractContextManager[None]:
        """The weights that make the samples: those that are trained, by default."""
        return nullcontext()

    # Rollout

    @property
    def reward_weights(self) -> list[float]:
        """Weight of each reward, at the optimizer step of the current rollout."""
        return [] if self.rewards is None else self.rewards.weights

    @property
    def trained_reward_weights(self) -> list[float]:
        """Those of rewards that are not only watched; some may be 0 for now."""
        watched = [] if self.rewards is None else self.rewards.watched
        return [weight for weight, only in zip(self.reward_weights, watched, strict=True) if not only]

    def _weigh_rewards(self, step: int) -> None:
        """Gives the rewards the weights of an optimizer step, where they change."""
        runner, args = self.rewards, self.args
        if runner is None or args.reward_weights_end is None:
            return
        runner.weights = scheduled_weights(
            runner.initial_weights, runner.final_weights, args.reward_weights_schedule, step, self.state.max_steps
        )

    def _with_what_rewards_need(self, params: SamplingParams) -> SamplingParams:
        """Keeps clean latents for rewards that look at them, and decodes nothing where all rewards do."""
        assert self.rewards is not None
        keep_clean = params.keep_clean or self.rewards.needs_latents
        return replace(params, keep_clean=keep_clean, decode=params.decode and self.rewards.needs_media)

    def make_rollout(self, rollout: int) -> RolloutBuffer:
        """Samples, scores and prepares one rollout; every rank makes its share."""
        self._forwards, before = 0, self.engine.forwards
        requests = self._plan.requests(rollout)
        self._read_pictures(rollout, requests)
        params, scoring = self.sampling_params(rollout), None
        if self.scores_rollouts:
            self._weigh_rewards(self.state.global_step)
            scoring = self.new_scoring(self.args.num_generations)
            params = self._with_what_rewards_need(params)
        if self.watch is not None:
            self.watch.discard()
            params = replace(params, decode=params.decode or self.watch.looks_at_samples)
        merged = merged_adapters(self.flow_model) if self.args.merge_adapters else nullcontext()
        self._completions = self._new_completions()
        params = replace(params, decode=params.decode or self._completions is not None)
        self.engine.wake()
        with self.rollout_weights(), merged:
            self.sync_engine()
            with self.metrics.timed("rollout"):
                trajectories = self._sample(requests, params, scoring)
        self.engine.sleep()
        self.note_engine()
        self.count_forwards(self.engine.forwards - before)
        advantages, rewards = self._share_of_advantages(rollout, requests, scoring)
        units, advantages = self.select(advantages)
        buffer = self._buffer_of(rollout, requests, trajectories, advantages, units)
        if rewards is not None:
            buffer.extras[_REWARDS] = rewards
        self.prepare(buffer)
        return buffer

    def _read_pictures(self, rollout: int, requests: Sequence[SampleRequest]) -> None:
        """Raises where a condition image is broken: here its row is known, and nothing has been made yet."""
        if self.flow_model.num_images[1]:
            for group, row in {request.group_id: request.row for request in requests}.items():
                with naming(self._plan.feed.where(rollout, group)):
                    self.flow_model.images(row)

    def _sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, scoring: Scoring | None
    ) -> list[Trajectory]:
        """Makes samples; each batch goes to the rewards as soon as it is decoded."""
        trajectories: list[Trajectory] = []
        for batch in self.engine.generate(requests, params):
            if scoring is not None:
                scoring.submit(batch)
            if self.watch is not None:
                self.watch.submit(batch)
            if self._completions is not None:
                self._completions.keep(batch)
            for trajectory in batch:
                trajectory.media = None  # the rewards hold it as long as they need it
            trajectories += batch
            self.progress.phase(f"rollout {len(trajectories)}/{len(requests)}")
        if len(trajectories) != len(requests):
            raise RunError(f"The engine gave {len(trajectories)} samples for {len(requests)} requests.")
        return trajectories

    def _share_of_advantages(
        self, rollout: int, requests: Sequence[SampleRequest], scoring: Scoring | None
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages of this rank's samples, and their rewards in sum, `None` where they are not scored."""
        share = self._plan.share
        if scoring is None:
            self._watch_rollout(None)
            nothing = torch.zeros(self._plan.num_samples)[share]
            self._show_completions(requests, {}, nothing, nothing, {})
            return nothing, None
        assert self.rewards is not None
        scored = self._collect_rewards(scoring)
        rewards = torch.tensor(gather_list(scored.rewards.tolist()), dtype=torch.float32)
        self._watch_rollout(rewards)
        advantages = self._advantages(rewards)
        if self.args.shuffle_advantages:
            generator = torch.Generator().manual_seed(stable_seed(self.args.seed, "control", rollout))
            advantages = advantages[torch.randperm(len(advantages), generator=generator)]
        advantages, total = advantages[share], self.rewards.total(rewards)[share]
        by_name = dict(zip(self.rewards.names, scored.rewards.unbind(1), strict=True))
        self._show_completions(requests, by_name, total, advantages, scored.extras)
        return advantages, total

    def _collect_rewards(self, scoring: Scoring) -> RewardBatch:
        """Rewards of this rank's samples, whose metrics are logged."""
        self.progress.phase("rewards")
        with self.metrics.timed("reward_wait"):
            scored = scoring.collect()
        for name, value in scored.metrics.items():
            self.metrics.add(name, value)
        return scored

    def _new_completions(self) -> Completions | None:
        """
        What keeps samples of the next rollout, where a person is to see them; every rank decides alike.

        Those of a third rollout of equal rewards are shown unasked, as the warning of it is about them.
        """
        args = self.args
        if not self._completions_are_due and self._equal_rollouts + 1 != EQUAL_ROLLOUTS:
            return None
        pictured = args.save_report and args.process_index == 0
        return Completions(self.state.global_step, args.num_samples_to_save if pictured else 0)

    @property
    def _completions_are_due(self) -> bool:
        passed = self.state.global_step - self._shown_step
        return self.args.log_completions and passed >= max(self.state.logging_steps, 1)

    def _show_completions(self, requests: Sequence[SampleRequest], *of_samples: Any) -> None:
        """Writes the samples of a rollout; see [`Completions.rows`] for the arguments."""
        shown, self._completions = self._completions, None
        if shown is None or not (self._completions_are_due or self._equal_rollouts == EQUAL_ROLLOUTS):
            return
        self._shown_step = shown.step
        rows = shown.rows(requests, *of_samples)
        samples = shown.samples(rows)
        self.report.record_completions(shown.step, gather_list(rows), samples, self.args.num_generations)

    def _watch_rollout(self, rewards: Tensor | None) -> None:
        """Shows the rewards (N, F) of a rollout, where it is scored, to what watches its samples."""
        if self.watch is None:
            return
        by_name: dict[str, Tensor] = {}
        total = None
        if rewards is not None and self.rewards is not None:
            by_name = dict(zip(self.rewards.names, rewards.unbind(1), strict=True))
            total = self.rewards.total(rewards)
        for name, value in self.watch.observe(self.state, self._plan.group_ids(), by_name, total).items():
            self.metrics.add(name, value)

    def _advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of the samples of all ranks, and the log of their rewards (N, F)."""
        assert self.rewards is not None
        total = self.rewards.total(rewards)
        for i, name in enumerate(self.rewards.names):
            self.metrics.add(f"rewards/{name}/mean", rewards[:, i])
            self.metrics.add(f"rewards/{name}/std", _nanstd(rewards[:, i]))
        self.metrics.add("reward", total)
        if self.args.reward_weights_end is not None:
            for name, weight in zip(self.rewards.names, self.rewards.weights, strict=True):
                self.metrics.add(f"rewards/{name}/weight", weight)
        if self.args.num_generations > 1:
            self._compare_in_groups(total)
        return self.compute_advantages(rewards[:, ~torch.tensor(self.rewards.watched)])

    def _compare_in_groups(self, total: Tensor) -> None:
        """Logs how the rewards (N,) of a group differ, and warns where they do not."""
        groups = self._plan.group_ids()
        self.metrics.add("reward_std", group_std_mean(total, groups))
        equal = zero_std_fraction(total, groups)
        self.metrics.add("frac_reward_zero_std", equal)
        self._warn_if_equal(equal)

    def _warn_if_equal(self, fraction: float) -> None:
        self._equal_rollouts = self._equal_rollouts + 1 if fraction == 1 else 0
        if self._equal_rollouts == EQUAL_ROLLOUTS:
            logger.warning(
                "All members of every group had the same reward in three rollouts, so nothing can be learnt: look at "
                "the samples in %s, and at what the reward returns for them.",
                self.report.folder.samples if self.args.save_report else self.report.folder.completions,
            )

    def _buffer_of(
        self,
        rollout: int,
        requests: Sequence[SampleRequest],
        trajectories: list[Trajectory],
        advantages: Tensor,
        units: Units,
    ) -> RolloutBuffer:
        table, transitions = self.tables(rollout)
        groups = list(dict.fromkeys(request.group_id for request in requests))
        row_of = {request.group_id: request.row for request in requests}
        conditions = self.flow_model.encode(
            [row_of[group] for group in groups],
            guidance=self.flow_model.needs_negative(self.guidance_scale_train),
            size=self.size_of(rollout),
        )
        return RolloutBuffer(
            index=rollout,
            trajectories=trajectories,
            advantages=advantages,
            units=units,
            conditions=conditions,
            condition_rows=[groups.index(request.group_id) for request in requests],
            table=table,
            transitions=transitions,
            seed=self.args.seed + self.args.process_index,
            modalities=self.flow_model.modalities(self.size_of(rollout)),
        )

    # Micro-batches

    def next_micro_batch(self) -> tuple[RolloutBuffer, MicroBatch]:
        rollout, position = divmod(self._micro_step, self.args.micro_steps_per_rollout)
        if self._buffer is None or self._buffer.index != rollout:
            self._buffer = None  # frees the last rollout before the next one is made
            self.flow_model.networks.eval()  # a replay in train mode could differ from its rollout
            self._buffer = self.make_rollout(rollout)
        samples = self._buffer.samples_of(position, self.args.per_device_train_batch_size)
        return self._buffer, self.cut(self._buffer, samples)

    def after_micro_batch(self, source: RolloutBuffer) -> None:
        if self._micro_step % self.args.micro_steps_per_rollout == 0:
            self.metrics.add("forwards_per_sample", self._forwards / source.num_trained)
            self.after_rollout(source)

    def after_rollout(self, buffer: RolloutBuffer) -> None:
        """Called when the last micro-batch of a rollout has gone backward; its optimizer step is still to come."""

    @property
    def updates_since_rollout(self) -> int:
        """Optimizer steps since the samples of the current rollout were made."""
        assert self._buffer is not None
        return self.state.global_step - self._buffer.trajectories[0].weight_version

    @property
    def is_last_update(self) -> bool:
        """Whether the next optimizer step is the current rollout's last."""
        left = self.args.micro_steps_per_rollout - self._micro_step % self.args.micro_steps_per_rollout
        return left <= self.args.gradient_accumulation_steps

    def describe_failure(self, loss: float, source: RolloutBuffer, batches: MicroBatch) -> str:
        timesteps: set[float] = set()
        samples: set[int] = set()
        for i in range(len(batches)):
            batch = batches[i]
            timesteps.update(batch.timesteps.tolist())
            samples.update(int(sample) for sample in batch.samples)
        chosen = sorted(samples)
        rewards = _rounded(source.extras[_REWARDS][chosen]) if _REWARDS in source.extras else "none"
        steps = f"sampler steps {list(source.steps)}, " if source.steps else ""
        return (
            f"The loss is {loss} at optimizer step {self.state.global_step}, {steps}timesteps "
            f"{[round(value, 1) for value in sorted(timesteps, reverse=True)]}, on samples with rewards {rewards} and "
            f"advantages {_rounded(source.advantages[chosen])}: the weights of the last step are kept. Lower "
            "learning_rate, check the reward, or use bf16 instead of fp16."
        )

    # Checkpoints

    def _state(self) -> dict[str, Any]:
        """A checkpoint in the midst of a rollout holds the rest of it."""
        state = {**super()._state(), "plan": plan_of(self.args)}
        done = self.state.global_step * self.args.gradient_accumulation_steps
        rollout, position = divmod(done, self.args.micro_steps_per_rollout)
        if position and self._buffer is not None and self._buffer.index == rollout:
            sampling = {"sampling": self._sampling(rollout), "forwards": self._forwards}
            state["rollout"] = {**self._buffer.state_dict(), **sampling}
        return state

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        where = str(self._resumed_from)
        check_same(where, state["plan"], plan_of(self.args), "which samples a rollout has")
        if "rollout" in state:
            rollout, saved = state["rollout"]["index"], state["rollout"]
            check_same(where, saved["sampling"], self._sampling(rollout), "how the rest of its rollout was sampled")
            check_prompts(where, saved["prompts"], [request.row["prompt"] for request in self._plan.requests(rollout)])

    def _sampling(self, rollout: int) -> dict[str, Any]:
        guidance = {
            "guidance_scale_train": self.guidance_scale_train,
            "guidance_scale_2": self.flow_model.guidance_scale_2,
        }
        return {**asdict(self.sampling_params(rollout)), **guidance}

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        if "rollout" in state:
            self._buffer = self._restore_rollout(state["rollout"])
            self._forwards = state["rollout"]["forwards"]

    def _restore_rollout(self, saved: dict[str, Any]) -> RolloutBuffer:
        rollout, device = saved["index"], self.args.device
        self._weigh_rewards(saved["weight_version"])
        requests, table = self._plan.requests(rollout), self.tables(rollout)[0]
        trajectories = []
        for request, sample in zip(requests, saved["samples"], strict=True):
            tensors = {key: value.to(device) for key, value in sample.items()}
            trajectories.append(
                Trajectory(request, None, table, saved["steps"], weight_version=saved["weight_version"], **tensors)
            )
        units = [tuple(unit) for unit in saved["units"]]
        buffer = self._buffer_of(rollout, requests, trajectories, saved["advantages"], units)
        buffer.extras = {key: value.to(device) for key, value in saved["extras"].items()}
        return buffer


def _rounded(values: Tensor) -> list[Any]:
    """The values of a tensor, short enough for a sentence."""
    rounded: list[Any] = (values.double() * 1e4).round().div(1e4).tolist()
    return rounded


def _nanstd(values: Tensor) -> float:
    values = values[~values.isnan()]
    return float(values.std()) if len(values) > 1 else 0.0

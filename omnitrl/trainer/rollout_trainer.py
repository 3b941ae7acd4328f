# SPDX-License-Identifier: Apache-2.0
"""Trainers that learn from their own samples: rollouts, rewards, advantages, replay, evaluation."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from omnitrl.algorithms import (
    PolicyLoss,
    SigmaTable,
    TransitionTable,
    gaussian_log_prob,
    group_std_mean,
    reward_advantages,
    transition_mean,
    transition_std,
    transition_table,
    zero_std_fraction,
)
from omnitrl.data import PromptStream, load_prompts
from omnitrl.errors import InputError, RunError
from omnitrl.rewards import RewardRunner
from omnitrl.rollout import ENGINES, SampleRequest, SamplingParams, Trajectory, stable_seed
from omnitrl.trainer.base_trainer import BaseTrainer, ModelLike
from omnitrl.trainer.checkpoints import check_prompts, check_same, plan_of
from omnitrl.trainer.evaluation import evaluate_prompts
from omnitrl.trainer.metrics import gather_list
from omnitrl.trainer.rollout_config import RolloutConfig
from omnitrl.trainer.rollouts import ReplayBatch, RolloutBuffer, RolloutPlan
from omnitrl.trainer.scoring import Scoring


logger = logging.getLogger(__name__)

# Training prompts that are pictured before and after where there is no evaluation set.
PREVIEW_PROMPTS = 8

RewardLike = str | Callable | nn.Module


class RolloutTrainer(BaseTrainer):
    """
    The loop that on-policy trainers share; a subclass states `compute_row_losses`.

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`RolloutConfig`], *optional*):
            Options; `output_dir` is named after the trainer by default.
        train_dataset:
            Prompts in any form that [`~omnitrl.data.load_prompts`] takes.
        eval_dataset:
            The same, or a dict of named sets; evaluated with ODE sampling and fixed seeds.
        callbacks, optimizers:
            As in `transformers.Trainer`.
        peft_config (`PeftConfig` or `str`, *optional*):
            New adapters, or a folder or Hub id of saved ones to go on with; `None` trains all weights.
    """

    args: RolloutConfig

    def __init__(
        self,
        model: ModelLike,
        reward_funcs: RewardLike | Sequence[RewardLike],
        args: RolloutConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        peft_config: PeftConfig | str | None = None,
    ) -> None:
        args = args or self.config_class(output_dir=f"{self._name}")
        self._check_args(args, eval_dataset)
        self.rewards = RewardRunner(
            reward_funcs,
            weights=args.reward_weights,
            max_retries=args.reward_max_retries,
            timeout=args.reward_timeout,
            max_failed_fraction=args.reward_max_failed_fraction,
        )
        super().__init__(
            model,
            args,
            train_dataset=load_prompts(train_dataset) if train_dataset is not None else None,
            eval_dataset=_load_eval(eval_dataset),
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        self.engine = self._build_engine()
        self._synced_version: int | None = None
        self._buffer: RolloutBuffer | None = None
        self._micro_step = 0
        self._forwards = 0
        self._equal_rollouts = 0
        self._latent_shape = self.flow_model.latent_shape(args.height, args.width)
        self._set_up_algorithm()

    # Set-up

    def _set_up_algorithm(self) -> None:
        """What a subclass makes of the untrained model, such as a reference policy."""

    def _check_args(self, args: RolloutConfig, eval_dataset: Any) -> None:
        if not isinstance(args, self.config_class):
            raise InputError(f"{type(self).__name__} takes a {self.config_class.__name__}, got {type(args).__name__}.")
        if eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
            raise InputError(
                f"eval_strategy={args.eval_strategy!s} and eval_on_start={args.eval_on_start} ask for evaluation, but "
                "there is no eval_dataset: pass one, or use eval_strategy='no'."
            )

    def _build_engine(self) -> Any:
        return ENGINES[self.args.rollout_engine](
            self.flow_model,
            policy=self._current_policy,
            batch_size=self.args.rollout_batch_size or self.args.per_device_train_batch_size,
            autocast=self.accelerator.autocast,
            on_step=self.interrupts.check,
        )

    def _current_policy(self) -> nn.Module:
        """The policy's module; Accelerate may replace it when training begins."""
        assert self.model is not None
        return self.model

    @property
    def guidance_scale(self) -> float:
        """Guidance of rollouts and evaluation."""
        given = self.args.guidance_scale
        return self.flow_model.default_guidance_scale if given is None else given

    @property
    def guidance_scale_train(self) -> float:
        """Guidance of the replay."""
        given = self.args.guidance_scale_train
        return self.guidance_scale if given is None else given

    @property
    def plan(self) -> RolloutPlan:
        """Which samples each rollout is made of."""
        args, rows = self.args, self._train_rows
        return RolloutPlan(
            rows,
            PromptStream(len(rows), args.prompts_per_rollout, args.seed, args.shuffle_dataset),
            args.num_generations,
            args.seed,
            args.same_init_noise,
            args.process_index,
            args.world_size,
        )

    @property
    def _train_rows(self) -> Any:
        if self.train_dataset is None:
            raise InputError("Training needs a train_dataset with a column 'prompt'.")
        return self.train_dataset

    def get_train_dataloader(self) -> DataLoader:
        """
        Ticks: one item per micro-batch of an epoch.

        Which samples a micro-batch holds follows from its number alone, so there is nothing for workers to load,
        nothing to shard, and a resumed run is at the right place.
        """
        self._plan = self.plan
        steps = self._plan.stream.rollouts_per_epoch * self.args.micro_steps_per_rollout
        accumulation = self.args.gradient_accumulation_steps
        ticks: Any = range(math.ceil(steps / accumulation) * accumulation)
        return DataLoader(ticks, collate_fn=_tick)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Prompts of an epoch."""
        return len(self._train_rows)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """See [`BaseTrainer.train`]; without an `eval_dataset`, some training prompts show before and after."""
        output = super().train(resume_from_checkpoint, **kwargs)
        self._preview()
        return output

    def _preview(self) -> None:
        if self.eval_dataset is None and self.args.save_report:
            rows = [self._train_rows[i] for i in range(min(len(self._train_rows), PREVIEW_PROMPTS))]
            self.evaluate(rows, metric_key_prefix="eval_preview")

    def _begin(self) -> None:
        self._micro_step = self.state.global_step * self.args.gradient_accumulation_steps
        self._buffer = None
        self._logged_at, self._logged_step = time.perf_counter(), self.state.global_step
        super()._begin()
        self._announce()
        if self.state.global_step == 0:
            self._preview()

    def _announce(self) -> None:
        args, window, steps = self.args, self.args.window(0), self.args.trained_steps(0)
        if not self.is_world_process_zero():
            return
        self._warn_of_dominant_steps()
        trained = sum(p.numel() for p in self.trainable_parameters())
        self.progress.message(
            f"{self._name}: trains {len(steps)} of {args.num_inference_steps} steps ({_ranges(steps)}; stochastic: "
            f"{_ranges(window)}) on {args.generation_batch_size} samples a rollout = "
            f"{args.prompts_per_rollout} prompts × {args.num_generations}, "
            f"{args.updates_per_rollout:g} optimizer step(s) each; "
            f"{trained:,} trainable weights, "
            f"{args.world_size} process(es) on {args.device}."
        )

    def _warn_of_dominant_steps(self) -> None:
        """The gradient of a step goes with |c_v| / s; one that is far above the others leaves them nothing to say."""
        steps = list(self.args.trained_steps(0))
        _, transitions = self.tables(0)
        weight = (transitions.velocity_coef.abs() / transitions.std)[steps]
        largest, median = int(weight.argmax()), float(weight.median())
        if self.args.log_prob_form == "gaussian" and len(steps) > 1 and float(weight[largest]) > 20 * median:
            logger.warning(
                "Step %d weighs %.0f times as much in the gradient as the median of the trained steps, because it "
                "ends near noise level 0: leave it out with sde_window_range=[0, %d].",
                steps[largest],
                float(weight[largest]) / median,
                steps[largest],
            )

    # Rollout

    def sampling_params(self, rollout: int) -> SamplingParams:
        """How the samples of a rollout are made."""
        args = self.args
        return SamplingParams(
            num_inference_steps=args.num_inference_steps,
            guidance_scale=self.guidance_scale,
            height=args.height,
            width=args.width,
            sde_type=args.sde_type,
            noise_level=args.noise_level,
            sde_steps=args.window(rollout),
            keep_steps=args.trained_steps(rollout),
            log_prob_form=args.log_prob_form,
        )

    def make_rollout(self, rollout: int) -> RolloutBuffer:
        """Samples, scores and prepares one rollout; every rank makes its share."""
        forwards = self.engine.forwards
        self._sync_engine()
        requests = self._plan.requests(rollout)
        scoring = self.new_scoring()
        with self.metrics.timed("rollout"):
            trajectories = self._sample(requests, self.sampling_params(rollout), scoring)
        rewards = self._collect_rewards(scoring)
        advantages = self._advantages(rewards)
        if self.args.shuffle_advantages:
            generator = torch.Generator().manual_seed(stable_seed(self.args.seed, "control", rollout))
            advantages = advantages[torch.randperm(len(advantages), generator=generator)]
        advantages = advantages[self._plan.share]
        buffer = self._buffer_of(rollout, requests, trajectories, advantages)
        self._forwards = self.engine.forwards - forwards
        if self.guidance_scale_train != self.guidance_scale:
            self._recompute_log_probs(buffer)
        return buffer

    def _sync_engine(self) -> None:
        version = self.state.global_step
        if version != self._synced_version:
            with self.metrics.timed("weight_sync"):
                self.engine.update_weights(version).check()
            self._synced_version = version

    def _sample(self, requests: Sequence[SampleRequest], params: SamplingParams, scoring: Scoring) -> list[Trajectory]:
        """Makes samples; each batch goes to the rewards as soon as it is decoded."""
        trajectories: list[Trajectory] = []
        for batch in self.engine.generate(requests, params):
            scoring.submit(batch)
            for trajectory in batch:
                trajectory.media = None  # the rewards hold it as long as they need it
            trajectories += batch
            self.progress.phase(f"rollout {len(trajectories)}/{len(requests)}")
        if len(trajectories) != len(requests):
            raise RunError(f"The engine gave {len(trajectories)} samples for {len(requests)} requests.")
        return trajectories

    def new_scoring(self) -> Scoring:
        """A round of scoring; a round that was broken off is forgotten."""
        return Scoring(self.rewards, self.interrupts, self.args.world_size, self.state)

    def _collect_rewards(self, scoring: Scoring) -> Tensor:
        """Rewards (N, F) of the samples of all ranks, in sample order, NaN where missing."""
        self.progress.phase("rewards")
        with self.metrics.timed("reward_wait"):
            scored = scoring.collect()
        for name, value in scored.metrics.items():
            self.metrics.add(name, value)
        return torch.tensor(gather_list(scored.rewards.tolist()), dtype=torch.float32)

    def _advantages(self, rewards: Tensor) -> Tensor:
        """Advantages (N,) of the samples of all ranks, and the log of their rewards (N, F)."""
        args, groups = self.args, self._plan.group_ids()
        total = self.rewards.total(rewards)
        for i, name in enumerate(self.rewards.names):
            self.metrics.add(f"rewards/{name}/mean", rewards[:, i])
            self.metrics.add(f"rewards/{name}/std", _nanstd(rewards[:, i]))
        self.metrics.add("reward", total)
        self.metrics.add("reward_std", group_std_mean(total, groups))
        equal = zero_std_fraction(total, groups)
        self.metrics.add("frac_reward_zero_std", equal)
        self._warn_if_equal(equal)
        weights = torch.tensor(self.rewards.weights, dtype=torch.float32)
        counted = weights != 0
        return reward_advantages(
            rewards[:, counted],
            weights[counted],
            groups,
            aggregation=args.multi_objective_aggregation,
            scale=args.scale_rewards,
            ddof=args.advantage_ddof,
            eps=args.advantage_eps,
        )

    def _warn_if_equal(self, fraction: float) -> None:
        self._equal_rollouts = self._equal_rollouts + 1 if fraction == 1 else 0
        if self._equal_rollouts == 3:
            logger.warning(
                "All members of every group had the same reward in three rollouts, so nothing can be learnt: look at "
                "the samples and at what the reward returns for them."
            )

    def _buffer_of(
        self,
        rollout: int,
        requests: Sequence[SampleRequest],
        trajectories: list[Trajectory],
        advantages: Tensor,
    ) -> RolloutBuffer:
        table, transitions = self.tables(rollout)
        groups = list(dict.fromkeys(request.group_id for request in requests))
        row_of = {request.group_id: request.row for request in requests}
        conditions = self.flow_model.encode([row_of[group] for group in groups], self.guidance_scale_train > 1.0)
        return RolloutBuffer(
            index=rollout,
            trajectories=trajectories,
            advantages=advantages,
            conditions=conditions,
            condition_rows=[groups.index(request.group_id) for request in requests],
            table=table,
            transitions=transitions,
            seed=self.args.seed + self.args.process_index,
        )

    def tables(self, rollout: int) -> tuple[SigmaTable, TransitionTable]:
        """The sigma table and the transition table of a rollout, on the device."""
        args = self.args
        table = self.flow_model.sigmas(args.num_inference_steps, self._latent_shape)
        transitions = transition_table(table.sigmas, args.sde_type, args.noise_level, args.window(rollout))
        device = args.device
        return SigmaTable(*(t.to(device) for t in table)), TransitionTable(*(t.to(device) for t in transitions))

    @torch.no_grad()
    def _recompute_log_probs(self, buffer: RolloutBuffer) -> None:
        """Old log-probs under the guidance that is trained, where it differs from the rollout's."""
        policy, args = self._current_policy(), self.args
        for start in range(0, len(buffer.trajectories), args.per_device_train_batch_size):
            part = buffer.trajectories[start : start + args.per_device_train_batch_size]
            batches = buffer.replay(list(range(start, start + len(part))), args.timesteps_per_forward)
            rows = torch.cat([self.replay(policy, batch, buffer)[3] for batch in batches])
            for trajectory, log_probs in zip(part, rows.view(len(buffer.steps), len(part)).unbind(1), strict=True):
                trajectory.log_probs = log_probs.clone()

    # Replay

    def replay(
        self, model: nn.Module, batch: ReplayBatch, buffer: RolloutBuffer
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Runs the policy on recorded states.

        Returns:
            velocity (R, ...), mean (R, ...) and total std (R, 1, ...) of the step, log-probs (R,) of what was drawn.
        """
        velocity = self.call_policy(model, batch, buffer.table)
        mean = transition_mean(batch.latents, velocity, buffer.transitions, batch.steps)
        std = transition_std(batch.latents, buffer.transitions, batch.steps)
        log_probs = gaussian_log_prob(batch.next_latents, mean, std, form=self.args.log_prob_form)
        return velocity, mean, std, log_probs

    def call_policy(self, velocity: Callable[..., Tensor], batch: ReplayBatch, table: SigmaTable) -> Tensor:
        """One network call of the replay, in the rollout's precision, counted in `forwards_per_sample`."""
        guidance = self.guidance_scale_train
        self._forwards += len(batch) * (2 if guidance > 1.0 else 1)
        with self.accelerator.autocast():
            return velocity(batch.latents, table.timesteps[batch.steps], batch.conditions, guidance)

    @abstractmethod
    def compute_row_losses(self, model: nn.Module, batch: ReplayBatch, buffer: RolloutBuffer) -> Tensor:
        """The loss (R,) of each row; the trainer takes the mean over rows, micro-batches and ranks."""

    def log_policy(self, policy: PolicyLoss, log_ratio: Tensor, buffer: RolloutBuffer) -> None:
        """
        Records how far the policy has moved from the one that made the samples.

        `ratio/sum_log_std` is the spread of the log-ratio summed over latent elements, in a rollout's last update: the
        size of the step that was taken, whatever the learning rate, adapter scale or resolution. Healthy is 0.3 to 1.
        """
        log_ratio = log_ratio.detach()
        self.metrics.add("clip_ratio/low_mean", policy.clipped_low.float())
        self.metrics.add("clip_ratio/high_mean", policy.clipped_high.float())
        self.metrics.add("clip_ratio/region_mean", (policy.clipped_low | policy.clipped_high).float())
        self.metrics.add("ratio/mean", policy.ratio)
        self.metrics.add("ratio/approx_kl", policy.approx_kl)
        if self.updates_since_rollout == 0:  # nothing has changed yet: any difference is one of implementation
            self.metrics.add("rollout/logp_abs_diff_mean", log_ratio.abs())
            self.metrics.add("rollout/logp_abs_diff_max", log_ratio.abs())
        elif self.is_last_update and len(log_ratio) > 1:
            self.metrics.add("ratio/sum_log_std", log_ratio.std() * buffer.latent_dim)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Backward of one micro-batch: a part of the current rollout, in as many network calls as were asked for."""
        buffer, samples = self._next_micro_batch()
        self.progress.phase("train")
        started = time.perf_counter()
        batches = buffer.replay(samples, self.args.timesteps_per_forward)
        total = torch.zeros((), device=self.args.device)
        for i, batch in enumerate(batches):
            self.interrupts.check()  # gradients of a part of an update are no loss
            with self.gradient_sync(model, last=i == len(batches) - 1):
                losses = self.compute_row_losses(model, batch, buffer)
                loss = losses.sum() / batches.num_rows / self.current_gradient_accumulation_steps
                self.backward(loss)
                total += loss.detach()
        self._check_finite(total, samples, buffer)
        self.metrics.add("time/train", time.perf_counter() - started)
        self._micro_step += 1
        if self._micro_step % self.args.micro_steps_per_rollout == 0:
            self.metrics.add("forwards_per_sample", self._forwards / len(buffer.trajectories))
        return total

    def _next_micro_batch(self) -> tuple[RolloutBuffer, list[int]]:
        rollout, position = divmod(self._micro_step, self.args.micro_steps_per_rollout)
        if self._buffer is None or self._buffer.index != rollout:
            self._buffer = None  # frees the last rollout before the next one is made
            self.flow_model.networks.eval()  # a replay in train mode could differ from its rollout
            self._buffer = self.make_rollout(rollout)
        return self._buffer, self._buffer.samples_of(position, self.args.per_device_train_batch_size)

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

    def _check_finite(self, loss: Tensor, samples: list[int], buffer: RolloutBuffer) -> None:
        if torch.isfinite(loss):
            return
        advantages = [round(float(buffer.advantages[i]), 4) for i in samples]
        raise RunError(
            f"The loss is {float(loss)} at optimizer step {self.state.global_step}, sampler steps "
            f"{list(buffer.steps)}, advantages {advantages}: the weights of the last step are kept. Lower "
            "learning_rate, check the reward, or use bf16 instead of fp16."
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now = time.perf_counter()
            steps = self.state.global_step - self._logged_step
            self.metrics.add("step_time", (now - self._logged_at) / max(steps, 1))
            self._logged_at, self._logged_step = now, self.state.global_step
        super().log(logs, start_time)

    _logged_at = 0.0
    _logged_step = 0

    # Checkpoints

    def _state(self) -> dict[str, Any]:
        """A checkpoint in the midst of a rollout holds the rest of it."""
        state = {**super()._state(), "plan": plan_of(self.args)}
        done = self.state.global_step * self.args.gradient_accumulation_steps
        rollout, position = divmod(done, self.args.micro_steps_per_rollout)
        if position and self._buffer is not None and self._buffer.index == rollout:
            state["rollout"] = {**self._buffer.state_dict(), "sampling": self._sampling(rollout)}
        return state

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        where = str(self._resumed_from)
        check_same(where, state["plan"], plan_of(self.args), "which samples a rollout has")
        if "rollout" in state:
            rollout, saved = state["rollout"]["index"], state["rollout"]
            check_same(where, saved["sampling"], self._sampling(rollout), "how the rest of its rollout was sampled")
            check_prompts(where, saved["prompts"], [request.row["prompt"] for request in self.plan.requests(rollout)])

    def _sampling(self, rollout: int) -> dict[str, Any]:
        return {**vars(self.sampling_params(rollout)), "guidance_scale_train": self.guidance_scale_train}

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        if "rollout" in state:
            self._buffer = self._restore_rollout(state["rollout"])

    def _restore_rollout(self, saved: dict[str, Any]) -> RolloutBuffer:
        rollout, device = saved["index"], self.args.device
        requests = self._plan.requests(rollout)
        steps, table = self.args.trained_steps(rollout), self.tables(rollout)[0]
        trajectories = []
        for request, sample in zip(requests, saved["samples"], strict=True):
            tensors = {key: value.to(device) for key, value in sample.items()}
            trajectories.append(
                Trajectory(request, None, table, steps, weight_version=saved["weight_version"], **tensors)
            )
        return self._buffer_of(rollout, requests, trajectories, saved["advantages"])

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """
        Samples the evaluation prompts with the ODE, fixed seeds and the averaged weights, and scores them.

        Args:
            eval_dataset (*optional*):
                Prompts, or a dict of named sets; those of the trainer by default.
            metric_key_prefix (`str`, defaults to `"eval"`):
                Prefix of the metrics.

        Returns:
            `dict[str, float]`: `eval_reward`, `eval_reward_std`, `eval_rewards/<name>/mean`, `eval_runtime`.
        """
        dataset = self.eval_dataset if eval_dataset is None else _load_eval(eval_dataset)
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if dataset is None:
            raise InputError("Evaluation needs an eval_dataset with a column 'prompt'.")
        self.flow_model.networks.eval()
        self.progress.phase(metric_key_prefix)
        self._synced_version = None  # an engine of its own must not keep the averaged weights
        with self.metrics.timed("eval"), self.ema_weights():
            self.engine.update_weights(self.state.global_step).check()
            metrics = evaluate_prompts(self, dataset, metric_key_prefix)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _load_eval(dataset: Any) -> Any:
    if isinstance(dataset, dict):
        return {name: load_prompts(part) for name, part in dataset.items()}
    return None if dataset is None else load_prompts(dataset)


def _tick(items: list[int]) -> dict[str, int]:
    return {"micro_step": items[0]}


def _nanstd(values: Tensor) -> float:
    values = values[~values.isnan()]
    return float(values.std()) if len(values) > 1 else 0.0


def _ranges(steps: Sequence[int]) -> str:
    """`0-4` or `0-1, 3` for step indices."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)

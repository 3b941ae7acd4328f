# SPDX-License-Identifier: Apache-2.0
"""Trainers that run the transitions of their rollouts through the network again."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from omnitrl.algorithms import (
    PolicyLoss,
    SigmaTable,
    TransitionTable,
    clipped_policy_loss,
    gaussian_log_prob,
    importance_weights,
    reference_kl,
    thin_tail,
    transition_mean,
    transition_std,
    transition_table,
    weighted_modalities,
)
from omnitrl.errors import InputError
from omnitrl.rollout import SamplingParams
from omnitrl.trainer.adapters import ReferencePolicy
from omnitrl.trainer.networks import check_trained_steps
from omnitrl.trainer.replay_config import ClippedPolicyConfig, PolicyGradientConfig, ReplayConfig
from omnitrl.trainer.rollout_trainer import RolloutTrainer
from omnitrl.trainer.rollouts import IMPORTANCE_WEIGHTS, ReplayBatch, ReplayBatches, RolloutBuffer


logger = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """
    What the policy makes of recorded states now.

    Args:
        velocity, mean (`Tensor`):
            (R, ...) the velocity and the mean of the step.
        std (`Tensor`):
            (R, 1, ...) its total standard deviation.
        log_probs (`Tensor`):
            (R,) log-probs of what was drawn.
    """

    velocity: Tensor
    mean: Tensor
    std: Tensor
    log_probs: Tensor


class ReplayTrainer(RolloutTrainer):
    """Rollouts with stochastic steps, replayed in training; see [`SamplingTrainer`] for the arguments."""

    args: ReplayConfig
    keep_means = False
    """Whether the mean of each trained step under the policy that drew it is kept, at the memory of one more state."""
    weighs_modalities: ClassVar[bool] = True
    """Whether the loss is made of log-probs, in which modalities can have weights."""

    def _check_model(self) -> None:
        super()._check_model()
        weights = self.args.weights_of_modalities
        if weights is not None and not self.weighs_modalities:
            raise InputError(f"{type(self).__name__} has no modality_weights, got {weights}: leave it out.")
        try:
            weighted_modalities(self.flow_model.modalities(self.size), weights)
        except ValueError as error:
            raise InputError(str(error)) from error

        steps = self.args.possible_steps
        check_trained_steps(self.flow_model, self.flow_model.sigmas(self.args.num_inference_steps, self.size), steps)

    def describe_run(self) -> str:
        args, window, steps = self.args, self.args.window(0), self.args.trained_steps(0)
        self._warn_of_dominant_steps()
        return (
            f"trains {len(steps)} of {args.num_inference_steps} steps ({_ranges(steps)}; stochastic: "
            f"{_ranges(window)}) on {super().describe_run()}"
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

    @property
    def noise_level(self) -> float:
        """Noise of the stochastic steps: as given, or the family's."""
        given = self.args.noise_level
        return self.flow_model.default_noise_level(self.args.sde_type) if given is None else given

    def sampling_params(self, rollout: int) -> SamplingParams:
        args = self.args
        return replace(
            super().sampling_params(rollout),
            sde_type=args.sde_type,
            noise_level=self.noise_level,
            sde_steps=args.window(rollout),
            keep_steps=args.trained_steps(rollout),
            keep_means=self.keep_means,
            keep_clean=False,
            log_prob_form=args.log_prob_form,
            log_prob_reduction=args.log_prob_reduction,
            modality_weights=args.weights_of_modalities,
            shared_prefix=args.shared_prefix,
            tail_ratio=args.tail_ratio,
        )

    def tables(self, rollout: int) -> tuple[SigmaTable, TransitionTable]:
        args, window = self.args, self.args.window(rollout)
        table = self.flow_model.sigmas(args.num_inference_steps, self.size_of(rollout))
        table = thin_tail(table, window[-1], args.tail_ratio)
        return self.on_device(table, transition_table(table.sigmas, args.sde_type, self.noise_level, window))

    def prepare(self, buffer: RolloutBuffer) -> None:
        if self.guidance_scale_train != self.guidance_scale:
            self._recompute_log_probs(buffer)

    @property
    def compares_with_engine(self) -> bool:
        """Whether the engine's log-probs were compared with the trainer's before the first update."""
        return False

    @torch.no_grad()
    def _recompute_log_probs(self, buffer: RolloutBuffer) -> None:
        """Old log-probs (and means) of the trainer's networks, under the guidance that is trained."""
        policy, size = self.current_policy(), self.args.per_device_train_batch_size
        trained = sorted({i for unit in buffer.units for i in unit})
        for start in range(0, len(trained), size):
            part = [buffer.trajectories[i] for i in trained[start : start + size]]
            batches = self.cut(buffer, trained[start : start + size])
            replays = [self.replay(policy, batches[i], buffer) for i in range(len(batches))]
            log_probs = torch.cat([replayed.log_probs for replayed in replays]).view(len(buffer.steps), len(part))
            for trajectory, values in zip(part, log_probs.unbind(1), strict=True):
                trajectory.log_probs = values.clone()
            if self.keep_means:
                means = torch.cat([replayed.mean for replayed in replays]).unflatten(0, log_probs.shape)
                for trajectory, values in zip(part, means.unbind(1), strict=True):
                    trajectory.means = values.clone()

    # Replay

    def cut(self, buffer: RolloutBuffer, samples: list[int]) -> ReplayBatches:
        return buffer.replay(samples, self.args.timesteps_per_forward)

    def replay(self, model: nn.Module, batch: ReplayBatch, buffer: RolloutBuffer) -> Replayed:
        """Runs the policy on recorded states."""
        velocity = self.call_policy(model, batch)
        mean = transition_mean(batch.latents, velocity, buffer.transitions, batch.steps)
        std = transition_std(batch.latents, buffer.transitions, batch.steps)
        args = self.args
        log_probs = gaussian_log_prob(
            batch.next_latents,
            mean,
            std,
            args.log_prob_reduction,
            args.log_prob_form,
            self._modalities(buffer),
        )
        return Replayed(velocity, mean, std, log_probs)

    def _modalities(self, buffer: RolloutBuffer) -> Sequence[tuple[slice, float]]:
        """The modalities that count, each with its weight; none where all elements count alike."""
        return weighted_modalities(buffer.modalities, self.args.weights_of_modalities)

    def divergence(
        self, form: str, replayed: Replayed, velocity: Tensor, batch: ReplayBatch, buffer: RolloutBuffer
    ) -> Tensor:
        """
        Divergence (R,) of the policy's steps from those of another velocity; of modalities with weights, their sum.

        Args:
            form (`str`):
                A key of `omnitrl.algorithms.KL_FORMS`.
            replayed ([`Replayed`]):
                What the policy does.
            velocity (`Tensor`):
                (R, ...) velocity of the other model at the same states.
            batch ([`ReplayBatch`]), buffer ([`RolloutBuffer`]):
                The states, and the tables that they belong to.
        """
        sigmas = buffer.table.sigmas
        mean_ref = transition_mean(batch.latents, velocity, buffer.transitions, batch.steps)
        parts = [
            weight
            * reference_kl(
                form,
                mean=replayed.mean[:, part],
                mean_ref=mean_ref[:, part],
                velocity=replayed.velocity[:, part],
                velocity_ref=velocity[:, part],
                std=replayed.std,
                dt=sigmas[batch.steps + 1] - sigmas[batch.steps],
            )
            for part, weight in self._modalities(buffer) or [(slice(None), 1.0)]
        ]
        return torch.stack(parts).sum(dim=0)

    def log_ratio(self, log_ratio: Tensor, buffer: RolloutBuffer) -> None:
        """
        Records how far the policy has moved from the one that made the samples.

        `ratio/sum_log_std` is the spread of the log-ratio summed over latent elements, in a rollout's last update: the
        size of the step that was taken, whatever the learning rate, adapter scale or resolution. Healthy is 0.3 to 1.
        """
        log_ratio = log_ratio.detach()
        self.metrics.add("ratio/mean", log_ratio.exp())
        self.metrics.add("ratio/approx_kl", 0.5 * log_ratio.square())
        if self.updates_since_rollout == 0:  # nothing has changed yet: any difference is one of implementation
            if not self.compares_with_engine:
                self.metrics.add("rollout/logp_abs_diff_mean", log_ratio.abs())
                self.metrics.add("rollout/logp_abs_diff_max", log_ratio.abs())
        elif self.is_last_update and len(log_ratio) > 1:
            elements = self._counted_elements(buffer) if self.args.log_prob_reduction == "mean" else 1
            self.metrics.add("ratio/sum_log_std", log_ratio.std() * elements)

    def _counted_elements(self, buffer: RolloutBuffer) -> int:
        """Elements of a sample's latents, without those of modalities of weight 0."""
        of_each, *others = buffer.latent_shape
        parts = [part for part, _ in self._modalities(buffer)] or [slice(0, of_each)]
        return sum(part.stop - part.start for part in parts) * prod(others)


class PolicyGradientTrainer(ReplayTrainer):
    """
    A replay weighted by advantages, with a KL to the untrained policy; a subclass states `policy_loss`.

    See [`SamplingTrainer`] for the arguments.
    """

    args: PolicyGradientConfig

    def _check_model(self) -> None:
        super()._check_model()
        if self.args.vllm_importance_sampling_correction and not self.compares_with_engine:
            raise InputError(
                f"vllm_importance_sampling_correction=True compares the policy that is trained with the engine's, but "
                f"guidance_scale_train={self.guidance_scale_train} makes it another policy than that of the rollouts, "
                f"guided by {self.guidance_scale}: leave guidance_scale_train out."
            )

    def _set_up_algorithm(self) -> None:
        self.reference = ReferencePolicy(self.flow_model) if self.args.beta else None

    @property
    def compares_with_engine(self) -> bool:
        return self.args.recomputes_log_probs and self.guidance_scale_train == self.guidance_scale

    def prepare(self, buffer: RolloutBuffer) -> None:
        if not self.compares_with_engine:
            super().prepare(buffer)
            return
        drawn = torch.stack([trajectory.log_probs for trajectory in buffer.trajectories])
        self._recompute_log_probs(buffer)
        self._compare_with_engine(buffer, drawn)

    def _compare_with_engine(self, buffer: RolloutBuffer, drawn: Tensor) -> None:
        """
        Logs how far the engine's log-probs (N, K) are from the trainer's, warns, and weighs samples where asked to.

        Only samples that are trained have log-probs of the trainer; those of the others are the engine's still.
        """
        args, trained = self.args, sorted({i for unit in buffer.units for i in unit})
        mine = torch.stack([trajectory.log_probs for trajectory in buffer.trajectories])
        distance = (mine - drawn)[trained].abs()
        self.metrics.add("rollout/logp_abs_diff_mean", distance)
        self.metrics.add("rollout/logp_abs_diff_max", distance)
        if float(distance.mean()) > args.logp_diff_bound:
            logger.warning(
                "The log-probs of the engine differ from the trainer's by %.2g in the mean, more than logp_diff_bound="
                "%g: its samples come from another policy than the one that is trained. Look at the precision and "
                "quantisation that it was started with, at guidance and max_sequence_length, and at whether it has "
                "the new weights; if that is as you want it, set vllm_importance_sampling_correction=True.",
                float(distance.mean()),
                args.logp_diff_bound,
            )
        if args.vllm_importance_sampling_correction:
            weights, bounded = importance_weights(
                mine,
                drawn,
                args.vllm_importance_sampling_mode,
                args.vllm_importance_sampling_clip_max,
                args.vllm_importance_sampling_clip_min,
            )
            self.metrics.add("rollout/importance_weight_mean", weights[trained])
            self.metrics.add("rollout/importance_weight_max", weights[trained])
            self.metrics.add("rollout/importance_bounded", bounded[trained].float())
            buffer.extras[IMPORTANCE_WEIGHTS] = weights

    @abstractmethod
    def policy_loss(self, replayed: Replayed, batch: ReplayBatch, buffer: RolloutBuffer) -> Tensor:
        """The loss (R,) of each row without the KL."""

    def compute_row_losses(self, model: nn.Module, batch: ReplayBatch, source: RolloutBuffer) -> Tensor:
        """`policy_loss` plus `beta` times the KL to the reference, (R,)."""
        reference_velocity = self._reference_velocity(model, batch)
        replayed = self.replay(model, batch, source)
        self.log_ratio(replayed.log_probs - batch.old_log_probs, source)
        loss = self.policy_loss(replayed, batch, source)
        if batch.importance_weights is not None:
            loss = loss * batch.importance_weights
        if reference_velocity is None:
            return loss
        kl = self.divergence(self.args.kl_form, replayed, reference_velocity, batch, source)
        self.metrics.add("kl", kl)
        return loss + self.args.beta * kl

    def _reference_velocity(self, model: nn.Module, batch: ReplayBatch) -> Tensor | None:
        if self.reference is None:
            return None
        with self.reference.velocity(model) as velocity:
            return self.call_policy(velocity, batch)

    def log_clipping(self, policy: PolicyLoss) -> None:
        """Records the share of rows whose gradient the clip cuts."""
        self.metrics.add("clip_ratio/low_mean", policy.clipped_low.float())
        self.metrics.add("clip_ratio/high_mean", policy.clipped_high.float())
        self.metrics.add("clip_ratio/region_mean", (policy.clipped_low | policy.clipped_high).float())


class ClippedPolicyTrainer(PolicyGradientTrainer):
    """A policy gradient whose probability ratio is clipped, as in PPO; see [`SamplingTrainer`] for the arguments."""

    args: ClippedPolicyConfig

    def policy_loss(self, replayed: Replayed, batch: ReplayBatch, buffer: RolloutBuffer) -> Tensor:
        """`max(-A r, -A clip(r, 1 - epsilon, 1 + epsilon_high))`, (R,)."""
        args = self.args
        policy = clipped_policy_loss(
            replayed.log_probs,
            batch.old_log_probs,
            batch.advantages,
            args.epsilon,
            args.epsilon_high,
            args.advantage_clip,
        )
        self.log_clipping(policy)
        return policy.loss


def _ranges(steps: Sequence[int]) -> str:
    """`0-4` or `0-1, 3` for step indices."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)

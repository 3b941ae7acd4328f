# SPDX-License-Identifier: Apache-2.0
"""Advantage Weighted Matching: the loss of pre-training on own samples, weighted by advantages."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from omnitrl.algorithms import (
    awm_log_likelihood,
    clipped_policy_loss,
    old_policy_decay,
    velocity_kl,
    velocity_target,
)
from omnitrl.trainer.adapters import ReferencePolicy
from omnitrl.trainer.awm_config import AWMConfig
from omnitrl.trainer.matching_trainer import AveragingTrainer
from omnitrl.trainer.noising import NoisedBatch
from omnitrl.trainer.rollouts import RolloutBuffer


# Where a rollout keeps the log-likelihoods (N, K) of the policy that made it.
_OLD = "old_log_likelihoods"


class AWMTrainer(AveragingTrainer):
    """
    Trainer for [Advantage Weighted Matching](https://huggingface.co/papers/2509.25050).

    Samples are noised again, and the negative loss of pre-training at one noise and level stands in for the
    log-likelihood of a sample. With its ratio r to the value before the update at the same noise and level, and the
    advantage A scaled to ±1, the loss is the mean over samples and noise levels of

    ```
    max(-A r, -A clip(r, 1 - epsilon, 1 + epsilon)) + beta |v - v_ref|² + ema_beta |v - v_average|²
    ```

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`AWMConfig`], *optional*):
            Options.
        train_dataset:
            Prompts in any form that [`~omnitrl.data.load_prompts`] takes.
        eval_dataset:
            The same, or a dict of named sets.
        callbacks, optimizers:
            As in `transformers.Trainer`.
        peft_config (`PeftConfig` or `str`, *optional*):
            Adapters to train; `None` trains all weights.

    Example:

    ```python
    >>> trainer = AWMTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs="ocr",
    ...     args=AWMConfig(output_dir="sd35-ocr"),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = AWMConfig
    _name = "AWM"
    _tag_names = ("omnitrl", "awm")
    _paper: ClassVar[dict[str, str]] = {
        "title": "Advantage Weighted Matching: Aligning RL with Pretraining in Diffusion Models",
        "id": "2509.25050",
        "citation": (
            "@article{xue2025advantage,\n"
            "    title  = {Advantage Weighted Matching: Aligning RL with Pretraining in Diffusion Models},\n"
            "    author = {Shuchen Xue and Chongjian Ge and Shilong Zhang and Yichen Li and Zhi-Ming Ma},\n"
            "    year   = {2025},\n"
            "    eprint = {arXiv:2509.25050},\n"
            "}"
        ),
    }
    args: AWMConfig

    def _set_up_algorithm(self) -> None:
        args = self.args
        self.reference = ReferencePolicy(self.flow_model) if args.beta else None
        self.keeps_average = args.ema_beta > 0
        if self.keeps_average:
            self.check_averages(f"ema_beta={args.ema_beta}", ", or ema_beta=0 with epsilon=1e-5")

    def move_average(self) -> None:
        """The average follows after every optimizer step."""
        self.blend_average(old_policy_decay("awm", self.state.global_step))

    # Log-likelihoods before the first update

    @torch.no_grad()
    def prepare(self, buffer: RolloutBuffer) -> None:
        """
        Computes those that are needed after the first update and do not come by in it, in the very batches of later.

        The first update computes the others itself, with the weights that made the samples.
        """
        args, policy = self.args, self.current_policy()
        shape = (len(buffer.trajectories), args.num_noise_levels)
        buffer.extras[_OLD] = torch.full(shape, torch.nan, device=args.device)
        for position in range(args.gradient_accumulation_steps, args.steps_per_generation or 0):
            batches = self.cut(buffer, buffer.samples_of(position, args.per_device_train_batch_size))
            for i in range(len(batches)):
                batch = batches[i]
                velocity = self.call_policy(policy, batch)
                buffer.extras[_OLD][batch.samples, batch.draws] = self.log_likelihood(velocity, batch)

    def log_likelihood(self, velocity: Tensor, batch: NoisedBatch) -> Tensor:
        """What stands in for the log-likelihood (R,) of the samples."""
        target = velocity_target(batch.clean_latents, batch.noise)
        return awm_log_likelihood(velocity, target, batch.sigmas, self.args.awm_weighting, self.args.ghuber_power)

    # Loss

    def compute_row_losses(self, model: nn.Module, batch: NoisedBatch, source: RolloutBuffer) -> Tensor:
        """The clipped loss of the ratio plus the KL to the reference and to the average, (R,)."""
        reference, average = self.reference_velocity(model, batch), self.average_velocity(model, batch)
        velocity = self.call_policy(model, batch)
        loss = self._policy_loss(self.log_likelihood(velocity, batch), batch, source)
        loss = loss + self.reference_kl(velocity, reference, self.args.beta)
        if not self.keeps_average:
            return loss
        kl = velocity_kl(velocity, velocity.detach() if average is None else average)
        self.metrics.add("ema_kl", kl)
        return loss + self.args.ema_beta * kl

    def _policy_loss(self, log_likelihood: Tensor, batch: NoisedBatch, source: RolloutBuffer) -> Tensor:
        bound, rows = self.args.advantage_clip, (batch.samples, batch.draws)
        if self.updates_since_rollout == 0:
            source.extras[_OLD][rows] = log_likelihood.detach()
        advantages = batch.advantages if bound is None else batch.advantages.clamp(-bound, bound) / bound
        policy = clipped_policy_loss(
            log_likelihood, source.extras[_OLD][rows], advantages, self.args.epsilon, advantage_clip=None
        )
        self.metrics.add("log_likelihood", log_likelihood)
        self.metrics.add("ratio/mean", policy.ratio)
        self.metrics.add("ratio/approx_kl", policy.approx_kl)
        self.metrics.add("clip_ratio/region_mean", (policy.clipped_low | policy.clipped_high).float())
        return policy.loss

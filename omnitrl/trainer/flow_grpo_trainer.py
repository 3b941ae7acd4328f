# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO: policy gradients through stochastic steps of a flow-matching sampler."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from omnitrl.algorithms import clipped_policy_loss, reference_kl, transition_mean
from omnitrl.trainer.adapters import ReferencePolicy
from omnitrl.trainer.flow_grpo_config import FlowGRPOConfig
from omnitrl.trainer.rollout_trainer import RolloutTrainer
from omnitrl.trainer.rollouts import ReplayBatch, RolloutBuffer


class FlowGRPOTrainer(RolloutTrainer):
    """
    Trainer for [Flow-GRPO](https://huggingface.co/papers/2505.05470).

    A rollout turns some steps of the ODE sampler into steps of an SDE with the same marginals, so that each has a
    Gaussian density. With the group-normalised advantage A of a sample, and the ratio r of the new density of one of
    its steps to the one at rollout time, the loss is the mean over samples and trained steps of

    ```
    max(-A r, -A clip(r, 1 - epsilon, 1 + epsilon)) + beta KL(policy | reference)
    ```

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`FlowGRPOConfig`], *optional*):
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
    >>> trainer = FlowGRPOTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs="ocr",
    ...     args=FlowGRPOConfig(output_dir="sd35-ocr"),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = FlowGRPOConfig
    _name = "FlowGRPO"
    _tag_names = ("omnitrl", "flow-grpo")
    _paper: ClassVar[dict[str, str]] = {
        "title": "Flow-GRPO: Training Flow Matching Models via Online RL",
        "id": "2505.05470",
        "citation": (
            "@article{liu2025flowgrpo,\n"
            "    title  = {Flow-GRPO: Training Flow Matching Models via Online RL},\n"
            "    author = {Jie Liu and Gongye Liu and Jiajun Liang and Yangguang Li and Jiaheng Liu and "
            "Xintao Wang and Pengfei Wan and Di Zhang and Wanli Ouyang},\n"
            "    year   = {2025},\n"
            "    eprint = {arXiv:2505.05470},\n"
            "}"
        ),
    }
    args: FlowGRPOConfig

    def _set_up_algorithm(self) -> None:
        self.reference = ReferencePolicy(self.flow_model) if self.args.beta else None

    def compute_row_losses(self, model: nn.Module, batch: ReplayBatch, buffer: RolloutBuffer) -> Tensor:
        """Clipped policy loss plus `beta` times the KL to the reference, (R,)."""
        args = self.args
        reference_velocity = self._reference_velocity(model, batch, buffer)
        velocity, mean, std, log_probs = self.replay(model, batch, buffer)
        policy = clipped_policy_loss(
            log_probs, batch.old_log_probs, batch.advantages, args.epsilon, args.epsilon_high, args.advantage_clip
        )
        self.log_policy(policy, log_probs - batch.old_log_probs, buffer)
        if reference_velocity is None:
            return policy.loss
        kl = self._kl(velocity, reference_velocity, mean, std, batch, buffer)
        self.metrics.add("kl", kl)
        return policy.loss + args.beta * kl

    def _reference_velocity(self, model: nn.Module, batch: ReplayBatch, buffer: RolloutBuffer) -> Tensor | None:
        if self.reference is None:
            return None
        with self.reference.velocity(model) as velocity:
            return self.call_policy(velocity, batch, buffer.table)

    def _kl(
        self,
        velocity: Tensor,
        reference_velocity: Tensor,
        mean: Tensor,
        std: Tensor,
        batch: ReplayBatch,
        buffer: RolloutBuffer,
    ) -> Tensor:
        """KL of each row to the reference, (R,), in the form that `kl_form` names."""
        sigmas = buffer.table.sigmas
        return reference_kl(
            self.args.kl_form,
            mean=mean,
            mean_ref=transition_mean(batch.latents, reference_velocity, buffer.transitions, batch.steps),
            velocity=velocity,
            velocity_ref=reference_velocity,
            std=std,
            dt=sigmas[batch.steps + 1] - sigmas[batch.steps],
        )

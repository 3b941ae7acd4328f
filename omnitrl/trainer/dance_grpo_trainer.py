# SPDX-License-Identifier: Apache-2.0
"""DanceGRPO: constant noise, one start for a group, a share of the steps, and a choice of the samples."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from omnitrl.algorithms import PolicyLoss, best_and_worst, clipped_policy_loss
from omnitrl.trainer.dance_grpo_config import DanceGRPOConfig
from omnitrl.trainer.replay_trainer import ClippedPolicyTrainer, Replayed
from omnitrl.trainer.rollouts import ReplayBatch, RolloutBuffer, Units


class DanceGRPOTrainer(ClippedPolicyTrainer):
    """
    Trainer for [DanceGRPO](https://huggingface.co/papers/2505.07818).

    The loss is Flow-GRPO's, of transitions whose noise has a constant strength, without a KL. All members of a group
    start from one noise, a random share of the steps is trained, and with `best_of_n` only the best and the worst
    members are. With `per_reward_loss`, rewards f of weights w have a loss each,

    ```
    sum over f of   w_f max(-A_f r, -A_f clip(r, 1 - epsilon, 1 + epsilon))
    ```

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`DanceGRPOConfig`], *optional*):
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
    >>> trainer = DanceGRPOTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs="ocr",
    ...     args=DanceGRPOConfig(output_dir="sd35-dance", num_generations=24, best_of_n=8),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=128, lora_alpha=256),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = DanceGRPOConfig
    _name = "DanceGRPO"
    _tag_names = ("omnitrl", "dance-grpo")
    _paper: ClassVar[dict[str, str]] = {
        "title": "DanceGRPO: Unleashing GRPO on Visual Generation",
        "id": "2505.07818",
        "citation": (
            "@article{xue2025dancegrpo,\n"
            "    title  = {DanceGRPO: Unleashing GRPO on Visual Generation},\n"
            "    author = {Zeyue Xue and Jie Wu and Yu Gao and Fangyuan Kong and Lingting Zhu and Mengzhao Chen and "
            "Zhiheng Liu and Wei Liu and Qiushan Guo and Weilin Huang and Ping Luo},\n"
            "    year   = {2025},\n"
            "    eprint = {arXiv:2505.07818},\n"
            "}"
        ),
    }
    args: DanceGRPOConfig

    def describe_run(self) -> str:
        half = self.args.units_per_group // 2
        chosen = "" if self.args.best_of_n is None else f" on the {half} best and the {half} worst of each prompt"
        return super().describe_run() + chosen

    @property
    def loss_weights(self) -> Tensor:
        """Weights (F,) of the losses of the rewards; a reward of negative weight has its advantages turned instead."""
        return torch.tensor(self.trained_reward_weights).abs()

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Advantages (N,), or (N, F) with `per_reward_loss`: each reward against its own mean and std."""
        if not self.args.per_reward_loss:
            return super().compute_advantages(rewards)
        signs = torch.tensor(self.trained_reward_weights).sign()
        return torch.stack([self.advantages_of(rewards[:, [i]], signs[[i]]) for i in range(len(signs))], dim=1)

    def select(self, advantages: Tensor) -> tuple[Units, Tensor]:
        """The best and the worst of each group by their advantage, or all samples."""
        size, kept = self.args.num_generations, self.args.units_per_group
        if kept == size:  # a group may lie on several ranks
            return super().select(advantages)
        scores = advantages if advantages.ndim == 1 else advantages @ self.loss_weights
        groups = torch.arange(len(scores)) // size
        return [(i,) for i in best_and_worst(scores, groups, kept).tolist()], advantages

    def policy_loss(self, replayed: Replayed, batch: ReplayBatch, buffer: RolloutBuffer) -> Tensor:
        """The clipped loss (R,), or with `per_reward_loss` the weighted sum of those of the rewards, of one ratio."""
        if not self.args.per_reward_loss:
            return super().policy_loss(replayed, batch, buffer)
        args, advantages = self.args, batch.advantages  # (R, F)
        policy: PolicyLoss = clipped_policy_loss(
            replayed.log_probs[:, None].expand_as(advantages),
            batch.old_log_probs[:, None].expand_as(advantages),
            advantages,
            args.epsilon,
            args.epsilon_high,
            args.advantage_clip,
        )
        self.log_clipping(policy)
        return policy.loss @ self.loss_weights.to(policy.loss)

    def _sampling(self, rollout: int) -> dict[str, Any]:
        """The advantages of a rollout in a checkpoint are those of one loss, or of one for each reward."""
        args = self.args
        losses: dict[str, Any] = {"per_reward_loss": args.per_reward_loss}
        if args.per_reward_loss:
            assert self.rewards is not None
            losses["reward_weights"] = self.rewards.initial_weights
            if self.args.reward_weights_end is not None:
                losses["reward_weights_end"] = self.rewards.final_weights
        return {**super()._sampling(rollout), **losses}

# SPDX-License-Identifier: Apache-2.0
"""Flow-DPPO: policy gradients that a divergence keeps near the policy that made the samples."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from omnitrl.algorithms import dppo_policy_loss
from omnitrl.trainer.flow_dppo_config import FlowDPPOConfig
from omnitrl.trainer.replay_trainer import PolicyGradientTrainer, Replayed
from omnitrl.trainer.rollouts import ReplayBatch, RolloutBuffer


class FlowDPPOTrainer(PolicyGradientTrainer):
    """
    Trainer for [Flow-DPPO](https://huggingface.co/papers/2606.11025).

    The rollouts are those of [`FlowGRPOTrainer`]. The ratio r of one draw is a noisy estimate of how far the policy
    has moved. But the steps are Gaussians, so their divergence is known, and it takes the place of the clip:

    ```
    KL = mean((mean - mean_old)²) / (2 s²)
    loss = 0 if KL >= kl_threshold and (r - 1) A > 0, else -A r;   + beta KL(policy | reference)
    ```

    A step is dropped only if its gradient leads away from the old policy; one that leads back is always used. The
    means of the rollout are kept for it, which costs the memory of one more state for each trained step.

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`FlowDPPOConfig`], *optional*):
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
    >>> trainer = FlowDPPOTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs="ocr",
    ...     args=FlowDPPOConfig(output_dir="sd35-ocr"),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = FlowDPPOConfig
    _name = "FlowDPPO"
    _tag_names = ("omnitrl", "flow-dppo")
    _paper: ClassVar[dict[str, str]] = {
        "title": "Flow-DPPO: Divergence Proximal Policy Optimization for Flow Matching Models",
        "id": "2606.11025",
        "citation": (
            "@article{ping2026flowdppo,\n"
            "    title  = {Flow-DPPO: Divergence Proximal Policy Optimization for Flow Matching Models},\n"
            "    author = {Bowen Ping and Xiangxin Zhou and Penghui Qi and Minnan Luo and Liefeng Bo and "
            "Tianyu Pang},\n"
            "    year   = {2026},\n"
            "    eprint = {arXiv:2606.11025},\n"
            "}"
        ),
    }
    args: FlowDPPOConfig
    keep_means = True
    weighs_modalities = False

    def policy_loss(self, replayed: Replayed, batch: ReplayBatch, buffer: RolloutBuffer) -> Tensor:
        """The surrogate of each row, 0 where it is dropped, (R,)."""
        args = self.args
        assert batch.old_means is not None  # see `keep_means`
        policy = dppo_policy_loss(
            replayed.log_probs,
            batch.old_log_probs,
            replayed.mean,
            batch.old_means,
            replayed.std,
            batch.advantages,
            args.kl_threshold,
            args.advantage_clip,
        )
        self.metrics.add("dppo/dropped_mean", policy.dropped.float())
        self.metrics.add("dppo/kl_mean", policy.kl)
        self.metrics.add("dppo/kl_max", policy.kl)
        return policy.loss

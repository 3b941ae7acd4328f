# SPDX-License-Identifier: Apache-2.0
"""GRPO-Guard: Flow-GRPO with a ratio that one clip range fits, and with steps that pull equally hard."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from torch import Tensor

from omnitrl.algorithms import guard_policy_loss, transition_table
from omnitrl.models import MediaSize
from omnitrl.trainer.grpo_guard_config import GRPOGuardConfig
from omnitrl.trainer.replay_trainer import PolicyGradientTrainer, Replayed
from omnitrl.trainer.rollouts import ReplayBatch, RolloutBuffer


class GRPOGuardTrainer(PolicyGradientTrainer):
    """
    Trainer for [GRPO-Guard](https://huggingface.co/papers/2510.22319).

    The rollouts are those of [`FlowGRPOTrainer`]. Where the policy has moved the mean of a step by d, the log-ratio
    has the mean -mean(d²) / (2 s²) and a spread that goes with 1/s, so that a clip around 1 acts on one side only and
    on some steps only. GRPO-Guard clips another ratio r̃, with the noise z that was drawn,

    ```
    log r̃ = s (log r + mean(d²) / (2 s²)) = mean(z d)
    loss = w max(-A r̃, -A clip(r̃, 1 - epsilon, 1 + epsilon)) + beta KL(policy | reference)
    ```

    and weights each step with the inverse of its velocity coefficient. The means of the rollout are kept for it, which
    costs the memory of one more state for each trained step.

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`GRPOGuardConfig`], *optional*):
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
    >>> trainer = GRPOGuardTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs="ocr",
    ...     args=GRPOGuardConfig(output_dir="sd35-ocr"),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = GRPOGuardConfig
    _name = "GRPOGuard"
    _tag_names = ("omnitrl", "grpo-guard")
    _paper: ClassVar[dict[str, str]] = {
        "title": "GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via Regulated Clipping",
        "id": "2510.22319",
        "citation": (
            "@article{wang2025grpoguard,\n"
            "    title  = {GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via Regulated "
            "Clipping},\n"
            "    author = {Jing Wang and Jiajun Liang and Jie Liu and Henglin Liu and Gongye Liu and Jun Zheng and "
            "Wanyuan Pang and Ao Ma and Zhenyu Xie and Xintao Wang and Meng Wang and Pengfei Wan and Xiaodan Liang},\n"
            "    year   = {2025},\n"
            "    eprint = {arXiv:2510.22319},\n"
            "}"
        ),
    }
    args: GRPOGuardConfig
    keep_means = True
    weighs_modalities = False

    @cached_property
    def _step_weights(self) -> dict[MediaSize, Tensor]:
        """Those that have been computed."""
        return {}

    def step_weights(self, size: MediaSize) -> Tensor:
        """
        Weight (T,) of each step: 1 / |velocity coefficient|, which is the size of its gradient otherwise.

        The noise levels of a step may depend on the media size, and so do the weights.

        It is scaled by the mean of that size over all steps that the run can train, so that the gradient is on average
        as large as without weights: learning rate, `max_grad_norm` and `beta` keep their meaning. The mean is not that
        of one rollout's window, or a window of one step would undo its own weight.
        """
        if size not in self._step_weights:
            args, steps = self.args, list(self.args.reachable_steps)
            sigmas = self.flow_model.sigmas(args.num_inference_steps, size).sigmas
            pull = transition_table(sigmas, args.sde_type, self.noise_level, steps).velocity_coef.abs()
            self._step_weights[size] = (pull[steps].mean() / pull).to(args.device)
        return self._step_weights[size]

    def policy_loss(self, replayed: Replayed, batch: ReplayBatch, buffer: RolloutBuffer) -> Tensor:
        """The clipped loss of the normalised ratio, (R,)."""
        args = self.args
        assert batch.old_means is not None  # see `keep_means`
        policy = guard_policy_loss(
            batch.next_latents,
            replayed.mean,
            batch.old_means,
            replayed.std,
            batch.advantages,
            args.epsilon,
            args.epsilon_high,
            args.advantage_clip,
            weight=self.step_weights(self.size_of(buffer.index))[batch.steps] if args.reweight else None,
        )
        self.log_clipping(policy)
        self.metrics.add("guard/ratio_mean", policy.ratio)
        self.metrics.add("guard/log_ratio_abs_mean", (2 * policy.approx_kl).sqrt())
        return policy.loss

    def _warn_of_dominant_steps(self) -> None:
        """None is dominant: the normalised ratio has no std in its denominator."""

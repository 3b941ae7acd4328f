# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO: policy gradients through stochastic steps of a flow-matching sampler."""

from __future__ import annotations

from typing import ClassVar

from omnitrl.trainer.flow_grpo_config import FlowGRPOConfig
from omnitrl.trainer.replay_trainer import ClippedPolicyTrainer


class FlowGRPOTrainer(ClippedPolicyTrainer):
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

# SPDX-License-Identifier: Apache-2.0
"""MixGRPO: stochastic steps within a window that moves over the sampler, and cheap deterministic ones around it."""

from __future__ import annotations

from typing import ClassVar

from omnitrl.trainer.mix_grpo_config import MixGRPOConfig
from omnitrl.trainer.replay_trainer import ClippedPolicyTrainer


class MixGRPOTrainer(ClippedPolicyTrainer):
    """
    Trainer for [MixGRPO](https://huggingface.co/papers/2507.21802) and MixGRPO-Flash.

    Noise is drawn, and steps are trained, within a short window only; all other steps are those of the ODE. The window
    begins at the noisiest steps, which settle the layout, and moves towards the details as training goes on. What the
    ODE stretches cost can be cut too: by a second-order solver and fewer steps after the window (`ode_solver`,
    `tail_ratio`), and by computing the steps before the window once for a group (`shared_prefix`).

    The loss is the clipped policy loss of [`FlowGRPOTrainer`].

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`MixGRPOConfig`], *optional*):
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
    >>> trainer = MixGRPOTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs=["ocr", aesthetics],
    ...     args=MixGRPOConfig(output_dir="sd35-mix", ode_solver="dpmpp_2m", tail_ratio=0.4),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = MixGRPOConfig
    _name = "MixGRPO"
    _tag_names = ("omnitrl", "mix-grpo")
    _paper: ClassVar[dict[str, str]] = {
        "title": "MixGRPO: Unlocking Flow-based GRPO Efficiency with Mixed ODE-SDE",
        "id": "2507.21802",
        "citation": (
            "@article{li2025mixgrpo,\n"
            "    title  = {MixGRPO: Unlocking Flow-based GRPO Efficiency with Mixed ODE-SDE},\n"
            "    author = {Junzhe Li and Yutao Cui and Tao Huang and Yinping Ma and Chun Fan and Miles Yang and "
            "Zhao Zhong},\n"
            "    year   = {2025},\n"
            "    eprint = {arXiv:2507.21802},\n"
            "}"
        ),
    }
    args: MixGRPOConfig

# SPDX-License-Identifier: Apache-2.0
"""DiffusionOPD: a student learns from a frozen teacher at the states that the student itself visits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omnitrl.algorithms import velocity_kl
from omnitrl.errors import InputError
from omnitrl.models import Conditions, load_flow_model
from omnitrl.trainer.base_trainer import ModelLike
from omnitrl.trainer.diffusion_opd_config import DiffusionOPDConfig
from omnitrl.trainer.replay_trainer import ReplayTrainer
from omnitrl.trainer.rollouts import ReplayBatch, RolloutBuffer
from omnitrl.trainer.teachers import Teacher


class DiffusionOPDTrainer(ReplayTrainer):
    """
    Trainer for [DiffusionOPD](https://huggingface.co/papers/2605.15055): on-policy distillation.

    The student samples with stochastic steps. At each state that it visited, its next step and the teacher's are two
    Gaussians of one variance, and the loss is the divergence of the one from the other in closed form:

    ```
    mean_D((mean - mean_teacher)²) / (2 s²)          distillation_form="exact"
    ```

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`]: the student.
        reward_funcs (*optional*):
            Rewards that are watched in training and evaluation; nothing is learnt from them.
        args ([`DiffusionOPDConfig`], *optional*):
            Options.
        train_dataset:
            Prompts in any form that [`~omnitrl.data.load_prompts`] takes.
        eval_dataset:
            The same, or a dict of named sets.
        callbacks, optimizers:
            As in `transformers.Trainer`.
        peft_config (`PeftConfig` or `str`, *optional*):
            Adapters to train; `None` trains all weights.
        teacher_model (*optional*):
            The teacher: Hub id, folder, loaded pipeline or [`FlowModel`] of the student's family.
        teacher_adapter (`str`, *optional*):
            Folder or Hub id of a saved adapter on the student's base, in place of `teacher_model`.

    Raises:
        [`~omnitrl.errors.InputError`]: no teacher or two, one of another family, or one with other latents.

    Example:

    ```python
    >>> trainer = DiffusionOPDTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     args=DiffusionOPDConfig(output_dir="sd35-student"),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ...     teacher_adapter="sd35-ocr",
    ... )
    >>> trainer.train()
    ```
    """

    config_class = DiffusionOPDConfig
    needs_rewards = False
    control_option = "shuffle_prompts"
    _name = "DiffusionOPD"
    _tag_names = ("omnitrl", "diffusion-opd")
    _paper: ClassVar[dict[str, str]] = {
        "title": "DiffusionOPD: A Unified Perspective of On-Policy Distillation in Diffusion Models",
        "id": "2605.15055",
        "citation": (
            "@article{li2026diffusionopd,\n"
            "    title  = {DiffusionOPD: A Unified Perspective of On-Policy Distillation in Diffusion Models},\n"
            "    author = {Quanhao Li and Junqiu Yu and Kaixun Jiang and Yujie Wei and Zhen Xing and Pandeng Li and "
            "Ruihang Chu and Shiwei Zhang and Yu Liu and Zuxuan Wu},\n"
            "    year   = {2026},\n"
            "    eprint = {arXiv:2605.15055},\n"
            "}"
        ),
    }
    args: DiffusionOPDConfig
    _encoded: tuple[int, Conditions] | None = None

    def __init__(
        self, *args: Any, teacher_model: ModelLike | None = None, teacher_adapter: str | None = None, **kwargs: Any
    ) -> None:
        if (teacher_model is None) == (teacher_adapter is None):
            raise InputError(
                f"{type(self).__name__} needs one teacher, got {'none' if teacher_model is None else 'two'}: pass "
                "`teacher_model`, a Hub id or folder of a pipeline, or `teacher_adapter`, those of a saved LoRA."
            )
        self._teacher_model, self._teacher_adapter = teacher_model, teacher_adapter
        super().__init__(*args, **kwargs)

    def _set_up_algorithm(self) -> None:
        args = self.args
        self.scores_rollouts = self.rewards is not None
        if args.shuffle_prompts and self.train_dataset is not None:
            self.check_other_prompts()
        if self._teacher_model is None:
            self.teacher = Teacher.of_adapter(str(self._teacher_adapter), self.flow_model)
            return
        dtype = {"dtype": self.flow_model.dtype} if isinstance(self._teacher_model, str) else {}
        teacher = load_flow_model(self._teacher_model, args.max_sequence_length, **dtype)
        self.teacher = Teacher.of_model(teacher, self.flow_model, self.sizes)

    def _begin(self) -> None:
        self._encoded = None
        super()._begin()

    @property
    def teacher_guidance_scale(self) -> float:
        """Guidance of the teacher."""
        given = self.args.teacher_guidance_scale
        return self.guidance_scale_train if given is None else given

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Zeros: rewards are watched only."""
        return torch.zeros(len(rewards))

    def _warn_if_equal(self, fraction: float) -> None:
        """Equal rewards do no harm here."""

    def compute_row_losses(self, model: nn.Module, batch: ReplayBatch, source: RolloutBuffer) -> Tensor:
        """The divergence of the student's step from the teacher's, (R,)."""
        taught = replace(batch, conditions=self._teacher_conditions(batch, source))
        with self.teacher.velocity(model) as velocity:
            teacher_velocity = self.call_policy(velocity, taught, self.teacher_guidance_scale)
        replayed = self.replay(model, batch, source)
        self.log_ratio(replayed.log_probs - batch.old_log_probs, source)
        distance = self.divergence(self.args.distillation_form, replayed, teacher_velocity, batch, source)
        self.metrics.add("distillation/distance", distance.detach())
        self.metrics.add("distillation/velocity_mse", velocity_kl(replayed.velocity.detach(), teacher_velocity))
        return distance

    def _teacher_conditions(self, batch: ReplayBatch, source: RolloutBuffer) -> Conditions:
        """The teacher's own encoding of the prompts, made once for a rollout."""
        if self._encoded is None or self._encoded[0] != source.index:
            rows = {t.request.group_id: t.request.row for t in source.trajectories}
            if self.args.shuffle_prompts:
                rows = {group: self._plan.other_row(source.index, group) for group in rows}
            teacher = self.teacher.model
            guidance = teacher.needs_negative(self.teacher_guidance_scale)
            encoded = teacher.encode(list(rows.values()), guidance, self.size_of(source.index))
            self._encoded = (source.index, encoded)
        return self._encoded[1][[source.condition_rows[i] for i in batch.samples]]

# SPDX-License-Identifier: Apache-2.0
"""Options of DiffusionOPD."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from omnitrl.algorithms import KL_FORMS
from omnitrl.errors import InputError
from omnitrl.trainer.base_config import check_choice
from omnitrl.trainer.replay_config import ReplayConfig, check_density


@dataclass
class DiffusionOPDConfig(ReplayConfig):
    """
    Options of [`DiffusionOPDTrainer`]; see [`ReplayConfig`] for those of rollouts, of which advantages are not used.

    Example:

    ```python
    >>> args = DiffusionOPDConfig(output_dir="sd35-student", teacher_guidance_scale=4.5, guidance_scale=1.0)
    ```
    """

    _at_least: ClassVar[dict[str, float]] = {
        **ReplayConfig._at_least,
        "num_generations": 1,
        "teacher_guidance_scale": 0,
    }

    num_generations: int = field(default=1, metadata={"help": "Samples per prompt; there is nothing to compare."})
    distillation_form: str = field(
        default="exact",
        metadata={
            "help": "Distance of the student's step from the teacher's: 'exact' (KL of the two Gaussians, per latent "
            "element), 'flow_grpo' (without the step size) or 'velocity' (squared velocity difference)."
        },
    )
    teacher_guidance_scale: float | None = field(
        default=None, metadata={"help": "Guidance of the teacher; that of the student in training by default."}
    )
    shuffle_prompts: bool = field(
        default=False,
        metadata={"help": "Control experiment: the teacher sees other prompts, so that none should be learnt."},
    )

    def _check_choices(self) -> None:
        super()._check_choices()
        check_choice("distillation_form", self.distillation_form, KL_FORMS)

    def _check_ranges(self) -> None:
        super()._check_ranges()
        check_density(self, "distillation_form", self.distillation_form)
        if self.shuffle_advantages:
            raise InputError("shuffle_advantages=True shuffles nothing, for there are none: use shuffle_prompts=True.")

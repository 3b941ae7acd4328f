# SPDX-License-Identifier: Apache-2.0
"""Options of SRPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from omnitrl.algorithms import ALIGN_BRANCHES
from omnitrl.errors import InputError
from omnitrl.trainer.base_config import check_choice
from omnitrl.trainer.rollout_config import RolloutConfig


@dataclass
class SRPOConfig(RolloutConfig):
    """
    Options of [`SRPOTrainer`]; see [`RolloutConfig`] for those of rollouts, of which advantages are not used.

    Defaults are those of the authors' recipe for FLUX.1-dev (https://huggingface.co/papers/2509.06942), except for the
    control words: theirs are lists made for one reward model, HPSv2.1.

    Example:

    ```python
    >>> args = SRPOConfig(output_dir="flux-srpo", num_inference_steps=25, per_device_train_batch_size=1)
    ```
    """

    _at_least: ClassVar[dict[str, float]] = {
        **RolloutConfig._at_least,
        "num_generations": 1,
        "align_num_inference_steps": 1,
    }

    num_generations: int = field(default=1, metadata={"help": "Samples per prompt; there is nothing to compare."})
    num_inference_steps: int = field(default=25, metadata={"help": "Sampler steps T in rollouts (ODE)."})

    # Direct-Align
    branches: list[str] = field(
        default_factory=lambda: list(ALIGN_BRANCHES),
        metadata={"help": "Steps that each sample is trained with: 'denoise' towards the data, 'inversion' away."},
    )
    align_num_inference_steps: int = field(
        default=50, metadata={"help": "Steps of the sampler that `align_range` counts."}
    )
    align_range: list[int] = field(
        default_factory=lambda: [5, 25],
        metadata={"help": "Noise levels are drawn between these two steps, the noisier one first."},
    )
    groundtruth_ratio: float = field(
        default=0.9,
        metadata={"help": "Share of the range that is recovered exactly; the network steps over the rest."},
    )

    # Relative preference
    relative_margin: float = field(
        default=0.7, metadata={"help": "Preference above which a sample is not trained, in units of the reward."}
    )
    positive_words: list[str] | None = field(
        default_factory=lambda: ["Realistic photo"],
        metadata={"help": "Words of praise, in turn; None here and below trains the reward itself."},
    )
    negative_words: list[str] | None = field(
        default_factory=lambda: ["CG Render"], metadata={"help": "Words of blame, in turn."}
    )
    control_word_format: str = field(
        default="{word}. {prompt}", metadata={"help": "How a control word and a prompt are put together."}
    )
    eval_reward_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each of `eval_reward_funcs`, 1 by default."}
    )

    # Data and memory
    image_column: str | None = field(
        default=None, metadata={"help": "Column of pictures that are trained on in place of rollouts (offline)."}
    )
    checkpoint_decoder: bool = field(
        default=False, metadata={"help": "Recompute the decoder in the backward, which saves most of its memory."}
    )
    shuffle_prompts: bool = field(
        default=False,
        metadata={"help": "Control experiment: the reward sees other prompts, so that none should be learnt."},
    )

    @property
    def has_control_words(self) -> bool:
        """Whether the reward is asked under a praising and a blaming prompt."""
        return bool(self.positive_words)

    def _check_choices(self) -> None:
        super()._check_choices()
        if not self.branches or len(set(self.branches)) < len(self.branches):
            raise InputError(f"branches={self.branches} must name each branch once: use denoise inversion.")
        for branch in self.branches:
            check_choice("branches", branch, ALIGN_BRANCHES)

    def _check_ranges(self) -> None:
        super()._check_ranges()
        steps, bounds = self.align_num_inference_steps, self.align_range
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= steps:
            raise InputError(
                f"align_range={bounds} must be two rising steps of align_num_inference_steps={steps}: use "
                f"{steps // 10} {max(steps // 2, 1)}."
            )
        if not 0 <= self.groundtruth_ratio < 1:
            raise InputError(f"groundtruth_ratio={self.groundtruth_ratio} must be in [0, 1): use 0.9.")
        if self.shuffle_advantages:
            raise InputError("shuffle_advantages=True shuffles nothing, for there are none: use shuffle_prompts=True.")
        if self.reward_weights_end is not None:
            raise InputError(
                f"reward_weights_end={self.reward_weights_end} is for rewards of rollouts, and SRPO follows the "
                "gradient of its rewards: leave it out."
            )
        self._check_words()

    def _check_words(self) -> None:
        if bool(self.positive_words) != bool(self.negative_words):
            raise InputError(
                f"positive_words={self.positive_words} and negative_words={self.negative_words} go together: give "
                "both, or None for both."
            )
        if "inversion" in self.branches and not self.has_control_words:
            raise InputError(
                "branches has 'inversion', which without control words undoes what 'denoise' does: use "
                "branches=['denoise'], or give positive_words and negative_words."
            )
        if not {"{word}", "{prompt}"} <= set(_fields(self.control_word_format)):
            raise InputError(
                f"control_word_format={self.control_word_format!r} must have {{word}} and {{prompt}}, and no other "
                "braces: use '{word}. {prompt}'."
            )


def _fields(text: str) -> list[str]:
    """`{name}` for each name in a format, none if it is not one of the two."""
    try:
        text.format(word="", prompt="")
    except (KeyError, IndexError, ValueError):
        return []
    return [field for field in ("{word}", "{prompt}") if field in text]

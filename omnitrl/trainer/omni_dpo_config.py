# SPDX-License-Identifier: Apache-2.0
"""Options of DPO for omni-modality models."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import DPOConfig

from omnitrl.errors import InputError
from omnitrl.omni.decoding import VideoLimits
from omnitrl.trainer.base_config import check_choice, check_positive


# The losses of `trl.DPOTrainer`.
LOSS_TYPES = (
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)

# Losses that TRL gives `label_smoothing` to, in a meaning of their own.
_SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")


@dataclass
class OmniDPOConfig(DPOConfig):
    """
    Options of [`OmniDPOTrainer`]: those of [`~trl.DPOConfig`], and a few of omnitrl.

    `per_device_train_batch_size` counts pairs: a micro-batch is twice as many sequences.

    Example:

    ```python
    >>> args = OmniDPOConfig(output_dir="omni-dpo", label_smoothing=0.1, bf16=False, use_cpu=True)
    ```
    """

    # Preferences
    label_smoothing: float = field(
        default=0.0,
        metadata={
            "help": "Share of pairs that are taken to be labelled the wrong way round, at least 0 and below 0.5. "
            "The losses 'robust', 'exo_pair', 'aot' and 'aot_unpaired' use it as TRL does."
        },
    )

    # Mixture of experts
    freeze_router: bool = field(
        default=True, metadata={"help": "Do not train what sends tokens to experts, nor adapters on it."}
    )
    router_aux_loss_coef: float | None = field(
        default=0.0,
        metadata={"help": "Weight of the load-balancing loss of a mixture of experts; None for the checkpoint's own."},
    )

    # Media
    max_length: int | None = field(
        default=4096,
        metadata={"help": "Tokens of prompt and answer, those of media among them; what is over is cut off answers."},
    )
    video_fps: float | None = field(
        default=2.0, metadata={"help": "Frames per second of a video that the model is shown; None for all frames."}
    )
    video_max_frames: int | None = field(
        default=64, metadata={"help": "The most frames of a video, whatever its length; None for no bound."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for loss_type in self.loss_type:
            check_choice("loss_type", loss_type, LOSS_TYPES)
        check_positive(self, "0.1", "beta")
        self._check_smoothing()
        self.limits  # noqa: B018  (which refuses numbers that cannot be)
        if self.router_aux_loss_coef is not None and self.router_aux_loss_coef < 0:
            raise InputError(
                f"router_aux_loss_coef={self.router_aux_loss_coef} must be at least 0: use 0.001, or 0.0."
            )
        if self.truncation_mode != "keep_start":
            raise InputError(
                f"truncation_mode={self.truncation_mode!r} would cut media off the prompt: use 'keep_start', and a "
                "max_length that answers fit in."
            )

    def _check_smoothing(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise InputError(
                f"label_smoothing={self.label_smoothing} must be at least 0 and below 0.5, where labels say nothing: "
                "use 0.1."
            )
        others = [loss_type for loss_type in self.loss_type if loss_type in _SMOOTHED]
        if self.label_smoothing and "sigmoid" in self.loss_type and others:
            raise InputError(
                f"label_smoothing={self.label_smoothing} has one meaning for loss_type='sigmoid' and another for "
                f"{others[0]!r}: use it with one of them, or label_smoothing=0.0."
            )

    @property
    def limits(self) -> VideoLimits:
        """How many frames of a video the model is shown."""
        return VideoLimits(self.video_fps, self.video_max_frames)

# SPDX-License-Identifier: Apache-2.0
"""What HunyuanImage-2.1 and HunyuanVideo-1.5 have in common: two text encoders, a guider, a static shift."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import InputError
from omnitrl.models.base import JOINT_ATTENTION, FlowModel, stock_sigma_table
from omnitrl.models.conditions import Conditions, trimmed
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)

# What a `ClassifierFreeGuidance` is made with if it does nothing but the formula of `FlowModel.guide`, at all steps.
PLAIN_GUIDANCE = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}


class HunyuanModel(FlowModel):
    """
    The text and the sampler of the Hunyuan pipelines.

    Prompts go through Qwen2.5-VL, the text that they quote through ByT5, both with masks, so padding is trimmed. The
    pipelines have their guidance scale in a component, the guider; of guiders, omnitrl has plain classifier-free
    guidance, as a guider with a momentum makes a step depend on those before it, and it could not be replayed alone.

    Raises:
        [`~omnitrl.errors.InputError`]: the checkpoint was distilled with MeanFlow.
    """

    default_lora_targets = JOINT_ATTENTION
    default_max_sequence_length = 1000

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        super().__init__(pipeline, max_sequence_length)
        if self.transformer.config.use_meanflow:
            raise InputError(
                f"This checkpoint of {type(pipeline).__name__} was distilled with MeanFlow (use_meanflow=True): its "
                "network predicts the mean velocity of a whole step, and no score follows from that: use one without, "
                "such as hunyuanvideo-community/HunyuanImage-2.1-Diffusers or HunyuanVideo-1.5-Diffusers-480p_i2v."
            )
        components = self.pipeline.components
        for guider in (components.get("guider"), components.get("ocr_guider")):
            if guider is not None and not is_plain(guider):
                warn_of_guider(type(pipeline).__name__, type(guider).__name__)

    def text_conditions(self, prompt: str) -> dict[str, Any]:
        """`prompt_embeds` (1, L, D) and, of the quoted text, `glyph_embeds` (1, G, E), with masks, without padding."""
        self.pipeline.tokenizer_max_length = self.max_sequence_length
        embeds, mask, glyphs, glyphs_mask = self.pipeline.encode_prompt([prompt], device=self.device)
        padded = {
            "prompt_embeds": embeds,
            "prompt_embeds_mask": mask.bool(),
            "glyph_embeds": glyphs,
            "glyph_embeds_mask": glyphs_mask.bool(),
        }
        return {name: tensor.clone() for name, tensor in trimmed(padded).items()}  # a slice would keep its padding

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """`prompt_embeds` and `glyph_embeds` with their masks."""
        return Conditions(self.text_conditions(row["prompt"]))

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """The scheduler's table of an even grid from 1, with its static shift."""
        if num_steps < 1:
            raise ValueError(f"num_inference_steps must be at least 1, got {num_steps}.")
        grid = np.linspace(1.0, 0.0, num_steps + 1)[:-1]
        return stock_sigma_table(self.pipeline.scheduler, num_steps, sigmas=grid)

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """The VAE's decoder (of a video: of all frames at once)."""
        vae = self.pipeline.vae
        return vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """The mode of the VAE's encoder, scaled as the network wants it."""
        vae = self.pipeline.vae
        return vae.encode(pixels.to(vae.dtype)).latent_dist.mode() * vae.config.scaling_factor


def is_plain(guider: Any) -> bool:
    """Whether a stock guider guides as `FlowModel.guide` does."""
    from diffusers import ClassifierFreeGuidance

    config = guider.config
    return isinstance(guider, ClassifierFreeGuidance) and all(config[k] == v for k, v in PLAIN_GUIDANCE.items())


@cache  # once for each
def warn_of_guider(pipeline_class: str, guider_class: str) -> None:
    """Says that omnitrl guides otherwise than the stock pipeline would."""
    logger.warning(
        f"This checkpoint of {pipeline_class} has a {guider_class} of its own, but omnitrl guides with plain "
        "classifier-free guidance, whose steps can be replayed one by one. Where the result is used, set "
        "pipe.guider = ClassifierFreeGuidance(guidance_scale=…) with the scale of the training, and no ocr_guider."
    )

# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-2.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from omnitrl.models.hunyuan import HunyuanModel
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, check_multiple


class HunyuanImageModel(HunyuanModel):
    """
    `HunyuanImagePipeline`: prompts and quoted text with masks, classifier-free or embedded guidance.

    The stock pipeline guides with an `AdaptiveProjectedMixGuidance` of scale 3.5; here that is plain classifier-free
    guidance, with 3.5 as the default.

    Example:

    ```python
    >>> model = load_flow_model("hunyuanvideo-community/HunyuanImage-2.1-Diffusers", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("HunyuanImagePipeline",)
    default_guidance_scale = 3.5

    @property
    def embeds_guidance(self) -> bool:
        """What the network's config says."""
        return bool(self.transformer.config.guidance_embeds)

    @property
    def default_size(self) -> MediaSize:
        """2048 × 2048, the stock pipeline's."""
        side = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return MediaSize(side, side)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(C, height / f, width / f) with the VAE's factor f."""
        factor, size = self.pipeline.vae_scale_factor, size.filled(self.default_size)
        patches = dict(zip(("height", "width"), self.transformer.config.patch_size, strict=True))
        height, width = (check_multiple(name, vars(size)[name], factor * patch) for name, patch in patches.items())
        return (self.transformer.config.in_channels, height // factor, width // factor)

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """One call of `HunyuanImageTransformer2DModel`, with timesteps rounded to its dtype."""
        dtype = self.dtype
        velocity = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=timesteps.to(dtype),
            guidance=inputs["guidance"].to(dtype) * 1000.0 if self.embeds_guidance else None,
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            encoder_attention_mask=inputs["prompt_embeds_mask"],
            encoder_hidden_states_2=inputs["glyph_embeds"].to(dtype),
            encoder_attention_mask_2=inputs["glyph_embeds_mask"],
            return_dict=False,
        )[0]
        return velocity.to(latents.dtype)

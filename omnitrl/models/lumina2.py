# SPDX-License-Identifier: Apache-2.0
"""Lumina-Image 2.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.models.base import stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.levels import even_levels, shift_by_tokens
from omnitrl.models.pictures import KLPictureModel
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, sides_of


class Lumina2Model(KLPictureModel):
    """
    `Lumina2Pipeline`: one language model (Gemma 2) as text encoder, one stream of text and image tokens.

    Guidance keeps the norm of each row of pixels of the positive velocity, as the stock pipeline does by default.

    Example:

    ```python
    >>> model = load_flow_model("Alpha-VLLM/Lumina-Image-2.0", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("Lumina2Pipeline",)
    default_lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    default_guidance_scale = 4.0
    default_max_sequence_length = 256

    def cache_key(self, row: dict[str, Any], size: MediaSize) -> tuple:
        """The text as it is encoded."""
        return (self._text(row),)

    def negative_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Negative prompts are encoded as they are, without the system prompt that others begin with."""
        return {**super().negative_row(row), "_as_it_is": True}

    def _text(self, row: dict[str, Any]) -> str:
        start = "" if row.get("_as_it_is") else f"{self.pipeline.system_prompt} <Prompt Start> "
        return start + row["prompt"]

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """`prompt_embeds` (1, L, D): the last hidden states but one, with their mask."""
        pipe = self.pipeline
        tokens = pipe.tokenizer(
            [self._text(row)], max_length=self.max_sequence_length, truncation=True, return_tensors="pt"
        ).to(self.device)
        states = pipe.text_encoder(**tokens, output_hidden_states=True).hidden_states
        return Conditions({"prompt_embeds": states[-2], "prompt_embeds_mask": tokens.attention_mask.bool()})

    @property
    def default_size(self) -> MediaSize:
        """The checkpoint's, 1024 × 1024."""
        return MediaSize(self.pipeline.default_image_size, self.pipeline.default_image_size)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(C, height / f, width / f) with the VAE's factor f."""
        config, factor = self.transformer.config, self.pipeline.vae_scale_factor
        height, width = sides_of(size.filled(self.default_size), factor * config.patch_size)
        return (config.in_channels, height // factor, width // factor)

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """
        Levels from 1 to `1 / num_steps`, shifted by the scheduler.

        A dynamic shift is one for all sizes: the stock pipeline computes it from the number of channels.
        """
        from diffusers.pipelines.lumina2.pipeline_lumina2 import calculate_shift

        config = self.pipeline.scheduler.config
        mu = shift_by_tokens(config, calculate_shift, self.latent_shape(size)[0])
        return stock_sigma_table(self.pipeline.scheduler, num_steps, sigmas=even_levels(num_steps), mu=mu)

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """One call of `Lumina2Transformer2DModel`, whose time goes from noise to image."""
        network, dtype = self.transformer, self.dtype
        backwards = network(
            hidden_states=latents.to(dtype),
            timestep=1 - timesteps / self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            encoder_attention_mask=inputs["prompt_embeds_mask"],
            return_dict=False,
        )[0]
        return -backwards.to(latents.dtype)

    def guide(self, negative: Tensor, positive: Tensor, guidance_scale: float, timesteps: Tensor) -> Tensor:
        """Classifier-free guidance, each row of pixels at the norm that the positive velocity has there."""
        guided = super().guide(negative, positive, guidance_scale, timesteps)
        norm, kept = (torch.linalg.vector_norm(velocity, dim=-1, keepdim=True) for velocity in (guided, positive))
        return guided * (kept / norm)

# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.models.base import JOINT_ATTENTION, stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.levels import shift_by_tokens
from omnitrl.models.pictures import KLPictureModel
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, sides_of


class SD3Model(KLPictureModel):
    """
    `StableDiffusion3Pipeline`: two CLIP text encoders and a T5, any of them absent; static or dynamic shift.

    Works for Stable Diffusion 3 and 3.5 (dual attention included). Recipe defaults are those of Flow-GRPO
    (https://arxiv.org/abs/2505.05470): guidance 4.5, LoRA on the joint attention.

    Example:

    ```python
    >>> model = load_flow_model("stabilityai/stable-diffusion-3.5-medium", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("StableDiffusion3Pipeline",)
    default_lora_targets = JOINT_ATTENTION
    default_guidance_scale = 4.5
    default_max_sequence_length = 256

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """`prompt_embeds` (1, 77 + L, D) and `pooled` (1, P); an absent encoder contributes zeros."""
        prompts = [row["prompt"]]
        pipe, config = self.pipeline, self.transformer.config
        clips = [
            self._clip_embeds(prompts, pipe.tokenizer, pipe.text_encoder),
            self._clip_embeds(prompts, pipe.tokenizer_2, pipe.text_encoder_2),
        ]
        t5 = self._t5_embeds(prompts)
        tokens, pooled = _join_clips(clips, config.pooled_projection_dim, t5)
        tokens = torch.nn.functional.pad(tokens, (0, t5.shape[-1] - tokens.shape[-1]))
        return Conditions({"prompt_embeds": torch.cat([tokens, t5], dim=-2), "pooled": pooled})

    def _clip_embeds(self, prompts: list[str], tokenizer: Any, encoder: Any) -> tuple[Tensor, Tensor] | None:
        """Penultimate hidden states (B, 77, D) and pooled projection (B, P) of one CLIP encoder."""
        if encoder is None:
            return None
        # The pipeline's length is that of its first tokenizer, or 77 if that is absent.
        first = self.pipeline.tokenizer is not None
        length = self.pipeline.tokenizer_max_length if first else tokenizer.model_max_length
        tokens = tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        output = encoder(tokens.input_ids.to(encoder.device), output_hidden_states=True)
        return output.hidden_states[-2], output.text_embeds

    def _t5_embeds(self, prompts: list[str]) -> Tensor:
        """T5 hidden states (B, L, D); zeros when the checkpoint has no T5, as in the stock pipeline."""
        encoder, network = self.pipeline.text_encoder_3, self.transformer
        if encoder is None:
            shape = (len(prompts), self.max_sequence_length, network.config.joint_attention_dim)
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        tokens = self.pipeline.tokenizer_3(
            prompts, padding="max_length", max_length=self.max_sequence_length, truncation=True, return_tensors="pt"
        )
        return encoder(tokens.input_ids.to(encoder.device))[0]

    @property
    def default_size(self) -> MediaSize:
        """That of the position embeddings."""
        side = self.transformer.config.sample_size * self.pipeline.vae_scale_factor
        return MediaSize(side, side)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(C, height / f, width / f) with the VAE's factor f."""
        config, factor = self.transformer.config, self.pipeline.vae_scale_factor
        size, multiple = size.filled(self.default_size), factor * config.patch_size
        largest = config.pos_embed_max_size * multiple
        height, width = sides_of(size, multiple, largest)
        return (config.in_channels, height // factor, width // factor)

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """The grid of `FlowMatchEulerDiscreteScheduler`, with its `mu` where the checkpoint shifts dynamically."""
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        config = self.pipeline.scheduler.config
        if not config.get("use_dynamic_shifting"):
            return stock_sigma_table(self.pipeline.scheduler, num_steps)
        patch, (_, height, width) = self.transformer.config.patch_size, self.latent_shape(size)
        mu = shift_by_tokens(config, calculate_shift, (height // patch) * (width // patch), shifts=(0.5, 1.16))
        return stock_sigma_table(self.pipeline.scheduler, num_steps, mu=mu)

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """One call of `SD3Transformer2DModel`."""
        network, dtype = self.transformer, self.dtype
        velocity = network(
            hidden_states=latents.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            pooled_projections=inputs["pooled"].to(dtype),
            return_dict=False,
        )[0]
        return velocity.to(latents.dtype)


def _join_clips(clips: list[tuple[Tensor, Tensor] | None], pooled_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """
    Joins the CLIP encoders' tokens (B, 77, D) and pooled vectors (B, P); an absent encoder contributes zeros.

    A checkpoint states only the sum of the two widths: an absent encoder gets what the present one leaves, and with
    both absent one block of zeros stands for the two.
    """
    present = [clip for clip in clips if clip is not None]
    left = pooled_dim - sum(pooled.shape[-1] for _, pooled in present)
    length = present[0][0].shape[1] if present else 0
    parts = []
    for clip in clips:
        if clip is None:
            width, left = left, 0
            clip = (like.new_zeros(like.shape[0], length, width), like.new_zeros(like.shape[0], width))
        parts.append(clip)
    return torch.cat([tokens for tokens, _ in parts], dim=-1), torch.cat([pooled for _, pooled in parts], dim=-1)

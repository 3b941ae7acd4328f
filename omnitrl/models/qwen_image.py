# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.models.base import JOINT_ATTENTION, FlowModel, stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.levels import even_levels, shift_by_tokens
from omnitrl.models.patches import packed, unpacked
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, sides_of


class QwenImageModel(FlowModel):
    """
    `QwenImagePipeline`: Qwen-Image and Qwen-Image-2512.

    The shift of the sigmas follows the size, guidance is classifier-free (the stock pipeline's `true_cfg_scale`) with
    the norm of each token brought back to that of the conditional velocity, and the text encoder is a Qwen2.5-VL.
    Recipe defaults are those of Flow-GRPO (https://arxiv.org/abs/2505.05470): guidance 4 away from the prompt " ",
    LoRA on the joint attention and the feed-forward layers of both streams.

    Example:

    ```python
    >>> model = load_flow_model("Qwen/Qwen-Image", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("QwenImagePipeline",)
    default_lora_targets = (
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    default_guidance_scale = 4.0
    noise_levels = {"flow_sde": 1.2}
    default_negative_prompt = " "
    default_max_sequence_length = 512
    longest_prompt = 1024

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """`prompt_embeds` (1, L, D) of the prompt's own length, with their mask."""
        return Conditions(self._prompt(row["prompt"]))

    def _prompt(self, prompt: str, **images: Any) -> dict[str, Tensor]:
        embeds, mask = self.pipeline.encode_prompt(
            prompt, device=self.device, max_sequence_length=self.max_sequence_length, **images
        )
        if mask is None:  # what the stock pipeline says where nothing is padding
            mask = torch.ones(embeds.shape[:2], device=embeds.device)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask.bool()}

    @property
    def default_size(self) -> MediaSize:
        """1024 × 1024 with the VAE's factor of 8."""
        side = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return MediaSize(side, side)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(C, height / f, width / f) with the VAE's factor f; the network sees patches of 2 × 2."""
        factor, size = self.pipeline.vae_scale_factor, size.filled(self.default_size)
        height, width = sides_of(size, 2 * factor)
        return (self.transformer.config.in_channels // 4, height // factor, width // factor)

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """The pipeline's even grid, shifted by the number of image tokens and stretched to the terminal sigma."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        config, (_, height, width) = self.pipeline.scheduler.config, self.latent_shape(size)
        mu = shift_by_tokens(config, calculate_shift, (height // 2) * (width // 2))
        return stock_sigma_table(self.pipeline.scheduler, num_steps, sigmas=even_levels(num_steps), mu=mu)

    def guide(self, negative: Tensor, positive: Tensor, guidance_scale: float, timesteps: Tensor) -> Tensor:
        """Classifier-free guidance, then each token (2 × 2 patch) rescaled to the norm that it has in `positive`."""
        guided = packed(super().guide(negative, positive, guidance_scale, timesteps))
        wanted, norm = (tokens.norm(dim=-1, keepdim=True) for tokens in (packed(positive), guided))
        return unpacked(guided * (wanted / norm), *grid_of(positive))

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """
        One call of `QwenImageTransformer2DModel`.

        `layout` has the height and width in tokens of each condition image, whose latents follow the media's.
        """
        network, dtype = self.transformer, self.dtype
        grid, images = grid_of(latents), tuple(layout or ())
        tokens = packed(latents)
        if images:
            conditions = inputs["images"][:, : sum(prod(image) for image in images)]
            tokens = torch.cat([tokens, conditions.to(tokens.dtype)], dim=1)
        mask = inputs["prompt_embeds_mask"]
        velocity = network(
            hidden_states=tokens.to(dtype),
            timestep=timesteps.to(dtype) / 1000,
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            encoder_hidden_states_mask=None if bool(mask.all()) else mask,  # attention without a mask is faster
            img_shapes=[[(1, *shape) for shape in (grid, *images)]] * len(latents),
            return_dict=False,
        )[0]
        return unpacked(velocity[:, : prod(grid)], *grid).to(latents.dtype)

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """The decoder of the VAE, which is one of videos: a picture is a video of one frame."""
        vae = self.pipeline.vae
        mean, std = self._statistics(latents)
        return vae.decode((latents * std + mean)[:, :, None].to(vae.dtype), return_dict=False)[0][:, :, 0]

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """The mode of the VAE's encoder, with the mean and scale that the network wants."""
        vae = self.pipeline.vae
        latents = vae.encode(pixels[:, :, None].to(vae.dtype)).latent_dist.mode()[:, :, 0]
        mean, std = self._statistics(latents)
        return (latents - mean) / std

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (C, 1, 1) of the VAE's latents."""
        config = self.pipeline.vae.config
        return like.new_tensor(config.latents_mean)[:, None, None], like.new_tensor(config.latents_std)[:, None, None]


def grid_of(latents: Tensor) -> tuple[int, int]:
    """Height and width in tokens of latents (B, C, H, W)."""
    return latents.shape[-2] // 2, latents.shape[-1] // 2

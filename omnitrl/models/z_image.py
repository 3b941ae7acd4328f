# SPDX-License-Identifier: Apache-2.0
"""Z-Image and Z-Image-Turbo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import InputError
from omnitrl.models.base import stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.levels import shift_by_tokens
from omnitrl.models.pictures import KLPictureModel
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, check_multiple


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


PATCH = 2  # the stock pipeline uses this of the network's patch sizes
TEXT_MULTIPLE = 32  # the network pads captions to it, with a token that it learned
TURBO_SHIFT = 3.0  # of the scheduler of Z-Image-Turbo; that of Z-Image has 6


class ZImageModel(KLPictureModel):
    """
    `ZImagePipeline`: a Qwen3 text encoder and one stream of picture and text, of any length in one batch.

    A guidance scale of 1 is none, as everywhere here. The stock pipeline counts from 0: its `guidance_scale` is this
    one less 1. Its `cfg_normalization` and `cfg_truncation` are left at their defaults, which are no normalisation and
    no truncation.

    Example:

    ```python
    >>> model = load_flow_model("Tongyi-MAI/Z-Image", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("ZImagePipeline",)
    default_lora_targets = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    default_guidance_scale = 5.0
    default_max_sequence_length = 512

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        super().__init__(pipeline, max_sequence_length)
        if self.pipeline.scheduler.config.shift == TURBO_SHIFT:
            self.default_guidance_scale = 1.0  # distilled for that; nothing else tells it from Z-Image

    @property
    def default_size(self) -> MediaSize:
        """What the stock pipeline makes if it is told no size."""
        return MediaSize(1024, 1024)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(C, height / f, width / f) with the VAE's factor f."""
        size, factor = size.filled(self.default_size), self.pipeline.vae_scale_factor
        sides = zip(("height", "width"), (size.height, size.width), self.transformer.config.axes_lens[1:], strict=True)
        multiple = factor * PATCH
        height, width = (check_multiple(name, side, multiple, longest * multiple) for name, side, longest in sides)
        return (self.transformer.config.in_channels, height // factor, width // factor)

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """The grid from 1 to 1 / T, shifted by the scheduler; `mu` is for checkpoints that shift dynamically."""
        from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift, get_default_z_image_sigmas

        config, (_, height, width) = self.pipeline.scheduler.config, self.latent_shape(size)
        mu = shift_by_tokens(config, calculate_shift, (height // PATCH) * (width // PATCH))
        grid = get_default_z_image_sigmas(num_steps) if num_steps > 0 else None
        return stock_sigma_table(self.pipeline.scheduler, num_steps, sigmas=grid, mu=mu)

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """`prompt_embeds` (1, L, D) with a mask, of the prompt's own length."""
        (embeds,), _ = self.pipeline.encode_prompt(
            row["prompt"],
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        longest = (self.transformer.config.axes_lens[0] - 2) // TEXT_MULTIPLE * TEXT_MULTIPLE
        if len(embeds) > longest:
            raise InputError(
                f"The prompt {row['prompt'][:40]!r}… has {len(embeds)} tokens, but the checkpoint has positions for "
                f"{longest}: use max_sequence_length={longest}."
            )
        mask = torch.ones(1, len(embeds), dtype=torch.bool, device=embeds.device)
        return Conditions({"prompt_embeds": embeds[None], "prompt_embeds_mask": mask})

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """One call of `ZImageTransformer2DModel`, whose time runs from 0 to 1 and whose output points to the data."""
        rows = zip(inputs["prompt_embeds"].to(self.dtype), inputs["prompt_embeds_mask"], strict=True)
        direction = self.transformer(
            list(latents.to(self.dtype).unsqueeze(2).unbind()),  # (C, 1, H, W) each
            (1000 - timesteps) / 1000,
            [embeds[mask] for embeds, mask in rows],
            return_dict=False,
        )[0]
        return -torch.stack(direction).squeeze(2).to(latents.dtype)

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """The VAE's decoder."""
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(scaled, return_dict=False)[0]

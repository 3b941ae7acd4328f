# SPDX-License-Identifier: Apache-2.0
"""FLUX.1: dev, schnell and Kontext."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import InputError
from omnitrl.models.base import JOINT_ATTENTION, stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.levels import even_levels, shift_by_tokens
from omnitrl.models.patches import packed, unpacked
from omnitrl.models.pictures import KLPictureModel
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, sides_of


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

FULL_AREA = 1024 * 1024
"""Pixels of the sizes that Kontext was trained on, but for what rounding their sides to multiples takes."""


class FluxModel(KLPictureModel):
    """
    `FluxPipeline`: FLUX.1-dev with its guidance scale as an input of the network, FLUX.1-schnell without.

    Of the checkpoint's `guidance_embeds` depends what a guidance scale is: an input of the network, at the cost of one
    evaluation, or classifier-free guidance with two (the stock pipeline's `true_cfg_scale`), which is off by default.
    Other defaults are those of Flow-GRPO (https://arxiv.org/abs/2505.05470): guidance 3.5, LoRA on the attention of
    all blocks and the feed-forward layers of those with two streams.

    Example:

    ```python
    >>> model = load_flow_model("black-forest-labs/FLUX.1-dev", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("FluxPipeline",)
    default_lora_targets = (
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    default_guidance_scale = 3.5
    default_max_sequence_length = 512
    longest_prompt = 512
    noise_levels = {"flow_sde": 0.9}

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        super().__init__(pipeline, max_sequence_length)
        if not self.embeds_guidance:
            self.default_guidance_scale = 1.0  # distilled to need none

    @property
    def embeds_guidance(self) -> bool:
        """What the network's config says; one that embeds guidance must be told its scale, others must not."""
        return bool(self.transformer.config.guidance_embeds)

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """`prompt_embeds` (1, L, D) of T5, padded as the network attends to padding, and CLIP's `pooled` (1, P)."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            row["prompt"], prompt_2=None, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return Conditions({"prompt_embeds": embeds, "pooled": pooled})

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
        """The pipeline's even grid, shifted by the number of image tokens where the checkpoint's scheduler does so."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config, (_, height, width) = self.pipeline.scheduler.config, self.latent_shape(size)
        mu = shift_by_tokens(config, calculate_shift, height * width // 4)
        return stock_sigma_table(self.pipeline.scheduler, num_steps, sigmas=even_levels(num_steps), mu=mu)

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """
        One call of `FluxTransformer2DModel`; `layout` is the height and width in tokens of a condition image, if any.
        """
        network, dtype = self.transformer, self.dtype
        height, width = (side // 2 for side in latents.shape[-2:])
        tokens, positions = packed(latents.to(dtype)), _positions(0, height, width, latents.device)
        if layout is not None:
            rows, columns = layout
            tokens = torch.cat([tokens, inputs["image"][:, : rows * columns].to(dtype)], dim=1)
            positions = torch.cat([positions, _positions(1, rows, columns, latents.device)])
        velocity = network(
            hidden_states=tokens,
            timestep=timesteps.to(dtype) / 1000,
            guidance=inputs.get("guidance"),
            pooled_projections=inputs["pooled"].to(dtype),
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            txt_ids=positions.new_zeros(inputs["prompt_embeds"].shape[1], 3),
            img_ids=positions,
            return_dict=False,
        )[0]
        return unpacked(velocity[:, : height * width], height, width).to(latents.dtype)


class FluxKontextModel(FluxModel):
    """
    `FluxKontextPipeline`: FLUX.1-Kontext-dev, which edits one image.

    The image is resized to the one of Kontext's preferred sizes whose sides are most like its own, and its latents
    are tokens beside those that are denoised. Guidance 2.5, as in the model's card and in Flow-GRPO.

    Example:

    ```python
    >>> model = load_flow_model("black-forest-labs/FLUX.1-Kontext-dev", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("FluxKontextPipeline",)
    default_guidance_scale = 2.5
    num_images = (1, 1)

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """Those of the prompt, and `image` (1, L, 4C), tokens of the image; the layout is their height and width."""
        (image,) = self.images(row)
        prompt = super().encode_row(row, size).positive
        height, width = self.image_size(image, size)
        pixels = self.pipeline.image_processor.preprocess(image, height=height, width=width)
        latents = self.encode_pixels(pixels.to(self.device))
        tokens = packed(latents)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        layout = (latents.shape[-2] // 2, latents.shape[-1] // 2)
        return Conditions({**prompt, "image": tokens, "image_mask": mask}, layouts=(layout,))

    def image_size(self, image: Image, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, int]:
        """
        Height and width that a condition image is resized to.

        At the checkpoint's own media size, or any other of a megapixel, it is what the stock pipeline takes. For
        smaller media the image is smaller by the same factor, since it would else be most of what the network sees.

        Args:
            image (`PIL.Image.Image`):
                The image.
            size ([`MediaSize`], *optional*):
                Of the media; the checkpoint's own by default.

        Raises:
            [`~omnitrl.errors.InputError`]: a side of the image is less than one token.
        """
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        multiple, size = 2 * self.pipeline.vae_scale_factor, size.filled(self.default_size)
        if min(image.size) < multiple:
            raise InputError(
                f"A condition image has {image.width} × {image.height} pixels, but {type(self.pipeline).__name__} "
                f"takes none with a side under {multiple}: leave the row out."
            )
        height, width = self.pipeline.image_processor.get_default_height_width(image)
        _, width, height = min((abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        area = (size.height or 0) * (size.width or 0)  # neither is None, see `filled`
        # Sides of a megapixel that are rounded down to multiples of 16 lose up to 4 % of it.
        scale = 1.0 if area >= 0.96 * FULL_AREA else (area / FULL_AREA) ** 0.5
        height, width = (max(round(side * scale / multiple), 1) * multiple for side in (height, width))
        return height, width


def _positions(image: int, height: int, width: int, device: torch.device) -> Tensor:
    """(height width, 3): the number of the image, 0 for the one that is denoised, row and column of each token."""
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    return torch.cartesian_prod(torch.tensor([image], device=device), rows, columns).float()

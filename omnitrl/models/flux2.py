# SPDX-License-Identifier: Apache-2.0
"""FLUX.2: dev with embedded guidance, klein with classifier-free guidance or distilled; both with condition images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import InputError
from omnitrl.models.base import JOINT_ATTENTION, FlowModel, stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.levels import even_levels
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, sides_of


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


PATCH = 2  # of the VAE's latents, whose patches are the channels of a position
IMAGE_AREA = 1024 * 1024  # the stock pipelines shrink larger condition images to it
IMAGE_TIME = 10  # distance of the condition images, and of the first of them from the picture, in position


class Flux2Model(FlowModel):
    """
    `Flux2Pipeline` (FLUX.2 [dev]): a Mistral text encoder, the guidance scale as an input, up to 10 condition images.

    Latents are those that the stock pipeline draws noise for: (128, height / 16, width / 16), normalised by the
    statistics that the VAE carries. LoRA is on the attention of both kinds of blocks; in the single blocks one layer
    makes queries, keys, values and the feed-forward.

    Example:

    ```python
    >>> model = load_flow_model("black-forest-labs/FLUX.2-dev", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("Flux2Pipeline",)
    default_lora_targets = (
        *JOINT_ATTENTION,
        "attn.to_qkv_mlp_proj",
    )
    default_guidance_scale = 4.0
    default_max_sequence_length = 512
    num_images = (0, 10)

    @property
    def embeds_guidance(self) -> bool:
        """As the network's configuration says."""
        return bool(self.transformer.config.guidance_embeds)

    def needs_negative(self, guidance_scale: float) -> bool:
        """Never: the stock pipeline has no classifier-free guidance."""
        return False

    @property
    def default_size(self) -> MediaSize:
        """The pipeline's; condition images do not change it."""
        side = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return MediaSize(side, side)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(4 C, height / 2f, width / 2f) with the VAE's channels C and factor f."""
        size, multiple = size.filled(self.default_size), self._multiple
        height, width = sides_of(size, multiple)
        return (self.transformer.config.in_channels, height // multiple, width // multiple)

    @property
    def _multiple(self) -> int:
        return self.pipeline.vae_scale_factor * PATCH

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """The grid from 1 to 1 / T, with the `mu` that the stock pipeline fitted to the size and the steps."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        _, height, width = self.latent_shape(size)
        mu = compute_empirical_mu(height * width, num_steps)
        return stock_sigma_table(self.pipeline.scheduler, num_steps, sigmas=even_levels(num_steps), mu=mu)

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """
        `prompt_embeds` (1, L, D) and `image_latents` (1, N, 4C), the condition images' positions one after the other.

        The layout is the (height, width) of each image in positions.
        """
        embeds, _ = self.pipeline.encode_prompt(
            row["prompt"], device=self.pipeline.text_encoder.device, max_sequence_length=self.max_sequence_length
        )
        images = [self._image_latents(image, row["prompt"]) for image in self.images(row)]
        tokens = [embeds.new_zeros(1, 0, self.transformer.config.in_channels), *(_packed(image) for image in images)]
        joined = torch.cat(tokens, dim=1)
        mask = torch.ones(joined.shape[:2], dtype=torch.bool, device=joined.device)
        layout = tuple((image.shape[2], image.shape[3]) for image in images)
        return Conditions(
            {"prompt_embeds": embeds, "image_latents": joined, "image_latents_mask": mask}, layouts=(layout,)
        )

    def _image_latents(self, image: Any, prompt: str) -> Tensor:
        """Latents (1, 4C, H, W) of a condition image, shrunk and cropped as in the stock pipeline."""
        processor, multiple = self.pipeline.image_processor, self._multiple
        try:
            processor.check_image_input(image)
        except ValueError as error:
            raise InputError(
                f"A condition image of the prompt {prompt!r} does not fit this checkpoint ({error}): one of 512 × 512 "
                "pixels does."
            ) from error
        image = processor._resize_if_exceeds_area(image, IMAGE_AREA)
        height, width = (side // multiple * multiple for side in (image.height, image.width))
        pixels = processor.preprocess(image, height=height, width=width, resize_mode="crop")
        return self.encode_pixels(pixels.to(self.pipeline.vae.device))

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """One call of `Flux2Transformer2DModel` with the condition images behind the picture."""
        tokens, embeds = _packed(latents).to(self.dtype), inputs["prompt_embeds"].to(self.dtype)
        images = inputs["image_latents"][:, : sum(height * width for height, width in layout)].to(self.dtype)
        grids = [tuple(latents.shape[2:]), *layout]
        velocity = self.transformer(
            hidden_states=torch.cat([tokens, images], dim=1),
            timestep=timesteps.to(self.dtype) / 1000,
            guidance=inputs.get("guidance"),
            encoder_hidden_states=embeds,
            txt_ids=_positions(0, (1, 1), embeds.shape[1], latents.device),
            img_ids=torch.cat([_positions(IMAGE_TIME * i, g, 1, latents.device) for i, g in enumerate(grids)], dim=1),
            return_dict=False,
        )[0]
        return velocity[:, : tokens.shape[1]].transpose(1, 2).reshape(latents.shape).to(latents.dtype)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and std (4C, 1, 1) of the VAE's latents."""
        vae = self.pipeline.vae
        mean, variance = vae.bn.running_mean[:, None, None], vae.bn.running_var[:, None, None]
        return mean, (variance + vae.config.batch_norm_eps).sqrt()

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """The VAE's decoder on the patches' pixels."""
        vae, (mean, std) = self.pipeline.vae, self._statistics()
        return vae.decode(pixel_shuffle((latents * std + mean).to(vae.dtype), PATCH), return_dict=False)[0]

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """The mode of the VAE's encoder, in patches and normalised."""
        vae, (mean, std) = self.pipeline.vae, self._statistics()
        return (pixel_unshuffle(vae.encode(pixels.to(vae.dtype)).latent_dist.mode(), PATCH) - mean) / std


class Flux2KleinModel(Flux2Model):
    """
    `Flux2KleinPipeline` (FLUX.2 [klein]): a Qwen3 text encoder; base checkpoints have classifier-free guidance,
    distilled ones none.

    Example:

    ```python
    >>> model = load_flow_model("black-forest-labs/FLUX.2-klein-base-4B", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("Flux2KleinPipeline",)

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        super().__init__(pipeline, max_sequence_length)
        if self.pipeline.config.is_distilled:
            self.default_guidance_scale = 1.0

    @property
    def embeds_guidance(self) -> bool:
        """Never: the stock pipeline gives the network none."""
        return False

    def needs_negative(self, guidance_scale: float) -> bool:
        """Distilled checkpoints (`is_distilled` in `model_index.json`) ignore the guidance scale."""
        return guidance_scale > 1.0 and not self.pipeline.config.is_distilled


def _packed(latents: Tensor) -> Tensor:
    """(B, C, H, W) as positions (B, H W, C)."""
    return latents.flatten(2).transpose(1, 2)


def _positions(time: int, grid: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    """Coordinates (1, N, 4) of a picture's grid (height, width) or of a text, in time, height, width and text."""
    sides = (torch.arange(side, device=device) for side in (*grid, length))
    return torch.cartesian_prod(torch.tensor([time], device=device), *sides)[None]

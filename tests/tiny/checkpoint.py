# SPDX-License-Identifier: Apache-2.0
"""What the tests of all families know of a tiny checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from omnitrl.models import MediaSize, family_of


def _guidance_scale(guidance):
    return {"guidance_scale": guidance}


def _as_is(model, latents, size):
    return latents


def _images(output):
    return output.images


_SMALL = MediaSize(64, 64)


@dataclass(frozen=True)
class Tiny:
    """
    A checkpoint and how the stock pipeline is called to make what omnitrl makes of it.

    Args:
        build: Makes the pipeline, the same each time.
        size: Of the media in tests, small.
        max_sequence_length: Token length of prompts.
        guidance_scale: One that guides.
        num_images: Condition images of a row.
        image_sizes: (width, height) of the condition images of successive rows.
        guidance: From the guidance scale to the stock pipeline's arguments, or to components of it.
        arguments: Further arguments of the stock call.
        media: From the stock output to its media, one for each prompt.
        latents: From (model, stock latents, size) to latents as omnitrl has them.
        negative_prompt: What the stock call is told where omnitrl's row has no negative prompt.
        loads_lora: Whether the stock pipeline has a `load_lora_weights`.
        wrapped_share: Least share of a network's weights that its blocks have; small where diffusers has the width of
            other layers in its code.
        moved_share: Least share of a network's tensors that training moves; less where some are for inputs that the
            tests' rows do not have.
    """

    build: Callable[[], Any]
    size: MediaSize = _SMALL
    max_sequence_length: int = 16
    guidance_scale: float = 4.0
    num_images: int = 0
    image_sizes: tuple[tuple[int, int], ...] = ((64, 64), (96, 64), (64, 64))
    guidance: Callable[[float], dict] = _guidance_scale
    arguments: dict = field(default_factory=dict)
    media: Callable[[Any], Any] = _images
    latents: Callable[[Any, torch.Tensor, MediaSize], torch.Tensor] = _as_is
    negative_prompt: str | None = ""
    loads_lora: bool = True
    wrapped_share: float = 0.3
    moved_share: float = 0.9

    def model(self, **options):
        """A [`FlowModel`] of it."""
        pipeline = self.build(**options)
        return family_of(type(pipeline).__name__)(pipeline, max_sequence_length=self.max_sequence_length)

    def row(self, prompt, number=0):
        """A dataset row with its condition images."""
        row = {"prompt": prompt}
        if self.num_images:
            row["images"] = [picture(number + i, self.image_sizes[number]) for i in range(self.num_images)]
        return row

    def stock(self, pipeline, row, steps, guidance, seed, output_type="pil", latents=None):
        """What the stock pipeline makes of a row."""
        arguments = {"prompt": row["prompt"], "num_inference_steps": steps, "output_type": output_type}
        sizes = {name: value for name, value in vars(self.size).items() if value is not None}
        if self.num_images:
            arguments["image"] = row["images"] if self.num_images > 1 else row["images"][0]
        if self.negative_prompt is not None:
            arguments["negative_prompt"] = row.get("negative_prompt") or self.negative_prompt
        arguments |= {"max_sequence_length": self.max_sequence_length, **sizes, **self.guidance(guidance)}
        arguments |= {"generator": torch.Generator().manual_seed(seed), **self.arguments}
        for name in arguments.keys() & pipeline.components.keys():
            setattr(pipeline, name, arguments.pop(name))
        if latents is not None:
            arguments["latents"] = latents
        return pipeline(**{key: value for key, value in arguments.items() if value is not LEFT_OUT})


LEFT_OUT = object()
"""A value in `arguments` for what a pipeline does not take."""


def picture(number, size=(64, 64)):
    """A picture of noise, another one for each number."""
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def quiet(pipeline):
    """The pipeline without its progress bar."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline

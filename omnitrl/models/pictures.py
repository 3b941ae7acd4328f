# SPDX-License-Identifier: Apache-2.0
"""What several families of pictures share: sides, the shift by the number of tokens, and the usual VAE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from omnitrl.models.base import FlowModel
from omnitrl.models.size import MediaSize, check_multiple


def sides_of(size: MediaSize, multiple: int, largest: int | None = None) -> tuple[int, int]:
    """
    Height and width of a whole size.

    Args:
        size ([`MediaSize`]):
            Filled in with the default.
        multiple (`int`):
            What the VAE and the patches of the network ask of both sides.
        largest (`int`, *optional*):
            The largest side that the checkpoint takes.

    Raises:
        [`~omnitrl.errors.InputError`]: a side does not fit; names the nearest that does.
    """
    height = check_multiple("height", size.height, multiple, largest)
    return height, check_multiple("width", size.width, multiple, largest)


def even_levels(num_steps: int) -> Any:
    """The levels 1 to 1 / T that many pipelines give their scheduler; `None` for no steps, which it refuses itself."""
    return np.linspace(1.0, 1 / num_steps, num_steps) if num_steps > 0 else None


def shift_by_tokens(
    config: Any, calculate_shift: Callable[..., float], num_tokens: int, max_shift: float = 1.15
) -> float:
    """
    The scheduler's `mu` for a number of image tokens, as stock pipelines compute it.

    Args:
        config (`FrozenDict`):
            Of the scheduler.
        calculate_shift (`Callable`):
            The pipeline's own function.
        num_tokens (`int`):
            Image tokens that the network sees.
        max_shift (`float`, defaults to 1.15):
            The pipeline's value where the config has none.
    """
    return calculate_shift(
        num_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )


class KLPictureModel(FlowModel):
    """A family whose VAE is an `AutoencoderKL` with one shift and one scale for all channels."""

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """The VAE's decoder."""
        vae = self.pipeline.vae
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(scaled.to(vae.dtype), return_dict=False)[0]

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """The mode of the VAE's encoder, shifted and scaled as the network wants it."""
        vae = self.pipeline.vae
        latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor

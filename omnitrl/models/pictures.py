# SPDX-License-Identifier: Apache-2.0
"""Families of pictures with the usual VAE."""

from __future__ import annotations

from torch import Tensor

from omnitrl.models.base import FlowModel


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

# SPDX-License-Identifier: Apache-2.0
"""Families whose media are sounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.media import Audio
from omnitrl.models.base import FlowModel
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize


class AudioModel(FlowModel):
    """
    A family whose media are sounds: latents (B, C, L); `decode_pixels` gives waveforms (B, channels, samples).

    An autoencoder makes whole blocks of samples. What it makes is cut to the exact length.
    """

    @property
    @abstractmethod
    def sampling_rate(self) -> int:
        """Samples per second."""

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize = CHECKPOINT_SIZE) -> list[Any]:
        """An [`~omnitrl.media.Audio`] of each of the clean latents (B, ...), `None` where one is not finite."""
        length = size.filled(self.default_size).audio_length
        assert length is not None  # every family of sounds has one
        waves = self.decode_pixels(latents).float().cpu()[..., : int(length * self.sampling_rate)]
        finite = waves.isfinite().flatten(1).all(dim=1).tolist()
        sounds = waves.clamp(-1, 1).numpy()
        return [Audio(sound, self.sampling_rate) if ok else None for sound, ok in zip(sounds, finite, strict=True)]

    def encode_images(self, images: Sequence[Any], size: MediaSize = CHECKPOINT_SIZE) -> Tensor:
        """Refused: a picture is no sound."""
        raise InputError(
            f"{type(self.pipeline).__name__} makes sounds, and pictures cannot take their place: give clean latents "
            f"of shape {self.latent_shape(size)}, which `encode_pixels` makes of sounds."
        )

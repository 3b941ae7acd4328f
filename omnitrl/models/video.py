# SPDX-License-Identifier: Apache-2.0
"""Families whose media are videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.media import Video
from omnitrl.models.base import FlowModel
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize


# Of all frames that are decoded together: 24 MiB of them in float32, and what the decoder has in between.
PIXELS_AT_ONCE = 2**21


class VideoModel(FlowModel):
    """
    A family whose media are videos: latents (B, C, F, H, W), pixels (B, 3, F, H, W).

    Videos are decoded one at a time, or several where they are small, and made 8-bit before the next are decoded, so
    that memory does not grow with the batch. A family whose VAE decodes all frames at once turns on its slicing of
    frames.
    """

    frame_rate: float = 16.0
    """Frames per second."""

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize = CHECKPOINT_SIZE) -> list[Any]:
        """A [`~omnitrl.media.Video`] of each of the clean latents (B, ...), `None` where one is not finite."""
        return [video for part in latents.split(self._at_once(size)) for video in self._videos(part)]

    def _at_once(self, size: MediaSize) -> int:
        """Videos that are decoded together."""
        size = size.filled(self.default_size)
        pixels = (size.height or 1) * (size.width or 1) * (size.num_frames or 1)
        return max(1, int(PIXELS_AT_ONCE / pixels))

    def _videos(self, latents: Tensor) -> list[Video | None]:
        """Videos of latents that are decoded together, whose pixels are free when this returns."""
        return [self._video(pixels) for pixels in self.decode_pixels(latents)]

    def _video(self, pixels: Tensor) -> Video | None:
        """An 8-bit video of pixels (3, F, H, W) in [-1, 1]."""
        if not bool(pixels.isfinite().all()):
            return None
        frames = (pixels.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to("cpu", torch.uint8)
        return Video(frames.permute(1, 2, 3, 0).numpy(), self.frame_rate)

    def encode_images(self, images: Sequence[Any], size: MediaSize = CHECKPOINT_SIZE) -> Tensor:
        """Refused: a picture is no video."""
        raise InputError(
            f"{type(self.pipeline).__name__} makes videos, and pictures cannot take their place: give clean latents "
            f"of shape {self.latent_shape(size)}, which `encode_pixels` makes of videos."
        )

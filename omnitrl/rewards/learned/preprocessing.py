# SPDX-License-Identifier: Apache-2.0
"""From images of any size to the square that a CLIP looks at: as the originals do it, and with a gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Preprocessing:
    """
    How images become the input of a network: bicubic to a square, then normalised.

    Args:
        size (`int`):
            Side of the square.
        fit (`str`, defaults to `"crop"`):
            `"crop"` makes the shorter side `size` and cuts out the centre; pictures are resized in 8 bit, as Pillow
            does. `"pad"` makes the longer side `size` and fills up with black; pictures are resized in floating point,
            where bicubic values may overshoot [0, 1].
        rounds_half (`bool`, defaults to `False`):
            Where an odd number of pixels is cut off, whether the offset is rounded to the even neighbour, as
            torchvision does, or down, as transformers does.
    """

    size: int
    fit: Literal["crop", "pad"] = "crop"
    rounds_half: bool = False

    def pictures(self, images: Sequence[Image.Image]) -> Tensor:
        """RGB pictures of any sizes to the input (B, 3, S, S) of the network."""
        if self.fit == "pad":
            return torch.cat([self.pixels(_as_pixels(image)) for image in images])
        return _normalised(torch.cat([_as_pixels(self._cropped(image)) for image in images]))

    def pixels(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) in [0, 1] to the input (B, 3, S, S) of the network, differentiably."""
        height, width = pixels.shape[-2:]
        if self.fit == "pad":
            return _normalised(self._padded(pixels))
        resized = _resized(pixels, _short_side(height, width, self.size)).clamp(0, 1)  # 8 bit has no overshoot
        top, left = self._offset(resized.shape[-2]), self._offset(resized.shape[-1])
        return _normalised(resized[..., top : top + self.size, left : left + self.size])

    def _cropped(self, image: Image.Image) -> Image.Image:
        height, width = _short_side(image.height, image.width, self.size)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        top, left = self._offset(height), self._offset(width)
        return image.crop((left, top, left + self.size, top + self.size))

    def _padded(self, pixels: Tensor) -> Tensor:
        height, width = pixels.shape[-2:]
        scale = self.size / max(height, width)
        height, width = round(height * scale), round(width * scale)
        above, before = (self.size - height) // 2, (self.size - width) // 2
        margins = (before, self.size - width - before, above, self.size - height - above)
        return functional.pad(_resized(pixels, (height, width)), margins)

    def _offset(self, side: int) -> int:
        return round((side - self.size) / 2) if self.rounds_half else (side - self.size) // 2


def _short_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width with a shorter side of `size`; the longer one is rounded down."""
    if height <= width:
        return size, int(size * width / height)
    return int(size * height / width), size


def _resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    return functional.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)


def _as_pixels(image: Image.Image) -> Tensor:
    """(1, 3, H, W) in [0, 1]."""
    return torch.from_numpy(np.array(image)).movedim(-1, 0)[None].float() / 255


def _normalised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    return (pixels - mean) / std

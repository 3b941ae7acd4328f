# SPDX-License-Identifier: Apache-2.0
"""
The differentiable forms of the rewards of an image's pixels.

Each takes `completions`, a tensor (B, 3, H, W) of RGB in [0, 1], and returns a tensor (B,). On 8-bit pixels the values
are those of the reward of pictures, but for the rounding of luma to 8 bit there. Roots stay away from 0, where they
have no gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, the weights of Pillow and of JPEG
_SMALLEST_VARIANCE = 1e-10  # of pixels in [0, 1]: far below what 8 bit can hold


def brightness(completions: Tensor, **kwargs: Any) -> Tensor:
    """Mean luma, in [0, 1]."""
    return _luma(completions).mean(dim=(1, 2))


def contrast(completions: Tensor, **kwargs: Any) -> Tensor:
    """Standard deviation of luma, in [0, 0.5]."""
    return _root(_luma(completions).var(dim=(1, 2), correction=0))


def saturation(completions: Tensor, **kwargs: Any) -> Tensor:
    """Mean HSV saturation, in [0, 1]."""
    high, low = completions.amax(dim=1), completions.amin(dim=1)  # (B, H, W)
    return ((high - low) / high.clamp(min=1 / 255)).mean(dim=(1, 2))


def colourfulness(completions: Tensor, **kwargs: Any) -> Tensor:
    """The measure of Hasler and Süsstrunk over 100, in [0, 3]."""
    red, green, blue = completions.unbind(dim=1)
    opponents = torch.stack([red - green, (red + green) / 2 - blue], dim=1).flatten(2)  # (B, 2, H * W)
    spread = _root(opponents.var(dim=2, correction=0).sum(dim=1))
    offset = _root(opponents.mean(dim=2).square().sum(dim=1))
    return 2.55 * (spread + 0.3 * offset)


def sharpness(completions: Tensor, **kwargs: Any) -> Tensor:
    """Variance of the Laplacian of luma from 0 to 255, over 1000."""
    luma = 255 * _luma(completions)
    padded = F.pad(luma, (1, 1, 1, 1), mode="reflect")
    neighbours = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1] + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
    return (neighbours - 4 * luma).var(dim=(1, 2), correction=0) / 1000


def _root(variance: Tensor) -> Tensor:
    return variance.clamp(min=_SMALLEST_VARIANCE).sqrt()


def _luma(pixels: Tensor) -> Tensor:
    """(B, 3, H, W) in [0, 1] to (B, H, W) in [0, 1]."""
    weights = torch.tensor(_LUMA, dtype=pixels.dtype, device=pixels.device)
    return torch.einsum("bchw,c->bhw", pixels, weights)

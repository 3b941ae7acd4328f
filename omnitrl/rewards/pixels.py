# SPDX-License-Identifier: Apache-2.0
"""
The differentiable forms of the rewards of an image's pixels.

Each takes `completions`, a tensor (B, 3, H, W) of RGB in [0, 1], and returns a tensor (B,). On 8-bit pixels the values
are those of the reward of pictures, but for the rounding of luma to 8 bit there.
"""

from typing import Any

import torch
from torch import Tensor


_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, the weights of Pillow and of JPEG


def brightness(completions: Tensor, **kwargs: Any) -> Tensor:
    """Mean luma, in [0, 1]."""
    return _luma(completions).mean(dim=(1, 2))


def _luma(pixels: Tensor) -> Tensor:
    """(B, 3, H, W) in [0, 1] to (B, H, W) in [0, 1]."""
    weights = torch.tensor(_LUMA, dtype=pixels.dtype, device=pixels.device)
    return torch.einsum("bchw,c->bhw", pixels, weights)

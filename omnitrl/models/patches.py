# SPDX-License-Identifier: Apache-2.0
"""Latents as the tokens of networks that see patches of 2 × 2."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle


def packed(latents: Tensor) -> Tensor:
    """
    Tokens of latents, row by row, with the four elements of a patch beside each other in each channel.

    Args:
        latents (`Tensor`):
            (B, C, H, W) with even H and W.

    Returns:
        `Tensor`: (B, H W / 4, 4 C).
    """
    return pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """
    The opposite of [`packed`].

    Args:
        tokens (`Tensor`):
            (B, height width, 4 C).
        height, width (`int`):
            In tokens.

    Returns:
        `Tensor`: (B, C, 2 height, 2 width).
    """
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (height, width)), 2)

# SPDX-License-Identifier: Apache-2.0
"""What rewards accept as an image, and the one place where it becomes a PIL image."""

from typing import Any

import numpy as np
import torch
from PIL import Image

from .contract import RewardError


# A float image may overshoot [0, 1] a little where a decoder does. Beyond this it has another range, [-1, 1] or [0,
# 255].
_FLOAT_RANGE = (-0.5, 1.5)


def to_pil(image: Any) -> Image.Image:
    """
    Converts an image to an RGB PIL image.

    Args:
        image (`PIL.Image.Image`, `np.ndarray` or `torch.Tensor`):
            Arrays are `(H, W)` or `(H, W, C)`, tensors `(H, W)` or `(C, H, W)`, with `C` in 1, 3, 4; either `uint8`
            or floating point in [0, 1], which is rounded to 8 bit and clamped. An alpha channel is dropped.

    Returns:
        `PIL.Image.Image` in mode RGB; the same object if it is one already.

    Raises:
        [`RewardError`]: for another type, shape or range, a video among them.
        `ValueError`: for NaN or infinite pixels.

    Example:

    ```python
    >>> import torch
    >>> from omnitrl.rewards import to_pil

    >>> to_pil(torch.ones(3, 32, 64)).size
    (64, 32)
    ```
    """
    if isinstance(image, Image.Image):
        return image if image.mode == "RGB" else image.convert("RGB")
    if isinstance(image, torch.Tensor):
        tensor = image.detach().cpu()
        pixels = (
            (tensor.movedim(0, -1) if tensor.ndim == 3 else tensor)
            .to(torch.float32 if tensor.is_floating_point() else tensor.dtype)
            .numpy()
        )
    elif isinstance(image, np.ndarray):
        pixels = image
    else:
        raise RewardError(f"expected an image (PIL, uint8 array or float tensor), got {type(image).__name__}.")
    if pixels.ndim == 4:
        raise RewardError(
            f"expected an image, got a video or batch of shape {tuple(image.shape)}: this reward scores single images."
        )
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in (1, 3, 4)):
        raise RewardError(
            f"expected an image as an (H, W, 3) array or a (3, H, W) tensor, got {type(image).__name__} of shape "
            f"{tuple(image.shape)}."
        )
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    return Image.fromarray(_to_uint8(pixels)).convert("RGB")


def _to_uint8(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return np.ascontiguousarray(pixels)
    if not np.issubdtype(pixels.dtype, np.floating):
        raise RewardError(f"expected uint8 or floating point pixels, got {pixels.dtype}.")
    low, high = float(pixels.min()), float(pixels.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("the image has NaN or infinite pixels.")
    if low < _FLOAT_RANGE[0] or high > _FLOAT_RANGE[1]:
        raise RewardError(
            f"expected floating point pixels in [0, 1], got the range [{low:.3g}, {high:.3g}]: pass for example "
            f"`image / 2 + 0.5` for an image in [-1, 1]."
        )
    return (pixels.astype(np.float32) * 255).round().clip(0, 255).astype(np.uint8)


def is_broken(completion: Any) -> bool:
    """
    Whether there is nothing to score: `None`, or a floating point tensor or array with NaN or infinity.

    A decoder that overflows gives NaN, which turns black once it is 8 bit: that must not be scored as a picture.
    """
    if completion is None:
        return True
    if isinstance(completion, torch.Tensor):
        return completion.is_floating_point() and not bool(torch.isfinite(completion).all())
    if isinstance(completion, np.ndarray):
        return bool(np.issubdtype(completion.dtype, np.floating) and not np.isfinite(completion).all())
    return False

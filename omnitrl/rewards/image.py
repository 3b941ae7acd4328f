# SPDX-License-Identifier: Apache-2.0
"""Rewards of an image's pixels that need no model."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import pixels
from .media import to_pil
from .traits import differentiable_as


_JPEG_QUALITY = 95


def _jpeg_kilobytes(image: Any) -> float:
    buffer = io.BytesIO()
    to_pil(image).save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    return buffer.tell() / 1000


def jpeg_compressibility_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""
    Rewards images that compress well: minus the size of the JPEG file in units of 500 kB.

    From DDPO ([Training Diffusion Models with Reinforcement Learning](https://huggingface.co/papers/2305.13301)), with
    the scale of flow_grpo: \\( -\mathrm{bytes} / 1000 / 500 \\) at quality 95 and Pillow's 4:2:0 subsampling. Range
    \\( (-\infty, 0) \\): at 512×512 between -0.01 for one plain colour and -0.62 for noise.

    Args:
        completions (`list`):
            Images: PIL, `uint8` arrays `(H, W, C)`, or float tensors `(C, H, W)` in [0, 1].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.

    Example:

    ```python
    >>> from PIL import Image
    >>> from omnitrl.rewards import jpeg_compressibility_reward

    >>> jpeg_compressibility_reward([Image.new("RGB", (8, 8))])[0] < 0
    True
    ```
    """
    return [-_jpeg_kilobytes(image) / 500 for image in completions]


def jpeg_incompressibility_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""
    Rewards images with much detail: the size of the JPEG file in kB (1000 bytes).

    From DDPO ([Training Diffusion Models with Reinforcement Learning](https://huggingface.co/papers/2305.13301)).
    Quality 95, Pillow's 4:2:0 subsampling. Range \\( (0, \infty) \\), growing with the number of pixels.

    Args:
        completions (`list`):
            Images, as for [`jpeg_compressibility_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.
    """
    return [_jpeg_kilobytes(image) for image in completions]


@differentiable_as(pixels.brightness)
def brightness_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    Rewards bright images: the mean luma (ITU-R 601: 0.299 R + 0.587 G + 0.114 B).

    Range [0, 1]: 0 for black, 1 for white. Dense and cheap, which makes it the reward to try first with a new model:
    if it does not rise within some tens of updates, the fault is not in the reward.

    Args:
        completions (`list`):
            Images, as for [`jpeg_compressibility_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.
    """
    return [float(np.asarray(to_pil(image).convert("L"), dtype=np.float64).mean() / 255) for image in completions]

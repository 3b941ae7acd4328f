# SPDX-License-Identifier: Apache-2.0
"""
Statistics of one image: what the rewards of pixels are made of, and what is worth watching beside any reward.

Each takes an image in any form that [`to_pil`] does, and looks at its 8-bit pixels. Luma is that of ITU-R 601,
0.299 R + 0.587 G + 0.114 B, as Pillow rounds it.
"""

import io
from typing import Any

import numpy as np

from .contract import RewardError
from .media import to_pil


_JPEG_QUALITY = 95


def brightness(image: Any) -> float:
    """
    Mean luma, in [0, 1].

    Args:
        image (`PIL.Image.Image`, `np.ndarray` or `torch.Tensor`):
            The image.

    Returns:
        `float`: 0 for black, 1 for white.
    """
    return float(_luma(image).mean() / 255)


def contrast(image: Any) -> float:
    """
    Standard deviation of luma, in [0, 0.5].

    Args:
        image (`PIL.Image.Image`, `np.ndarray` or `torch.Tensor`):
            The image.

    Returns:
        `float`: 0 for one shade, 0.5 for half black and half white.
    """
    return float(_luma(image).std() / 255)


def entropy(image: Any) -> float:
    r"""
    Entropy of the distribution of luma over its 256 levels, in bits, in [0, 8].

    \\( -\sum_k p_k \log_2 p_k \\). It falls when pictures become flat, and where pixels are does not matter to it.

    Args:
        image (`PIL.Image.Image`, `np.ndarray` or `torch.Tensor`):
            The image.

    Returns:
        `float`: 0 for one shade, 1 for half black and half white, 8 for all levels alike.
    """
    counts = np.bincount(_luma(image).astype(np.uint8).ravel(), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0  # no minus in front of a zero


def saturation(image: Any) -> float:
    """
    Mean saturation of the HSV model, `(max - min) / max` of a pixel's channels, in [0, 1].

    Args:
        image (`PIL.Image.Image`, `np.ndarray` or `torch.Tensor`):
            The image.

    Returns:
        `float`: 0 for greys, and 1 where each pixel lacks a primary colour. A black pixel counts as 0.
    """
    pixels = _rgb(image)
    high, low = pixels.max(axis=-1), pixels.min(axis=-1)
    return float(((high - low) / np.maximum(high, 1)).mean())


def colourfulness(image: Any) -> float:
    r"""
    The measure M of Hasler and Süsstrunk, of RGB from 0 to 255.

    With \\( rg = R - G \\) and \\( yb = (R + G) / 2 - B \\), and mean and standard deviation of each over all pixels,

    $$ M = \sqrt{\sigma_{rg}^2 + \sigma_{yb}^2} + 0.3 \sqrt{\mu_{rg}^2 + \mu_{yb}^2} $$

    From [Measuring colourfulness in natural images](https://doi.org/10.1117/12.477378) (2003), whose viewers called 15
    slightly, 33 moderately, 45 averagely, 59 quite, 82 highly and 109 extremely colourful.

    Args:
        image (`PIL.Image.Image`, `np.ndarray` or `torch.Tensor`):
            The image.

    Returns:
        `float`: 0 for greys; below 300.
    """
    red, green, blue = np.moveaxis(_rgb(image), -1, 0)
    red_green, yellow_blue = red - green, (red + green) / 2 - blue
    spread = np.hypot(red_green.std(), yellow_blue.std())
    return float(spread + 0.3 * np.hypot(red_green.mean(), yellow_blue.mean()))


def sharpness(image: Any) -> float:
    """
    Variance of the Laplacian of luma from 0 to 255.

    The kernel is `[[0, 1, 0], [1, -4, 1], [0, 1, 0]]`, and pixels beyond the border are mirrored without the border
    itself, as in OpenCV's `cv2.Laplacian(grey, cv2.CV_64F).var()`. Photographs below some 100 are often
    taken for blurred. Noise is sharp too.

    Args:
        image (`PIL.Image.Image`, `np.ndarray` or `torch.Tensor`):
            The image, of at least 2×2 pixels.

    Returns:
        `float`: 0 for one shade, at most 1020² for a chequerboard of pixels.

    Raises:
        [`RewardError`]: for an image of one row or column.
    """
    luma = _luma(image)
    if min(luma.shape) < 2:
        height, width = luma.shape
        raise RewardError(f"sharpness needs an image of at least 2×2 pixels, got {height}×{width}.")
    padded = np.pad(luma, 1, mode="reflect")
    neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return float((neighbours - 4 * luma).var())


def jpeg_kilobytes(image: Any) -> float:
    """
    Size of the image as a JPEG file of quality 95 with Pillow's 4:2:0 subsampling, in kB of 1000 bytes.

    Args:
        image (`PIL.Image.Image`, `np.ndarray` or `torch.Tensor`):
            The image.

    Returns:
        `float`: above 0, growing with the number of pixels and with detail.
    """
    buffer = io.BytesIO()
    to_pil(image).save(buffer, format="JPEG", quality=_JPEG_QUALITY)
    return buffer.tell() / 1000


def _luma(image: Any) -> np.ndarray:
    return np.asarray(to_pil(image).convert("L"), dtype=np.float64)  # (H, W), 0 to 255


def _rgb(image: Any) -> np.ndarray:
    return np.asarray(to_pil(image), dtype=np.float64)  # (H, W, 3), 0 to 255

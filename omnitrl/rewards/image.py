# SPDX-License-Identifier: Apache-2.0
"""Rewards of an image's pixels that need no model."""

from collections.abc import Callable, Sequence
from typing import Any

from . import pixels, statistics
from .media import pictures
from .traits import differentiable_as, reward_traits


_of_an_image = reward_traits(media="image", deterministic=True)


def _each(statistic: Callable[[Any], float], completions: Sequence[Any], unit: float = 1.0) -> list[float]:
    return [statistic(picture) / unit for picture in pictures(completions)]


@_of_an_image
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

    Raises:
        [`RewardError`]: for what is no image, such as a video: see [`framewise`].
        `ValueError`: for NaN or infinite pixels, as do all rewards of images.

    Example:

    ```python
    >>> from PIL import Image
    >>> from omnitrl.rewards import jpeg_compressibility_reward

    >>> jpeg_compressibility_reward([Image.new("RGB", (8, 8))])[0] < 0
    True
    ```
    """
    return _each(statistics.jpeg_kilobytes, completions, -500)


@_of_an_image
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
    return _each(statistics.jpeg_kilobytes, completions)


@differentiable_as(pixels.brightness)
@_of_an_image
def brightness_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    Rewards bright images: the mean luma (ITU-R 601: 0.299 R + 0.587 G + 0.114 B).

    Range [0, 1]: 0 for black, 1 for white. Dense and cheap, which makes it the reward to try first with a new model:
    if it does not rise within some tens of updates, the fault is not in the reward. It has a differentiable form.

    Args:
        completions (`list`):
            Images, as for [`jpeg_compressibility_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.
    """
    return _each(statistics.brightness, completions)


@differentiable_as(pixels.contrast)
@_of_an_image
def contrast_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    Rewards contrast: the standard deviation of luma in [0, 1].

    Range [0, 0.5]: 0 for one shade, 0.5 for half black and half white. It has a differentiable form.

    Args:
        completions (`list`):
            Images, as for [`jpeg_compressibility_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.
    """
    return _each(statistics.contrast, completions)


@_of_an_image
def entropy_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    Rewards images that use many shades: the entropy of luma, as a share of the 8 bits that there are.

    Range [0, 1]: 0 for one shade, 1/8 for half black and half white. See [`~omnitrl.rewards.statistics.entropy`]. With
    weight 0 it shows a collapse to flat pictures.

    Args:
        completions (`list`):
            Images, as for [`jpeg_compressibility_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.
    """
    return _each(statistics.entropy, completions, 8)


@differentiable_as(pixels.saturation)
@_of_an_image
def saturation_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    Rewards saturated colours: the mean saturation of the HSV model.

    Range [0, 1]: 0 for greys, 1 for pure colours, however dark. It has a differentiable form.

    Args:
        completions (`list`):
            Images, as for [`jpeg_compressibility_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.
    """
    return _each(statistics.saturation, completions)


@differentiable_as(pixels.colourfulness)
@_of_an_image
def colourfulness_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    Rewards colourful images: the measure of Hasler and Süsstrunk over 100.

    Range [0, 3): 0 for greys, 0.33 for what people call moderately and 1.09 for what they call extremely colourful.
    From [Measuring colourfulness in natural images](https://doi.org/10.1117/12.477378) (2003); the formula is in
    [`~omnitrl.rewards.statistics.colourfulness`]. It has a differentiable form.

    Args:
        completions (`list`):
            Images, as for [`jpeg_compressibility_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.
    """
    return _each(statistics.colourfulness, completions, 100)


@differentiable_as(pixels.sharpness)
@_of_an_image
def sharpness_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    Rewards sharp images: the variance of the Laplacian of luma from 0 to 255, over 1000.

    Range [0, 1040.4]; photographs below some 0.1 are often taken for blurred. Kernel and border are in
    [`~omnitrl.rewards.statistics.sharpness`]. Noise is sharp too, so give it a small weight, or a reward beside it
    that dislikes noise. It has a differentiable form.

    Args:
        completions (`list`):
            Images of at least 2×2 pixels, as for [`jpeg_compressibility_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: one number per image.
    """
    return _each(statistics.sharpness, completions, 1000)

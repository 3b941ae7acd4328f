# SPDX-License-Identifier: Apache-2.0
"""What rewards accept as an image, a video or a sound, and the one place where it becomes one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from omnitrl.media import Audio, Video

from .contract import RewardError
from .kinds import media_kind


# A float image may overshoot [0, 1] a little where a decoder does. Beyond this it has another range, [-1, 1] or [0,
# 255].
_FLOAT_RANGE = (-0.5, 1.5)

T = TypeVar("T")


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
    if media_kind(image) == "video":
        raise RewardError(
            f"expected an image, got {_described(image)}: this reward scores single images. For videos, pass "
            f"framewise(reward), which scores their frames."
        )
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
        raise RewardError(f"expected an image (PIL, uint8 array or float tensor), got {_described(image)}.")
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


def pictures(completions: Sequence[Any]) -> list[Image.Image]:
    """
    All completions as RGB PIL images; see [`to_pil`].

    Raises:
        [`RewardError`], `ValueError`: as `to_pil`, with the place of the first that is none.
    """
    return [_at(row, to_pil, completion) for row, completion in enumerate(completions)]


def video_frames(video: Any) -> np.ndarray:
    """
    Converts a video to its frames.

    Args:
        video ([`~omnitrl.media.Video`], `np.ndarray`, `torch.Tensor` or `list`):
            Arrays are `(F, H, W, C)`, tensors `(F, C, H, W)`, `uint8` or floating point in [0, 1]; lists hold
            images of one size.

    Returns:
        `np.ndarray`: (F, H, W, 3) uint8.

    Raises:
        [`RewardError`]: for what is no video, or has no frame.
        `ValueError`: for NaN or infinite pixels.
    """
    if isinstance(video, Video):
        frames = video.frames
    elif media_kind(video) == "video":
        frames = np.stack([np.asarray(to_pil(frame)) for frame in video]) if len(video) else np.zeros((0, 0, 0, 3))
    else:
        raise RewardError(
            f"expected a video (a Video, a uint8 array (F, H, W, 3) or a list of images), got {_described(video)}: "
            f"this reward scores videos only."
        )
    if not len(frames):
        raise RewardError("expected a video, got one without a frame.")
    return frames


def videos(completions: Sequence[Any]) -> list[np.ndarray]:
    """The frames of all completions; see `video_frames`, whose errors get the place of the first that is no video."""
    return [_at(row, video_frames, completion) for row, completion in enumerate(completions)]


def to_audio(value: Any) -> Audio:
    """
    The sound of a completion.

    Args:
        value ([`~omnitrl.media.Audio`] or [`~omnitrl.media.Video`]):
            A sound, or a video that has one.

    Returns:
        [`~omnitrl.media.Audio`]

    Raises:
        [`RewardError`]: for anything else, a video without sound and a sound without a sample among them.
        `ValueError`: for NaN or infinite samples.
    """
    audio = value.audio if isinstance(value, Video) else value
    if not isinstance(audio, Audio):
        what = "a video without sound" if isinstance(value, Video) else _described(value)
        raise RewardError(
            f"expected a sound (Audio, or a Video with one), got {what}: this reward scores sounds only."
        )
    if not audio.samples.size:
        raise RewardError("expected a sound, got one without a sample.")
    if not np.isfinite(audio.samples).all():
        raise ValueError("the sound has NaN or infinite samples.")
    return audio


def sounds(completions: Sequence[Any]) -> list[Audio]:
    """The sounds of all completions; see `to_audio`, whose errors get the place of the first that is none."""
    return [_at(row, to_audio, completion) for row, completion in enumerate(completions)]


def durations(completions: Sequence[Any]) -> list[float]:
    """Seconds of videos and sounds."""
    return [_at(row, _seconds, completion) for row, completion in enumerate(completions)]


def _seconds(value: Any) -> float:
    return len(value) / value.frame_rate if isinstance(value, Video) else to_audio(value).duration


def sizes(completions: Sequence[Any]) -> list[tuple[int, int]]:
    """Height and width of images and videos."""
    return [_at(row, _size, completion) for row, completion in enumerate(completions)]


def _size(value: Any) -> tuple[int, int]:
    if media_kind(value) == "video":
        height, width = video_frames(value).shape[1:3]
        return height, width
    picture = to_pil(value)
    return picture.height, picture.width


def _at(row: int, convert: Callable[[Any], T], completion: Any) -> T:
    try:
        return convert(completion)
    except (RewardError, ValueError) as error:
        raise type(error)(f"completions[{row}]: {error}") from error


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray | torch.Tensor):
        if value.ndim == 4:
            return f"a video or batch of shape {tuple(value.shape)}"
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, Image.Image):
        return f"an image of {value.height}×{value.width}"
    return {Video: "a video", Audio: "a sound", list: "a list"}.get(type(value), type(value).__name__)


def is_broken(completion: Any) -> bool:
    """
    Whether there is nothing to score: `None`, or a sound or a floating point tensor or array with NaN or infinity.

    A decoder that overflows gives NaN, which turns black once it is 8 bit: that must not be scored as a picture.
    """
    if completion is None:
        return True
    if isinstance(completion, Audio):
        return not bool(np.isfinite(completion.samples).all())
    if isinstance(completion, torch.Tensor):
        return completion.is_floating_point() and not bool(torch.isfinite(completion).all())
    if isinstance(completion, np.ndarray):
        return bool(np.issubdtype(completion.dtype, np.floating) and not np.isfinite(completion).all())
    return False

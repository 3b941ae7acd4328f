# SPDX-License-Identifier: Apache-2.0
"""Rewards of how a video moves, without a model. For how it looks, see [`framewise`]."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from omnitrl.errors import InputError

from .media import videos
from .traits import RewardTraits, reward_traits


_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601
_STATIC = 0.005  # 1.3 of 255 levels


@reward_traits(media="video", deterministic=True)
def motion_reward(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """
    Rewards motion: the mean absolute difference of luma between neighbouring frames.

    Range [0, 1]: 0 for a still, 1 for frames that change between black and white. A measure of energy, which flicker,
    noise and cuts raise as well as movement does: set [`flicker_reward`] beside it.

    Args:
        completions (`list`):
            Videos: [`~omnitrl.media.Video`], `uint8` arrays `(F, H, W, C)` or lists of images.
        **kwargs:
            Ignored.

    Returns:
        `list[float | None]`: one number per video, `None` for a single frame.

    Raises:
        [`RewardError`]: for what is no video.

    Example:

    ```python
    >>> import numpy as np
    >>> from omnitrl.media import Video
    >>> from omnitrl.rewards import motion_reward

    >>> frames = np.zeros((3, 8, 8, 3), dtype=np.uint8)
    >>> frames[1] = 255
    >>> motion_reward([Video(frames, 8.0)])
    [1.0]
    ```
    """
    return [_motion(frames) for frames in videos(completions)]


@reward_traits(media="video", deterministic=True)
def flicker_reward(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """
    Penalises flicker: minus the mean absolute second difference of the frames' mean luma.

    Range [-2, 0]: 0 for brightness that is constant or changes at a constant rate, -2 for frames that change between
    black and white.

    Args:
        completions (`list`):
            Videos, as for [`motion_reward`].
        **kwargs:
            Ignored.

    Returns:
        `list[float | None]`: one number per video, `None` for fewer than three frames.
    """
    return [_flicker(frames) for frames in videos(completions)]


class MovingReward:
    """
    A rule against stills: 1.0 for a video that moves, 0.0 for one that does not.

    Range 0 or 1. Models that are rewarded for the looks of single frames drift towards videos that stand still.

    Args:
        threshold (`float`, *optional*, defaults to `0.005`):
            The value of [`motion_reward`] from which on a video moves, in (0, 1].

    Raises:
        [`~omnitrl.errors.InputError`]: for another threshold.
    """

    traits = RewardTraits(media=("video",), deterministic=True)

    def __init__(self, threshold: float = _STATIC):
        if not 0 < threshold <= 1:
            raise InputError(f"threshold={threshold} must be above 0 and at most 1: use {_STATIC}.")
        self.threshold = threshold

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        """
        Scores videos.

        Args:
            completions (`list`):
                Videos, as for [`motion_reward`].
            **kwargs:
                Ignored.

        Returns:
            `list[float | None]`: 0.0 or 1.0 per video, `None` for a single frame.
        """
        motions = motion_reward(completions)
        return [None if motion is None else float(motion >= self.threshold) for motion in motions]


def _motion(frames: np.ndarray) -> float | None:
    if len(frames) < 2:
        return None
    # Frame by frame: differences of a whole video in float64 would be 8 times its size.
    lumas = (frame @ _LUMA for frame in frames)
    before = next(lumas)
    total = 0.0
    for luma in lumas:
        total += float(np.abs(luma - before).mean())
        before = luma
    return total / (len(frames) - 1) / 255


def _flicker(frames: np.ndarray) -> float | None:
    if len(frames) < 3:
        return None
    levels = frames.mean(axis=(1, 2), dtype=np.float64) @ _LUMA  # (F,)
    return -float(np.abs(np.diff(levels, n=2)).mean() / 255) + 0.0  # no minus in front of a zero

# SPDX-License-Identifier: Apache-2.0
"""Rules for sounds, without a model. A video that has a sound is taken as that sound."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from omnitrl.errors import InputError
from omnitrl.media import Audio

from .media import durations, sounds
from .traits import RewardTraits


_WINDOW_SECONDS = 0.02


class LoudnessReward:
    r"""
    Rewards sounds whose level is in a range.

    The level is \\( 20 \log_{10} \\) of the root mean square over all samples and channels, in dB of full scale: 0 for
    a full-scale square wave, -3.01 for a full-scale sine, \\( -\infty \\) for silence. It knows nothing of hearing,
    unlike LUFS. Range [0, 1]: 1 within the bounds, falling linearly to 0 at `tolerance` beyond them.

    Args:
        low (`float`, *optional*, defaults to `-30.0`):
            The lower bound in dB.
        high (`float`, *optional*, defaults to `-10.0`):
            The upper bound in dB.
        tolerance (`float`, *optional*, defaults to `10.0`):
            Where the reward is 0, in dB beyond a bound; above 0.

    Raises:
        [`~omnitrl.errors.InputError`]: for bounds in the wrong order or a tolerance that is not above 0.

    Example:

    ```python
    >>> import numpy as np
    >>> from omnitrl.media import Audio
    >>> from omnitrl.rewards import LoudnessReward

    >>> LoudnessReward()(completions=[Audio(np.full((1, 100), 0.1, dtype=np.float32), 16000)])  # -20 dB
    [1.0]
    ```
    """

    traits = RewardTraits(media=("audio",), deterministic=True)

    def __init__(self, low: float = -30.0, high: float = -10.0, tolerance: float = 10.0):
        if not low < high or not tolerance > 0:
            raise InputError(
                f"low={low}, high={high}, tolerance={tolerance}: low must be below high and tolerance above 0, for "
                "example -30, -10 and 10."
            )
        self.low, self.high, self.tolerance = low, high, tolerance

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """
        Scores sounds.

        Args:
            completions (`list`):
                [`~omnitrl.media.Audio`], or [`~omnitrl.media.Video`] with sound.
            **kwargs:
                Ignored.

        Returns:
            `list[float]`: one number per sound.
        """
        return [self._score(_decibels(audio.samples)) for audio in sounds(completions)]

    def _score(self, level: float) -> float:
        beyond = max(self.low - level, level - self.high, 0.0)
        return max(0.0, 1.0 - beyond / self.tolerance)


class SilenceReward:
    """
    Penalises silence: minus the share of a sound that is silent.

    Range [-1, 0]. The sound is cut into windows of 20 ms, the last of which may be shorter, and a window is silent if
    its level over all channels is below the threshold; see [`LoudnessReward`].

    Args:
        threshold (`float`, *optional*, defaults to `-60.0`):
            In dB of full scale.
    """

    traits = RewardTraits(media=("audio",), deterministic=True)

    def __init__(self, threshold: float = -60.0):
        self.threshold = threshold

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """
        Scores sounds.

        Args:
            completions (`list`):
                [`~omnitrl.media.Audio`], or [`~omnitrl.media.Video`] with sound.
            **kwargs:
                Ignored.

        Returns:
            `list[float]`: one number per sound.
        """
        return [-self._silent_share(audio) + 0.0 for audio in sounds(completions)]  # no minus in front of a zero

    def _silent_share(self, audio: Audio) -> float:
        width = max(round(_WINDOW_SECONDS * audio.sampling_rate), 1)
        count = audio.samples.shape[1]
        windows = [audio.samples[:, start : start + width] for start in range(0, count, width)]
        silent = sum(window.shape[1] for window in windows if _decibels(window) < self.threshold)
        return silent / count


class DurationReward:
    r"""
    Rewards sounds and videos of the length that is asked for: \\( \min(d / w, w / d) \\) of the seconds there are and
    those wanted.

    Range [0, 1]. A row's column `duration` counts before the length that is given here; a row with neither has no
    reward (`None`).

    Args:
        seconds (`float`, *optional*):
            The length for rows without a column `duration`.

    Raises:
        [`~omnitrl.errors.InputError`]: for a length that is not above 0.
    """

    traits = RewardTraits(media=("audio", "video"), deterministic=True)

    def __init__(self, seconds: float | None = None):
        if seconds is not None and not seconds > 0:
            raise InputError(f"seconds={seconds} must be above 0: give for example 10.0.")
        self.seconds = seconds

    def __call__(
        self, completions: Sequence[Any], duration: Sequence[float | None] | None = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Scores sounds and videos.

        Args:
            completions (`list`):
                [`~omnitrl.media.Audio`] or [`~omnitrl.media.Video`]; of a video, its frames count.
            duration (`list[float]`, *optional*):
                The dataset's column of wanted seconds.
            **kwargs:
                Ignored.

        Returns:
            `list[float | None]`: one number per row, `None` where no length is asked for.
        """
        asked = duration or [None] * len(completions)
        return [
            self._score(row, seconds, self.seconds if wanted is None else wanted)
            for row, (seconds, wanted) in enumerate(zip(durations(completions), asked, strict=True))
        ]

    @staticmethod
    def _score(row: int, seconds: float, wanted: float | None) -> float | None:
        if wanted is None:
            return None
        if not wanted > 0:
            raise InputError(f"duration[{row}]={wanted} must be above 0: give for example 10.0.")
        return min(seconds / wanted, wanted / seconds)


def _decibels(samples: np.ndarray) -> float:
    power = float(np.square(samples, dtype=np.float64).mean())
    return 10 * math.log10(power) if power > 0 else -math.inf

# SPDX-License-Identifier: Apache-2.0
"""Which frames of a video a reward of images looks at, and how their values become one."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from omnitrl.errors import InputError

from .contract import Reward, RewardError, RewardFunc, callable_name
from .media import videos
from .registry import get_reward
from .traits import RewardTraits, traits_of


_ENDS = {"first": [0], "last": [-1], "first_last": [0, -1]}
_NOT_PER_ROW = {"trainer_state", "log_metric", "log_extra"}  # of the keywords of a reward


def _mean_above_zero(values: list[float]) -> float:
    above = [value for value in values if value > 0]
    return float(np.mean(above)) if above else 0.0


_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "median": lambda values: float(np.median(values)),
    "min": min,
    "max": max,
    "mean_above_zero": _mean_above_zero,
}


def framewise(reward: "str | RewardFunc", frames: "str | int | slice" = "all", reduce: str = "mean") -> RewardFunc:
    """
    Makes a reward of videos out of one of images.

    The chosen frames of all videos are handed to the reward as one batch of PIL images, with the prompt and the
    columns of their video, in parts of its `batch_size` where its traits name one. A groupwise reward is called once
    for each chosen frame, with that frame of all members of the group. What it logs with `log_extra` becomes a list
    for each video. A reward that asks for processes of its own (`in_process`) runs in a thread here.

    Args:
        reward (`Callable` or `str`):
            Any reward of images: a function, an `async` one, an object, a module or a name.
        frames (`str`, `int` or `slice`, *optional*, defaults to `"all"`):
            `"all"`, `"first"`, `"last"`, `"first_last"`, a number of frames evenly spaced from the first to the last
            (1 takes the middle one), or a slice, such as `slice(None, None, 4)` for every fourth.
        reduce (`str`, *optional*, defaults to `"mean"`):
            `"mean"`, `"median"`, `"min"`, `"max"`, or `"mean_above_zero"`, the mean of the frames that score above 0
            and 0 if there are none. Frames for which the reward does not apply (`None`) are left out; a frame for
            which it fails (NaN) makes it fail for the video.

    Returns:
        `Callable`: the reward of videos, named like the other with `_frames` behind.

    Raises:
        [`~omnitrl.errors.InputError`]: for an unknown choice, and for a reward that takes no images.

    Example:

    ```python
    >>> import numpy as np
    >>> from omnitrl.media import Video
    >>> from omnitrl.rewards import framewise

    >>> pixels = np.zeros((4, 16, 16, 3), dtype=np.uint8)
    >>> pixels[-1] = 255
    >>> brightest = framewise("brightness", frames="first_last", reduce="max")
    >>> brightest(prompts=["dawn"], completions=[Video(pixels, 8.0)])
    [1.0]
    ```
    """
    function = get_reward(reward)
    traits = traits_of(function)
    inner = Reward.from_callable(function, callable_name(function))
    if traits.media and "image" not in traits.media:
        raise InputError(
            f"framewise(reward) takes a reward of images, but {inner.name!r} scores {' and '.join(traits.media)}: "
            "give it to the trainer as it is."
        )
    check_frames(frames, reduce)

    def begin(completions: Sequence[Any], columns: dict[str, Any]) -> _Frames:
        return _Frames(inner, traits, frames, reduce, completions, columns)

    score = _asynchronous(begin) if inner.is_async else _synchronous(begin)
    score.__name__ = f"{inner.name}_frames"
    score.__signature__ = _signature(inner)  # type: ignore[attr-defined]
    score.traits = replace(traits, media=("video",), batch_size=None, in_process=False)  # type: ignore[attr-defined]
    score.to = inner.move  # type: ignore[attr-defined] # a model goes to the device that rewards are to run on
    return score


def _synchronous(begin: "Callable[[Sequence[Any], dict[str, Any]], _Frames]") -> RewardFunc:
    def score(*, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        work = begin(completions, columns)
        for batch in work.batches:
            work.add(batch, work.inner.call(work.arguments(batch)))
        return work.values()

    return score


def _asynchronous(begin: "Callable[[Sequence[Any], dict[str, Any]], _Frames]") -> RewardFunc:
    async def score(*, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        work = begin(completions, columns)
        for batch in work.batches:
            work.add(batch, await work.inner.call(work.arguments(batch)))
        return work.values()

    return score


def _signature(inner: Reward) -> inspect.Signature:
    """Columns that the inner reward cannot do without are required of the dataset for videos too."""
    names = ["completions", *sorted(inner.requires - {"completions"})]
    required = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return inspect.Signature([*required, inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)])


class _Frames:
    """The chosen frames of some videos on their way through a reward of images."""

    def __init__(
        self,
        inner: Reward,
        traits: RewardTraits,
        frames: "str | int | slice",
        reduce: str,
        completions: Sequence[Any],
        columns: dict[str, Any],
    ):
        self.inner = inner
        self._reduce = reduce
        self._columns = columns
        self._pictures: list[Image.Image] = []
        self._rows: list[int] = []  # of each picture
        self._members: list[list[int]] = []  # the pictures of each video
        for row, pixels in enumerate(videos(completions)):
            chosen = frame_indices(frames, len(pixels))
            self._members.append(list(range(len(self._pictures), len(self._pictures) + len(chosen))))
            self._pictures += [Image.fromarray(pixels[i]) for i in chosen]
            self._rows += [row] * len(chosen)
        self._values: list[float | None] = [None] * len(self._pictures)
        self._extras: dict[str, list[Any]] = {}
        self.batches = self._groups() if traits.groupwise else self._parts(traits.batch_size)

    def _parts(self, size: int | None) -> list[list[int]]:
        everything = list(range(len(self._pictures)))
        size = size or max(len(everything), 1)
        return [everything[start : start + size] for start in range(0, len(everything), size)]

    def _groups(self) -> list[list[int]]:
        counts = sorted({len(members) for members in self._members})
        if len(counts) > 1:
            raise RewardError(
                f"reward {self.inner.name!r} compares the frames of a group, whose videos have {counts[0]} to "
                f"{counts[-1]} of them: choose as many of each, for example with framewise(reward, frames=4)."
            )
        return [list(batch) for batch in zip(*self._members, strict=True)]

    def arguments(self, batch: list[int]) -> dict[str, Any]:
        """What to call the inner reward with, for a batch of pictures."""
        given = {
            name: value if name in _NOT_PER_ROW else [value[self._rows[i]] for i in batch]
            for name, value in self._columns.items()
        }
        given["completions"] = [self._pictures[i] for i in batch]
        if "log_extra" in given:
            given["log_extra"] = lambda column, values: self._record(column, batch, list(values))
        return self.inner.arguments(given)

    def _record(self, column: str, batch: list[int], values: list[Any]) -> None:
        if len(values) != len(batch):
            raise RewardError(
                f"reward {self.inner.name!r}: log_extra({column!r}, ...) got {len(values)} values for {len(batch)} "
                "frames: give one per frame."
            )
        target = self._extras.setdefault(column, [None] * len(self._pictures))
        for i, value in zip(batch, values, strict=True):
            target[i] = value

    def add(self, batch: list[int], returned: Any) -> None:
        """Takes what the inner reward returned for a batch."""
        for i, value in zip(batch, self.inner.values(returned, len(batch)), strict=True):
            self._values[i] = value

    def values(self) -> list[float | None]:
        """A value for each video, when all batches are there."""
        for column, values in self._extras.items():
            self._columns["log_extra"](column, [[values[i] for i in members] for members in self._members])
        return [reduced([self._values[i] for i in members], self._reduce) for members in self._members]


def check_frames(frames: "str | int | slice", reduce: str) -> None:
    """
    Checks a choice of frames and a reduction by name.

    Raises:
        [`~omnitrl.errors.InputError`]: for an unknown one.
    """
    if reduce not in _REDUCTIONS:
        raise InputError(f"reduce={reduce!r} must be one of {', '.join(map(repr, _REDUCTIONS))}.")
    number = isinstance(frames, int) and not isinstance(frames, bool) and frames >= 1
    if not (number or isinstance(frames, slice) or frames == "all" or (isinstance(frames, str) and frames in _ENDS)):
        raise InputError(
            f"frames={frames!r} must be 'all', {', '.join(map(repr, _ENDS))}, a number of frames such as 4, or a "
            "slice such as slice(None, None, 4) for every fourth."
        )


def frame_indices(frames: "str | int | slice", count: int) -> list[int]:
    """
    The chosen ones of `count` frames, in order; see [`framewise`].

    Raises:
        [`~omnitrl.errors.InputError`]: for a slice that chooses none.
    """
    if isinstance(frames, slice):
        chosen = list(range(count))[frames]
        if not chosen:
            raise InputError(f"frames={frames} chooses none of {count} frames: give for example slice(None, None, 4).")
        return chosen
    if isinstance(frames, int):
        if frames == 1:
            return [(count - 1) // 2]
        return [int(i) for i in np.unique(np.linspace(0, count - 1, min(frames, count)).round())]
    if frames == "all":
        return list(range(count))
    return sorted({i % count for i in _ENDS[frames]})


def reduced(values: Sequence[float | None], reduce: str) -> float | None:
    """One value of those of some frames: `None` ones are left out, and one that is not finite makes it NaN."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if not np.isfinite(known).all():
        return math.nan
    return _REDUCTIONS[reduce](known)

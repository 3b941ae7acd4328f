# SPDX-License-Identifier: Apache-2.0
"""Statistics of samples that no reward looks at, computed beside the rollouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.media import Video
from omnitrl.rewards import RewardRunner
from omnitrl.rewards.media import is_broken
from omnitrl.rewards.statistics import (
    brightness,
    colourfulness,
    contrast,
    entropy,
    jpeg_kilobytes,
    saturation,
    sharpness,
)
from omnitrl.rollout import Trajectory


logger = logging.getLogger(__name__)

STATISTICS: dict[str, Callable[[Image], float]] = {
    "entropy": entropy,
    "saturation": saturation,
    "jpeg_kilobytes": jpeg_kilobytes,
    "colourfulness": colourfulness,
    "sharpness": sharpness,
    "brightness": brightness,
    "contrast": contrast,
}
"""Statistics of one picture by their names."""

DIVERSITY = "diversity"
"""The name of what is known of a group: how far its members are apart."""

Embedding = Callable[[list[Any]], Any]
"""A function from media to vectors (N, D)."""

_COLUMN = "watched"
_SIDE = 8
_NOTHING = object()  # in the place of a medium that is missing or not finite, of which the rewards tell


class Look(NamedTuple):
    """
    What is known of one sample.

    Attributes:
        values (`list[float]`): its statistics, NaN where there is no picture.
        embedding (`list[float]`, *optional*): the vector by which it is compared with others.
    """

    values: list[float]
    embedding: list[float] | None


def picture_of(media: Any) -> Image | None:
    """The picture that stands for a medium: itself, or the middle frame of a video; `None` for anything else."""
    if isinstance(media, Video):
        return media[len(media) // 2] if len(media) else None
    return media if isinstance(media, Image) else None


def small_pictures(media: list[Any]) -> list[list[float] | None]:
    """Pictures of 8×8 pixels as vectors with values from 0 to 1; `None` for media without a picture."""
    pictures = [picture_of(one) for one in media]
    return [None if picture is None else _small(picture) for picture in pictures]


def _small(picture: Image) -> list[float]:
    small = picture.convert("RGB").resize((_SIDE, _SIDE), Resampling.BOX)
    return (np.asarray(small, dtype=np.float64).ravel() / 255).tolist()


def group_distances(embeddings: Sequence[list[float] | None], groups: Tensor) -> Tensor:
    """
    How far the members of each group are apart.

    Args:
        embeddings (`list[list[float] | None]`):
            N vectors of D numbers; those that are missing are left out.
        groups (`Tensor`):
            (N,) group of each.

    Returns:
        `Tensor`: (G,) for each group the mean over its pairs of the root mean square difference of their vectors; NaN
        for a group of fewer than two.
    """
    means = []
    for group in groups.unique().tolist():
        members = [embeddings[i] for i in (groups == group).nonzero().flatten().tolist() if embeddings[i] is not None]
        vectors = torch.tensor(members, dtype=torch.float64)
        means.append(
            torch.pdist(vectors).mean() / vectors.shape[1] ** 0.5 if len(members) > 1 else torch.tensor(torch.nan)
        )
    return torch.stack([mean.double() for mean in means])


class SampleStatistics:
    """
    Looks at samples in a thread of its own, so that nothing waits for it and media are free as soon as it is done.

    What cannot be computed is missing, and said once: watching a run must not end it.

    Args:
        names (`list[str]`):
            Statistics, of `STATISTICS`.
        embed (`Callable`, *optional*):
            From a list of media to their vectors (N, D), or `None` for a medium that has none; `None` for no vectors.
    """

    def __init__(self, names: Sequence[str], embed: Embedding | None) -> None:
        self.names = list(names)
        self._embed = embed
        self._length: int | None = None
        self._warned = False
        self._runner = RewardRunner(self._look, max_retries=0, max_failed_fraction=1.0)

    def submit(self, batch: Sequence[Trajectory]) -> None:
        """Starts on samples that have just been decoded."""
        media = [_NOTHING if is_broken(t.media) else t.media for t in batch]
        self._runner.submit([{"prompt": t.request.row["prompt"]} for t in batch], media)

    def collect(self) -> list[Look]:
        """Waits for all samples since the last call; one entry each, in their order."""
        scored = self._runner.collect()
        nothing = Look([np.nan] * len(self.names), None)
        looks = scored.extras.get(_COLUMN, [None] * len(scored.rewards))
        return [nothing if look is None else look for look in looks]

    def discard(self) -> None:
        """Forgets the samples of a rollout that was broken off."""
        self._runner.discard()

    def close(self) -> None:
        """Ends the thread."""
        self._runner.close()

    def _look(self, completions: list[Any], log_extra: Callable, **_: Any) -> list[float]:
        """Called by the runner as a reward is; what it returns does not matter."""
        pictures = [picture_of(media) for media in completions]
        values = [[self._value(name, picture) for name in self.names] for picture in pictures]
        vectors = self._vectors(completions)
        log_extra(_COLUMN, [Look(*one) for one in zip(values, vectors, strict=True)])
        return [0.0] * len(completions)

    def _value(self, name: str, picture: Image | None) -> float:
        if picture is None:
            return float("nan")
        try:
            return STATISTICS[name](picture)
        except Exception as error:
            self._warn(name, error)
            return float("nan")

    def _vectors(self, media: list[Any]) -> list[list[float] | None]:
        vectors: list[list[float] | None] = [None] * len(media)
        places = [i for i, one in enumerate(media) if one is not _NOTHING]
        if self._embed is None or not places:
            return vectors
        try:
            given = [_numbers(vector) for vector in self._embed([media[i] for i in places])]
            self._check(given, len(places))
        except Exception as error:
            self._warn("The embedding", error)
            return vectors
        for i, vector in zip(places, given, strict=True):
            vectors[i] = vector
        return vectors

    def _check(self, vectors: list[list[float] | None], count: int) -> None:
        """Raises unless there are `count` vectors of one length."""
        if len(vectors) != count:
            raise InputError(f"it gave {len(vectors)} vectors for {count} media")
        lengths = {len(vector) for vector in vectors if vector is not None}
        self._length = self._length or min(lengths, default=None)
        if lengths - {self._length}:
            raise InputError(f"its vectors have {sorted(lengths)} numbers, where the first had {self._length}")

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            logger.warning(
                "%s of a sample could not be computed and is missing among what is watched (%s: %s).",
                what,
                type(error).__name__,
                error,
            )
        self._warned = True


def _numbers(vector: Any) -> list[float] | None:
    """A vector (D,), whatever it is, as a list."""
    if vector is None:
        return None
    tensor = torch.as_tensor(vector).detach().double().cpu()
    if tensor.ndim != 1 or not tensor.isfinite().all():
        raise InputError(f"a vector has shape {tuple(tensor.shape)} or is not finite, expected (D,)")
    return tensor.tolist()

# SPDX-License-Identifier: Apache-2.0
"""How large a picture, how long a video or a sound is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from omnitrl.errors import InputError


@dataclass(frozen=True)
class MediaSize:
    """
    Size of what is made; `None` leaves a part open, for the checkpoint's own.

    Args:
        height, width (`int`, *optional*):
            Of pictures and videos, in pixels.
        num_frames (`int`, *optional*):
            Of videos.
        audio_length (`float`, *optional*):
            Of sounds that are made alone, in seconds; the sound of a video is as long as the video.

    Example:

    ```python
    >>> MediaSize(height=512).filled(MediaSize(1024, 1024))
    MediaSize(height=512, width=1024, num_frames=None, audio_length=None)
    ```
    """

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    audio_length: float | None = None

    def filled(self, default: MediaSize) -> MediaSize:
        """The same with `default`'s parts where there is none."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return MediaSize(**{**asdict(default), **given})

    def of_row(self, row: Mapping[str, Any]) -> MediaSize:
        """
        The same with what a dataset row says in columns of these names.

        Raises:
            [`~omnitrl.errors.InputError`]: a column holds something else than a positive number.
        """
        return MediaSize(**{name: _number(name, row.get(name)) for name in SIZE_COLUMNS}).filled(self)

    def __str__(self) -> str:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return ", ".join(f"{name}={value}" for name, value in given.items()) or "of the checkpoint"


def _number(name: str, value: Any) -> Any:
    """A part of a size as a table has it: whole numbers may be floats there, and what is missing NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    example = "30.0" if name == "audio_length" else "512"
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not value > 0:
        raise InputError(f"{name}={value!r} must be a number above 0, or missing: use {name}={example}.")
    if name == "audio_length":
        return float(value)
    if value != int(value):
        raise InputError(f"{name}={value!r} must be a whole number: use {name}={round(float(value))}.")
    return int(value)


CHECKPOINT_SIZE = MediaSize()
"""All parts are the checkpoint's own."""

SIZE_COLUMNS = tuple(field.name for field in fields(MediaSize))


def check_multiple(name: str, value: int | None, multiple: int, largest: int | None = None, offset: int = 0) -> int:
    """
    Raises unless `value` is `offset` plus a positive multiple of `multiple`, up to `largest`.

    Args:
        name (`str`):
            What it is, for the error.
        value (`int`):
            What was given, filled in with the default.
        multiple (`int`):
            What the VAE and the patches of the network ask for.
        largest (`int`, *optional*):
            The largest that the checkpoint takes.
        offset (`int`, defaults to 0):
            1 for video frames, of which the first is encoded alone; then 0 multiples are allowed too.

    Returns:
        `int`: `value`.
    """
    assert value is not None  # see `MediaSize.filled`
    fits = value >= (offset or multiple) and (value - offset) % multiple == 0
    if fits and (largest is None or value <= largest):
        return value
    steps = max(round((value - offset) / multiple), 0 if offset else 1)
    nearest = offset + steps * multiple
    nearest = nearest if largest is None else min(nearest, largest)
    form = f"multiples of {multiple}" + (f" plus {offset}" if offset else "")
    bound = "" if largest is None else f" up to {largest}"
    raise InputError(
        f"{name}={value} does not fit this checkpoint: it takes {form}{bound}, for example {name}={nearest}."
    )


def sides_of(size: MediaSize, multiple: int, largest: int | None = None) -> tuple[int, int]:
    """
    Height and width of a whole size.

    Args:
        size ([`MediaSize`]):
            Filled in with the default.
        multiple (`int`):
            What the VAE and the patches of the network ask of both sides.
        largest (`int`, *optional*):
            The largest side that the checkpoint takes.

    Raises:
        [`~omnitrl.errors.InputError`]: a side does not fit; names the nearest that does.
    """
    height = check_multiple("height", size.height, multiple, largest)
    return height, check_multiple("width", size.width, multiple, largest)

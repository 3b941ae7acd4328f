# SPDX-License-Identifier: Apache-2.0
"""Videos and sounds as values, and pictures from whatever a dataset has."""

from __future__ import annotations

import io
import os
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from omnitrl.errors import InputError


if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Audio:
    """
    A sound.

    Args:
        samples (`np.ndarray`):
            (channels, S) float32 in [-1, 1].
        sampling_rate (`int`):
            Samples per second.

    Example:

    ```python
    >>> import numpy as np
    >>> Audio(np.zeros((2, 16000), dtype=np.float32), 16000).duration
    1.0
    ```
    """

    samples: np.ndarray
    sampling_rate: int

    def __post_init__(self) -> None:
        if self.samples.ndim != 2:
            raise ValueError(f"Audio has samples of shape (channels, S), got {self.samples.shape}.")

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.samples.shape[1] / self.sampling_rate

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.samples, dtype=dtype) if copy else np.asarray(self.samples, dtype=dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a 16-bit WAV file."""
        Path(path).write_bytes(self.wav_bytes())

    def wav_bytes(self) -> bytes:
        """The sound as a 16-bit WAV file."""
        pcm = (self.samples.T.clip(-1, 1) * 32767).round().astype("<i2")
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(self.samples.shape[0])
            file.setsampwidth(2)
            file.setframerate(self.sampling_rate)
            file.writeframes(pcm.tobytes())
        return buffer.getvalue()

    def preview(self, seconds: float = 10.0, sampling_rate: int = 16000) -> Audio:
        """The beginning in one channel at a low rate, for a page: about 300 kB for ten seconds."""
        every = max(round(self.sampling_rate / sampling_rate), 1)
        mono = self.samples.mean(axis=0, keepdims=True)[:, : round(seconds * self.sampling_rate)]
        whole = mono[:, : mono.shape[1] // every * every]
        return Audio(whole.reshape(1, -1, every).mean(axis=2), round(self.sampling_rate / every))

    def waveform(self, width: int = 256, height: int = 64) -> Image:
        """A picture of the sound: loudest and quietest sample of each column."""
        from PIL import Image

        mono = self.samples.mean(axis=0)
        columns = np.array_split(mono, width) if len(mono) >= width else np.array_split(np.resize(mono, width), width)
        pixels = np.full((height, width, 3), 255, dtype=np.uint8)
        for x, column in enumerate(columns):
            levels = np.clip((column.max(), column.min()), -1, 1)
            top, bottom = ((1 - levels) / 2 * (height - 1)).round().astype(int)
            pixels[top : bottom + 1, x] = (9, 105, 218)
        return Image.fromarray(pixels)


@dataclass(frozen=True, eq=False)
class Video(Sequence["Image"]):
    """
    A video: a sequence of RGB PIL images.

    Args:
        frames (`np.ndarray`):
            (F, H, W, 3) uint8.
        frame_rate (`float`):
            Frames per second.
        audio ([`Audio`], *optional*):
            Its sound.

    Example:

    ```python
    >>> import numpy as np
    >>> video = Video(np.zeros((5, 48, 64, 3), dtype=np.uint8), 16.0)
    >>> len(video), video[0].size
    (5, (64, 48))
    ```
    """

    frames: np.ndarray
    frame_rate: float
    audio: Audio | None = None

    def __post_init__(self) -> None:
        if self.frames.ndim != 4 or self.frames.shape[-1] != 3 or self.frames.dtype != np.uint8:
            raise ValueError(
                f"A video has frames of shape (F, H, W, 3) in uint8, got {self.frames.shape} in {self.frames.dtype}."
            )

    def __len__(self) -> int:
        return len(self.frames)

    @overload
    def __getitem__(self, index: int) -> Image: ...

    @overload
    def __getitem__(self, index: slice) -> Video: ...

    def __getitem__(self, index: int | slice) -> Image | Video:
        from PIL import Image

        if isinstance(index, slice):
            return Video(self.frames[index], self.frame_rate)
        return Image.fromarray(self.frames[index])

    def __iter__(self) -> Iterator[Image]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.frames, dtype=dtype) if copy else np.asarray(self.frames, dtype=dtype)

    def storyboard(self, count: int = 3, gap: int = 2) -> Image:
        """One picture of the first, the last and frames between them, side by side."""
        from PIL import Image

        chosen = np.unique(np.linspace(0, len(self) - 1, count).round().astype(int))
        line = np.full((self.frames.shape[1], gap, 3), 255, dtype=np.uint8)
        parts = [part for i in chosen for part in (self.frames[i], line)][:-1]
        return Image.fromarray(np.concatenate(parts, axis=1))

    def webp_bytes(self, side: int | None = None) -> bytes:
        """The frames as an animated WebP, their longest side at most `side` pixels."""
        frames = list(self)
        if side is not None:
            for frame in frames:
                frame.thumbnail((side, side))
        buffer = io.BytesIO()
        _write_animation(frames, self.frame_rate, buffer, format="WEBP", quality=70)
        return buffer.getvalue()

    def save(self, path: str | os.PathLike[str]) -> None:
        """
        Writes the frames as an animation that every browser plays (`.webp` or `.gif`), and the sound beside it as WAV.
        """
        path = Path(path)
        _write_animation(list(self), self.frame_rate, path)
        if self.audio is not None:
            self.audio.save(path.with_suffix(".wav"))


def _write_animation(frames: list[Image], frame_rate: float, target: Any, **options: Any) -> None:
    first, *others = frames
    milliseconds = max(round(1000 / frame_rate), 1)
    first.save(target, save_all=True, append_images=others, duration=milliseconds, loop=0, **options)


def still(media: Any) -> Image | None:
    """A picture of any medium: itself, frames of a video, the waveform of a sound; `None` for anything else."""
    from PIL import Image

    if isinstance(media, Video):
        return media.storyboard()
    if isinstance(media, Audio):
        return media.waveform()
    return media if isinstance(media, Image.Image) else None


def read_picture(value: Any, where: str, whole: bool = True) -> Image:
    """
    The PIL image of what a dataset has as a picture.

    Args:
        value (`Any`):
            A PIL image, a path, bytes, a dictionary with `bytes` or `path`, or an array or tensor (H, W, 3).
        where (`str`):
            What to call it in an error.
        whole (`bool`, defaults to `True`):
            Whether all of it is read; `False` stops at its header.

    Returns:
        `PIL.Image.Image` in mode RGB, or in its own if `whole` is `False`; upright, if its Exif says how it was held.

    Raises:
        [`~omnitrl.errors.InputError`]: there is no picture, or it cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, Image.Image):
        return _rgb(_upright(value)) if whole else _upright(value)
    pixels = as_array(value)
    if pixels is not None:
        return Image.fromarray(_eight_bit(pixels, where)).convert("RGB")
    name = None
    if isinstance(value, Mapping):
        name = value.get("path")
        value = name if value.get("bytes") is None else value["bytes"]
    if value is None:
        raise InputError(f"{where} is missing: give a path such as 'pictures/0.png', or leave the row out.")
    if is_url(value):
        raise InputError(
            f"{where} is the URL {value}, and pictures are not downloaded while training: save them first and give "
            "their paths, for example 'pictures/0.png'."
        )
    if not isinstance(value, str | bytes | os.PathLike):
        raise InputError(
            f"{where} is a {type(value).__name__}, but a picture is a PIL image, a path such as 'pictures/0.png', "
            "bytes, a dictionary with either, or an array (height, width, 3)."
        )
    try:
        image = _upright(Image.open(io.BytesIO(value) if isinstance(value, bytes) else value))
        return _rgb(image) if whole else image
    except FileNotFoundError as error:
        raise InputError(
            f"{where} is the file {value!s}, which does not exist; the working folder is {Path.cwd()}."
        ) from error
    except (
        UnidentifiedImageError,
        Image.DecompressionBombError,
        OSError,
        SyntaxError,
    ) as error:  # cut off, broken PNGs
        what = f"the file {value!s}"
        if isinstance(value, bytes):
            what = f"{len(value)} bytes of {name}" if name else f"{len(value)} bytes"
        raise InputError(f"{where} is no picture that can be read ({what}): leave the row out.") from error


def _upright(image: Image) -> Image:
    """The image turned as the Exif of its header says; of one without, nothing more is read."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image) if "exif" in image.info else image


def _rgb(image: Image) -> Image:
    """The image in mode RGB; of 16 bits the high ones, where Pillow would make all that is above 255 white."""
    from PIL import Image

    if image.mode.startswith("I") and (levels := np.asarray(image)).max(initial=0) > 255:
        image = Image.fromarray((levels.clip(0, 65535) // 257).astype(np.uint8))
    return image.convert("RGB")


def is_url(value: Any) -> bool:
    """Whether it is a text such as `"https://…"`."""
    return isinstance(value, str) and "://" in value


def _eight_bit(pixels: np.ndarray, where: str) -> np.ndarray:
    if pixels.ndim != 3 or pixels.shape[-1] != 3:
        raise InputError(
            f"{where} is an array of shape {pixels.shape}, but a picture is (height, width, 3), such as (512, 512, 3)."
        )
    if pixels.dtype == np.uint8:
        return np.ascontiguousarray(pixels)
    low, high = (float(pixels.min()), float(pixels.max())) if pixels.size else (0.0, 0.0)
    if not np.issubdtype(pixels.dtype, np.floating) or not (low >= 0 and high <= 1):
        raise InputError(
            f"{where} is an array of {pixels.dtype} from {low:.3g} to {high:.3g}, but pictures have 8-bit values, or "
            "floating point values from 0 to 1."
        )
    return (pixels * 255).round().astype(np.uint8)


def as_array(value: Any) -> np.ndarray | None:
    """Latents or pixels as an array of floating point or 8-bit values; `None` for what can only be a picture."""
    import torch  # here, as prompts alone need none

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    elif isinstance(value, list):  # what `datasets` makes of an array
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return None
    if np.issubdtype(value.dtype, np.integer) and value.size and value.min() >= 0 and value.max() <= 255:
        return value.astype(np.uint8)
    return value.astype(np.float32) if np.issubdtype(value.dtype, np.floating) else value

# SPDX-License-Identifier: Apache-2.0
"""Sounds and videos from whatever a dataset has: one channel at the model's rate, and frames within limits."""

from __future__ import annotations

import io
import os
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video, as_array, is_url, read_picture


@dataclass(frozen=True)
class VideoLimits:
    """
    How many frames of a video a model is shown.

    Args:
        fps (`float`, *optional*, defaults to `2.0`):
            Frames per second of the video; `None` for all that there are.
        max_frames (`int`, *optional*, defaults to `64`):
            The most frames, whatever the length; `None` for no bound.

    Example:

    ```python
    >>> VideoLimits(fps=2.0, max_frames=8).chosen(count=300, rate=30.0).tolist()
    [0, 37, 75, 112, 150, 187, 225, 262]
    ```
    """

    fps: float | None = 2.0
    max_frames: int | None = 64

    def __post_init__(self) -> None:
        if self.fps is not None and not self.fps > 0:
            raise InputError(
                f"video_fps={self.fps} must be above 0 frames per second: use 2.0, or None for all frames."
            )
        if self.max_frames is not None and self.max_frames < 2:
            raise InputError(f"video_max_frames={self.max_frames} must be at least 2: use 64, or None for no bound.")

    def chosen(self, count: int, rate: float) -> np.ndarray:
        """Numbers of the frames to show, of `count` at `rate` per second; evenly spaced, the first among them."""
        wanted = count if self.fps is None else max(round(count / rate * self.fps), 2)
        wanted = min(wanted, count, self.max_frames or count)
        return np.arange(wanted) * count // wanted


def read_sound(value: Any, rate: int, where: str) -> np.ndarray:
    """
    One channel of a sound at a rate.

    Args:
        value (`Any`):
            A path, the bytes of a file, a dictionary with `path` or `bytes`, or with `array` and `sampling_rate`, an
            [`~omnitrl.media.Audio`], or a decoder of `datasets`. Of an array of two dimensions the shorter one is that
            of channels. Whole numbers are as in files, by their dtype: 32767 is as loud as 1.0 in a sound of 16 bits.
        rate (`int`):
            Samples per second that are wanted, as the model was trained with.
        where (`str`):
            What to call it in an error.

    Returns:
        `np.ndarray` of shape (S,), float32.

    Raises:
        [`~omnitrl.errors.InputError`]: there is no sound, it cannot be read, or its rate is not known.

    Example:

    ```python
    >>> import numpy as np
    >>> read_sound({"array": np.zeros((2, 800)), "sampling_rate": 16000}, 16000, "the sound").shape
    (800,)
    ```
    """
    samples, own_rate = _samples(value, where)
    if samples.ndim == 2 and samples.size:
        samples = samples.mean(axis=int(np.argmin(samples.shape)))
    if samples.ndim != 1 or len(samples) * rate < own_rate:  # not one sample at the rate that is wanted
        raise InputError(
            f"{where} has samples of shape {samples.shape}, but a sound is (samples,): leave the row out."
        )
    if not np.isfinite(samples).all():
        raise InputError(f"{where} has samples that are no numbers (NaN or infinity): leave the row out.")
    return _resampled(np.ascontiguousarray(samples, dtype=np.float32), own_rate, rate, where)


def _samples(value: Any, where: str) -> tuple[np.ndarray, int]:
    """(S,), (channels, S) or (S, channels), and samples per second."""
    if isinstance(value, Audio):
        return value.samples, value.sampling_rate
    if hasattr(value, "get_all_samples"):  # torchcodec's AudioDecoder, which `datasets` makes of the feature Audio
        decoded = value.get_all_samples()
        return decoded.data.numpy(), decoded.sample_rate
    if isinstance(value, Mapping) and value.get("array") is not None:
        rate = value.get("sampling_rate")
        if not rate or rate < 0:
            raise InputError(f"{where} has no sampling_rate: give {{'array': …, 'sampling_rate': 16000}}.")
        return _in_one(np.asarray(value["array"])), int(rate)
    data = _file_bytes(value, where, "sound", "an array with its sampling_rate, {'array': …, 'sampling_rate': 16000}")
    return _decoded_sound(data, where)


def _in_one(samples: np.ndarray) -> np.ndarray:
    """Samples in [-1, 1]; of whole numbers that `datasets` made a list of, the bits are not known any more."""
    if not np.issubdtype(samples.dtype, np.integer):
        return samples.astype(np.float32)
    bits = np.iinfo(samples.dtype).bits
    if bits == 64:
        bits = 16 if abs(samples).max(initial=0) <= 2**15 else 32
    half = 2.0 ** (bits - 1)
    return np.asarray((samples - half * (samples.dtype.kind == "u")) / half, dtype=np.float32)


def _file_bytes(value: Any, where: str, kind: str, other: str) -> bytes:
    """What is in the file that a value names or has."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if value is None:
        raise InputError(f"{where} is missing: give the path of a {kind}, or leave the row out.")
    if is_url(value):
        raise InputError(
            f"{where} is the URL {value}, and nothing is downloaded while training: save it first and give its path."
        )
    if not isinstance(value, str | os.PathLike):
        raise InputError(
            f"{where} is a {type(value).__name__}, but a {kind} is a path, the bytes of a file, or {other}."
        )
    try:
        return Path(value).read_bytes()
    except FileNotFoundError as error:
        raise InputError(
            f"{where} is the file {value!s}, which does not exist; the working folder is {Path.cwd()}."
        ) from error
    except OSError as error:
        raise InputError(
            f"{where} is the file {value!s}, which cannot be read ({error}): leave the row out."
        ) from error


def _decoded_sound(data: bytes, where: str) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError:
        return _decoded_wave(data, where)
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise InputError(f"{where} is no sound that can be read ({error}): leave the row out.") from error
    return samples.T, rate


def _decoded_wave(data: bytes, where: str) -> tuple[np.ndarray, int]:
    """WAV files of whole numbers, which need no package."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise InputError(
            f"{where} is no WAV file of 8, 16, 24 or 32 bits ({error or 'it is cut off'}); other sounds are read with "
            'soundfile: pip install "omnitrl[omni]"'
        ) from error
    values = np.frombuffer(raw[: len(raw) // (width * channels) * width * channels], dtype=np.uint8)
    if width == 1:
        samples = (values.astype(np.float32) - 128) / 128
    else:  # the bytes are the high ones of 32-bit numbers
        wide = np.zeros((len(values) // width, 4), dtype=np.uint8)
        wide[:, 4 - width :] = values.reshape(-1, width)
        samples = wide.reshape(-1).view("<i4").astype(np.float32) / 2**31
    return samples.reshape(-1, channels).T, rate


def _resampled(mono: np.ndarray, own_rate: int, rate: int, where: str) -> np.ndarray:
    if own_rate == rate:
        return mono
    try:
        import soxr
    except ImportError as error:
        raise ImportError(
            f"{where} has {own_rate} samples per second, and the model takes {rate}; they are resampled with soxr: "
            'pip install "omnitrl[omni]"'
        ) from error
    return np.asarray(soxr.resample(mono, own_rate, rate), dtype=np.float32)


def read_video(value: Any, limits: VideoLimits, where: str) -> Video:
    """
    The frames of a video that a model is shown.

    Args:
        value (`Any`):
            A path, the bytes of a file, a dictionary with either (read with PyAV), an [`~omnitrl.media.Video`], an
            array (F, H, W, 3), a list of pictures or of their paths, or a dictionary with such `frames` and their
            `fps`. Frames without a rate are taken to be at that of the limits.
        limits ([`VideoLimits`]):
            How many of them.
        where (`str`):
            What to call it in an error.

    Returns:
        [`~omnitrl.media.Video`]: the chosen frames, with their own frames per second.

    Raises:
        [`~omnitrl.errors.InputError`]: there is no video, or it cannot be read.

    Example:

    ```python
    >>> import numpy as np
    >>> video = read_video(Video(np.zeros((40, 8, 8, 3), np.uint8), 8.0), VideoLimits(fps=2.0), "the video")
    >>> len(video), video.frame_rate
    (10, 2.0)
    ```
    """
    if isinstance(value, Video):
        return _limited(value.frames, value.frame_rate, limits, where)
    if isinstance(value, Mapping) and value.get("frames") is not None:
        rate = value.get("fps")
        if not (rate and rate > 0):
            raise InputError(f"{where} has frames without fps: give {{'frames': […], 'fps': 2.0}}.")
        return _limited(_frames(value["frames"], where), float(rate), limits, where)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return _limited(_frames(value, where), limits.fps or 1.0, limits, where)
    array = None if isinstance(value, str | bytes | os.PathLike | Mapping) else as_array(value)
    if array is not None:
        return _limited(array, limits.fps or 1.0, limits, where)
    data = _file_bytes(value, where, "video", "frames with their rate, {'frames': […], 'fps': 2.0}")
    return _decoded_video(data, limits, where)


def _frames(values: Any, where: str) -> np.ndarray:
    if isinstance(values, np.ndarray) or hasattr(values, "detach"):
        array = as_array(values)
        assert array is not None
        return array
    pictures = [np.asarray(read_picture(v, f"frame {i} of {where}")) for i, v in enumerate(values)]
    sizes = {picture.shape for picture in pictures}
    if len(sizes) != 1:
        raise InputError(
            f"{where} has frames of {len(sizes)} sizes, but all are of one: give at least one, of one size."
        )
    return np.stack(pictures)


def _limited(frames: np.ndarray, rate: float, limits: VideoLimits, where: str) -> Video:
    if frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise InputError(
            f"{where} has frames of shape {frames.shape}, but they are (frames, height, width, 3), such as "
            "(16, 224, 224, 3)."
        )
    if frames.dtype != np.uint8:
        if not (np.issubdtype(frames.dtype, np.floating) and frames.min() >= 0 and frames.max() <= 1):
            raise InputError(f"{where} has frames of {frames.dtype}: give 8-bit values, or floating point ones to 1.")
        frames = (frames * 255).round().astype(np.uint8)
    chosen = limits.chosen(len(frames), rate)
    return Video(frames[chosen], rate * len(chosen) / len(frames))


def _decoded_video(data: bytes, limits: VideoLimits, where: str) -> Video:
    try:
        import av
    except ImportError as error:
        raise ImportError(f'{where} is a file, and videos are read with PyAV: pip install "omnitrl[omni]"') from error
    try:
        with av.open(io.BytesIO(data)) as container:
            if not container.streams.video:
                raise InputError(f"{where} has no pictures: leave the row out, or give it as an audio.")
            rate = float(container.streams.video[0].average_rate or 0)
            count = container.streams.video[0].frames or sum(1 for _ in container.decode(video=0))
        if not rate or not count:
            raise InputError(f"{where} has no frames: leave the row out.")
        chosen = set(limits.chosen(count, rate).tolist())
        with av.open(io.BytesIO(data)) as container:
            numbered = enumerate(container.decode(video=0))
            frames = [frame.to_ndarray(format="rgb24") for i, frame in numbered if i in chosen]
    except av.FFmpegError as error:
        raise InputError(f"{where} is no video that can be read ({error}): leave the row out.") from error
    if not frames:
        raise InputError(f"{where} has no frames that can be read: leave the row out.")
    return Video(np.stack(frames), rate * len(chosen) / count)

# SPDX-License-Identifier: Apache-2.0
"""Chat rows with pictures, videos and sounds: which file belongs to which place in the messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from omnitrl.errors import InputError
from omnitrl.media import Video, read_picture

from .decoding import VideoLimits, read_sound, read_video


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from PIL.Image import Image

    AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)

KINDS = ("image", "video", "audio")
"""What a message may have besides text."""

COLUMNS = {"image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio")}
MEDIA_COLUMNS = tuple(name for names in COLUMNS.values() for name in names)
"""Columns of a dataset that hold media: `images` for lists, `image` for a single one, and so on."""

ROW_COLUMN = "omnitrl_row"
"""Column with the number of a row, which datasets are given so that an error can say which it is."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Decoded:
    """
    The media of a row as a processor takes them.

    Args:
        images (`list[PIL.Image.Image]`):
            In mode RGB.
        videos (`list[Video]`):
            The frames that the model is shown, with their rate.
        audios (`list[np.ndarray]`):
            (S,) float32 each, at the model's rate.
    """

    images: list[Image]
    videos: list[Video]
    audios: list[np.ndarray]


@dataclass(frozen=True)
class OmniRow:
    """
    A row of a dataset: its messages, and its media in the order of their places in them.

    Args:
        messages (`list[dict]` or `str`):
            Chat messages, each with `role` and a list of parts as `content`; a part is `{"type": "text", "text": …}`
            or the place of a medium, `{"type": "image"}`. A text that is no chat has no media.
        media (`dict[str, list]`):
            For each of `"image"`, `"video"` and `"audio"`, what the dataset has, not decoded yet.
        where (`str`):
            What to call the row in an error.
    """

    messages: list[Message] | str
    media: dict[str, list[Any]]
    where: str = "the row"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of media that the row has."""
        return tuple(kind for kind in KINDS if self.media.get(kind))

    def decoded(self, rate: int | None, limits: VideoLimits) -> Decoded:
        """
        Reads the files.

        Args:
            rate (`int`, *optional*):
                Samples per second of the model's sounds; `None` if it hears nothing.
            limits ([`VideoLimits`]):
                Frames of its videos.

        Raises:
            [`~omnitrl.errors.InputError`]: one of them cannot be read; the message names the row and the file.
        """
        sounds = list(self._numbered("audio"))
        if sounds and rate is None:
            raise InputError(
                f"{_sentence(self.where)} has sounds, but the model's processor takes none: leave it out."
            )
        return Decoded(
            images=[read_picture(value, name) for name, value in self._numbered("image")],
            videos=[read_video(value, limits, name) for name, value in self._numbered("video")],
            audios=[read_sound(value, rate or 0, name) for name, value in sounds],
        )

    def _numbered(self, kind: str) -> Iterator[tuple[str, Any]]:
        for i, value in enumerate(self.media.get(kind, [])):
            yield _sentence(f"{kind} {i} of {self.where}"), value


def read_row(row: Mapping[str, Any], where: str = "the row") -> OmniRow:
    """
    Finds the media of a row, and the place of each in its messages.

    The media are in the columns `images`, `videos` and `audios` (or `image`, `video` and `audio`), or in the parts of
    the messages themselves, `{"type": "image", "image": "cat.png"}`. Places without a file of their own are filled
    from the columns, in order. Where the messages have no place for a kind, its media go before the text of the first
    user message.

    Args:
        row (`Mapping`):
            A row of a dataset with `prompt`, a text or a list of messages.
        where (`str`, *optional*):
            What to call it in an error.

    Raises:
        [`~omnitrl.errors.InputError`]: places and files do not match, or there is no prompt; the message names the
            row and the cure.

    Example:

    ```python
    >>> prompt = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "Who speaks?"}]}]
    >>> row = read_row({"prompt": prompt, "audios": ["a.wav"]})
    >>> row.media["audio"], row.kinds
    (['a.wav'], ('audio',))
    ```
    """
    prompt = row.get("prompt")
    columns = {kind: _files(row, kind, where) for kind in KINDS}
    if isinstance(prompt, str):
        used = [names[0] for kind, names in COLUMNS.items() if columns[kind]]
        if used:
            raise InputError(
                f"{_sentence(where)} has {used[0]} but a prompt that is a text, which has no place for them: give "
                "messages, [{'role': 'user', 'content': 'What is this?'}]."
            )
        return OmniRow(prompt, {kind: [] for kind in KINDS}, where)
    return place_media(prompt, columns, where)


def place_media(messages: Any, columns: Mapping[str, Sequence[Any]], where: str) -> OmniRow:
    """
    Pairs the places in some messages with files; see [`read_row`].

    Args:
        messages (`list[dict]`):
            Chat messages.
        columns (`dict[str, list]`):
            Files of each kind that are not in the messages.
        where (`str`):
            What to call the row in an error.
    """
    _check_messages(messages, where)
    parts = [_parts(message["content"], where) for message in messages]
    media: dict[str, list[Any]] = {}
    for kind in KINDS:
        places = [part for content in parts for part in content if part["type"] == kind]
        files, without = list(columns.get(kind, [])), sum(kind not in part for part in places)
        if files and not places:
            first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
            before = sum(part["type"] in KINDS[: KINDS.index(kind)] and "added" in part for part in parts[first])
            parts[first][before:before] = [{"type": kind, "added": True} for _ in files]
            media[kind] = files
            continue
        if without != len(files):
            raise InputError(_mismatch(kind, without, len(files), where))
        left = iter(files)
        media[kind] = [part[kind] if kind in part else next(left) for part in places]
    plain = [
        {**_without_empty(message), "content": [_plain(part) for part in content]}
        for message, content in zip(messages, parts, strict=True)
    ]
    return OmniRow(plain, media, where)


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(
            f"{_sentence(where)} has no messages but {messages!r:.60}: its column prompt is a text or a list of "
            "messages, [{'role': 'user', 'content': 'What is this?'}]."
        )
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise InputError(
                f"{_sentence(where)} has the message {message!r:.80}, but a message has role and content: "
                "{'role': 'user', 'content': 'What is this?'}."
            )


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    """The content of a message as parts; the keys that `datasets` filled with `None` are left out."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None:
        return []
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            found.append({"type": "text", "text": part.get("text") or ""})
        elif kind in KINDS:
            inline = next((part[key] for key in (kind, "path", "url") if part.get(key) is not None), None)
            found.append({"type": kind} if inline is None else {"type": kind, kind: inline})
        else:
            raise InputError(
                f"{_sentence(where)} has the part {part!r:.80} in a message: parts are {{'type': 'text', 'text': …}}, "
                f"or {{'type': …}} with one of {', '.join(KINDS)}."
            )
    return found


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    return part if part["type"] == "text" else {"type": part["type"]}


def _without_empty(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _files(row: Mapping[str, Any], kind: str, where: str) -> list[Any]:
    """What the columns of a kind have for a row."""
    many, single = COLUMNS[kind]
    given = row.get(many)
    if given is None:
        one = row.get(single)
        return [] if one is None else [one]
    if row.get(single) is not None:
        raise InputError(f"{_sentence(where)} has both {single} and {many}: keep one of the two columns.")
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InputError(
            f"{_sentence(where)} has a {type(given).__name__} as {many}, which is a list of them: give [{kind}], or "
            f"name the column {single!r}."
        )
    return list(given)


def _mismatch(kind: str, places: int, files: int, where: str) -> str:
    many = COLUMNS[kind][0]
    return (
        f"{_sentence(where)} has {places} place(s) for {kind} in its messages and {files} in the column {many!r}: "
        f"give as many {{'type': '{kind}'}} in the content as there are {many}, or none, and all go before the text "
        "of the first user message."
    )


def _sentence(where: str) -> str:
    return where[0].upper() + where[1:]


def undecoded(dataset: AnyDataset) -> AnyDataset:
    """
    The same dataset with media as they are stored, so that each is read when it is needed.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            Features `Image`, `Audio` and `Video` of it, wherever they are nested, become dictionaries with bytes or a
            path.
    """
    features = dataset.features
    if features is None:  # a stream that nobody has looked into
        return dataset
    for name, feature in features.items():
        stored = _undecoded_feature(feature)
        if stored != feature:
            dataset = dataset.cast_column(name, stored)
    return dataset


def _undecoded_feature(feature: Any) -> Any:
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.Audio):
        return datasets.Audio(sampling_rate=feature.sampling_rate, decode=False)
    if isinstance(feature, datasets.Video):
        return datasets.Video(decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded_feature(feature.feature))
    if isinstance(feature, dict):
        return {key: _undecoded_feature(value) for key, value in feature.items()}
    return feature


def numbered(dataset: AnyDataset) -> AnyDataset:
    """
    The same dataset with the number of each row in the column [`ROW_COLUMN`].

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            One that computes its rows as they are asked for (`set_transform`) is returned as it is.
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        return dataset.map(lambda row, i: {ROW_COLUMN: i}, with_indices=True)
    if dataset.format["type"] == "custom":
        return dataset
    if ROW_COLUMN in dataset.column_names:  # of another trainer; rows of several may have the same numbers
        dataset = dataset.remove_columns(ROW_COLUMN)
    return dataset.add_column(ROW_COLUMN, np.arange(len(dataset)))

# SPDX-License-Identifier: Apache-2.0
"""What a judge is shown: media as parts of a chat message, and text filled with the columns of a row."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from omnitrl.errors import InputError
from omnitrl.media import read_picture

from ..answer_texts import completion_text
from ..contract import RewardError
from ..frames import frame_indices
from ..kinds import media_kind
from ..media import to_pil, video_frames


IMAGE_FORMATS: dict[str, dict[str, Any]] = {"png": {"format": "PNG"}, "jpeg": {"format": "JPEG", "quality": 95}}
"""What images may be sent as, and how Pillow is told so."""

Part = dict[str, Any]
"""A part of a chat message, of type `"text"` or `"image_url"`."""


@dataclass(frozen=True)
class Shown:
    """
    One row as a judge's template gets it.

    Args:
        prompt (`str`):
            What was asked for.
        kind (`str`):
            `"image"`, `"video"` or `"text"`.
        parts (`list[dict]`):
            The completion as parts of a chat message: an image, the frames of a video in order, or a text.
        columns (`dict[str, Any]`):
            The row's values of the dataset's columns.
        sources (`list[dict]`):
            The pictures that it was made from, as parts, where the template asks for them.
    """

    prompt: str
    kind: str
    parts: list[Part]
    columns: Mapping[str, Any]
    sources: Sequence[Part] = ()

    def column(self, name: str) -> Any:
        """
        The row's value of a column.

        Raises:
            [`RewardError`]: there is no such column.
        """
        if name not in self.columns:
            raise RewardError(
                f"the judge's template needs the column {name!r}, and the dataset has "
                f"{', '.join(map(repr, self.columns)) or 'none besides the prompt'}: add it, or name another one."
            )
        return self.columns[name]

    def fill(self, text: str, **more: Any) -> str:
        """
        `text` with `{prompt}`, columns, `more` and `{media}` filled in, which is what the completion is, in a word.

        Raises:
            [`RewardError`]: a name in braces is none of them.
        """
        return text.format_map(_Names(self, more))

    def looked_at(self, name: str | None = None) -> list[Part]:
        """What comes before the question: the pictures that the completion was made from, and the completion."""
        before = [text_part("Before the edit:"), *self.sources, text_part("After the edit:")] if self.sources else []
        frames = f"The frames of the video, {len(self.parts)} in order:" if self.kind == "video" else None
        return [*before, *(text_part(line) for line in (name, frames) if line), *self.parts]


class _Names(dict[str, Any]):
    def __init__(self, shown: Shown, more: Mapping[str, Any]):
        super().__init__({**shown.columns, "prompt": shown.prompt, "media": shown.kind, **more})
        self._shown = shown

    def __missing__(self, name: str) -> Any:
        return self._shown.column(name)


@dataclass(frozen=True)
class Pictures:
    """
    How images and videos are sent.

    Args:
        format (`str`):
            `"png"`, which loses nothing, or `"jpeg"` of quality 95, which is several times smaller.
        max_side (`int`, *optional*):
            Longest side in pixels; larger images are made smaller. `None` sends them as they are.
        num_frames (`int`):
            Frames of a video, evenly from the first to the last; for one, that in the middle.
    """

    format: str = "png"
    max_side: int | None = None
    num_frames: int = 8

    def __post_init__(self) -> None:
        if self.format not in IMAGE_FORMATS:
            raise InputError(f"image_format={self.format!r} must be one of {', '.join(map(repr, IMAGE_FORMATS))}.")
        if self.max_side is not None and self.max_side < 1:
            raise InputError(f"max_side={self.max_side} must be at least 1 pixel: use 1024, or None for no limit.")
        if self.num_frames < 1:
            raise InputError(f"num_frames={self.num_frames} must be at least 1: use 8.")

    def shown(self, completion: Any) -> tuple[str, list[Part]]:
        """
        The kind of a completion, and it as parts of a message.

        Raises:
            [`RewardError`]: it is neither image, video nor text.
        """
        text = completion_text(completion)
        if text is not None:
            return "text", [text_part(f"[Start of the text]\n{text}\n[End of the text]")]
        kind = media_kind(completion)
        if kind == "image":
            return "image", [self.part(to_pil(completion))]
        if kind == "video":
            frames = video_frames(completion)
            chosen = frame_indices(self.num_frames, len(frames))
            return "video", [self.part(Image.fromarray(frames[index])) for index in chosen]
        raise RewardError(
            f"a judge looks at images, videos and texts, and was given {'a sound' if kind else 'a'} "
            f"{type(completion).__name__}: use another reward for it."
        )

    def sources(self, value: Any, column: str) -> list[Part]:
        """The pictures in a row's column, which holds one or a list of them."""
        several = value if isinstance(value, list | tuple) else [value]
        return [self.part(read_picture(picture, f"The picture in column {column!r}")) for picture in several]

    def part(self, picture: Image.Image) -> Part:
        """A picture as a data URI in a part of a message."""
        if self.max_side is not None and max(picture.size) > self.max_side:
            picture = picture.copy()
            picture.thumbnail((self.max_side, self.max_side), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        picture.save(buffer, **IMAGE_FORMATS[self.format])
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        return {"type": "image_url", "image_url": {"url": f"data:image/{self.format};base64,{data}"}}


def text_part(text: str) -> Part:
    """A text as a part of a message."""
    return {"type": "text", "text": text}

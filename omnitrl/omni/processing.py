# SPDX-License-Identifier: Apache-2.0
"""From a row to token ids and the tensors of its own media, and from some rows' media to the inputs of one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.media import Video

from .decoding import VideoLimits
from .rows import Decoded, Message, OmniRow


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

# What a processor says of each token of a text, rather than of its media.
TOKEN_FIELDS = ("token_type_ids", "mm_token_type_ids")

# Features of sounds (sounds, bins, frames) and their masks (sounds, frames), whose frames are padded to the longest.
PADDED_FIELDS = ("input_features", "feature_attention_mask", "input_features_mask")

# Seconds between two of the time steps of each video, as the models call it.
SECONDS_FIELDS = ("video_second_per_grid", "second_per_grid_ts")


@dataclass(frozen=True)
class RowInputs:
    """
    What a model is given of one row.

    Args:
        input_ids (`list[int]`):
            Token ids of its messages, with as many placeholders as its media take.
        media (`dict[str, Tensor]`):
            Tensors of its media, such as `pixel_values` (patches, dim) and `image_grid_thw` (images, 3).
        token_fields (`dict[str, list[int]]`):
            Numbers that some models want for each token, such as `mm_token_type_ids`.
    """

    input_ids: list[int]
    media: dict[str, Tensor] = field(default_factory=dict)
    token_fields: dict[str, list[int]] = field(default_factory=dict)


class OmniProcessor:
    """
    The processor of a model, one row at a time.

    Rows of one batch may have different kinds of media, or none. So each row is processed alone, its tensors are kept
    with it, and [`collate`] puts those of any rows together.

    Args:
        processing_class (`transformers.ProcessorMixin` or `transformers.PreTrainedTokenizerBase`):
            That of Qwen3-Omni, Qwen2.5-Omni, a vision-language model, or a tokenizer.
        limits ([`VideoLimits`], *optional*):
            Frames of a video that the model is shown.
        template_options (`dict`, *optional*):
            Further arguments of the chat template.

    Example:

    ```python
    >>> processor = OmniProcessor(AutoProcessor.from_pretrained("Qwen/Qwen3-Omni-30B-A3B-Instruct"))  # doctest: +SKIP
    >>> inputs = processor(read_row({"prompt": prompt, "images": ["cat.png"]}))  # doctest: +SKIP
    ```
    """

    def __init__(
        self,
        processing_class: ProcessorMixin | PreTrainedTokenizerBase,
        limits: VideoLimits | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.processing_class = processing_class
        self.limits = VideoLimits() if limits is None else limits
        self.template_options = dict(template_options or {})
        self._extractor: Any = getattr(processing_class, "feature_extractor", None)
        self._is_tokenizer = not hasattr(processing_class, "tokenizer")

    @property
    def sampling_rate(self) -> int | None:
        """Samples per second of the model's sounds; `None` if it hears nothing."""
        return None if self._extractor is None else int(self._extractor.sampling_rate)

    @property
    def shortest_sound(self) -> int:
        """
        Samples that a sound has at least; silence is added to shorter ones.

        Qwen3-Omni's encoder cuts sounds into pieces of a second. Where no sound of a batch fills one, the pieces are
        shorter, and so are the windows of attention: what it makes of a sound would depend on the rest of the batch.
        """
        if all(class_.__name__ != "Qwen3OmniMoeProcessor" for class_ in type(self.processing_class).__mro__):
            return 0
        return 2 * int(getattr(self.processing_class, "n_window", 50)) * self._extractor.hop_length

    def decoded(self, row: OmniRow) -> Decoded:
        """The media of a row as this processor takes them."""
        decoded = row.decoded(self.sampling_rate, self.limits)
        sounds = [np.pad(sound, (0, max(self.shortest_sound - len(sound), 0))) for sound in decoded.audios]
        return replace(decoded, audios=sounds)

    def text(self, row: OmniRow, add_generation_prompt: bool = True) -> str:
        """The messages of a row by the chat template, with one placeholder for each medium."""
        if isinstance(row.messages, str):
            return row.messages
        options = {"add_generation_prompt": add_generation_prompt, **self.template_options}
        messages: Any = text_messages(row.messages) if self._is_tokenizer else row.messages
        return str(self.processing_class.apply_chat_template(messages, tokenize=False, **options))

    def __call__(self, row: OmniRow, text: str | None = None, decoded: Decoded | None = None) -> RowInputs:
        """
        Token ids and tensors of a row.

        Args:
            row ([`OmniRow`]):
                The row.
            text (`str`, *optional*):
                Its messages as [`~OmniProcessor.text`] gives them, if that was called before.
            decoded ([`Decoded`], *optional*):
                Its media, if they were read before.

        Raises:
            [`~omnitrl.errors.InputError`]: a medium cannot be read, the model takes none of its kind, or the processor
                refuses it; the message names the row.
        """
        text = self.text(row) if text is None else text
        if self._is_tokenizer:
            if row.kinds:
                raise InputError(
                    f"{_sentence(row.where)} has media ({', '.join(row.kinds)}), but processing_class is a tokenizer: "
                    "give the processor of the model, AutoProcessor.from_pretrained(…)."
                )
            return RowInputs(self.processing_class(text=text, **self._specials(row, text))["input_ids"])
        for kind in ("image", "video"):
            if kind in row.kinds and getattr(self.processing_class, f"{kind}_processor", None) is None:
                raise InputError(
                    f"{_sentence(row.where)} has {kind}s, but the model's processor takes none: leave it out."
                )
        decoded = self.decoded(row) if decoded is None else decoded
        processed = self._processed(row, text, decoded)
        self._check_heard(row, processed.get("feature_attention_mask"), decoded.audios)
        return self._split(processed, decoded)

    def _specials(self, row: OmniRow, text: str) -> dict[str, bool]:
        """The option that keeps a tokenizer from beginning a text once more that the chat template has begun."""
        tokenizer: Any = self.processing_class if self._is_tokenizer else self.processing_class.tokenizer
        begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        whole = begun or (self._is_tokenizer and not isinstance(row.messages, str))
        return {"add_special_tokens": False} if whole else {}

    def _processed(self, row: OmniRow, text: str, decoded: Decoded) -> Mapping[str, Any]:
        given: dict[str, Any] = {"text": [text], **self._specials(row, text)}
        if decoded.images:
            given["images"] = decoded.images
        if decoded.audios:
            given["audio"] = decoded.audios
        if decoded.videos:
            given["videos"] = [video.frames for video in decoded.videos]
            rates = [_metadata(video) for video in decoded.videos]
            given["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": rates}
        try:
            return self.processing_class(**given, return_tensors="pt")
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            kinds = " and ".join(row.kinds) or "text"
            raise InputError(
                f"{_sentence(row.where)}: {type(self.processing_class).__name__} refuses its {kinds} ({error}). Its "
                f"media are {_described(decoded)}; change or leave out the row."
            ) from error

    def _check_heard(self, row: OmniRow, frames: Any, sounds: Sequence[np.ndarray]) -> None:
        """Raises for a sound of which the processor has cut off the end, as that of Qwen2.5-Omni does."""
        for i, sound in enumerate(sounds if frames is not None else ()):
            heard = int(torch.as_tensor(frames[i]).sum() + 1) * self._extractor.hop_length
            if heard < len(sound):
                rate = self._extractor.sampling_rate
                raise InputError(
                    f"Audio {i} of {row.where} is {len(sound) / rate:.0f} seconds long, of which "
                    f"{type(self.processing_class).__name__} takes {heard / rate:.0f}: cut it, or leave the row out."
                )

    def _split(self, processed: Mapping[str, Any], decoded: Decoded) -> RowInputs:
        media, token_fields = {}, {}
        for name, value in processed.items():
            if name in TOKEN_FIELDS:
                token_fields[name] = torch.as_tensor(value)[0].tolist()
            elif name not in ("input_ids", "attention_mask", "video_metadata"):
                media[name] = torch.as_tensor(value)
        if "video_grid_thw" in media:  # processors take one rate for all videos of a call, or none
            per_grid = self.processing_class.video_processor.temporal_patch_size
            seconds = torch.tensor([per_grid / video.frame_rate for video in decoded.videos])
            media |= {name: seconds for name in SECONDS_FIELDS if name in media}
        return RowInputs(torch.as_tensor(processed["input_ids"])[0].tolist(), media, token_fields)


def collate(rows: Sequence[Mapping[str, Tensor]], device: torch.device | str | None = None) -> dict[str, Tensor]:
    """
    The media of some rows as the inputs of one batch.

    Args:
        rows (`list[dict[str, Tensor]]`):
            `RowInputs.media` of each, in the order of the batch. Rows may have different fields, or none.
        device (`torch.device`, *optional*):
            Where the tensors go.

    Returns:
        `dict[str, Tensor]`: each field of any row, concatenated along its first dimension. Frames of sounds are padded
        with zeros to the longest.

    Example:

    ```python
    >>> import torch
    >>> collate([{"image_grid_thw": torch.tensor([[1, 2, 2]])}, {}, {"image_grid_thw": torch.tensor([[1, 4, 2]])}])
    {'image_grid_thw': tensor([[1, 2, 2],
            [1, 4, 2]])}
    ```
    """
    joined = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name in PADDED_FIELDS:
            longest = max(value.shape[-1] for value in values)
            values = [torch.nn.functional.pad(value, (0, longest - value.shape[-1])) for value in values]
        joined[name] = torch.cat(values).to(device)
    return joined


def pad_token_fields(
    rows: Sequence[Mapping[str, Sequence[int]]],
    prompt_width: int,
    width: int,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """
    The numbers for each token of some prompts, as (B, width) for prompts padded on the left and what follows them.

    Args:
        rows (`list[dict[str, list[int]]]`):
            `RowInputs.token_fields` of each.
        prompt_width (`int`):
            Columns of the padded prompts.
        width (`int`):
            All columns; those of padding and after the prompts are 0, which is a token of text.
        device (`torch.device`, *optional*):
            Where the tensors go.

    Example:

    ```python
    >>> pad_token_fields([{"mm_token_type_ids": [1, 1, 0]}], prompt_width=4, width=5)
    {'mm_token_type_ids': tensor([[0, 1, 1, 0, 0]])}
    ```
    """
    padded = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        padded[name] = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            numbers = row.get(name, [])
            padded[name][i, prompt_width - len(numbers) : prompt_width] = torch.tensor(numbers, dtype=torch.long)
        padded[name] = padded[name].to(device)
    return padded


def text_messages(messages: list[Message] | str) -> list[Message] | str:
    """Messages whose content is one text, as chat templates of language models take them; media are left out."""
    if isinstance(messages, str):
        return messages
    return [{**m, "content": "".join(part.get("text", "") for part in m["content"])} for m in messages]


def _metadata(video: Video) -> dict[str, Any]:
    """What processors that write time stamps want to know of frames that were chosen before."""
    return {"fps": video.frame_rate, "total_num_frames": len(video), "frames_indices": list(range(len(video)))}


def _described(decoded: Decoded) -> str:
    texts = [f"an image of {image.width} × {image.height}" for image in decoded.images]
    texts += [f"a video of {len(v)} frames of {v.frames.shape[2]} × {v.frames.shape[1]}" for v in decoded.videos]
    texts += [f"a sound of {len(audio)} samples" for audio in decoded.audios]
    return ", ".join(texts) or "none"


def _sentence(where: str) -> str:
    return where[0].upper() + where[1:]

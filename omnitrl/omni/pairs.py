# SPDX-License-Identifier: Apache-2.0
"""Rows with a preferred and a rejected answer, and what a model is given of some of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omnitrl.errors import InputError

from .decoding import VideoLimits
from .processing import OmniProcessor, RowInputs, collate
from .rows import KINDS, ROW_COLUMN, Message, OmniRow, place_media, read_row


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

ANSWERS = ("chosen", "rejected")
"""Columns of the answers, the preferred one first."""

REFERENCE_COLUMNS = tuple(f"ref_{answer}_logps" for answer in ANSWERS)
"""Columns of the log-probs of the reference, where they were computed before training."""

# So much of an answer's end is looked for in what the chat template makes of it.
_TAIL = 40


@dataclass(frozen=True)
class OmniPair:
    """
    Two answers to one prompt.

    Args:
        prompt ([`OmniRow`]):
            Messages with their media, or a text.
        chosen, rejected (`list[dict]` or `str`):
            Messages whose content is text, or a text where the prompt is one.
        template_options (`dict`):
            Arguments of the chat template for this row: its `tools` and `chat_template_kwargs`.
    """

    prompt: OmniRow
    chosen: list[Message] | str
    rejected: list[Message] | str
    template_options: dict[str, Any]


@dataclass(frozen=True)
class PairInputs:
    """
    What a model is given of a pair.

    Args:
        prompt ([`RowInputs`]):
            Token ids and media of the prompt.
        chosen_ids, rejected_ids (`list[int]`):
            Token ids of the answers.
    """

    prompt: RowInputs
    chosen_ids: list[int]
    rejected_ids: list[int]


def read_pair(row: Mapping[str, Any], where: str = "the row") -> OmniPair:
    """
    Reads a row of preferences: its prompt with its media, and the two answers.

    Args:
        row (`Mapping`):
            A row of a dataset with `chosen`, `rejected` and, unless both begin with it, `prompt`; media as in
            [`read_row`].
        where (`str`, *optional*):
            What to call it in an error.

    Raises:
        [`~omnitrl.errors.InputError`]: an answer is missing or has media, or the prompt is one that [`read_row`]
            refuses; the message names the row and the cure.

    Example:

    ```python
    >>> pair = read_pair({
    ...     "prompt": [{"role": "user", "content": "What is this?"}],
    ...     "chosen": "A cat.",
    ...     "rejected": "A dog.",
    ...     "images": ["cat.png"],
    ... })
    >>> pair.prompt.kinds, pair.chosen
    (('image',), [{'role': 'assistant', 'content': 'A cat.'}])
    ```
    """
    for name in ANSWERS:
        if not row.get(name):
            raise InputError(
                f"{_sentence(where)} has no {name} but {row.get(name)!r}: give a text such as 'A cat.', or messages, "
                "[{'role': 'assistant', 'content': 'A cat.'}]."
            )
    if row.get("prompt") is None:
        row = {**row, **_shared_beginning(row, where)}
    prompt = read_row(row, where)
    chosen, rejected = (_answer(row[name], name, prompt, where) for name in ANSWERS)
    options: dict[str, Any] = dict(row.get("chat_template_kwargs") or {})
    if row.get("tools"):
        options = {"tools": _tools(row["tools"]), **options}
    return OmniPair(prompt, chosen, rejected, options)


def _shared_beginning(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Prompt and answers of a row whose answers both begin with the prompt."""
    from trl import extract_prompt

    found = extract_prompt({name: row[name] for name in ANSWERS})
    if not all(found[name] for name in ("prompt", *ANSWERS)):
        raise InputError(
            f"{_sentence(where)} has no prompt, and its chosen and rejected do not begin alike and differ then: add "
            "the column prompt, or give whole conversations of which only the answers differ."
        )
    return found


def _answer(value: Any, name: str, prompt: OmniRow, where: str) -> list[Message] | str:
    if isinstance(prompt.messages, str):
        if not isinstance(value, str):
            raise InputError(
                f"{_sentence(where)} has a prompt that is a text and messages as {name}: give messages for both, or a "
                "text for both."
            )
        return value
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    contents = [message.get("content") for message in value if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, Sequence | Mapping) for part in content]
    kinds = [part["type"] for part in parts if isinstance(part, Mapping) and part.get("type") in KINDS]
    if kinds:
        raise InputError(
            f"{_sentence(where)} has a place for {kinds[0]} in {name}, but answers are text: move what the question "
            "shows to the prompt, or leave the row out."
        )
    placed = place_media(value, {}, f"{name} of {where}").messages
    answer = [{**message, "content": _text(message)} for message in placed if isinstance(message, dict)]
    if answer[0]["role"] in ("system", "user"):
        raise InputError(
            f"{_sentence(where)} has a {name} that begins with the role {answer[0]['role']!r}, as a prompt does: give "
            "the answer alone, or whole conversations and no column prompt."
        )
    return answer


def _tools(tools: Any) -> Any:
    import json

    return json.loads(tools) if isinstance(tools, str) else tools


def _text(message: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"])


class PairProcessor:
    """
    The processor of a model for pairs: the prompt and its media once, and each answer as it would be generated.

    Args:
        processing_class (`transformers.ProcessorMixin` or `transformers.PreTrainedTokenizerBase`):
            As in [`OmniProcessor`].
        limits ([`VideoLimits`], *optional*):
            Frames of a video that the model is shown.
        template_options (`dict`, *optional*):
            Further arguments of the chat template.

    Example:

    ```python
    >>> processor = PairProcessor(AutoProcessor.from_pretrained("Qwen/Qwen3-Omni-30B-A3B-Instruct"))  # doctest: +SKIP
    >>> inputs = processor(read_pair(row))  # doctest: +SKIP
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
        self.tokenizer: Any = getattr(processing_class, "tokenizer", processing_class)

    def __call__(self, pair: OmniPair) -> PairInputs:
        """
        Token ids and tensors of a pair.

        Raises:
            [`~omnitrl.errors.InputError`]: a medium cannot be read or the processor refuses it, or the chat template
                leaves an answer out; the message names the row.
        """
        options = {**self.template_options, **pair.template_options}
        processor = OmniProcessor(self.processing_class, self.limits, options)
        prompt, answers = self._texts(processor, pair)
        ids = [self.tokenizer(text=answer, add_special_tokens=False)["input_ids"] for answer in answers]
        return PairInputs(processor(pair.prompt, text=prompt), *ids)

    def _texts(self, processor: OmniProcessor, pair: OmniPair) -> tuple[str, list[str]]:
        """The prompt, and what follows it in each of the two."""
        prompt, both = processor.text(pair.prompt), (pair.chosen, pair.rejected)
        if isinstance(prompt_messages := pair.prompt.messages, str):
            end = self.tokenizer.eos_token or ""
            return prompt, [text if text.endswith(end) else text + end for text in both if isinstance(text, str)]
        whole = [self._whole(processor, pair.prompt, prompt_messages, answer) for answer in both]
        shared = min(_common(prompt, text) for text in whole)
        if shared < len(prompt):
            _warn_of_template(prompt[shared:])
        return prompt[:shared], [text[shared:] for text in whole]

    def _whole(self, processor: OmniProcessor, prompt: OmniRow, messages: list[Message], answer: Any) -> str:
        """
        Prompt and answer by the chat template.

        Some templates take the content of an answer as a text, some as parts, and leave out what they do not expect.
        Those of tokenizers are given texts, which [`OmniProcessor`] makes of parts.
        """
        end = answer[-1]["content"].strip()[-_TAIL:]
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in answer]
        for form in (parts,) if self.tokenizer is self.processing_class else (answer, parts):
            text = processor.text(OmniRow([*messages, *form], prompt.media, prompt.where), add_generation_prompt=False)
            if end in text[_common(processor.text(prompt), text) :]:
                return text
        raise InputError(
            f"{_sentence(prompt.where)} has an answer that the chat template of "
            f"{type(self.processing_class).__name__} leaves out: {answer[-1]['content']!r:.80}. Its last message must "
            "have the role 'assistant' and a text."
        )


def _common(a: str, b: str) -> int:
    """How many characters two texts begin alike with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@cache
def _warn_of_template(end: str) -> None:
    logger.warning(
        "The chat template ends a prompt with %r when an answer is to be generated, and goes on differently when "
        "there is one: the answers are trained from where the two part. Use a template that renders the prompt the "
        "same way in both cases.",
        end,
    )


class PairCollator:
    """
    The batch of some rows of preferences: those with the chosen answers, and then those with the rejected ones.

    The media of a prompt are read here and are in the batch twice. Rows may have different kinds of media, or none.

    Args:
        processor ([`PairProcessor`]):
            Of the model.
        max_length (`int`, *optional*):
            Tokens of prompt and answer; the rest of an answer is cut off.
        pad_to_multiple_of (`int`, *optional*):
            What the length of a batch is a multiple of.

    Example:

    ```python
    >>> collator = PairCollator(PairProcessor(processing_class), max_length=4096)  # doctest: +SKIP
    >>> collator([dataset[0], dataset[1]])["input_ids"].shape[0]  # doctest: +SKIP
    4
    ```
    """

    def __init__(
        self, processor: PairProcessor, max_length: int | None = None, pad_to_multiple_of: int | None = None
    ) -> None:
        self.processor = processor
        self.max_length = max_length
        self.pad_to_multiple_of = pad_to_multiple_of
        tokenizer = processor.tokenizer
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """
        Args:
            examples (`list[dict]`):
                Rows of a dataset; `ref_chosen_logps` and `ref_rejected_logps` go into the batch.

        Returns:
            `dict[str, Tensor]`: `input_ids`, `attention_mask` and `completion_mask` (2 B, L), padded on the right, and
            the tensors of the media.
        """
        pairs = [self._inputs(example) for example in examples]
        rows = [(pair.prompt, pair.chosen_ids) for pair in pairs]
        rows += [(pair.prompt, pair.rejected_ids) for pair in pairs]
        batch = {
            "input_ids": self._padded([p.input_ids + ids for p, ids in rows], self.pad_token_id),
            "attention_mask": self._padded([[1] * (len(p.input_ids) + len(ids)) for p, ids in rows], 0),
            "completion_mask": self._padded([[0] * len(p.input_ids) + [1] * len(ids) for p, ids in rows], 0),
        }
        for name in dict.fromkeys(name for prompt, _ in rows for name in prompt.token_fields):
            numbers = [p.token_fields.get(name, [0] * len(p.input_ids)) + [0] * len(ids) for p, ids in rows]
            batch[name] = self._padded(numbers, 0)
        for name in REFERENCE_COLUMNS:
            if name in examples[0]:
                batch[name] = torch.tensor([example[name] for example in examples])
        return {**batch, **collate([prompt.media for prompt, _ in rows])}

    def _inputs(self, example: Mapping[str, Any]) -> PairInputs:
        inputs = self.processor(read_pair(example, where_of(example)))
        length = len(inputs.prompt.input_ids)
        if self.max_length is not None and length >= self.max_length:
            raise InputError(
                f"{_sentence(where_of(example))} has a prompt of {length} tokens, which leaves none of "
                f"max_length={self.max_length} for an answer, and a prompt is not cut, as its media are whole: use "
                f"max_length={length + 256} or more, lower video_max_frames or the size of images, or leave the row "
                "out."
            )
        return inputs

    def _padded(self, numbers: Sequence[list[int]], value: int) -> Tensor:
        from trl.trainer.utils import pad

        cut = [torch.tensor(row[: self.max_length], dtype=torch.long) for row in numbers]
        return pad(cut, padding_value=value, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of)


def where_of(example: Mapping[str, Any]) -> str:
    """What to call a row of a dataset that was numbered."""
    number = example.get(ROW_COLUMN)
    return "a row" if number is None else f"row {number}"


def _sentence(where: str) -> str:
    return where[0].upper() + where[1:]

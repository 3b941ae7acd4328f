# SPDX-License-Identifier: Apache-2.0
"""What a judge answered, and how numbers are read from it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


_THOUGHTS = re.compile(r"^.*</think>", re.DOTALL)  # a chat template may have written the opening tag
_FENCE = re.compile(r"^```\w*\n(.*?)\n?```$", re.DOTALL)
_QUOTE_LENGTH = 160
# A note of the scale may stand between, "Final Score (1-5): 4".
_FINAL_SCORE = re.compile(
    r"final\s+score(?:\s*\([^()\n]*[^()\s\d.][^()\n]*\))?\W{0,40}?(?:is)?\W{0,40}?(-?(?:\d+(?:\.\d+)?|\.\d+))",
    re.IGNORECASE,
)
# Behind a number: "/ 5" and "out of 5", or a decimal comma and the end of a range.
_NO_SINGLE_NUMBER = re.compile(
    r"[ \t*]*(?:/|out\s+of\b)[ \t*]*(?P<scale>\d+(?:\.\d+)?)|,\d|[ \t]*(?:[-–—~]|to\b)[ \t]*\d", re.IGNORECASE
)


class AnswerError(ValueError):
    """An answer that does not hold what the template looks for; the row is missing."""


@dataclass(frozen=True)
class Answer:
    """
    One answer of a judge.

    Args:
        text (`str`):
            What it says, without thoughts in `<think>`.
        first_token (`dict[str, float]`, *optional*):
            The likeliest first tokens and their log-probabilities, where they were asked for and given.
        cut_off (`bool`):
            Whether it ended because `max_tokens` were reached.
    """

    text: str
    first_token: Mapping[str, float] | None = None
    cut_off: bool = False

    @classmethod
    def of_content(cls, content: str | None, **known: Any) -> "Answer":
        """From the content of a message."""
        return cls(_THOUGHTS.sub("", content or "").strip(), **known)

    @property
    def plain(self) -> str:
        """The text without a code fence around it."""
        fenced = _FENCE.match(self.text)
        return fenced[1].strip() if fenced else self.text

    def quote(self) -> str:
        """Its end, for a sentence: judges give their verdict last."""
        text = self.text if len(self.text) <= _QUOTE_LENGTH else "…" + self.text[-_QUOTE_LENGTH:]
        return repr(text) + (", cut off at max_tokens" if self.cut_off else "")


def number(answer: Answer, pattern: str, low: float, high: float) -> float:
    """
    The number in the last match of a pattern with one group.

    Raises:
        [`AnswerError`]: there is none, or it is outside [low, high].
    """
    found = re.findall(pattern, answer.text)
    try:
        value = float(found[-1])
    except (IndexError, TypeError, ValueError):
        raise AnswerError(f"the answer has no number where {pattern!r} looks for one: {answer.quote()}") from None
    return _within(value, low, high, answer)


def final_score(answer: Answer, low: float, high: float) -> float:
    """
    The number behind the last `Final Score`, with or without `/ high` behind it.

    Raises:
        [`AnswerError`]: there is none, it is a range or of another scale, or it is outside [low, high].
    """
    found = list(_FINAL_SCORE.finditer(answer.text))
    if not found:
        raise AnswerError(f"the answer has no number behind 'Final Score': {answer.quote()}")
    behind = _NO_SINGLE_NUMBER.match(answer.text, found[-1].end())
    if behind is not None and (behind["scale"] is None or float(behind["scale"]) != high):
        raise AnswerError(f"the answer has no single number from {low:g} to {high:g}: {answer.quote()}")
    return _within(float(found[-1][1]), low, high, answer)


def json_number(answer: Answer, field: str, low: float, high: float) -> float:
    """
    The number in a field of an answer that is a JSON object.

    Raises:
        [`AnswerError`]: it is no such object, or the number is outside [low, high].
    """
    try:
        value = json.loads(answer.plain)[field]
    except (ValueError, KeyError, TypeError, IndexError):
        raise AnswerError(f"the answer is no JSON object with the field {field!r}: {answer.quote()}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnswerError(f"the answer's field {field!r} is no number: {answer.quote()}")
    return _within(float(value), low, high, answer)


def choice(answer: Answer, pattern: str, values: Mapping[str, float]) -> float:
    """
    The value of the word in the last match of a pattern with one group; words are in lower case.

    Raises:
        [`AnswerError`]: there is none of the words.
    """
    found = [word.lower() for word in re.findall(pattern, answer.text, re.IGNORECASE)]
    if not found or found[-1] not in values:
        raise AnswerError(f"the answer has none of {', '.join(values)} where it should: {answer.quote()}")
    return values[found[-1]]


def probability(answer: Answer, yes: Sequence[str], no: Sequence[str]) -> float:
    r"""
    \\( P(\text{yes}) / (P(\text{yes}) + P(\text{no})) \\) of the first token.

    Tokens are compared without white space and case, and those that are the same word add up. A word that is not among
    the likeliest tokens counts as 0, which is off by less than the probability of the least likely of them.

    Raises:
        [`AnswerError`]: neither is among the likeliest tokens, or there are no log-probabilities.
    """
    if answer.first_token is None:
        raise AnswerError("the server gives no log-probabilities")
    chances = {"yes": 0.0, "no": 0.0}
    for token, log_probability in answer.first_token.items():
        for name, words in (("yes", yes), ("no", no)):
            if token.strip().lower() in {word.lower() for word in words}:
                chances[name] += math.exp(log_probability)
    total = chances["yes"] + chances["no"]
    if not total > 0:
        shown = ", ".join(repr(token) for token in list(answer.first_token)[:5])
        raise AnswerError(
            f"neither {yes[0]!r} nor {no[0]!r} is among the {len(answer.first_token)} likeliest first tokens "
            f"({shown}, …)"
        )
    return chances["yes"] / total


def _within(value: float, low: float, high: float, answer: Answer) -> float:
    if not low <= value <= high:
        raise AnswerError(f"the answer's number {value:g} is not from {low:g} to {high:g}: {answer.quote()}")
    return value

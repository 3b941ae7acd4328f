# SPDX-License-Identifier: Apache-2.0
"""What a text answers: its last words without its thoughts, one of several choices, and how such answers compare."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from .contract import RewardError
from .kinds import is_messages
from .text import edit_distance


ANSWER_NORMALISATIONS = ("case", "articles", "punctuation")
"""What a comparison of answers may leave out."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_END_OF_TAGGED = "</answer>"
_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"[{}]")
_STATED = re.compile(
    r"\b(?:answer|choice|option)\b[*_\s]*(?:\bis\b[\s:*_]*|[:=][\s*_]*)(?=[^\s:*_])([^\n]*)", re.IGNORECASE
)
# A command of LaTeX around a text, \text{B}, and marks around words, **B** or $5$, but none within, as in x_1 or 2*3.
_DECORATION = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|(?<![\w*`$])[*_`$]+|(?<![*_`$])[*_`$]++(?!\w)"
)
_LEADING = re.compile(r"[(\[]?([A-Z])(?:[)\]][.:,]?|[.:])(?=\s|$)", re.IGNORECASE)
_BRACKETED = re.compile(r"[(\[]([A-Z])[)\]]")
# A letter that stands alone; an article and a pronoun are followed by a small word, the article by none of these.
_LONE = re.compile(
    r"(?<![\w'’-])(?!I\s+[a-z]|A\s+(?!(?:is|was|as|and|or|but|for|if|with|because|since|due|which)\b)[a-z])"
    r"([A-Z])(?![\w'’-])"
)
_ARTICLE = re.compile(r"(?<!\w)(?:a|an|the)\s+(?=\S)", re.IGNORECASE)
# Characters of scripts that do not part words by spaces, one by one, and words of all others.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")


def completion_text(completion: Any) -> str | None:
    """
    The text of a completion.

    Args:
        completion (`str` or `list[dict]`):
            A string, or messages as TRL has them, of which the last one counts; its content is a string or a list of
            parts, of which those of text are joined.

    Returns:
        `str` or `None`: `None` for what is no text.
    """
    if isinstance(completion, str):
        return completion
    if not is_messages(completion):
        return None
    content = completion[-1]["content"]
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def check_texts(completions: Sequence[Any]) -> list[str]:
    """
    The texts of completions.

    Raises:
        [`RewardError`]: one of them is no text.
    """
    texts = []
    for row, completion in enumerate(completions):
        text = completion_text(completion)
        if text is None:
            raise RewardError(
                f"completions[{row}]: expected a text or a list of messages such as [{{'role': 'assistant', "
                f"'content': 'B'}}], got {type(completion).__name__}: use a reward for what this model makes."
            )
        texts.append(text)
    return texts


def without_thinking(text: str) -> str:
    """What stands behind the last `</think>`, nothing if `<think>` was not closed, and else the whole text."""
    _, closed, rest = text.rpartition("</think>")
    return rest.partition("<think>")[0].strip() if closed else text.partition("<think>")[0].strip()


def final_answer(text: str) -> str:
    r"""
    The answer that a text comes to: between `<answer>` tags, in `\boxed`, behind "answer is", or all of it.

    Args:
        text (`str`):
            A completion.
    """
    text = without_thinking(text)
    marked = _marked(text)
    return text if marked is None else marked


def _marked(text: str) -> str | None:
    """The part of a text that is marked as its answer."""
    tagged = tagged_answer(text)
    boxed = _boxed(text if tagged is None else tagged)
    if boxed is not None or tagged is not None:
        return tagged if boxed is None else boxed
    stated = _STATED.findall(text)
    return _undecorated(stated[-1]) if stated else None


def tagged_answer(text: str) -> str | None:
    """What stands between the last `<answer>…</answer>`, or `None`."""
    # Without what is behind the last end, in which each beginning of a text that repeats itself is looked for one.
    tagged = _TAGGED.findall(text[: text.lower().rfind(_END_OF_TAGGED) + len(_END_OF_TAGGED)])
    return tagged[-1].strip() if tagged else None


def _boxed(text: str) -> str | None:
    r"""What is in the last `\boxed{…}` that is closed, braces within it counted."""
    opened: list[int] = []
    closed: dict[int, int] = {}  # where a brace is closed, by the place behind it
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened:
            closed[opened.pop()] = brace.start()
    starts = [match.end() for match in _BOXED.finditer(text) if match.end() in closed]
    return _undecorated(text[starts[-1] : closed[starts[-1]]]) if starts else None


def _undecorated(text: str) -> str:
    return _DECORATION.sub(lambda match: match[1] or "", text).strip()


def normalised_answer(text: str, ignore: Sequence[str] = ANSWER_NORMALISATIONS) -> str:
    """
    An answer as it is compared: compatible characters in one form, and white space as single spaces.

    Args:
        text (`str`):
            The answer.
        ignore (`tuple[str, ...]`, *optional*):
            What is left out, of `ANSWER_NORMALISATIONS`.
    """
    text = unicodedata.normalize("NFKC", text)
    if "case" in ignore:
        text = text.casefold()
    if "punctuation" in ignore:
        text = _undecorated(text)
        text = "".join(" " if _is_punctuation(text, i) else text[i] for i in range(len(text)))
    text = " ".join(text.split())
    return _ARTICLE.sub("", text) if "articles" in ignore else text


def _is_punctuation(text: str, i: int) -> bool:
    """Whether a character is punctuation and no part of a number: neither the point in 3.5 nor the sign of -5."""
    if not unicodedata.category(text[i]).startswith("P"):
        return False
    before, after = text[i - 1 : i], text[i + 1 : i + 2]
    within = before.isdigit() and after.isdigit()
    sign = text[i] == "-" and after.isdigit() and not before.strip()
    return not (within or sign or text[i] == "%")


def word_error_rate(given: str, wanted: str) -> float:
    """
    Words that must be put in, taken out or replaced to make the one text the other, over the words of `wanted`.

    Args:
        given (`str`):
            What was answered.
        wanted (`str`):
            The right answer, with at least one word.
    """
    words = _WORD.findall(wanted)
    return edit_distance(_WORD.findall(given), words) / len(words)


def texts_of_choices(row: int, choices: Any) -> list[str] | None:
    """
    The choices of a row as texts, or `None` where it has none.

    Raises:
        [`RewardError`]: they are no list.
    """
    if choices is None:
        return None
    given = choices.get("text") if isinstance(choices, Mapping) else choices
    if isinstance(given, str) or not isinstance(given, Sequence) or not 0 < len(given) <= 26:
        raise RewardError(
            f"choices[{row}]={choices!r:.80} must be a list of at most 26 texts: give for example ['a cat', 'a dog']."
        )
    return [str(choice) for choice in given]


def choice_of(text: str, choices: Sequence[str] | None, alone: bool = False) -> str | None:
    """
    The letter of the choice that a text comes to.

    Args:
        text (`str`):
            A completion, or a right answer.
        choices (`list[str]`, *optional*):
            The choices.
        alone (`bool`, *optional*, defaults to `False`):
            Whether the text must be a choice and nothing else, as right answers are.

    Returns:
        `str` or `None`: a capital letter; `None` if it comes to none of the choices.
    """
    letters = [chr(ord("A") + i) for i in range(26 if choices is None else len(choices))]
    if alone:
        return _named(text.strip(), choices, letters)
    text = without_thinking(text)
    marked = _marked(text)
    if marked is not None:
        named = _named(_undecorated(marked), choices, letters)
        if named is not None:
            return named
        plain = _undecorated(marked)
        first = _LONE.match(plain)
        lone = {first[1]} if first is not None else set(_LONE.findall(plain))
        return lone.pop() if len(lone) == 1 and lone <= set(letters) else None
    text = _undecorated(text)
    named = _named(text, choices, letters)
    if named is not None:
        return named
    for pattern in (_BRACKETED, _LONE):
        found = [letter for letter in pattern.findall(text) if letter in letters]
        if found:
            return found[-1]
    return None


def _named(text: str, choices: Sequence[str] | None, letters: Sequence[str]) -> str | None:
    """The letter of a text that is a letter, the text of a choice, or begins with a letter as lists have them."""
    bare = text.strip(" \t\r\n()[].,:;'\"").upper()
    if bare in letters:
        return bare
    plain = normalised_answer(text)
    same = [i for i, choice in enumerate(choices or []) if normalised_answer(choice) == plain]
    if plain and same:
        return letters[same[0]]
    leading = _LEADING.match(text)
    return leading[1].upper() if leading is not None and leading[1].upper() in letters else None

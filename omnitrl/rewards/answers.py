# SPDX-License-Identifier: Apache-2.0
"""Rewards of texts that answer a question: whether the answer is right, and has the form that was asked for."""

import importlib.util
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from omnitrl.errors import InputError

from .answer_texts import (
    ANSWER_NORMALISATIONS,
    check_texts,
    choice_of,
    final_answer,
    normalised_answer,
    tagged_answer,
    texts_of_choices,
    without_thinking,
    word_error_rate,
)
from .contract import RewardError
from .traits import RewardTraits, reward_traits


logger = logging.getLogger(__name__)

Column = Sequence[Any] | None
LogExtra = Callable[[str, list[Any]], None] | None

_MATCHES = ("exact", "contains", "words")
_DELIMITERS = re.compile(r"\\?\$+|\\[()\[\]]")  # of LaTeX in a text, and dollars
_WARNED: set[str] = set()


class NoAnswerColumn(RewardError, InputError):
    """The dataset has no column that says what the right answer is: no row could ever be scored."""


class AnswerReward:
    r"""
    Rewards texts whose answer is the right one, compared as text.

    The answer of a completion is what stands behind `</think>` and, in this order, between the last
    `<answer>…</answer>`, in the last `\boxed{…}`, behind the last `answer:`, `answer is` or `choice is` up to the
    end of its line, or the next line where that is its end, or all of it. The right one is the dataset's column
    `answer`, and in rows where that is `None`, `solution`; a list holds several, of which the best counts. A solution
    that ends in `#### 72`, as those of GSM8K do, means what stands there. A row without any, or with nothing to
    compare in it, has no reward (`None`).

    Range 0 or 1, with `match="words"` [0, 1].

    Args:
        match (`str`, *optional*, defaults to `"exact"`):
            `"exact"`: 1 for the same text. `"contains"`: 1 where the words of the right answer occur in the other one,
            in a row; a policy learns to list all answers unless something charges for length. `"words"`: 1 minus the
            word error rate, at least 0, where each character of Chinese and Japanese counts as a word.
        ignore (`tuple[str, ...]`, *optional*, defaults to `("case", "articles", "punctuation")`):
            What does not count: `"case"`; `"articles"`, which are `a`, `an` and `the` before another word;
            `"punctuation"`, but for what stands within a number. White space counts as one space in any case.

    Raises:
        [`~omnitrl.errors.InputError`]: for an unknown option.

    Example:

    ```python
    >>> from omnitrl.rewards import AnswerReward

    >>> texts = ["<answer>The cat.</answer>", "I hear a cat that purrs"]
    >>> AnswerReward()(completions=texts, answer=["cat", "cat"])
    [1.0, 0.0]
    >>> AnswerReward(match="contains")(completions=texts, answer=["cat", "cat"])
    [1.0, 1.0]
    ```
    """

    traits = RewardTraits(media=("text",), deterministic=True)

    def __init__(
        self,
        match: Literal["exact", "contains", "words"] = "exact",
        ignore: Sequence[str] = ANSWER_NORMALISATIONS,
    ):
        if match not in _MATCHES:
            raise InputError(f"match={match!r} must be one of {', '.join(map(repr, _MATCHES))}.")
        unknown = [name for name in ignore if name not in ANSWER_NORMALISATIONS]
        if isinstance(ignore, str) or unknown:
            raise InputError(
                f"ignore={ignore!r} must be some of {', '.join(map(repr, ANSWER_NORMALISATIONS))}: give for example "
                "('case',), or () for the very text."
            )
        self.match, self.ignore = match, tuple(ignore)

    def __call__(
        self,
        completions: Sequence[Any],
        answer: Column = None,
        solution: Column = None,
        log_extra: LogExtra = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """
        Scores texts.

        Args:
            completions (`list`):
                Strings, or lists of messages, of which the last one counts.
            answer (`list`, *optional*):
                The dataset's column of right answers: texts, numbers, or lists of them.
            solution (`list`, *optional*):
                The same by the name that TRL has for it.
            log_extra (`Callable`, *optional*):
                Records the column `answer_read`.
            **kwargs:
                Ignored.

        Returns:
            `list[float | None]`: one number per row, `None` where no right answer is known.

        Raises:
            [`RewardError`]: there is neither column, or a completion is no text.
        """
        right = _right_answers("exact_answer", answer, solution, len(completions))
        read = [final_answer(text) for text in check_texts(completions)]
        if log_extra is not None:
            log_extra("answer_read", list(read))
        return [self._score(*pair) for pair in zip(read, right, strict=True)]

    def _score(self, read: str, right: Any) -> float | None:
        several = list(right) if isinstance(right, list | tuple) else [right]
        wanted = [_short(text) for text in several if text is not None]
        compared = [text for text in (normalised_answer(text, self.ignore) for text in wanted) if text]
        if not compared:
            if right is not None:
                _warn_once("text", f"The right answer {right!r:.80} has no characters to compare with")
            return None
        given = normalised_answer(read, self.ignore)
        return max(self._compared(given, text) for text in compared)

    def _compared(self, given: str, wanted: str) -> float:
        if self.match == "exact":
            return float(given == wanted)
        if self.match == "contains":
            return float(re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", given) is not None)
        return max(0.0, 1.0 - word_error_rate(given, wanted))


_exact = AnswerReward()
_words = AnswerReward(match="words")


@reward_traits(media="text", deterministic=True)
def exact_answer_reward(
    completions: Sequence[Any],
    answer: Column = None,
    solution: Column = None,
    log_extra: LogExtra = None,
    **kwargs: Any,
) -> list[float | None]:
    """
    Rewards the very answer but for case, articles and punctuation: [`AnswerReward`] with its defaults. Range 0 or 1.

    Args:
        completions (`list`):
            Strings, or lists of messages.
        answer (`list`, *optional*):
            The dataset's column of right answers.
        solution (`list`, *optional*):
            The same by the name that TRL has for it.
        log_extra (`Callable`, *optional*):
            Records the column `answer_read`.
        **kwargs:
            Ignored.

    Returns:
        `list[float | None]`: 0.0 or 1.0, `None` where no right answer is known.

    Example:

    ```python
    >>> from omnitrl.rewards import exact_answer_reward

    >>> exact_answer_reward(completions=["Answer: the Blue Whale.", "a whale"], answer=["blue whale", "blue whale"])
    [1.0, 0.0]
    ```
    """
    return _exact(completions, answer, solution, log_extra)


@reward_traits(media="text", deterministic=True)
def audio_answer_reward(
    completions: Sequence[Any],
    answer: Column = None,
    solution: Column = None,
    log_extra: LogExtra = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Rewards answers to questions about sounds by their words, and transcripts: [`AnswerReward`] with `match="words"`.

    $$ r = \max\left(0,\; 1 - \frac{d(\text{read}, \text{right})}{|\text{right}|}\right) $$

    with the Levenshtein distance \\( d \\) in words. Range [0, 1].

    Args:
        completions (`list`):
            Strings, or lists of messages.
        answer (`list`, *optional*):
            The dataset's column of right answers, or of transcripts.
        solution (`list`, *optional*):
            The same by the name that TRL has for it.
        log_extra (`Callable`, *optional*):
            Records the column `answer_read`.
        **kwargs:
            Ignored.

    Returns:
        `list[float | None]`: one number per row, `None` where no right answer is known.

    Example:

    ```python
    >>> from omnitrl.rewards import audio_answer_reward

    >>> audio_answer_reward(completions=["A dog barks", "a dog is barking twice"], answer=["dog barks", "dog barks"])
    [1.0, 0.0]
    ```
    """
    return _words(completions, answer, solution, log_extra)


@reward_traits(media="text", deterministic=True)
def multiple_choice_reward(
    completions: Sequence[Any],
    answer: Column = None,
    solution: Column = None,
    choices: Column = None,
    log_extra: LogExtra = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Rewards the letter, or the text, of the right choice: 1.0, and 0.0 for another one or none.

    In what stands behind `</think>`, the choice is, in this order,

    1. what stands between the last `<answer>…</answer>`, in the last `\boxed{…}`, or behind the last `answer:`,
       `answer is` or `choice is` up to the end of its line, or the next line where that is its end: a letter (`B`,
       `b`, `(B)`, `B. a dog`), or the text of one of the choices;
    2. a text that is nothing but a letter, begins with one (`(B) a dog`, `B: a dog`), or is that of a choice;
    3. the last letter in brackets, or else the last capital letter that stands alone. `I` before a small word is none,
       nor is `A`, unless that is one which follows no article, such as `is` or `because`.

    Letters beyond the number of `choices` are no letters. Of several letters within the first kind, without one at the
    beginning, none counts.

    Args:
        completions (`list`):
            Strings, or lists of messages.
        answer (`list`, *optional*):
            The dataset's column of right choices: a letter, the number of the choice from 0 as an `int`, or its text.
        solution (`list`, *optional*):
            The same by the name that TRL has for it.
        choices (`list[list[str]]`, *optional*):
            The dataset's column of choices; optional where the answers are letters. Also as in ARC, a dictionary with
            the list `text`.
        log_extra (`Callable`, *optional*):
            Records the column `choice_read`.
        **kwargs:
            Ignored.

    Returns:
        `list[float | None]`: 0.0 or 1.0, `None` where there is no right choice or it is not one of the choices.

    Raises:
        [`RewardError`]: there is no column of answers, a completion is no text, or choices are no list.

    Example:

    ```python
    >>> from omnitrl.rewards import multiple_choice_reward

    >>> texts = ["<think>A?</think>Answer: (B)", "a dog", "I think that it is C"]
    >>> multiple_choice_reward(completions=texts, answer=["B", "B", 1], choices=[["a cat", "a dog", "a hen"]] * 3)
    [1.0, 1.0, 0.0]
    ```
    """
    right = _right_answers("multiple_choice", answer, solution, len(completions))
    offered = [texts_of_choices(row, one) for row, one in enumerate(choices or [None] * len(completions))]
    read = [choice_of(text, options) for text, options in zip(check_texts(completions), offered, strict=True)]
    if log_extra is not None:
        log_extra("choice_read", list(read))
    wanted = [_right_choice(*pair) for pair in zip(right, offered, strict=True)]
    return [None if letter is None else float(got == letter) for got, letter in zip(read, wanted, strict=True)]


@reward_traits(media="text", deterministic=True, in_process=True)
def math_answer_reward(
    completions: Sequence[Any], answer: Column = None, solution: Column = None, log_extra: LogExtra = None
) -> list[float | None]:
    r"""
    Rewards mathematically equal answers: TRL's `accuracy_reward`, which compares with `math-verify`. Range 0 or 1.

    Needs `pip install "omnitrl[math]"`. What a completion answers is read from what stands behind `</think>`: the last
    `<answer>…</answer>`, with or without LaTeX in it, or else `\boxed{…}` or `The answer is $…$`; a number or formula
    in the middle of a text is no answer. It is called in a process of its own, since only there it can be broken off:
    the value of `9^{9^{9^9}}` would hold up a thread for good, and is a wrong answer after some seconds instead.

    Args:
        completions (`list`):
            Strings, or lists of messages.
        answer (`list`, *optional*):
            The dataset's column of right answers: numbers, LaTeX (`\frac{1}{2}`, `$1 + x$`), or solutions that end in
            `#### 72`. A plain formula must be between `$`: of `1 + x` only the 1 is read.
        solution (`list`, *optional*):
            The same by the name that TRL has for it.
        log_extra (`Callable`, *optional*):
            Records the columns `gold_parsed` and `answer_parsed`.

    Returns:
        `list[float | None]`: 0.0 or 1.0, `None` where the right answer is missing or cannot be read.

    Raises:
        `ImportError`: if `math-verify` is not installed.
        [`RewardError`]: there is no column of answers, or a completion is no text.

    Example:

    ```python
    >>> from omnitrl.rewards import math_answer_reward

    >>> texts = [r"So it is \boxed{\frac{1}{2}}.", "<answer>1/2</answer>", "The answer is $0.4$."]
    >>> math_answer_reward(completions=texts, answer=["0.5", "0.5", "0.5"])
    [1.0, 1.0, 0.0]
    ```
    """
    right = _right_answers("math_answer", answer, solution, len(completions))
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError('math_answer_reward needs the package math-verify: pip install "omnitrl[math]"')
    from trl.rewards import accuracy_reward

    messages = [[{"role": "assistant", "content": _in_latex(text)}] for text in check_texts(completions)]
    wanted = ["" if one is None else _short(one).replace(r"\$", "") for one in right]
    values = accuracy_reward(messages, wanted, log_extra=_without("solution", log_extra))
    for value, one in zip(values, right, strict=True):
        if value is None and one is not None:
            _warn_once("math", f"The right answer {one!r:.80} is nothing that math-verify reads")
    return values


class FormatReward:
    """
    Rewards texts of a form such as `<think>…</think><answer>…</answer>`: 1.0, and 0.0 for any other.

    Each element occurs once, in the order given, with something in it, and nothing but white space stands around them.

    Args:
        tags (`tuple[str, ...]`, *optional*, defaults to `("think", "answer")`):
            Names of the elements.

    Raises:
        [`~omnitrl.errors.InputError`]: without a tag, or for one that is no name or is given twice.

    Example:

    ```python
    >>> from omnitrl.rewards import FormatReward

    >>> FormatReward()(completions=["<think>2 + 2</think> <answer>4</answer>", "<answer>4</answer>"])
    [1.0, 0.0]
    >>> FormatReward(tags=("answer",))(completions=["<answer>4</answer>"])
    [1.0]
    ```
    """

    traits = RewardTraits(media=("text",), deterministic=True)

    def __init__(self, tags: Sequence[str] = ("think", "answer")):
        named = not isinstance(tags, str) and all(re.fullmatch(r"[\w-]+", tag) for tag in tags)
        if not (tags and named and len(set(tags)) == len(tags)):
            raise InputError(f"tags={tags!r} must be different names: give for example ('think', 'answer').")
        self.tags = tuple(tags)
        self._marks = re.compile(rf"(</?(?:{'|'.join(map(re.escape, self.tags))})>)")
        self._form = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """
        Scores texts.

        Args:
            completions (`list`):
                Strings, or lists of messages.
            **kwargs:
                Ignored.

        Returns:
            `list[float]`: 0.0 or 1.0 per row.
        """
        return [float(self._has_form(text)) for text in check_texts(completions)]

    def _has_form(self, text: str) -> bool:
        parts = self._marks.split(text)  # texts and marks by turns, the texts outside of elements and within them too
        outside, within = parts[0::4], parts[2::4]
        return parts[1::2] == self._form and not "".join(outside).strip() and all(part.strip() for part in within)


_format = FormatReward()


@reward_traits(media="text", deterministic=True)
def format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    Rewards the form `<think>…</think><answer>…</answer>`: [`FormatReward`] with its defaults. Range 0 or 1.

    Args:
        completions (`list`):
            Strings, or lists of messages.
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: 0.0 or 1.0 per row.

    Example:

    ```python
    >>> from omnitrl.rewards import format_reward

    >>> format_reward(completions=["<think>2 + 2</think><answer>4</answer>", "4"])
    [1.0, 0.0]
    ```
    """
    return _format(completions)


@reward_traits(media="text", deterministic=True)
def think_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """
    TRL's reward of that name, for strings too: 1.0 for a text that begins with one `<think>…</think>`. Range 0 or 1.

    Args:
        completions (`list`):
            Strings, or lists of messages.
        **kwargs:
            Ignored.

    Returns:
        `list[float]`: 0.0 or 1.0 per row.

    Example:

    ```python
    >>> from omnitrl.rewards import think_format_reward

    >>> think_format_reward(completions=["<think>2 + 2</think>4", "4"])
    [1.0, 0.0]
    ```
    """
    from trl.rewards import think_format_reward as of_trl

    return of_trl([[{"role": "assistant", "content": text}] for text in check_texts(completions)])


def _right_answers(name: str, answer: Column, solution: Column, count: int) -> list[Any]:
    """Of each row the value of `answer`, or else that of `solution`."""
    if answer is None and solution is None:
        raise NoAnswerColumn(
            f"reward {name!r} needs the dataset column 'answer' or 'solution', and there is neither: rename the one "
            "that holds the right answers, for example dataset.rename_column('label', 'answer')."
        )
    pairs = zip(answer or [None] * count, solution or [None] * count, strict=True)
    return [second if first is None else first for first, second in pairs]


def _right_choice(right: Any, options: list[str] | None) -> str | None:
    """The letter of the right choice, or `None` where the row does not say it."""
    if right is None:
        return None
    if isinstance(right, int) and not isinstance(right, bool):
        found = chr(ord("A") + right) if 0 <= right < (26 if options is None else len(options)) else None
    else:
        found = choice_of(str(right), options, alone=True)
    if found is None:
        where = "a letter" if options is None else f"among the {len(options)} choices"
        _warn_once("choice", f"The right choice {right!r:.80} is not {where}")
    return found


def _short(answer: Any) -> str:
    """The answer of a solution as GSM8K has them, or the text as it is."""
    return str(answer).rpartition("####")[2].strip()


def _in_latex(text: str) -> str:
    r"""A completion behind its thoughts; the answer between tags alone, and in `\boxed`."""
    text = without_thinking(text)
    last = tagged_answer(text)
    if last is None:
        return text
    return last if r"\boxed" in last else rf"\boxed{{{_DELIMITERS.sub('', last).rstrip('. ')}}}"


def _without(column: str, log_extra: LogExtra) -> LogExtra:
    """Does not record a column that the dataset has."""
    if log_extra is None:
        return None
    return lambda name, values: None if name == column else log_extra(name, values)


def _warn_once(kind: str, what: str) -> None:
    if kind not in _WARNED:
        _WARNED.add(kind)
        logger.warning("%s: such rows have no reward. This is said once.", what)

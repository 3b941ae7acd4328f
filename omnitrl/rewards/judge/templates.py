# SPDX-License-Identifier: Apache-2.0
"""What a judge is asked, and how its answers become numbers."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omnitrl.errors import InputError

from ..contract import RewardError
from ..text import plain_text, text_score, wanted_text
from .answers import Answer, AnswerError, choice, final_score, json_number, number, probability
from .messages import Part, Shown, text_part


MAX_TOP_LOGPROBS = 20
"""What OpenAI's API gives at most, and `vllm serve` unless it is told otherwise."""


@dataclass(frozen=True)
class Question:
    """
    One request to a judge.

    Args:
        messages (`list[dict]`):
            Of the chat.
        max_tokens (`int`):
            Of the answer.
        top_logprobs (`int`, *optional*):
            Of how many first tokens the log-probabilities are wanted.
        schema (`dict`, *optional*):
            JSON schema that the answer is made to follow.
    """

    messages: list[dict[str, Any]]
    max_tokens: int
    top_logprobs: int | None = None
    schema: dict[str, Any] | None = None


@dataclass
class Verdict:
    """
    What a template reads from the answers.

    Args:
        values (`list`):
            For each row a number, `None` where the template does not apply, or the error that says why it is missing.
        texts (`list[str]`):
            For each row what was answered, for the table of samples.
        metrics (`dict[str, float]`):
            Numbers to log.
    """

    values: list[float | AnswerError | None]
    texts: list[str]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JudgeTemplate:
    """
    Base of the templates. One of your own has `questions_of` and `value`, or `questions` and `verdict` for groups.

    Args:
        name (`str`, *optional*):
            In metrics, columns and sentences; the template's own by default. Two judges of one run need two.
        system (`str`, *optional*):
            System message.
        source (`str`, *optional*):
            Column with the picture, or the list of pictures, that the completion was made from; they are shown before
            it. For models that edit.
        max_tokens (`int`, *optional*):
            Of an answer; the template's own by default.
    """

    default_name: ClassVar[str] = "judge"
    default_max_tokens: ClassVar[int] = 512
    groupwise: ClassVar[bool] = False

    name: str | None = None
    system: str | None = None
    source: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"max_tokens={self.max_tokens} must be at least 1: use {self.default_max_tokens}.")

    @property
    def title(self) -> str:
        """The name that is used."""
        return self.name or self.default_name

    def questions(self, rows: Sequence[Shown]) -> list[Question]:
        """What is asked about the rows of a unit: one row, or the members of a group."""
        return self.questions_of(rows[0])

    def verdict(self, rows: Sequence[Shown], answers: Sequence[Answer | AnswerError]) -> Verdict:
        """Reads the answers to `questions`; an error stands for a question that got none."""
        text = "\n".join("" if isinstance(answer, AnswerError) else answer.text for answer in answers)
        value: float | AnswerError | None
        try:
            value = self.value(rows[0], [_given(answer) for answer in answers])
        except AnswerError as error:
            value = error
        return Verdict([value], [text])

    def questions_of(self, row: Shown) -> list[Question]:
        """What is asked about one row; nothing where the template does not apply to it."""
        raise NotImplementedError(f"{type(self).__name__} needs questions_of(row), or questions(rows) for groups.")

    def value(self, row: Shown, answers: list[Answer]) -> float | None:
        """
        The value of a row, `None` where the template does not apply.

        Raises:
            `AnswerError`: the answers do not say it.
        """
        raise NotImplementedError(f"{type(self).__name__} needs value(row, answers), or verdict(rows, answers).")

    def question(self, parts: list[Part], text: str, **known: Any) -> Question:
        """A question: what is looked at, and then the text."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": [*parts, text_part(text)]}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return Question(messages, self.max_tokens or self.default_max_tokens, **known)


@dataclass(frozen=True, kw_only=True)
class OCRTemplate(JudgeTemplate):
    """
    The judge transcribes the text in the picture, and [`text_score`] compares it with the wanted one.

    Range [0, 1]. The wanted text is that of [`ocr_reward`]: the column `text`, else what the prompt has in
    quotes, else the prompt; `None` where it is empty. The judge does not see it, or it would read it into the picture.

    Args:
        substring (`bool`, defaults to `False`):
            As in [`text_score`].
        strip (`str`, defaults to `"whitespace"`):
            As in [`text_score`].
    """

    default_name: ClassVar[str] = "judge_ocr"
    text: ClassVar[str] = (
        "Copy out the text that is written in this {media}, letter by letter, from top to bottom. Keep mistakes as "
        "they are, and add nothing. Reply with the text alone; if there is none, reply <empty>."
    )

    substring: bool = False
    strip: str = "whitespace"

    def __post_init__(self) -> None:
        super().__post_init__()
        plain_text("", self.strip)  # which refuses an unknown one

    def questions_of(self, row: Shown) -> list[Question]:
        return [self.question(row.looked_at(), row.fill(self.text))] if _wanted_text(row) else []

    def value(self, row: Shown, answers: list[Answer]) -> float | None:
        target = _wanted_text(row)
        if not target:
            return None
        read = answers[0].plain.replace("<empty>", "").strip()
        if len(read) > 1 and read[0] + read[-1] in _QUOTES and target[0] + target[-1] not in _QUOTES:
            read = read[1:-1]
        return text_score(read, target, substring=self.substring, strip=self.strip)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ScoreTemplate(JudgeTemplate):
    """
    The judge rates the media from `low` to `high`, in the manner of UnifiedReward's point scores.

    Range [0, 1]: the number after `Final Score:`, scaled. Others divide by `high` instead, which is the same but for a
    shift and a factor. The judge writes its reasons first, which costs tokens and makes the score a better one.

    Args:
        low, high (`float`, default to 1 and 5):
            Ends of the scale that the judge is told.
        aspects (`list[str]`, *optional*):
            What to look at, in order; by default what suits images, videos, texts or edits.
        structured (`bool`, defaults to `False`):
            Makes the server hold the answer to `{"score": …}` with a whole number: short, never garbage, and without
            reasons.
    """

    default_name: ClassVar[str] = "judge_score"
    default_max_tokens: ClassVar[int] = 512
    text: ClassVar[str] = (
        "Rate how well the {media} does what was asked for.\n\nAsked for: {prompt}\n\n"
        "Look at these in turn:\n{aspects}\n\n{ending}"
    )
    ending: ClassVar[str] = (
        "Write one short sentence on each. Then close with a line of its own, from {low:g} (worst) to {high:g} "
        "(best), decimals allowed:\nFinal Score: <number>"
    )
    structured_ending: ClassVar[str] = (
        'Reply with JSON alone, the score being a whole number from {low:g} (worst) to {high:g} (best): {{"score": '
        "<number>}}"
    )

    low: float = 1.0
    high: float = 5.0
    aspects: Sequence[str] | None = None
    structured: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise InputError(f"low={self.low} must be below high={self.high}: use low=1, high=5.")
        if self.structured and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise InputError("structured=True takes whole numbers for low and high, such as low=1, high=5.")

    def questions_of(self, row: Shown) -> list[Question]:
        aspects = self.aspects or _ASPECTS["edit" if row.sources else row.kind]
        ending = self.structured_ending if self.structured else self.ending
        known = {
            "aspects": "\n".join(f"{i}. {aspect}" for i, aspect in enumerate(aspects, start=1)),
            "ending": ending.format(low=self.low, high=self.high),
        }
        return [self.question(row.looked_at(), row.fill(self.text, **known), schema=self._schema())]

    def value(self, row: Shown, answers: list[Answer]) -> float:
        if self.structured:
            score = json_number(answers[0], "score", self.low, self.high)
        else:
            score = final_score(answers[0], self.low, self.high)
        return (score - self.low) / (self.high - self.low)

    def _schema(self) -> dict[str, Any] | None:
        if not self.structured:
            return None
        score = {"type": "integer", "enum": list(range(round(self.low), round(self.high) + 1))}
        return {"type": "object", "properties": {"score": score}, "required": ["score"], "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class YesNoTemplate(JudgeTemplate):
    r"""
    How likely the judge is to say yes, from the log-probabilities of its first token, as in
    [VQAScore](https://huggingface.co/papers/2404.01291).

    Range [0, 1]: \\( P(\text{yes}) / (P(\text{yes}) + P(\text{no})) \\). One token per row and no ties, which makes
    it the cheapest of the templates and the finest. It needs a server that gives `top_logprobs`, and a judge that does
    not think first.

    Args:
        text (`str`, *optional*):
            The question, with `{prompt}`, `{media}` and columns.
        yes, no (`tuple[str, ...]`):
            First tokens that mean so, in any case.
        top_logprobs (`int`, defaults to 20):
            Of how many tokens the server gives them.
    """

    default_name: ClassVar[str] = "judge_yes_no"
    default_max_tokens: ClassVar[int] = 1

    text: str = 'Is "{prompt}" what this {media} shows? Say Yes or No, and nothing else.'
    yes: tuple[str, ...] = ("Yes",)
    no: tuple[str, ...] = ("No",)
    top_logprobs: int = MAX_TOP_LOGPROBS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs < 1:
            raise InputError(f"top_logprobs={self.top_logprobs} must be at least 1: use {MAX_TOP_LOGPROBS}.")

    def questions_of(self, row: Shown) -> list[Question]:
        return [self.question(row.looked_at(), row.fill(self.text), top_logprobs=self.top_logprobs)]

    def value(self, row: Shown, answers: list[Answer]) -> float:
        return probability(answers[0], self.yes, self.no)


@dataclass(frozen=True, kw_only=True)
class QuestionsTemplate(JudgeTemplate):
    """
    The judge answers a list of questions about each row with yes or no, in the manner of GenEval's checks.

    Range [0, 1]: the share of yes, or with `strict=True` 1.0 if all are yes and else 0.0. A row without questions has
    no reward (`None`).

    Args:
        column (`str`, defaults to `"questions"`):
            Column with a list of questions for each row, such as `["Are there two dogs?", "Is the left one black?"]`;
            each is to be answered by yes.
        strict (`bool`, defaults to `False`):
            Whether all must be yes.
        soft (`bool`, defaults to `False`):
            Takes the probability of yes, as [`YesNoTemplate`] does, in the place of the word.
    """

    default_name: ClassVar[str] = "judge_questions"
    default_max_tokens: ClassVar[int] = 8
    ending: ClassVar[str] = "Say Yes or No, and nothing else."

    column: str = "questions"
    strict: bool = False
    soft: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strict and self.soft:
            raise InputError("strict=True and soft=True exclude each other: leave one of them out.")

    def questions_of(self, row: Shown) -> list[Question]:
        top = MAX_TOP_LOGPROBS if self.soft else None
        return [
            self.question(row.looked_at(), f"{question} {self.ending}", top_logprobs=top)
            for question in self._listed(row)
        ]

    def value(self, row: Shown, answers: list[Answer]) -> float | None:
        if not answers:
            return None
        if self.soft:
            values = [probability(answer, ("Yes",), ("No",)) for answer in answers]
        else:
            values = [choice(answer, YES_OR_NO, {"yes": 1.0, "no": 0.0}) for answer in answers]
        return float(all(values)) if self.strict else math.fsum(values) / len(values)

    def _listed(self, row: Shown) -> list[str]:
        listed = row.column(self.column)
        if listed is None:
            return []
        if not isinstance(listed, list | tuple) or not all(isinstance(question, str) for question in listed):
            raise RewardError(
                f"the column {self.column!r} must have a list of questions in each row, such as ['Is there a dog?'], "
                f"and has {listed!r:.80}."
            )
        return list(listed)


@dataclass(frozen=True, kw_only=True)
class PairwiseTemplate(JudgeTemplate):
    """
    The judge compares the members of a group, two at a time; a member's value is its share of wins.

    Range [0, 1], a tie being half a win; the mean of a group is 0.5. Each pair is shown in both orders, as judges like
    the first or the second better for no other reason. What they agree on in both orders is logged as
    `{name}/order_agreement`. A comparison without an answer is left out; a member without any is missing.

    Args:
        both_orders (`bool`, defaults to `True`):
            Whether each pair is shown in both orders. `False` halves the cost, and adds the bias of position.
        opponents (`int`, *optional*):
            Compares each member with this many that follow it in the group, the last with the first, instead of with
            all. A group of G takes `2 * G * opponents` requests then, and `G * (G - 1)` else; half of it in one order.
        text (`str`, *optional*):
            The question, with `{prompt}`, `{media}` and columns; it must ask for a line `Answer: A`, `B` or `Tie`.
    """

    default_name: ClassVar[str] = "judge_pairwise"
    default_max_tokens: ClassVar[int] = 256
    groupwise: ClassVar[bool] = True

    both_orders: bool = True
    opponents: int | None = None
    text: str = (
        "Both were made for this: {prompt}\n\nWhich {media} does it better? Weigh what was asked for first, "
        "then defects, then looks. Write one short sentence on each of the two, and then a line of its own:\n"
        "Answer: <A, B or Tie>"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents is not None and self.opponents < 1:
            raise InputError(f"opponents={self.opponents} must be at least 1: use 2, or None to compare all.")

    def questions(self, rows: Sequence[Shown]) -> list[Question]:
        return [
            self.question(
                [*rows[first].looked_at("Candidate A:"), *rows[second].looked_at("Candidate B:")],
                rows[first].fill(self.text),
            )
            for first, second in self._orders(len(rows))
        ]

    def verdict(self, rows: Sequence[Shown], answers: Sequence[Answer | AnswerError]) -> Verdict:
        results: list[list[float]] = [[] for _ in rows]
        failures: list[list[AnswerError]] = [[] for _ in rows]
        texts: list[list[str]] = [[] for _ in rows]
        shares: dict[tuple[int, int], float] = {}
        for (first, second), answer in zip(self._orders(len(rows)), answers, strict=True):
            try:
                share = choice(_given(answer), BETTER, {"a": 1.0, "b": 0.0, "tie": 0.5})
            except AnswerError as error:
                for member in (first, second):
                    failures[member].append(error)
                continue
            shares[first, second] = share
            for member, other, won in ((first, second, share), (second, first, 1 - share)):
                results[member].append(won)
                texts[member].append(f"{won:g} against {other}")
        values: list[float | AnswerError | None] = [
            math.fsum(won) / len(won) if won else (failed[0] if failed else None)
            for won, failed in zip(results, failures, strict=True)
        ]
        return Verdict(values, ["; ".join(lines) for lines in texts], _agreement(shares))

    def _orders(self, members: int) -> list[tuple[int, int]]:
        steps = range(1, min(self.opponents or members, members - 1) + 1)
        pairs = sorted(
            {(min(i, j), max(i, j)) for i in range(members) for step in steps for j in [(i + step) % members]}
        )
        return [order for i, j in pairs for order in ([(i, j), (j, i)] if self.both_orders else [(i, j)])]


@dataclass(frozen=True, kw_only=True)
class CustomTemplate(JudgeTemplate):
    """
    A question of your own, whose answer holds a number.

    Range [0, 1], or [`low`, `high`] with `scaled=False`.

    Args:
        text (`str`):
            The question, with `{prompt}`, `{media}` and columns; a brace that is meant is doubled, `{{`.
        pattern (`str`, *optional*):
            Regular expression with one group, whose last match in the answer is the number.
        json_field (`str`, *optional*):
            Field of the answer, as a JSON object, that is the number. One of the two is given.
        low, high (`float`, default to 0 and 1):
            Ends of the scale; an answer beyond them is garbage.
        scaled (`bool`, defaults to `True`):
            Whether the number is scaled from [`low`, `high`] to [0, 1].
        schema (`dict`, *optional*):
            JSON schema that the server holds the answer to (`response_format`).

    Example:

    ```python
    >>> from omnitrl.rewards import CustomTemplate

    >>> template = CustomTemplate(
    ...     text="How many dogs does this {media} show? Reply with a number alone.",
    ...     pattern=r"(\\d+)",
    ...     high=10,
    ...     name="dogs",
    ... )
    ```
    """

    default_name: ClassVar[str] = "judge_custom"

    text: str
    pattern: str | None = None
    json_field: str | None = None
    low: float = 0.0
    high: float = 1.0
    scaled: bool = True
    schema: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.pattern is None) == (self.json_field is None):
            raise InputError("CustomTemplate takes one of pattern and json_field: use pattern=r'Score: ([\\d.]+)'.")
        if self.pattern is not None and re.compile(self.pattern).groups != 1:
            raise InputError(f"pattern={self.pattern!r} must have one group: use r'Score: ([\\d.]+)'.")
        if not self.low < self.high:
            raise InputError(f"low={self.low} must be below high={self.high}: use low=0, high=1.")

    def questions_of(self, row: Shown) -> list[Question]:
        return [self.question(row.looked_at(), row.fill(self.text), schema=self.schema)]

    def value(self, row: Shown, answers: list[Answer]) -> float:
        if self.pattern is not None:
            found = number(answers[0], self.pattern, self.low, self.high)
        else:
            found = json_number(answers[0], str(self.json_field), self.low, self.high)
        return (found - self.low) / (self.high - self.low) if self.scaled else found


_QUOTES = ('""', "“”", "„“", "''", "‘’", "«»", "「」")
YES_OR_NO = r"^\W*(yes|no)\b"
# One name: neither "a tie", which is no A, nor "A or B", nor "A, B or Tie".
BETTER = r"answer\W*(?:a\s+(?=tie\b))?(A|B|tie)\b(?!(?:,\s*B)?,?\s*(?:/|or\b|and\b)\s*(?:B|tie)\b)"

_ASPECTS = {
    "image": (
        "Content: is everything there that was asked for, with its number, colours, places, actions and words?",
        "Soundness: are bodies, objects, light and perspective free of defects?",
        "Looks: composition, detail and style.",
    ),
    "video": (
        "Content: does it show what was asked for, and does that happen in it?",
        "Motion: is it smooth, possible and more than a still, without flicker?",
        "Soundness and looks of the frames.",
    ),
    "text": (
        "Content: is it right, and does it answer all of what was asked?",
        "Form: is it clear, and no longer than it needs to be?",
    ),
    "edit": (
        "Change: was what was asked for done, all of it?",
        "Rest: is everything else as it was before?",
        "Soundness: is the result free of defects and seams?",
    ),
}


def _wanted_text(row: Shown) -> str:
    """What a picture should say; empty for nothing."""
    return wanted_text(row.prompt, row.columns.get("text")).strip()


def _given(answer: Answer | AnswerError) -> Answer:
    if isinstance(answer, AnswerError):
        raise answer
    return answer


def _agreement(shares: dict[tuple[int, int], float]) -> dict[str, float]:
    """The share of pairs that were judged the same in both orders."""
    both = [(share, shares[j, i]) for (i, j), share in shares.items() if i < j and (j, i) in shares]
    return {"order_agreement": sum(there == 1 - back for there, back in both) / len(both)} if both else {}

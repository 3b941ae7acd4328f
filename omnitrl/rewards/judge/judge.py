# SPDX-License-Identifier: Apache-2.0
"""A vision-language model as a reward."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..answer_texts import completion_text
from ..contract import RewardError, RewardUnavailable
from ..traits import RewardTraits
from .answers import Answer, AnswerError
from .endpoint import Counts, Endpoint, Refused, Settings
from .messages import Pictures, Shown
from .templates import JudgeTemplate, Question, Verdict


logger = logging.getLogger(__name__)


class VLMJudge:
    """
    A vision-language model behind any OpenAI-compatible endpoint as a reward, for images, videos and texts.

    A `template` says what is asked and how the answer becomes a number. Requests run beside each other, and are tried
    again after a status 408, 409, 429 or 5xx, a time-out and a broken connection, when `Retry-After` says. A row whose
    answer has no number is missing (NaN), never 0, and a warning quotes the answer; a server that is away is waited
    for (see [`RewardUnavailable`]); a wrong key, model or address ends the run. Needs `pip install "omnitrl[judge]"`.

    Args:
        template ([`JudgeTemplate`]):
            What is asked, for example [`YesNoTemplate`].
        base_url (`str`, *optional*):
            The endpoint, for example `"http://localhost:8001/v1"`; by default the environment's `OPENAI_BASE_URL`.
        model (`str`, *optional*):
            Name of the model; by default the only one that the server has.
        api_key (`str`, *optional*):
            By default the environment's `OPENAI_API_KEY`, if any.
        concurrency (`int`, *optional*, defaults to `32`):
            Most requests at a time.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that one request may take.
        max_retries (`int`, *optional*, defaults to `4`):
            Further tries of a request.
        temperature (`float`, *optional*, defaults to `0.0`):
            Of the answers; `None` leaves it to the server.
        seed (`int`, *optional*, defaults to `0`):
            Of the answers; `None` leaves it out.
        image_format (`str`, *optional*, defaults to `"png"`):
            `"png"`, or `"jpeg"` of quality 95, which is smaller.
        max_side (`int`, *optional*):
            Longest side in pixels of the images that are sent, larger ones being made smaller.
        num_frames (`int`, *optional*, defaults to `8`):
            Frames of a video that are sent, evenly from the first to the last.
        extra_body (`dict`, *optional*):
            Further fields of each request, for example `{"chat_template_kwargs": {"enable_thinking": False}}`.

    Attributes:
        traits ([`RewardTraits`]): groupwise if the template is.

    Example:

    ```python
    >>> from omnitrl.rewards import VLMJudge, YesNoTemplate

    >>> judge = VLMJudge(YesNoTemplate(), base_url="http://localhost:8001/v1")
    >>> judge.__name__
    'judge_yes_no'
    ```
    """

    def __init__(
        self,
        template: JudgeTemplate,
        base_url: str | None = None,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 32,
        timeout: float = 120.0,
        max_retries: int = 4,
        temperature: float | None = 0.0,
        seed: int | None = 0,
        image_format: str = "png",
        max_side: int | None = None,
        num_frames: int = 8,
        extra_body: dict[str, Any] | None = None,
    ):
        self.template = template
        self.traits = RewardTraits(groupwise=template.groupwise)
        self.__name__ = template.title
        self._pictures = Pictures(image_format, max_side, num_frames)
        self._endpoint = Endpoint(
            Settings(base_url, model, api_key, concurrency, timeout, max_retries, temperature, seed, extra_body)
        )

    async def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """
        Judges a batch; with a groupwise template, the members of one group.

        Args:
            prompts (`list[str]`):
                What was asked for, as texts or as lists of messages, of which the last one counts.
            completions (`list`):
                Images, videos or texts, the latter as strings or as lists of messages.
            log_metric, log_extra (`Callable`, *optional*):
                Where metrics (`{name}/seconds`, `{name}/tokens`, `{name}/failed_share`) and columns (`{name}_answer`,
                `{name}_failure`) are recorded.
            **columns:
                Columns of the dataset, for the template.

        Returns:
            `list[float | None]`: a number per row, `None` where the template does not apply, NaN where it failed.

        Raises:
            [`RewardError`]: the settings or the dataset are wrong.
            [`RewardUnavailable`]: the server is away or overloaded.
        """
        counts = Counts()
        rows = _rows(len(prompts), columns)
        units = [range(len(prompts))] if self.template.groupwise else [range(i, i + 1) for i in range(len(prompts))]
        verdicts = await _together(
            [
                self._judge(
                    [prompts[i] for i in unit], [completions[i] for i in unit], [rows[i] for i in unit], counts
                )
                for unit in units
                if unit
            ]
        )
        values = [value for verdict in verdicts for value in verdict.values]
        self._check_refusals(values)
        failures = [str(value) if isinstance(value, AnswerError) else None for value in values]
        if log_metric is not None and values:
            self._log(log_metric, verdicts, counts, failures)
        if log_extra is not None and values:
            log_extra(f"{self.__name__}_answer", [text for verdict in verdicts for text in verdict.texts])
            if any(failures):
                log_extra(f"{self.__name__}_failure", failures)
        self._warn(failures)
        return [math.nan if isinstance(value, AnswerError) else value for value in values]

    async def _judge(
        self, prompts: list[str], completions: list[Any], rows: list[dict[str, Any]], counts: Counts
    ) -> Verdict:
        """The verdict on a row, or on the members of a group."""
        try:
            shown = [
                # Compressing a picture takes a tenth of a second, in which the loop has others to serve.
                await asyncio.to_thread(self._shown, *known)
                for known in zip(prompts, completions, rows, strict=True)
            ]
        except ValueError as error:  # a picture of the dataset or of the model that cannot be shown
            return Verdict([AnswerError(str(error)) for _ in prompts], [""] * len(prompts))
        asked = self.template.questions(shown)
        answers = await _together([self._answer(question, counts) for question in asked])
        return self.template.verdict(shown, answers)

    def _shown(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> Shown:
        kind, parts = self._pictures.shown(completion)
        asked = completion_text(prompt)  # that of a chat is a list of messages, the last of which asks
        prompt = str(prompt) if asked is None else asked
        row = Shown(prompt, kind, parts, columns)
        if self.template.source is None:
            return row
        sources = self._pictures.sources(row.column(self.template.source), self.template.source)
        return Shown(prompt, kind, parts, columns, sources)

    async def _answer(self, question: Question, counts: Counts) -> Answer | AnswerError:
        try:
            return await self._endpoint.ask(question, counts)
        except AnswerError as error:
            return error

    def _check_refusals(self, values: Sequence[Any]) -> None:
        """A bad request is the row's fault if others are answered, and else that of the settings."""
        refused = next((value for value in values if isinstance(value, Refused)), None)
        if refused is not None and not self._endpoint.has_answered:
            raise RewardError(
                f"{refused}. None of the judge's requests was answered yet, so it is its settings: a model without "
                "pictures, pictures that are too many or too large for the server (max_side, num_frames, `vllm serve "
                "--max-model-len`, `--limit-mm-per-prompt`), or a field that it does not know (temperature=None, "
                "seed=None)."
            ) from refused

    def _log(
        self,
        log_metric: Callable[[str, float], None],
        verdicts: Sequence[Verdict],
        counts: Counts,
        failures: Sequence[str | None],
    ) -> None:
        name = self.__name__
        log_metric(f"{name}/failed_share", sum(failure is not None for failure in failures) / len(failures))
        if counts.seconds:
            log_metric(f"{name}/seconds", math.fsum(counts.seconds) / len(counts.seconds))
            log_metric(f"{name}/tokens", counts.tokens / len(failures))
        for verdict in verdicts:
            for metric, value in verdict.metrics.items():
                log_metric(f"{name}/{metric}", value)

    def _warn(self, failures: Sequence[str | None]) -> None:
        failed = [row for row, failure in enumerate(failures) if failure is not None]
        if failed:
            logger.warning(
                "judge %r gave no value for %d of %d rows, which are missing, not 0; row %d: %s",
                self.__name__,
                len(failed),
                len(failures),
                failed[0],
                failures[failed[0]],
            )


def _rows(count: int, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Columns as rows; what the runner passes beside them has no value per row."""
    lists = {
        name: values for name, values in columns.items() if isinstance(values, list | tuple) and len(values) == count
    }
    return [{name: values[row] for name, values in lists.items()} for row in range(count)]


async def _together(coroutines: Sequence[Any]) -> list[Any]:
    """The results in order. The first error ends the others; one that is final counts more than one to wait for."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first = min(errors.exceptions, key=lambda error: isinstance(error, RewardUnavailable))
        raise first from first.__cause__
    return [task.result() for task in tasks]

# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint: requests within a limit, and what each way to fail means for a run."""

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnitrl.errors import InputError

from ..contract import RewardError, RewardUnavailable
from .answers import Answer, AnswerError
from .templates import Question


if TYPE_CHECKING:
    from openai import APIError, APIStatusError, AsyncOpenAI

_PROBE_SECONDS = 10.0
_OVERLOADED = (429, 503)
_OF_THE_REQUEST = (400, 413, 422)  # the server refuses what was asked, which may be that row's fault


class Refused(AnswerError):
    """The server calls the request a bad one: the row's fault where others were answered, else the settings'."""


@dataclass(frozen=True)
class Settings:
    """How the endpoint is asked; see [`VLMJudge`] for the fields."""

    base_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 32
    timeout: float = 120.0
    max_retries: int = 4
    temperature: float | None = 0.0
    seed: int | None = 0
    extra_body: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError(f"concurrency={self.concurrency} must be at least 1 request at a time: use 32.")
        if not self.timeout > 0:
            raise InputError(f"timeout={self.timeout} must be more than 0 seconds: use 120.")
        if self.max_retries < 0:
            raise InputError(f"max_retries={self.max_retries} must be at least 0: use 4.")


@dataclass
class Counts:
    """What the requests of one call took."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass
class _Connection:
    """What belongs to one event loop: connections do not outlive theirs."""

    client: "AsyncOpenAI"
    slots: asyncio.Semaphore
    naming: asyncio.Lock


class Endpoint:
    """
    Asks questions, at most `concurrency` at a time.

    Args:
        settings ([`Settings`]):
            Where and how.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.has_answered = False
        self._model = settings.model
        self._connections: dict[asyncio.AbstractEventLoop, _Connection] = {}

    @property
    def url(self) -> str:
        """
        Where it is.

        Raises:
            [`RewardError`]: neither `base_url` nor `OPENAI_BASE_URL` says so, or what they say is no URL. The service
                of OpenAI is not taken for granted: pictures should not leave the house by accident.
        """
        url = self.settings.base_url or os.environ.get("OPENAI_BASE_URL")
        if not url:
            raise RewardError(
                "the judge has no endpoint: pass base_url='http://localhost:8001/v1', or set OPENAI_BASE_URL to it; "
                "`vllm serve Qwen/Qwen2.5-VL-7B-Instruct --port 8001` starts one."
            )
        if not url.startswith(("http://", "https://")):  # which a client would take for a server that is away
            raise RewardError(f"the judge's endpoint {url!r} is no URL: give for example 'http://localhost:8001/v1'.")
        return url

    async def ask(self, question: Question, counts: Counts) -> Answer:
        """
        One answer.

        Raises:
            `AnswerError`: this request failed, though the server is there; [`Refused`] if the server says that it is
                a bad one.
            [`RewardUnavailable`]: the server is away or overloaded.
            [`RewardError`]: the settings are wrong, such as a key or a model.
        """
        import_openai()
        connection = self._connection()
        async with connection.slots:
            start = time.monotonic()
            completion = await self._create(connection, question)
            counts.seconds.append(time.monotonic() - start)
        answer = self._read(completion, question)
        counts.tokens += getattr(completion.usage, "total_tokens", 0) or 0
        self.has_answered = True
        return answer

    async def _create(self, connection: _Connection, question: Question) -> Any:
        openai = import_openai()
        try:
            # A status, a time-out or a broken connection is tried again in there, when `Retry-After` says or with
            # growing waits.
            return await connection.client.chat.completions.create(
                model=await self._name(connection), **self._body(question)
            )
        except openai.APIStatusError as error:
            self._raise_if_wrong(error)
            raise await self._missing(connection, error) from error
        except openai.APIConnectionError as error:  # time-outs too
            raise await self._missing(connection, error) from error
        except (openai.APIError, ValueError) as error:
            raise AnswerError(f"the server's answer cannot be read: {str(error)[:160]}") from error

    def _body(self, question: Question) -> dict[str, Any]:
        known: dict[str, Any] = {
            "messages": question.messages,
            "max_tokens": question.max_tokens,
            "temperature": self.settings.temperature,
            "seed": self.settings.seed,
            "extra_body": self.settings.extra_body,
        }
        if question.top_logprobs is not None:
            known |= {"logprobs": True, "top_logprobs": question.top_logprobs}
        if question.schema is not None:
            schema = {"name": "answer", "schema": question.schema, "strict": True}
            known["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in known.items() if value is not None}

    def _read(self, completion: Any, question: Question) -> Answer:
        choices = getattr(completion, "choices", None)
        if not choices:
            raise RewardError(
                f"{self.url} answers with something that is no chat completion: {str(completion)[:160]!r}. Check "
                "base_url, which usually ends in /v1, as 'http://localhost:8001/v1'."
            )
        chosen = choices[0]
        first_token = None
        if question.top_logprobs is not None:
            tokens = chosen.logprobs.content if chosen.logprobs is not None else None
            if not tokens or not tokens[0].top_logprobs:
                raise RewardError(
                    f"{self.url} gives no log-probabilities, though top_logprobs={question.top_logprobs} was asked "
                    "for: use a server that does, such as `vllm serve`, or a template that reads words, such as "
                    "ScoreTemplate."
                )
            first_token = {entry.token: entry.logprob for entry in tokens[0].top_logprobs}
        return Answer.of_content(
            chosen.message.content or getattr(chosen.message, "refusal", None),
            first_token=first_token,
            cut_off=chosen.finish_reason == "length",
        )

    def _raise_if_wrong(self, error: "APIStatusError") -> None:
        """Raises where no other request would do better, or where it is the request's own fault."""
        status, words = error.status_code, _words(error)
        if status in _OF_THE_REQUEST:
            raise Refused(f"{self.url} refuses the request ({status}): {words}") from error
        if status in (401, 403):
            cure = "pass api_key='…', or set OPENAI_API_KEY."
        elif status == 404:
            cure = (
                f"check model={self._model!r} and base_url, which usually ends in /v1; without model the judge takes "
                "the one that the server has."
            )
        elif error.code == "insufficient_quota":
            cure = "top the account up, or use a server of your own."
        else:
            return
        raise RewardError(f"{self.url} answers {status}: {words}: {cure}") from error

    async def _missing(self, connection: _Connection, error: "APIError") -> Exception:
        """Whether the server is away, or only this request failed: it is asked for its models, which costs nothing."""
        status = getattr(error, "status_code", None)
        tries = f"after {self.settings.max_retries + 1} tries"
        said = f"{status}: {_words(error)}" if status else _cause(error, self.settings.timeout)
        if status in _OVERLOADED:
            return RewardUnavailable(f"the judge at {self.url} answers {said}, {tries}", _retry_after(error))
        try:
            await connection.client.with_options(max_retries=0, timeout=_PROBE_SECONDS).models.list()
        except import_openai().APIConnectionError:
            return RewardUnavailable(f"the judge at {self.url} is away ({said}, {tries})")
        except import_openai().APIStatusError as probe:
            if probe.status_code >= 500:
                return RewardUnavailable(f"the judge at {self.url} answers {said}, {tries}")
        return AnswerError(f"no answer {tries}, though the server is there: {said}")

    async def _name(self, connection: _Connection) -> str:
        """The model's name; by default the only one that the server has."""
        async with connection.naming:
            if self._model is None:
                names = [model.id for model in (await connection.client.models.list()).data]
                if len(names) != 1:
                    raise RewardError(
                        f"{self.url} has {len(names)} models ({', '.join(map(repr, names[:10])) or 'none'}): pass "
                        f"model={(names or ['Qwen/Qwen2.5-VL-7B-Instruct'])[0]!r}, or another of them."
                    )
                self._model = names[0]
        return self._model

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            openai, settings = import_openai(), self.settings
            client = openai.AsyncOpenAI(
                base_url=self.url,
                api_key=settings.api_key or os.environ.get("OPENAI_API_KEY") or "none",  # which `vllm serve` takes
                timeout=settings.timeout,
                max_retries=settings.max_retries,
                # The usual one closes itself when it is collected, on whatever loop runs then, which fails.
                http_client=openai.DefaultAsyncHttpxClient(timeout=settings.timeout),
            )
            made = _Connection(client, asyncio.Semaphore(settings.concurrency), asyncio.Lock())
            others = {other: known for other, known in self._connections.items() if not other.is_closed()}
            self._connections = {**others, loop: made}
        return self._connections[loop]


def import_openai() -> Any:
    """The package, or the sentence that says how to get it."""
    try:
        import openai
    except ImportError as error:
        raise ImportError('a judge needs the package openai: `pip install "omnitrl[judge]"`.') from error
    return openai


def _words(error: "APIError") -> str:
    """What the server said, without the client's words around it."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return " ".join(str(message or error.message).split())[:400]


def _cause(error: "APIError", timeout: float) -> str:
    if isinstance(error, import_openai().APITimeoutError):
        return f"no answer within timeout={timeout:g} s"
    cause = error.__cause__
    return f"{type(cause).__name__}: {cause}" if cause is not None else error.message


def _retry_after(error: Any) -> float | None:
    try:
        return max(float(error.response.headers["retry-after"]), 0.0)
    except (KeyError, ValueError):
        return None

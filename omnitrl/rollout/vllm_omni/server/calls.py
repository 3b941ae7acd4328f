# SPDX-License-Identifier: Apache-2.0
"""What services of all kinds of models share: refusals, a door between samples and weights, calls of the workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeVar

from torch import Tensor

from omnitrl.messages import unpack, unpack_head
from omnitrl.rollout.vllm_omni.transport import INFO
from omnitrl.rollout.vllm_omni.wire import PROTOCOL, ServerInfo
from omnitrl.version import __version__


Read = TypeVar("Read")

STATUS = {"input": 400, "stale": 409, "hooks": 404, "internal": 500, "away": 503}


class Refusal(Exception):
    """
    An answer that is not the one that was asked for.

    Args:
        kind (`str`):
            A key of [`STATUS`].
        sentence (`str`):
            Why, and what to do.
    """

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class CallService:
    """
    Answers the calls of one server.

    Weights change when no sample is being made, and samples that come meanwhile wait, so that each of them comes from
    one version of the weights.

    Args:
        engine (`AsyncOmni`):
            vLLM-Omni's own, whose workers have the methods `rollout_facts` and `rollout_state`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._facts: dict[str, Any] = {}
        self._door = Door()
        self._calls: dict[str, Callable[[bytes], Awaitable[bytes]]] = {}

    async def handle(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of the answer to a call; one without a body is a GET."""
        try:
            await self._learn_facts()
            if path == INFO:
                await self._engine.check_health()
                return 200, json.dumps(vars(self._info())).encode()
            if path not in self._calls or body is None:
                raise Refusal("hooks", f"There is no {'GET' if body is None else 'POST'} {path}.")
            return 200, await self._calls[path](body)
        except Refusal as refusal:
            kind, sentence = refusal.kind, str(refusal)
        except Exception as error:
            client = 400 <= getattr(error, "status_code", 500) < 500  # of vLLM-Omni's errors
            kind, sentence = "input" if client else "internal", str(error) or type(error).__name__
        if kind == "internal" and (reason := await self._death()):
            kind, sentence = "away", f"its engine has died ({reason}): start the server again"
        return STATUS[kind], json.dumps({"error": sentence, "kind": kind}).encode()

    async def _death(self) -> str:
        """Why the engine can make nothing any more; the process outlives its workers."""
        try:
            await self._engine.check_health()
        except Exception as error:
            return str(error).rstrip(".") or type(error).__name__
        return ""

    # Facts

    async def _learn_facts(self) -> None:
        if not self._facts:
            self._facts = await self._rpc("rollout_facts")

    def _info(self) -> ServerInfo:
        kept = {name: self._facts[name] for name in ServerInfo.__dataclass_fields__ if name in self._facts}
        return ServerInfo(
            protocol=PROTOCOL, omnitrl_version=__version__, vllm_omni_version=version("vllm-omni"), **kept
        )

    async def _rpc(self, method: str, *args: Any) -> dict[str, Any]:
        """A call of all workers; those of one server say the same, or the one that differs is the answer."""
        results: list[Any] = _flat(await self._engine.collective_rpc(method, args=args))
        for result in results:
            if not isinstance(result, Mapping):
                raise Refusal("internal", f"A worker answered {method} with {result!r}.")
            if result.get("supported") is False or result.get("todo"):
                error = str(result.get("error"))
                if result.get("todo") or (method in error and "attribute" in error):
                    raise Refusal("hooks", "This server has no rollouts: start it with `omnitrl vllm-serve MODEL`.")
                raise Refusal("internal", error)
        if not results:
            raise Refusal("internal", f"No worker answered {method}.")
        return min((dict(result) for result in results), key=lambda result: result.get("bound", 0))

    # Weights

    def _check_version(self, wanted: int) -> None:
        found = self._facts["weight_version"]
        if wanted != found:
            raise Refusal("stale", f"The weights {wanted} were asked for, but this server has {_words(found)}.")

    def _check_awake(self) -> None:
        """Raises while the engine has given its memory away."""

    async def _take(self, method: str, *message: Any) -> bytes:
        async with self._door.weights():
            self._check_awake()
            try:
                report = await self._rpc(method, *message)
            finally:
                self._facts |= await self._rpc("rollout_state")
        return json.dumps({key: report[key] for key in ("version", "bound", "expected", "missing") if report}).encode()


class Door:
    """Lets samples in together and weights alone, and no further samples while weights wait."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._waiting = 0
        self._closed = False

    @asynccontextmanager
    async def sample(self) -> AsyncIterator[None]:
        """While one sample is made."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed and self._waiting == 0)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def weights(self) -> AsyncIterator[None]:
        """While weights change."""
        async with self._changed:
            self._waiting += 1
            try:
                await self._changed.wait_for(lambda: not self._closed and self._inside == 0)
                self._closed = True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            async with self._changed:
                self._closed = False
                self._changed.notify_all()


def check_adapter(config: Mapping[str, Any]) -> None:
    """
    Raises for a PEFT config that servers cannot follow.

    Raises:
        [`Refusal`]: it is one.
    """
    unfit = _unfit(config)
    if unfit:
        raise Refusal("input", f"Servers take plain LoRA adapters, but this one {unfit}: leave it out.")


def _unfit(config: Mapping[str, Any]) -> str:
    kind = config.get("peft_type", "LORA")
    if str(kind).rpartition(".")[2] != "LORA":
        return f"is a {kind}"
    plain = {"use_dora": False, "bias": "none", "modules_to_save": None, "lora_bias": False}
    plain |= {"target_parameters": None}
    odd = [f"{key}={config[key]!r}" for key, value in plain.items() if config.get(key, value) not in (value, [])]
    return f"has {', '.join(odd)}" if odd else ""


def read_message(body: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """
    Head and tensors of a call.

    Raises:
        [`Refusal`]: it has none.
    """
    return _read(unpack, body)


def read_head(body: bytes) -> tuple[dict[str, Any], list[str]]:
    """
    Head of a call and names of its tensors, which the workers will read.

    Raises:
        [`Refusal`]: it has none.
    """
    return _read(unpack_head, body)


def _read(unpacked: Callable[[bytes, str], Read], body: bytes) -> Read:
    try:
        return unpacked(body, "rollout")
    except ValueError as error:
        raise Refusal("input", str(error)) from error


def _words(weight_version: int) -> str:
    if weight_version == -1:
        return "those that it was started with"
    if weight_version < 0:
        return "some that came in part only: send them again"
    return f"the weights {weight_version}"


def _flat(results: Any) -> list[Any]:
    """Results of stages of workers, as one list."""
    if not isinstance(results, list | tuple):
        return [results]
    return [one for result in results for one in _flat(result)]

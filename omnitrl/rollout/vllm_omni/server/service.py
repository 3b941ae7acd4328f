# SPDX-License-Identifier: Apache-2.0
"""Answers the calls of the wire, with a vLLM-Omni engine behind it: over HTTP, or in the trainer's own process."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from omnitrl.algorithms import make_sigma_table, thin_tail
from omnitrl.media import Video
from omnitrl.rollout.stepping import Sampler
from omnitrl.rollout.vllm_omni.server.families import FAMILIES
from omnitrl.rollout.vllm_omni.server.pipelines import ROLLOUT
from omnitrl.rollout.vllm_omni.transport import ADAPTER, GENERATE, INFO, SLEEP, WAKE, WEIGHTS
from omnitrl.rollout.vllm_omni.wire import (
    PROTOCOL,
    ServerInfo,
    WireRequest,
    pack_request,
    pack_sample,
    unpack,
    unpack_request,
)
from omnitrl.version import __version__


STATUS = {"input": 400, "stale": 409, "hooks": 404, "internal": 500}


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


class RolloutService:
    """
    The calls of one server.

    Weights change when no sample is being made, and samples that come meanwhile wait, so that each of them comes from
    one version of the weights.

    Args:
        engine (`AsyncOmni`):
            vLLM-Omni's own, with a pipeline of [`~omnitrl.rollout.vllm_omni.server.pipelines`] and the
            [`~omnitrl.rollout.vllm_omni.server.extension.RolloutExtension`].
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._facts: dict[str, Any] = {}
        self._asleep = False
        self._door = _Door()
        self._calls: dict[str, Callable[[bytes], Awaitable[bytes]]] = {
            GENERATE: self._generate,
            ADAPTER: self._adapter,
            WEIGHTS: self._weights,
            SLEEP: self._sleep,
            WAKE: self._wake,
        }

    async def handle(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of the answer to a call; one without a body is a GET."""
        try:
            await self._learn_facts()
            if path == INFO:
                return 200, json.dumps(vars(self._info())).encode()
            if path not in self._calls or body is None:
                raise Refusal("hooks", f"There is no {'GET' if body is None else 'POST'} {path}.")
            return 200, await self._calls[path](body)
        except Refusal as refusal:
            kind, sentence = refusal.kind, str(refusal)
        except Exception as error:
            client = 400 <= getattr(error, "status_code", 500) < 500  # of vLLM-Omni's errors
            kind, sentence = "input" if client else "internal", str(error) or type(error).__name__
        return STATUS[kind], json.dumps({"error": sentence, "kind": kind}).encode()

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

    # Samples

    async def _generate(self, body: bytes) -> bytes:
        try:
            request = unpack_request(body)
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal("input", str(error)) from error
        self._check_awake()
        _check(request, self._facts)
        async with self._door.sample():
            self._check_awake()
            self._check_version(request.weight_version)
            outcome = await self._run(request)
        found = outcome.pop("weight_version")
        if found != request.weight_version:
            raise Refusal("stale", f"The sample came from the weights {found}, not {request.weight_version}.")
        media = outcome.pop("media", None)
        return await asyncio.to_thread(pack_sample, outcome, self._seen(media), request.table, found)

    async def _run(self, request: WireRequest) -> dict[str, Any]:
        output = None
        prompt, sampling = self._native(request)
        name = uuid.uuid4().hex
        async for made in self._engine.generate(prompt=prompt, request_id=name, sampling_params_list=[sampling]):
            output = made
        if output is None or output.error:
            raise Refusal("internal", str(output.error) if output is not None else "The engine made nothing.")
        outcome = output.trajectory_latents
        if not isinstance(outcome, Mapping):
            raise Refusal("hooks", "This server's pipeline makes no rollouts: start it with `omnitrl vllm-serve`.")
        return dict(outcome)

    def _native(self, request: WireRequest) -> tuple[dict[str, Any], Any]:
        """Prompt and sampling parameters of the engine."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams
        from vllm_omni.lora.request import LoRARequest

        params, table, facts = request.params, request.table, self._facts
        guidance = FAMILIES[facts["pipeline_class"]].guidance(request, facts["embeds_guidance"])
        prompt: dict[str, Any] = {"prompt": request.row["prompt"]}
        if images := request.row.get("images"):
            prompt["multi_modal_data"] = {"image": images[0] if len(images) == 1 else images}
        if params.guidance_scale > 1 and not facts["embeds_guidance"]:
            prompt["negative_prompt"] = request.row.get("negative_prompt") or ""
        number = facts["adapter"]
        adapter = LoRARequest(lora_name=f"policy-{number}", lora_int_id=number, lora_path="memory") if number else None
        sampling = OmniDiffusionSamplingParams(
            height=params.size.height,
            width=params.size.width,
            num_frames=params.size.num_frames or 1,
            num_inference_steps=table.num_steps,
            sigmas=table.sigmas[:-1].tolist(),  # such with others are not batched together
            seed=request.seed,
            max_sequence_length=request.max_sequence_length,
            output_type=None if params.decode else "latent",
            lora_request=adapter,
            extra_args={ROLLOUT: pack_request(replace(request, row={"prompt": request.row["prompt"]}))},
            **guidance,
        )
        return prompt, sampling

    def _seen(self, pixels: Tensor | None) -> Any:
        """The media of 8-bit pixels."""
        if pixels is None:
            return None
        rate = self._facts["frame_rate"]
        return Image.fromarray(np.asarray(pixels)) if rate is None else Video(np.asarray(pixels), rate)

    def _check_version(self, wanted: int) -> None:
        found = self._facts["weight_version"]
        if wanted != found:
            raise Refusal("stale", f"The weights {wanted} were asked for, but this server has {_words(found)}.")

    def _check_awake(self) -> None:
        if self._asleep:
            raise Refusal("input", f"This server is asleep: wake it first with POST {WAKE}.")

    # Weights

    async def _adapter(self, body: bytes) -> bytes:
        self._check_awake()
        head, tensors = _message(body)
        unfit = _unfit(head.get("config") or {})
        if unfit:
            raise Refusal("input", f"Servers take plain LoRA adapters, but this one {unfit}: leave it out.")
        return await self._take("rollout_adapter", head, tensors)

    async def _weights(self, body: bytes) -> bytes:
        self._check_awake()
        head, tensors = _message(body)
        if self._facts["quantization"]:
            raise Refusal(
                "input",
                f"A server with quantization={self._facts['quantization']} takes adapters only: train LoRA, or start "
                "it without quantization.",
            )
        return await self._take("rollout_weights", head, tensors)

    async def _take(self, method: str, head: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
        async with self._door.weights():
            self._check_awake()
            try:
                report = await self._rpc(method, head, tensors)
            finally:
                self._facts |= await self._rpc("rollout_state")
        return json.dumps({key: report[key] for key in ("version", "bound", "expected", "missing") if report}).encode()

    # Memory

    async def _sleep(self, body: bytes) -> bytes:
        async with self._door.weights():
            if not self._asleep:
                _check_done(await self._engine.sleep(stage_ids=[0], level=1))
                self._asleep = True
        return b"{}"

    async def _wake(self, body: bytes) -> bytes:
        async with self._door.weights():
            if self._asleep:
                _check_done(await self._engine.wake_up(stage_ids=[0]))
                self._asleep = False
        return b"{}"


class _Door:
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


def _check(request: WireRequest, facts: Mapping[str, Any]) -> None:
    """Raises unless the server can make this sample."""
    if facts["cache_backend"] != "none":
        raise Refusal(
            "input",
            f"This server has the step cache {facts['cache_backend']!r}, which skips parts of the network, so that "
            "its samples are not the policy's: start it without --cache-backend.",
        )
    given, (least, most) = len(request.row.get("images") or ()), FAMILIES[facts["pipeline_class"]].num_images
    if not least <= given <= most:
        takes = str(least) if least == most else f"{least} to {most}"
        raise Refusal("input", f"{facts['pipeline_class']} takes {takes} condition images, but a row has {given}.")
    if not request.row.get("prompt"):
        raise Refusal("input", "The prompt is empty: leave such rows out of the dataset.")
    try:
        table = make_sigma_table(request.table.sigmas, request.table.timesteps, _num_steps(request))
        Sampler(table, request.params, request.latent_shape)
    except ValueError as error:
        raise Refusal("input", str(error)) from error
    shape = _latent_shape(request, facts)
    if shape != request.latent_shape:
        raise Refusal(
            "input",
            f"Latents of shape {request.latent_shape} were asked for, but {facts['model']} has {shape} for media of "
            f"{request.params.size}: serve the checkpoint that is trained, and take sides that are multiples of "
            f"{2 * facts['factor']}.",
        )


def _num_steps(request: WireRequest) -> int:
    """Steps of a table that fits the other settings."""
    params, steps = request.params, request.params.num_inference_steps
    if params.tail_ratio == 1 or not params.sde_steps or steps < 2:
        return steps
    levels = make_sigma_table([1 - i / steps for i in range(steps + 1)])
    return thin_tail(levels, max(params.sde_steps), params.tail_ratio).num_steps


def _latent_shape(request: WireRequest, facts: Mapping[str, Any]) -> tuple[int, ...]:
    size, factor = request.params.size, facts["factor"]
    sides = tuple((side or 0) // (2 * factor) * 2 for side in (size.height, size.width))
    frames = facts["frames_factor"]
    between = () if frames is None else (1 + ((size.num_frames or 1) - 1) // frames,)
    return (facts["channels"], *between, *sides)


def _unfit(config: Mapping[str, Any]) -> str:
    """What of a PEFT config servers cannot follow."""
    kind = config.get("peft_type", "LORA")
    if str(kind).rpartition(".")[2] != "LORA":
        return f"is a {kind}"
    plain = {"use_dora": False, "bias": "none", "modules_to_save": None, "lora_bias": False}
    odd = [f"{key}={config[key]!r}" for key, value in plain.items() if config.get(key, value) not in (value, [])]
    return f"has {', '.join(odd)}" if odd else ""


def _message(body: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        return unpack(body, "rollout")
    except ValueError as error:
        raise Refusal("input", str(error)) from error


def _check_done(acknowledgements: list[Any]) -> None:
    failed = [one for one in acknowledgements if getattr(one, "status", None) != "SUCCESS"]
    if failed:
        raise Refusal("internal", f"A worker did not do it: {failed[0]}")


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

# SPDX-License-Identifier: Apache-2.0
"""Answers the calls of the wire, with a vLLM-Omni engine behind it: over HTTP, or in the trainer's own process."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from omnitrl.algorithms import make_sigma_table, thin_tail
from omnitrl.media import Video
from omnitrl.rollout.stepping import Sampler
from omnitrl.rollout.vllm_omni.server.calls import CallService, Refusal, check_adapter, read_message
from omnitrl.rollout.vllm_omni.server.families import FAMILIES
from omnitrl.rollout.vllm_omni.server.pipelines import ROLLOUT
from omnitrl.rollout.vllm_omni.transport import ADAPTER, GENERATE, JOIN, SLEEP, WAKE, WEIGHTS
from omnitrl.rollout.vllm_omni.wire import WireRequest, pack_request, pack_sample, unpack_request


class RolloutService(CallService):
    """
    The calls of a server of diffusion models.

    Args:
        engine (`AsyncOmni`):
            vLLM-Omni's own, with a pipeline of [`~omnitrl.rollout.vllm_omni.server.pipelines`] and the
            [`~omnitrl.rollout.vllm_omni.server.extension.RolloutExtension`].
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._asleep = False
        self._calls = {
            GENERATE: self._generate,
            ADAPTER: self._adapter,
            WEIGHTS: self._weights,
            JOIN: self._join,
            SLEEP: self._sleep,
            WAKE: self._wake,
        }

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

    def _check_awake(self) -> None:
        if self._asleep:
            raise Refusal("input", f"This server is asleep: wake it first with POST {WAKE}.")

    # Weights

    async def _adapter(self, body: bytes) -> bytes:
        self._check_awake()
        head, tensors = read_message(body)
        check_adapter(head.get("config") or {})
        return await self._take("rollout_adapter", head, tensors)

    async def _weights(self, body: bytes) -> bytes:
        self._check_awake()
        head, tensors = read_message(body)
        if self._facts["quantization"]:
            raise Refusal(
                "input",
                f"A server with quantization={self._facts['quantization']} takes adapters only: train LoRA, or start "
                "it without quantization.",
            )
        return await self._take("rollout_weights", head, tensors)

    async def _join(self, body: bytes) -> bytes:
        async with self._door.weights():
            await self._rpc("rollout_join", json.loads(body))
        return b"{}"

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


def _check_done(acknowledgements: list[Any]) -> None:
    failed = [one for one in acknowledgements if getattr(one, "status", None) != "SUCCESS"]
    if failed:
        raise Refusal("internal", f"A worker did not do it: {failed[0]}")

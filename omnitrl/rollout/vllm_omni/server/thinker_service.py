# SPDX-License-Identifier: Apache-2.0
"""Answers the calls of the wire with a vLLM-Omni engine behind it that writes text."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from torch import Tensor

from omnitrl.rollout.vllm_omni.server.adapters import EXPERTS
from omnitrl.rollout.vllm_omni.server.calls import CallService, Refusal, check_adapter, read_head
from omnitrl.rollout.vllm_omni.text_wire import (
    Completion,
    TextRequest,
    TextSampling,
    pack_completions,
    unpack_text_request,
)
from omnitrl.rollout.vllm_omni.transport import ADAPTER, GENERATE, WEIGHTS


class ThinkerService(CallService):
    """
    The calls of a server of models that read, see and hear.

    Args:
        engine (`AsyncOmni`):
            vLLM-Omni's own, with a Thinker alone and the
            [`~omnitrl.rollout.vllm_omni.server.thinker_extension.ThinkerExtension`].
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._calls = {GENERATE: self._generate, ADAPTER: self._adapter, WEIGHTS: self._weights}

    # Completions

    async def _generate(self, body: bytes) -> bytes:
        try:
            request = unpack_text_request(body)
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal("input", str(error)) from error
        _check_length(request, self._facts)
        inputs = _inputs(request, self._facts)
        async with self._door.sample():
            self._check_version(request.weight_version)
            completions = await asyncio.gather(*(self._complete(dict(inputs), request, s) for s in request.seeds))
        return pack_completions(completions, request.weight_version)

    async def _complete(self, inputs: dict[str, Any], request: TextRequest, seed: int) -> Completion:
        sampling = _sampling(request.sampling, seed)
        output = None
        name = uuid.uuid4().hex
        async for made in self._engine.generate(prompt=inputs, request_id=name, sampling_params_list=[sampling]):
            output = made
        if output is None or output.error or not output.outputs:
            raise Refusal("internal", str(output.error) if output is not None else "The engine made nothing.")
        (made,) = output.outputs
        if made.logprobs is None or len(made.logprobs) != len(made.token_ids):
            raise Refusal("input", "This server gives no log-probs: start it with `omnitrl vllm-serve MODEL`.")
        if list(output.prompt_token_ids) != request.token_ids:
            raise Refusal("internal", "The engine read other tokens than those of the prompt.")
        log_probs = [step[token].logprob for step, token in zip(made.logprobs, made.token_ids, strict=True)]
        return Completion(list(made.token_ids), log_probs, str(made.finish_reason))

    # Weights

    async def _adapter(self, body: bytes) -> bytes:
        head, _ = read_head(body)
        check_adapter(head.get("config") or {})
        self._check_plain()
        return await self._take("rollout_adapter", body)

    async def _weights(self, body: bytes) -> bytes:
        _, names = read_head(body)
        self._check_plain()
        experts = [name for name in sorted(names) if EXPERTS in name]
        if experts and self._facts["device"] == "cpu":
            raise Refusal(
                "input",
                f"On a CPU, vLLM packs experts when a server starts, so that {experts[0]} cannot be replaced: leave "
                "experts out of training, train LoRA, or use rollout_engine='local'.",
            )
        return await self._take("rollout_weights", body)

    def _check_plain(self) -> None:
        if self._facts["quantization"]:
            raise Refusal(
                "input",
                f"A server with quantization={self._facts['quantization']} has no weights that those of a trainer "
                "could take the place of: start it without quantization.",
            )


def _sampling(drawn: TextSampling, seed: int) -> Any:
    """How vLLM draws a completion."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(
            max_tokens=drawn.max_tokens,
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            min_p=drawn.min_p,
            repetition_penalty=drawn.repetition_penalty,
            stop_token_ids=drawn.stop_token_ids,
            logit_bias=dict.fromkeys(drawn.suppress_tokens, -100.0) or None,
            seed=seed,
            logprobs=0,  # of the token that is drawn
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (ValueError, VLLMValidationError) as error:
        raise Refusal("input", f"vLLM does not draw answers like that: {error}") from error


def _check_length(request: TextRequest, facts: Mapping[str, Any]) -> None:
    whole, most = len(request.token_ids) + request.sampling.max_tokens, facts["max_model_len"]
    if whole > most:
        raise Refusal(
            "input",
            f"A prompt of {len(request.token_ids)} tokens and {request.sampling.max_tokens} of max_completion_length "
            f"are {whole}, but this server takes {most}: start it with --max-model-len {whole}, or more.",
        )


def _inputs(request: TextRequest, facts: Mapping[str, Any]) -> dict[str, Any]:
    """
    What vLLM makes of a prompt when it has processed it, here from what the trainer's processor has made.

    What is cached of a prompt and of its media is of one version of the weights.
    """
    from vllm.inputs.engine import mm_input, tokens_input

    salt = str(request.weight_version)
    if not request.media:
        return dict(tokens_input(request.token_ids, cache_salt=salt))
    items = _items(request.media, facts["merge_size"])
    places = {kind: _runs(request.token_ids, facts["placeholders"][kind]) for kind in items}
    for kind, found in places.items():
        if len(found) != len(items[kind]):
            raise Refusal(
                "input", f"A prompt has places for {len(found)} {kind}(s), but came with {len(items[kind])}."
            )
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(request.media.items()):
        digest.update(name.encode() + str(tuple(value.shape)).encode() + value.numpy().tobytes())
    names = {k: [f"{digest.hexdigest()}-{k}-{i}-{salt}" for i in range(len(v))] for k, v in items.items()}
    return dict(mm_input(request.token_ids, items, names, places, cache_salt=salt))


def _items(media: Mapping[str, Tensor], merge_size: int) -> Any:
    """The media one by one, as vLLM has them."""
    from transformers import BatchFeature
    from vllm.model_executor.models.qwen2_5_omni_thinker import create_qwen2_5_omni_thinker_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems

    fields: dict[str, Any] = dict(media)
    if "input_features" in fields:  # sounds one after the other, without padding
        features, mask = fields.pop("input_features"), fields["feature_attention_mask"].bool()
        fields["input_audio_features"] = features.permute(0, 2, 1)[mask].permute(1, 0)
        fields["audio_feature_lengths"] = mask.sum(-1)
    if "video_second_per_grid" in fields:
        fields["second_per_grid_ts"] = fields.pop("video_second_per_grid")
    known = create_qwen2_5_omni_thinker_field_factory(merge_size)(fields)
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(fields), known)


def _runs(token_ids: list[int], token: int) -> list[Any]:
    """Where the same token stands several times in a row."""
    from vllm.multimodal.inputs import PlaceholderRange

    found, start = [], 0
    for value, members in groupby(token_ids):
        length = sum(1 for _ in members)
        if value == token:
            found.append(PlaceholderRange(offset=start, length=length))
        start += length
    return found

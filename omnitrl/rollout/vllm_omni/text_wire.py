# SPDX-License-Identifier: Apache-2.0
"""
Messages between a trainer of models that write text and their server, under the routes of
[`~omnitrl.rollout.vllm_omni.wire`].

A request has the token ids of one prompt and the tensors that the trainer's own processor made of its media, so that
the server sees what the trainer sees, and a seed for each completion. The answer has the token ids of the completions
and the log-prob of each token under the distribution that it was drawn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from omnitrl.messages import pack, unpack
from omnitrl.rollout.vllm_omni.wire import PROTOCOL


_MEDIA = "media."


@dataclass(frozen=True)
class TextSampling:
    """
    How completions are drawn.

    Args:
        max_tokens (`int`):
            The most tokens of a completion.
        temperature, top_p, min_p, repetition_penalty (`float`):
            As in Transformers' `GenerationConfig`.
        top_k (`int`):
            Likeliest tokens that are drawn from; 0 for all.
        stop_token_ids (`list[int]`):
            Tokens that end a completion, of which they are the last.
        suppress_tokens (`list[int]`):
            Tokens that are never drawn.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    suppress_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TextRequest:
    """
    Completions of one prompt.

    Args:
        token_ids (`list[int]`):
            The prompt, with as many placeholders as its media take.
        media (`dict[str, Tensor]`):
            What the trainer's processor made of its media.
        seeds (`list[int]`):
            One for each completion.
        sampling ([`TextSampling`]):
            How they are drawn.
        weight_version (`int`):
            Version that they must come from.
    """

    token_ids: list[int]
    media: Mapping[str, Tensor]
    seeds: list[int]
    sampling: TextSampling
    weight_version: int


@dataclass(frozen=True)
class Completion:
    """
    A completion.

    Args:
        token_ids (`list[int]`):
            Its tokens, the one that ended it included.
        log_probs (`list[float]`):
            Log-prob of each of them.
        finish_reason (`str`):
            `"stop"`, or `"length"` where it was cut off.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


def pack_text_request(request: TextRequest) -> bytes:
    """A request as a message."""
    head = {
        "protocol": PROTOCOL,
        "seeds": request.seeds,
        "sampling": asdict(request.sampling),
        "weight_version": request.weight_version,
    }
    media = {_MEDIA + name: tensor for name, tensor in request.media.items()}
    return pack(head, {"token_ids": torch.tensor(request.token_ids), **media})


def unpack_text_request(message: bytes) -> TextRequest:
    """
    The request in a message.

    Raises:
        `ValueError`: it is none, or of another protocol.
    """
    head, tensors = unpack(message, "rollout")
    if head.get("protocol") != PROTOCOL or "seeds" not in head:
        raise ValueError(
            f"A request of rollout protocol {head.get('protocol')} for "
            f"{'text' if 'seeds' in head else 'no text'} came to a server of protocol {PROTOCOL} that writes text: "
            "install the same version of omnitrl on both sides, and serve the model that is trained."
        )
    media = {name.removeprefix(_MEDIA): value for name, value in tensors.items() if name.startswith(_MEDIA)}
    sampling = TextSampling(**head["sampling"])
    return TextRequest(tensors["token_ids"].tolist(), media, head["seeds"], sampling, head["weight_version"])


def pack_completions(completions: Sequence[Completion], weight_version: int) -> bytes:
    """Completions as a message."""
    head: dict[str, Any] = {
        "weight_version": weight_version,
        "lengths": [len(completion.token_ids) for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
    }
    tokens = [token for completion in completions for token in completion.token_ids]
    log_probs = [value for completion in completions for value in completion.log_probs]
    return pack(head, {"token_ids": torch.tensor(tokens), "log_probs": torch.tensor(log_probs, dtype=torch.float64)})


def unpack_completions(message: bytes) -> tuple[list[Completion], int]:
    """
    The completions in a message, and the version of the weights that they came from.

    Raises:
        `ValueError`, `KeyError`: there are none.
    """
    head, tensors = unpack(message, "rollout")
    lengths = head["lengths"]
    tokens, log_probs = (tensors[name].split(lengths) for name in ("token_ids", "log_probs"))
    completions = [
        Completion(ids.tolist(), values.tolist(), reason)
        for ids, values, reason in zip(tokens, log_probs, head["finish_reasons"], strict=True)
    ]
    return completions, head["weight_version"]

# SPDX-License-Identifier: Apache-2.0
"""
What goes over the wire between a trainer and a vLLM-Omni server: JSON where it is small, safetensors where it is not.

| route | body | answer |
|---|---|---|
| `GET /rollout/info` | | JSON, the fields of [`ServerInfo`] |
| `POST /rollout/generate` | a message of [`pack_request`], one sample | a message of [`pack_sample`] |
| `POST /rollout/adapter` | adapter tensors under an [`AdapterHead`] | JSON, the fields of a `WeightReport` |
| `POST /rollout/weights` | one bucket of tensors under a [`BucketHead`] | the same, after the last bucket |
| `POST /rollout/join` | JSON, the fields of an [`~omnitrl.rollout.vllm_omni.collective.Invitation`] | JSON `{}` |
| `POST /rollout/sleep`, `POST /rollout/wake` | | JSON `{}` |

A *message* is a safetensors file whose metadata has one entry, `head`, with JSON. An answer that is not 200 is JSON
with `error`, a sentence, and `kind`: `"input"` (the request can never work, 400), `"stale"` (the weights asked for are
not there, 409), `"internal"` (500) or `"away"` (the engine has died, 503).

A message to `/rollout/weights` may also be one without tensors whose head has the name of a `group` that the server
has joined and `num_bytes`: the message that is meant has that many bytes and is broadcast in the group.

Tensors of weights are named `<network>.<name>`: of a network, the name in diffusers' state dict
(`transformer.transformer_blocks.0.attn.to_q.weight`); of an adapter, the same with `lora_A.weight` and `lora_B.weight`
(`transformer.transformer_blocks.0.attn.to_q.lora_A.weight`). A *weight version* is a positive number of less than 63
bits that no other weights ever had, those of earlier trainers included; it is not the trainer's count of steps.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.media import Audio, Video
from omnitrl.messages import pack, unpack
from omnitrl.models import MediaSize
from omnitrl.rollout.trajectory import SampleRequest, SamplingParams, Trajectory


PROTOCOL = 1
"""Raised whenever a message changes in a way that an older side would misread."""

PREFIX = "/rollout"


@dataclass(frozen=True)
class ServerInfo:
    """
    What a server says of itself.

    Args:
        protocol (`int`):
            [`PROTOCOL`] of its omnitrl.
        omnitrl_version, vllm_omni_version (`str`):
            Of the server's environment.
        model (`str`):
            What it was started with.
        pipeline_class (`str`):
            Class of the diffusers pipeline, or of the Thinker, that it serves.
        dtype (`str`):
            Of its network, such as `"bfloat16"`.
        batching (`str`):
            `"serial"`, `"request"` or `"step"`; `"token"` for text.
        max_num_seqs (`int`):
            Samples that it makes at the same time.
        weight_version (`int`):
            Of the weights that it has; -1 for those that it was started with.
        cache_backend (`str`):
            Its step cache, `"none"` for none.
        quantization (`str`, *optional*):
            Method, such as `"fp8"`.
        log_probs (`str`, *optional*):
            Which log-probs it gives of the tokens of a text, in vLLM's words.
        max_model_len (`int`, *optional*):
            The most tokens of a prompt and its completion.
        sizes (`dict[str, int]`, *optional*):
            Of the language model, as its config has them.
        workers (`int`):
            Processes that hold its weights.
        device (`str`):
            Kind of their device.
    """

    protocol: int
    omnitrl_version: str
    vllm_omni_version: str
    model: str
    pipeline_class: str
    dtype: str
    batching: str
    max_num_seqs: int
    weight_version: int = -1
    cache_backend: str = "none"
    quantization: str | None = None
    log_probs: str | None = None
    max_model_len: int | None = None
    sizes: dict[str, int | None] | None = None
    workers: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class WireRequest:
    """
    One sample as the server sees it.

    Args:
        row (`dict`):
            `prompt`, `negative_prompt` (already the family's own where the row has none) and condition `images` (PIL).
        seed, start_seed (`int`):
            As in [`~omnitrl.rollout.SampleRequest`].
        params ([`~omnitrl.rollout.SamplingParams`]):
            How the sample is made; its size is whole.
        table ([`~omnitrl.algorithms.SigmaTable`]):
            The trainer's own grid, used verbatim.
        latent_shape (`tuple[int, ...]`):
            Shape of the sample's latents as the trainer has them.
        weight_version (`int`):
            Version that the sample must come from.
        max_sequence_length (`int`):
            Token length of prompts.
        guidance_scale_2 (`float`, *optional*):
            Guidance of the second of two networks.
    """

    row: dict[str, Any]
    seed: int
    start_seed: int | None
    params: SamplingParams
    table: SigmaTable
    latent_shape: tuple[int, ...]
    weight_version: int
    max_sequence_length: int
    guidance_scale_2: float | None = None


@dataclass(frozen=True)
class AdapterHead:
    """
    Head of a message with adapters.

    Args:
        version (`int`):
            Weight version that it makes.
        config (`dict`):
            The PEFT config as a dict; one for all networks.
        expected (`list[str]`):
            Names of the adapted modules, `<network>.<module>` as diffusers names them.
    """

    version: int
    config: dict[str, Any]
    expected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BucketHead:
    """
    Head of a message with a part of all weights.

    Args:
        version (`int`):
            Weight version that all buckets together make.
        index, count (`int`):
            Number of this bucket, and how many there are.
    """

    version: int
    index: int
    count: int


def pack_request(request: WireRequest) -> bytes:
    """A sample's request as a message."""
    row = {key: request.row.get(key) for key in ("prompt", "negative_prompt")}
    row["images"] = [_png(image) for image in request.row.get("images") or []]
    head = {
        "protocol": PROTOCOL,
        "row": row,
        "seed": request.seed,
        "start_seed": request.start_seed,
        "params": {**vars(request.params), "size": vars(request.params.size)},  # `asdict` would copy it all
        "latent_shape": list(request.latent_shape),
        "weight_version": request.weight_version,
        "max_sequence_length": request.max_sequence_length,
        "guidance_scale_2": request.guidance_scale_2,
    }
    return pack(head, {"sigmas": request.table.sigmas, "timesteps": request.table.timesteps})


def unpack_request(message: bytes) -> WireRequest:
    """
    The request in a message.

    Raises:
        `ValueError`: it is none, or of another protocol.
    """
    head, tensors = unpack(message, "rollout")
    if head.get("protocol") != PROTOCOL:
        raise ValueError(
            f"The trainer speaks rollout protocol {head.get('protocol')}, this server {PROTOCOL}: install the same "
            "version of omnitrl on both sides."
        )
    params = head["params"]
    params |= {"size": MediaSize(**params["size"])}
    params |= {key: tuple(params[key]) for key in ("sde_steps", "keep_steps")}
    row = {**head["row"], "images": [_image(data) for data in head["row"]["images"]]}
    return WireRequest(
        row,
        head["seed"],
        head["start_seed"],
        SamplingParams(**params),
        SigmaTable(tensors["sigmas"], tensors["timesteps"]),
        tuple(head["latent_shape"]),
        head["weight_version"],
        head["max_sequence_length"],
        head["guidance_scale_2"],
    )


def pack_sample(recorded: dict[str, Tensor], media: Any, table: SigmaTable, weight_version: int) -> bytes:
    """
    A finished sample as a message.

    Args:
        recorded (`dict[str, Tensor]`):
            The tensors of [`Trajectory.tensors`] that were asked for.
        media (`Any`):
            A PIL image, [`Video`] or [`Audio`], or `None`.
        table ([`~omnitrl.algorithms.SigmaTable`]):
            The grid that was used.
        weight_version (`int`):
            Of the weights that were used.
    """
    kind, head, tensors = "none", {}, dict(recorded)
    sound = media.audio if isinstance(media, Video) else media if isinstance(media, Audio) else None
    if isinstance(media, Video):
        kind, head["frame_rate"], tensors["media"] = "video", media.frame_rate, torch.from_numpy(media.frames)
    elif isinstance(media, Audio):
        kind = "audio"
    elif media is not None:
        kind, tensors["media"] = "image", torch.from_numpy(np.array(media.convert("RGB")))
    if sound is not None:
        head["sampling_rate"], tensors["sound"] = sound.sampling_rate, torch.from_numpy(sound.samples)
    tensors |= {"sigmas": table.sigmas, "timesteps": table.timesteps}
    return pack({"kind": kind, "weight_version": weight_version, **head}, tensors)


def unpack_sample(message: bytes, request: SampleRequest, params: SamplingParams) -> Trajectory:
    """
    The sample in a message.

    Raises:
        `ValueError`: it is none, or lacks what was asked for.
    """
    head, tensors = unpack(message, "rollout")
    wanted = {"latents", "next_latents", "log_probs"} if params.keep_steps else set()
    wanted |= {"means"} if params.keep_means and params.keep_steps else set()
    wanted |= {"clean_latents"} if params.keep_clean else set()
    missing = sorted(wanted - tensors.keys())
    if missing:
        raise ValueError(f"A sample of the server lacks {', '.join(missing)}, which were asked for.")
    empty = torch.zeros(0)
    return Trajectory(
        request,
        _media(head, tensors),
        SigmaTable(tensors["sigmas"], tensors["timesteps"]),
        tuple(sorted(params.keep_steps)),
        tensors.get("latents", empty),
        tensors.get("next_latents", empty),
        tensors.get("log_probs", empty),
        head["weight_version"],
        tensors.get("means"),
        tensors.get("clean_latents"),
    )


def _media(head: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    from PIL import Image

    sound = Audio(tensors["sound"].numpy(), head["sampling_rate"]) if "sound" in tensors else None
    if head["kind"] == "image":
        return Image.fromarray(tensors["media"].numpy())
    if head["kind"] == "video":
        return Video(tensors["media"].numpy(), head["frame_rate"], sound)
    return sound


def _png(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _image(data: str) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")

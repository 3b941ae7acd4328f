# SPDX-License-Identifier: Apache-2.0
"""Whether a server is the right one, and whether what it gives back is what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import InputError, RunError
from omnitrl.media import Audio, Video
from omnitrl.models import FlowModel, MediaSize
from omnitrl.rollout.trajectory import SamplingParams, Trajectory
from omnitrl.rollout.vllm_omni.client import BadAnswer
from omnitrl.rollout.vllm_omni.wire import PROTOCOL, ServerInfo
from omnitrl.version import __version__


def check_server(info: ServerInfo, name: str, pipeline_class: str) -> None:
    """
    Raises unless a server can make samples for a trainer.

    Args:
        info ([`ServerInfo`]):
            What the server says of itself.
        name (`str`):
            What it is called in the error.
        pipeline_class (`str`):
            Class of the trainer's pipeline.

    Raises:
        [`~omnitrl.errors.InputError`]: another version or model is there, or one that skips parts of the network.
    """
    _check_same(info, name, pipeline_class)
    if info.cache_backend != "none":
        raise InputError(
            f"{name} has the step cache {info.cache_backend!r}, which skips parts of the network, so that its samples "
            "are not the policy's: start it without --cache-backend."
        )


def check_text_server(info: ServerInfo, name: str, model_class: str, sizes: Mapping[str, int | None]) -> None:
    """
    Raises unless a server can write text for a trainer.

    Args:
        info ([`ServerInfo`]):
            What the server says of itself.
        name (`str`):
            What it is called in the error.
        model_class (`str`):
            Class of the trainer's model.
        sizes (`dict[str, int]`):
            Of its language model, as its config has them.

    Raises:
        [`~omnitrl.errors.InputError`]: another version or model is there, or one that gives other log-probs.
    """
    _check_same(info, name, model_class)
    other = {key: value for key, value in (info.sizes or {}).items() if sizes.get(key) != value}
    if other:
        key, value = next(iter(other.items()))
        raise InputError(
            f"{name} serves {info.model} with {key}={value}, but the trainer's model has {sizes.get(key)}: start it "
            "with the trainer's model, or correct vllm_server_base_url."
        )
    if info.log_probs != "processed_logprobs":
        raise InputError(
            f"{name} gives {info.log_probs or 'no log-probs'}, which are not those that its tokens are drawn with: "
            "start it with `omnitrl vllm-serve MODEL`, without --logprobs-mode."
        )


def _check_same(info: ServerInfo, name: str, served_class: str) -> None:
    """Raises where a server has another version of omnitrl than the trainer, or a model of another class."""
    if (info.protocol, info.omnitrl_version) != (PROTOCOL, __version__):
        raise InputError(
            f"{name} runs omnitrl {info.omnitrl_version} (rollout protocol {info.protocol}), the trainer "
            f"{__version__} (protocol {PROTOCOL}); samples must be made by the code that trains on them: use "
            f'`pip install "omnitrl=={__version__}"` there, or the same checkout.'
        )
    if info.pipeline_class != served_class:
        raise InputError(
            f"{name} serves {info.model} with a {info.pipeline_class}, but the trainer has a {served_class}: start it "
            "with `omnitrl vllm-serve` and the trainer's model, or correct vllm_server_base_url."
        )


def check_sample(
    sample: Trajectory,
    params: SamplingParams,
    table: SigmaTable,
    shape: tuple[int, ...],
    weight_version: int,
) -> None:
    """
    Raises unless a sample is what was asked for.

    Args:
        sample ([`~omnitrl.rollout.Trajectory`]):
            As it came.
        params ([`~omnitrl.rollout.SamplingParams`]):
            How it was to be made; its size is whole.
        table ([`~omnitrl.algorithms.SigmaTable`]):
            The grid that was to be used.
        shape (`tuple[int, ...]`):
            Of its latents.
        weight_version (`int`):
            On the wire.

    Raises:
        [`BadAnswer`]: it came from other weights, or is broken.
        [`~omnitrl.errors.RunError`]: it was made in another way, which asking again would not mend.
    """
    if sample.weight_version != weight_version:
        raise BadAnswer(f"a sample came from the weights {sample.weight_version} and not {weight_version}")
    if not (_equal(sample.table.sigmas, table.sigmas) and _equal(sample.table.timesteps, table.timesteps)):
        raise RunError(
            f"A server made a sample with {sample.table.num_steps} steps of other noise levels than the trainer's "
            f"{table.num_steps}: install the same version of omnitrl on both sides."
        )
    _check_tensors(sample, params, shape)
    if params.decode and sample.media is not None:
        _check_media(sample.media, params.size)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b.to(a.device))


def _check_tensors(sample: Trajectory, params: SamplingParams, shape: tuple[int, ...]) -> None:
    kept = len(params.keep_steps)
    expected = {"log_probs": (kept,), "clean_latents": shape}
    expected |= dict.fromkeys(("latents", "next_latents", "means"), (kept, *shape))
    for name, tensor in sample.tensors().items():
        if kept == 0 and name != "clean_latents":
            continue
        if tuple(tensor.shape) != expected[name] or tensor.dtype != torch.float32:
            raise RunError(
                f"A server gave {name} of shape {tuple(tensor.shape)} in {tensor.dtype}, but {expected[name]} in "
                "torch.float32 were asked for: serve the checkpoint that is trained, with the same version of omnitrl."
            )
        if not tensor.isfinite().all():
            raise RunError(
                f"A server gave {name} that are not finite for the prompt {sample.request.row.get('prompt')!r} (seed "
                f"{sample.request.seed}): start it with --dtype bfloat16 or float32, or lower noise_level and "
                "learning_rate."
            )


def _check_media(media: Any, size: MediaSize) -> None:
    if isinstance(media, Audio):
        return
    if isinstance(media, Video):
        frames, height, width = media.frames.shape[:3]
        found = MediaSize(height, width, frames)
    else:
        found = MediaSize(media.height, media.width, size.num_frames)
    if (found.height, found.width, found.num_frames) != (size.height, size.width, size.num_frames):
        raise RunError(
            f"A server made media of {found}, but {size} were asked for: serve the checkpoint that is trained, with "
            "the same version of omnitrl."
        )


def warn_of_other_name(info: ServerInfo, model: FlowModel) -> str | None:
    """A sentence where the server's checkpoint has another name than the trainer's, which may be the same one."""
    ours, theirs = (name.rstrip("/").rpartition("/")[2] for name in (model.name, info.model))
    if not ours or ours == theirs:
        return None
    return (
        f"The server has loaded {info.model}, the trainer {model.name}: if that is another checkpoint, the comparison "
        "of their samples will tell."
    )

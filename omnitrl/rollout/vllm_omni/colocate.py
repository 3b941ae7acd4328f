# SPDX-License-Identifier: Apache-2.0
"""A vLLM-Omni engine in the trainer's own process, with the same calls as a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omnitrl.errors import InputError
from omnitrl.rollout.context import EngineContext
from omnitrl.rollout.vllm_omni.server import families
from omnitrl.rollout.vllm_omni.transport import InProcessTransport


_HOOKS = families.__name__.rpartition(".")[0]
MAX_NUM_SEQS = 8
"""Samples that it makes at the same time where its pipeline can, as many as a server by default."""


def colocated(context: EngineContext) -> InProcessTransport:
    """
    Loads the trainer's checkpoint a second time, into an engine that sleeps while the trainer trains.

    Raises:
        [`~omnitrl.errors.InputError`]: vLLM-Omni is not installed, there are several processes, or there is no
            checkpoint to be loaded.
    """
    if context.world_size > 1:
        raise InputError(
            f"vllm_mode='colocate' is for one process, and there are {context.world_size}: use vllm_mode='server' "
            "with servers on devices of their own, or rollout_engine='local'."
        )
    model = context.model
    if not model.name:
        raise InputError(
            "vllm_mode='colocate' loads the checkpoint a second time, but the trainer's model was built in code: save "
            "it with `pipeline.save_pretrained(folder)` and pass the folder as `model`."
        )
    kwargs = engine_arguments(model.name, type(model.pipeline).__name__, str(model.dtype).removeprefix("torch."))
    try:
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        from omnitrl.rollout.vllm_omni.server.service import RolloutService
    except ImportError as error:
        raise InputError(
            f"vllm_mode='colocate' needs vLLM-Omni in the trainer's environment ({error}): install it with "
            "`pip install \"omnitrl[vllm]\"`, or use vllm_mode='server' with a server in another environment."
        ) from error
    # Prompts of a group are encoded once; only the environment says so to the engine.
    os.environ.setdefault("OMNI_DIFFUSION_PROMPT_EMBED_CACHE", "1")
    with _own_streams():
        engine = AsyncOmni(**kwargs)
    return InProcessTransport(RolloutService(engine).handle, engine.shutdown)


@contextmanager
def _own_streams() -> Iterator[None]:
    """Gives standard output and error back as they were; vLLM puts the name of a worker before each line of them."""
    streams = (sys.stdout, sys.stderr)
    writes = [stream.write for stream in streams]
    try:
        yield
    finally:
        for stream, write in zip(streams, writes, strict=True):
            stream.write = write  # type: ignore[method-assign]


def engine_arguments(model: str, pipeline_class: str, dtype: str) -> dict[str, Any]:
    """
    What the engine of a pipeline is made with, as `omnitrl vllm-serve` does it.

    Args:
        model (`str`):
            Folder or Hub id of the checkpoint.
        pipeline_class (`str`):
            Class of its diffusers pipeline.
        dtype (`str`):
            Of the network, such as `"bfloat16"`.

    Raises:
        [`~omnitrl.errors.InputError`]: vLLM-Omni makes no rollouts with it.
    """
    batching = families.family_of_server(pipeline_class).batchings[0]
    return {
        "model": model,
        "dtype": dtype,
        "custom_pipeline_args": {"pipeline_class": f"{_HOOKS}.pipelines.{pipeline_class}"},
        "worker_extension_cls": f"{_HOOKS}.extension.RolloutExtension",
        "enable_sleep_mode": True,
        "max_num_seqs": 1 if batching == "serial" else MAX_NUM_SEQS,
        "step_execution": batching == "step",
        **({"request_batch_max_wait_ms": 20} if batching == "request" else {}),
    }

# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from omnitrl.errors import RunError


# Both names begin with "_", which is what uploads of an output folder leave out.
STAGING = "_checkpoint-being-written"
_REPLACED = "_replaced-"

# What a checkpoint has beside the trained weights; the rest of it is what is published.
STATE_FILES = (
    "optimizer*",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "omnitrl_state*",
    "pytorch_model_fsdp*",
    "global_step*",
    "latest",
    "zero_to_fp32.py",
)

# What decides which samples a rollout has and how it is cut into updates; it stays for a whole run.
_PLAN = (
    "seed",
    "num_generations",
    "generation_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "shuffle_dataset",
    "same_init_noise",
)


def checkpoint_name(step: int) -> str:
    """The folder of an optimizer step."""
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def last_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of the latest step in `folder`, if there is one."""
    found = get_last_checkpoint(str(folder)) if Path(folder).is_dir() else None
    return None if found is None else Path(found)


def publish(staged: Path, target: Path) -> None:
    """Gives a finished folder its name; an older one of that name goes only when this one is there."""
    replaced = target.with_name(_REPLACED + target.name)
    if target.exists():
        os.replace(target, replaced)
    os.replace(staged, target)
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(staged.parent, ignore_errors=True)


def tidy_up(folder: str | Path) -> None:
    """Puts right what a process that was killed while it saved has left in `folder`."""
    folder = Path(folder)
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    for replaced in folder.glob(f"{_REPLACED}*"):
        target = folder / replaced.name.removeprefix(_REPLACED)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(replaced, target)


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turns the error of a disk that is full or may not be written to into a sentence about `target`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save reports a full disk by a RuntimeError of its file writer.
        if type(error) is RuntimeError and "PytorchStreamWriter" not in str(error):
            raise
        if isinstance(error, RunError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"{target} could not be written ({reason}), and what was there before is untouched: free space or make "
            "the folder writable, then go on with `trainer.train(resume_from_checkpoint=True)`."
        ) from error


def copy_weights(checkpoint: str | Path, folder: str | Path) -> None:
    """Copies the trained weights of a checkpoint, in all formats that it has, into `folder`."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*STATE_FILES))


def save_tensors(path: str | Path, content: dict[str, Any]) -> None:
    """`torch.save` of plain containers and tensors, readable with `weights_only=True`."""
    torch.save(content, path)


def load_tensors(path: str | Path) -> dict[str, Any]:
    """The inverse of [`save_tensors`], on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def plan_of(args: Any) -> dict[str, Any]:
    """The options that a run must go on with."""
    return {name: getattr(args, name) for name in (*_PLAN, *args.plan_options)}


def check_same(where: str, saved: dict[str, Any], now: dict[str, Any], what: str) -> None:
    """Raises at the first option of the checkpoint `where` that is another one now."""
    for name, value in saved.items():
        if now[name] != value:
            raise RunError(
                f"{where} was written with {name}={value}, which decides {what}, but this run has {name}={now[name]}: "
                f"resume with {name}={value}, or start a new run from its weights."
            )


def check_prompts(where: str, saved: Sequence[str], now: Sequence[str]) -> None:
    """Raises if the rest of a rollout in the checkpoint `where` is of other prompts than the dataset's."""
    for before, prompt in zip(saved, now, strict=True):
        if before != prompt:
            raise RunError(
                f"{where} is in the midst of a rollout of {before!r}, where train_dataset now has {prompt!r}: resume "
                "with the dataset as it was, or start a new run."
            )

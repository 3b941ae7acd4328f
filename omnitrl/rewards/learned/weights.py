# SPDX-License-Identifier: Apache-2.0
"""Reading weights from the Hub or a disk, so that a network either has all of them or is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..contract import RewardError


M = TypeVar("M")


def load_model(model_class: Any, source: str, reward: str) -> Any:
    """
    A transformers model with all of its weights.

    Args:
        model_class:
            Class of the model, such as `transformers.CLIPModel`.
        source (`str`):
            Hub id or folder.
        reward (`str`):
            Who asks, for messages.

    Raises:
        [`~omnitrl.rewards.RewardError`]: the model cannot be had, or has not all of its weights.
    """
    try:
        model, report = model_class.from_pretrained(source, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(_not_had(reward, source, error)) from error
    _check_report(model, report, reward, source)
    return model


def load_part(part_class: Any, source: str, reward: str) -> Any:
    """A tokenizer, a configuration or the like of transformers; see [`load_model`]."""
    try:
        return part_class.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise RewardError(_not_had(reward, source, error)) from error


def fill_model(
    model_class: Any, config: Any, state: Mapping[str, Tensor], reward: str, source: str, **options: Any
) -> Any:
    """
    A transformers model of a configuration, with the weights of `state`, in their own precision; `options` are those
    of the model.

    Raises:
        [`~omnitrl.rewards.RewardError`]: weights that are missing, left over, or of another shape.
    """
    dtype = next(iter(state.values())).dtype
    try:
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=dict(state), dtype=dtype, output_loading_info=True, **options
        )
    except RuntimeError as error:  # shapes
        raise RewardError(f"{reward}: the weights of {source!r} do not fit: {_first_line(error)}") from error
    _check_report(model, report, reward, source)
    left = sorted(report["unexpected_keys"])
    if left:
        raise RewardError(
            f"{reward}: {len(left)} of {len(state)} weights of {source!r} have no place in a {type(model).__name__}, "
            f"the first is {left[0]!r}: give the checkpoint that the reward was made for."
        )
    return model


def read_checkpoint(source: str, file: str, reward: str) -> dict[str, Any]:
    """
    The weights in a file.

    Args:
        source (`str`):
            A file, a folder, or a Hub id.
        file (`str`):
            Name of the file in the folder or repository.
        reward (`str`):
            Who asks, for messages.

    Raises:
        [`~omnitrl.rewards.RewardError`]: the file cannot be had or read.
    """
    path = _find(source, file, reward)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a file of another kind raises whatever its first bytes lead to
        raise RewardError(f"{reward}: {str(path)!r} is no file of weights: {_first_line(error)}") from error


def _find(source: str, file: str, reward: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / file).is_file():
            raise RewardError(f"{reward}: the folder {source!r} has no file {file!r}: give the path of the file.")
        return path / file
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, file))
    except (OSError, ValueError) as error:  # the Hub's errors are of the first kind, those of a name of the second
        raise RewardError(_not_had(reward, f"{source}/{file}", error)) from error


def _check_report(model: Any, report: Mapping[str, Any], reward: str, source: str) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        total = len(model.state_dict())
        raise RewardError(
            f"{reward}: {source!r} lacks {len(missing)} of the {total} weights of a {type(model).__name__}, the first "
            f"is {missing[0]!r}: with random ones in their place the reward would mean nothing."
        )


def _not_had(reward: str, source: str, error: Exception) -> str:
    return (
        f"{reward} cannot load {source!r}: {_first_line(error)} Give a Hub id or a folder as `model`; on a machine "
        f"without a connection, fetch it beforehand with `hf download`."
    )


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if line.endswith((".", "!", "?")) else f"{line}."

# SPDX-License-Identifier: Apache-2.0
"""
Messages between processes that trust each other no further than data: JSON where it is small, safetensors where not.

A message is a safetensors file whose metadata has one entry, `head`, with JSON. Nothing is pickled, so that reading
one never runs code.
"""

from __future__ import annotations

import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor


def pack(head: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """
    A message of a head that JSON can hold and tensors; those that share memory are written twice.

    Raises:
        `ValueError`, `TypeError`: JSON cannot hold the head, NaN and infinity among others.
    """
    whole, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        whole[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return save(whole, metadata={"head": json.dumps(head, allow_nan=False)})


def unpack(message: bytes, protocol: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """
    Head and tensors of a message.

    Args:
        message (`bytes`): What [`pack`] gave.
        protocol (`str`): Name of what both sides speak, for the sentence of the error.

    Raises:
        `ValueError`: it is no message.
    """
    try:
        head, _ = _read_head(message)
        return head, load(message)
    except _UNREADABLE as error:
        raise _no_message(message, protocol, error) from error


def unpack_head(message: bytes, protocol: str) -> tuple[dict[str, Any], list[str]]:
    """
    Head and names of the tensors of a message, whose values are not looked at.

    Raises:
        `ValueError`: it is no message.
    """
    try:
        return _read_head(message)
    except _UNREADABLE as error:
        raise _no_message(message, protocol, error) from error


_UNREADABLE = (SafetensorError, KeyError, TypeError, ValueError, RecursionError)


def _read_head(message: bytes) -> tuple[dict[str, Any], list[str]]:
    length = int.from_bytes(message[:8], "little")
    content = json.loads(message[8 : 8 + length])
    return json.loads(content.pop("__metadata__")["head"]), list(content)


def _no_message(message: bytes, protocol: str, error: Exception) -> ValueError:
    return ValueError(f"{len(message)} bytes are no message of the {protocol} protocol: {message[:40]!r} ({error})")

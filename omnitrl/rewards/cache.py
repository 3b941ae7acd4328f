# SPDX-License-Identifier: Apache-2.0
"""Values of deterministic rewards, kept by the content of what they were asked about."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from omnitrl.media import Audio, Video

from .contract import Reward


# A value and what was recorded of its row.
Known = tuple[float | None, dict[str, Any]]


class _NotHashable(Exception):
    """A value whose content nobody knows."""


class RewardCache:
    """
    The last `size` values of deterministic rewards; used by one event loop.

    A key is the reward, the pixels, samples or numbers of the medium, and all columns that the reward takes. What
    cannot be read as such, an object of a class of the user's for example, has no key and is always asked about.

    Args:
        size (`int`):
            Most values.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self.turn = asyncio.Lock()
        """Held while keys are made, so that rewards of the same media read them once."""

    def get(self, key: bytes | None) -> Known | None:
        """What is known, with a dictionary of its own."""
        if key is None or key not in self._known:
            return None
        self._known.move_to_end(key)
        value, extras = self._known[key]
        return value, dict(extras)

    def put(self, key: bytes, value: float | None, extras: dict[str, Any]) -> None:
        """Keeps a value, and forgets the one that was not asked about for longest."""
        self._known[key] = (value, dict(extras))
        self._known.move_to_end(key)
        while len(self._known) > self._size:
            self._known.popitem(last=False)


def content_key(reward: Reward, medium: bytes | None, columns: dict[str, Any]) -> bytes | None:
    """
    What a value of a reward is kept under.

    Args:
        reward ([`Reward`]):
            The reward.
        medium (`bytes`, *optional*):
            [`digest`] of what it looks at.
        columns (`dict`):
            The dataset row.

    Returns:
        `bytes` or `None`: `None` where some of it has no content that can be read.
    """
    taken = columns if reward.accepts is None else {k: v for k, v in columns.items() if k in reward.accepts}
    if reward.accepts is None or "prompts" in reward.accepts:
        taken = {**taken, "prompt": columns["prompt"]}
    if medium is None:
        return None
    row = digest(taken)
    return None if row is None else hashlib.blake2b(reward.name.encode() + b"\0" + medium + row).digest()


def digest(value: Any) -> bytes | None:
    """A hash of the content of a value, or `None` where it cannot be read."""
    state = hashlib.blake2b(digest_size=32)
    try:
        _feed(state, value)
    except (_NotHashable, RuntimeError, TypeError, ValueError):  # sparse tensors and other things without bytes
        return None
    return state.digest()


def _feed(state: Any, value: Any) -> None:
    """Adds a value to a hash, with its type and its length, so that no two different ones read the same."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        _feed_plain(state, value)
    elif isinstance(value, Image.Image):
        _feed_bytes(state, f"image {value.mode} {value.size}", value.tobytes())
        if value.mode == "P":
            _feed(state, value.getpalette())
    elif isinstance(value, Video):
        _feed(state, ("video", value.frames, value.frame_rate, value.audio))
    elif isinstance(value, Audio):
        _feed(state, ("audio", value.samples, value.sampling_rate))
    elif isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        _feed_bytes(state, f"tensor {tensor.dtype} {tuple(tensor.shape)}", tensor.view(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        _feed_bytes(state, f"array {array.dtype.str} {np.shape(value)}", array.reshape(-1).view(np.uint8))
    elif isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: str(pair[0]))
        _feed_bytes(state, "mapping", struct.pack("<q", len(pairs)))
        for pair in pairs:
            _feed(state, pair)
    elif isinstance(value, Sequence):
        _feed_bytes(state, type(value).__name__, struct.pack("<q", len(value)))
        for item in value:
            _feed(state, item)
    else:
        raise _NotHashable


def _feed_plain(state: Any, value: Any) -> None:
    content = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
    _feed_bytes(state, type(value).__name__, content)


def _feed_bytes(state: Any, kind: str, content: Any) -> None:
    length = content.nbytes if isinstance(content, np.ndarray) else len(content)
    state.update(f"{kind} {length}\0".encode())
    state.update(content)

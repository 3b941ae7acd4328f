# SPDX-License-Identifier: Apache-2.0
"""Randomness as a function of names, so that it does not depend on ranks, batches or interruptions."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def stable_seed(*key: int | str) -> int:
    """
    A 63-bit seed that is a pure function of `key`, equal on every machine, rank and Python version.

    Example:

    ```python
    >>> stable_seed(42, "noise", 0, 3, 1) == stable_seed(42, "noise", 0, 3, 1)
    True
    ```
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class SampleNoise:
    """
    The noise of one sample: its start latents, then one draw per stochastic step.

    Drawn on the CPU in float32, as the stock pipelines do for a CPU generator, so the start latents of a sample are
    those of `pipeline(..., generator=torch.Generator().manual_seed(seed))`.

    Args:
        seed (`int`):
            The sample's own seed.
        start_seed (`int`, *optional*):
            Seed of the start latents when a group shares them.
    """

    def __init__(self, seed: int, start_seed: int | None = None) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._start = self._generator if start_seed is None else torch.Generator().manual_seed(start_seed)

    def start(self, shape: tuple[int, ...]) -> Tensor:
        """Unit noise of `shape` for the first sigma; to be called first."""
        return torch.randn(shape, generator=self._start)

    def step(self, shape: tuple[int, ...]) -> Tensor:
        """Unit noise of `shape` for the next stochastic step."""
        return torch.randn(shape, generator=self._generator)

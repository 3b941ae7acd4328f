# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way to the log: averaged over micro-batches and ranks, missing ones left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_list(values: list[Any]) -> list[Any]:
    """The lists of all ranks, joined in rank order; every rank calls it."""
    if not (dist.is_available() and dist.is_initialized()):
        return values
    ranks: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, values)
    return [value for rank in ranks for value in rank]


class MetricStore:
    """
    Collects values between two logs; means count every value once, whichever rank and micro-batch it came from.

    Tensors are kept as they are until the log, so that recording never waits for the device. NaN counts as missing;
    a metric without any value is left out of the log.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        """Records one value or a tensor of them."""
        self._values.setdefault(name, []).append(torch.as_tensor(value, dtype=torch.float32).detach().flatten())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Records the seconds that the block took, summed between two logs: `time/{name}`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"time/{name}", time.perf_counter() - start)

    def drain(self) -> dict[str, float]:
        """
        Means over all ranks since the last call (`time/`, `/failed`, `/cached`: sums, `_max`: maxima).

        Every rank calls it.
        """
        local = {name: _summary(values) for name, values in self._values.items()}
        self._values = {}
        ranks: list[dict[str, tuple[float, int, float]]] = gather_list([local])
        merged: dict[str, float] = {}
        for name in sorted({name for rank in ranks for name in rank}):
            parts = [rank[name] for rank in ranks if name in rank]
            count = sum(part[1] for part in parts)
            if not count:
                continue
            if name.startswith("time/"):
                merged[name] = max(part[0] for part in parts)
            elif name.endswith(("/failed", "/cached")):
                merged[name] = sum(part[0] for part in parts)
            elif name.endswith("_max"):
                merged[name] = max(part[2] for part in parts if part[1])
            else:
                merged[name] = sum(part[0] for part in parts) / count
        return merged


def _summary(values: list[Tensor]) -> tuple[float, int, float]:
    """Sum, count and maximum of the values that are not NaN."""
    joined = torch.cat([value.to(values[0].device) for value in values])
    joined = joined[~joined.isnan()]
    if not len(joined):
        return 0.0, 0, float("nan")
    return float(joined.double().sum()), len(joined), float(joined.max())

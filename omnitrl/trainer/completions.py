# SPDX-License-Identifier: Apache-2.0
"""What a person is shown of a rollout: pictures of its first samples, and a table of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import numpy as np
from torch import Tensor

from omnitrl.report import Sample
from omnitrl.rollout import SampleRequest, Trajectory


_WIDTH = 80  # letters of what is shown of a value beside a picture


def plain(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The same with Python's numbers for those of NumPy and PyTorch."""
    scalar = np.generic | Tensor
    return {name: v.item() if isinstance(v, scalar) and v.ndim == 0 else v for name, v in recorded.items()}


def caption(recorded: Mapping[str, Any]) -> str:
    """What rewards recorded of a sample with `log_extra`, as far as it is a word or a number."""
    shown = {name: value for name, value in plain(recorded).items() if isinstance(value, str | int | float)}
    words = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in shown.items()}
    return ", ".join(f"{name}: {shorten(word, _WIDTH, placeholder=' …')}" for name, word in words.items())


@dataclass
class Completions:
    """
    The samples of one rollout, as far as a process shows them.

    Args:
        step (`int`):
            Optimizer steps before the rollout.
        most (`int`):
            How many of the first samples are pictured.
    """

    step: int
    most: int
    media: list[Any] = field(default_factory=list)

    def keep(self, batch: Sequence[Trajectory]) -> None:
        """Keeps the media of a batch that is pictured; the others may go."""
        self.media += [trajectory.media for trajectory in batch[: self.most - len(self.media)]]

    def rows(
        self,
        requests: Sequence[SampleRequest],
        rewards: Mapping[str, Tensor],
        total: Tensor,
        advantages: Tensor,
        extras: Mapping[str, Sequence[Any]],
    ) -> list[dict[str, Any]]:
        """
        This process's samples as rows of the table.

        Args:
            requests (`list[SampleRequest]`):
                What was asked for.
            rewards (`dict[str, Tensor]`):
                (n,) of each reward by its name, NaN where missing.
            total (`Tensor`):
                (n,) their weighted sum.
            advantages (`Tensor`):
                (n,), or (n, A) with several losses.
            extras (`dict[str, list]`):
                What rewards recorded of each sample.
        """
        columns: dict[str, Sequence[Any]] = {f"rewards/{name}": values.tolist() for name, values in rewards.items()}
        columns |= {"reward": total.tolist(), "advantage": advantages.tolist()}
        columns |= {f"extra/{name}": values for name, values in extras.items()}
        return [
            {"step": self.step, "prompt": request.row["prompt"], "group": request.group_id, "member": request.member}
            | plain({name: values[i] for name, values in columns.items()})
            for i, request in enumerate(requests)
        ]

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
        """The pictured samples, given their rows of the table."""
        return [
            Sample.of(row["prompt"], medium, row["reward"], caption(_extras(row)))
            for row, medium in zip(rows, self.media, strict=False)
            if medium is not None
        ]


def _extras(row: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "extra/"
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}

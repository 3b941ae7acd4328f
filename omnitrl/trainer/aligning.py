# SPDX-License-Identifier: Apache-2.0
"""Clean latents that are noised with known noise, one short step of the network, and the noise taken out again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omnitrl.algorithms import direct_align_levels, noised, preference_strength
from omnitrl.models import Conditions, FlowModel


NUM_POINTS = 1000  # of the grid that levels are drawn from


@dataclass(frozen=True)
class AlignSample:
    """
    A sample and what it is trained with.

    Args:
        latents (`Tensor`):
            (...) clean latents.
        noise (`Tensor`):
            (...) what is mixed in.
        index (`int`):
            Its noise level, a point of the grid.
        row (`dict`):
            The dataset row that the reward sees.
        praised, blamed (`str`):
            The prompt with control words; both are the prompt where there are none.
    """

    latents: Tensor
    noise: Tensor
    index: int
    row: dict[str, Any]
    praised: str
    blamed: str


@dataclass
class AlignBatch:
    """
    Rows for one network call; a row is one sample in one branch.

    Args:
        latents, noise (`Tensor`):
            (R, ...) the noised latents, and what was mixed in.
        sigma_from, sigma_to, timesteps (`Tensor`):
            (R,) the levels of the step, and what the network is told of the first.
        strengths (`Tensor`):
            (R,) of the relative preference.
        conditions ([`Conditions`]):
            R rows.
        samples (`list[AlignSample]`):
            R samples.
        branch (`str`):
            A key of `omnitrl.algorithms.ALIGN_BRANCHES`.
    """

    latents: Tensor
    noise: Tensor
    sigma_from: Tensor
    sigma_to: Tensor
    timesteps: Tensor
    strengths: Tensor
    conditions: Conditions
    samples: list[AlignSample]
    branch: str

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class AlignBatches:
    """
    The network calls of one micro-batch, one for each branch.

    Args:
        samples (`list[AlignSample]`):
            What is trained.
        conditions ([`Conditions`]):
            A row for each sample.
        branches (`Sequence[str]`):
            Keys of `omnitrl.algorithms.ALIGN_BRANCHES`.
        sigmas (`Tensor`):
            (T+1,) levels of the sampler that `step_range` counts.
        step_range (`tuple[int, int]`):
            The steps that the grid of levels lies between.
        gap (`int`):
            Points between the two levels of a step.
        model ([`FlowModel`]):
            Says what the network is told of a level.
    """

    samples: list[AlignSample]
    conditions: Conditions
    branches: Sequence[str]
    sigmas: Tensor
    step_range: tuple[int, int]
    gap: int
    model: FlowModel

    @property
    def num_rows(self) -> int:
        """Rows R of all batches together."""
        return len(self.samples) * len(self.branches)

    def __len__(self) -> int:
        return len(self.branches)

    def __getitem__(self, position: int) -> AlignBatch:
        branch = self.branches[position]
        levels = [
            direct_align_levels(self.sigmas, sample.index, branch, self.step_range, self.gap, NUM_POINTS)
            for sample in self.samples
        ]
        latents = torch.stack([sample.latents for sample in self.samples])
        noise = torch.stack([sample.noise for sample in self.samples]).to(latents.device)
        start = torch.tensor([level.sigma_from for level in levels], device=latents.device)
        return AlignBatch(
            latents=noised(latents, noise, start),
            noise=noise,
            sigma_from=start,
            sigma_to=torch.tensor([level.sigma_to for level in levels], device=latents.device),
            timesteps=self.model.timesteps_of(start),
            strengths=torch.tensor(
                [preference_strength(branch, level.position) for level in levels], device=latents.device
            ),
            conditions=self.conditions,
            samples=self.samples,
            branch=branch,
        )

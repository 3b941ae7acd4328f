# SPDX-License-Identifier: Apache-2.0
"""Clean latents with noise added to them: what forward-process losses are computed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable, noised, sample_sigmas
from omnitrl.models import Conditions, FlowModel


@dataclass(frozen=True)
class NoiseLevels:
    """
    At which noise levels samples are trained, a function of a seed for each.

    Args:
        sampling (`str`):
            A key of `omnitrl.algorithms.SIGMA_SAMPLINGS`.
        count (`int`):
            Levels K for each sample.
        bounds (`tuple[float, float]`):
            Part of the way from noise (0) to data (1), see [`~omnitrl.algorithms.sample_sigmas`].
        table ([`~omnitrl.algorithms.SigmaTable`]):
            The sampler's grid, for `"grid"`; on the CPU.
    """

    sampling: str
    count: int
    bounds: tuple[float, float]
    table: SigmaTable

    def draw(self, seed: int, shape: tuple[int, ...], model: FlowModel) -> Draws:
        """Levels and noise for one sample, on the CPU, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        sigmas, steps = sample_sigmas(self.sampling, self.count, generator, self.table.sigmas, *self.bounds)
        timesteps = model.timesteps_of(sigmas) if steps is None else self.table.timesteps[steps]
        return Draws(sigmas, timesteps, torch.randn(self.count, *shape, generator=generator))


@dataclass(frozen=True)
class Draws:
    """Noise levels (K,), what the network is told of them (K,), and the noise (K, ...) of one sample."""

    sigmas: Tensor
    timesteps: Tensor
    noise: Tensor


@dataclass
class NoisedBatch:
    """
    Rows for one network call; a row is one sample at one noise level.

    Args:
        latents (`Tensor`):
            (R, ...) the noised latents.
        clean_latents, noise (`Tensor`):
            (R, ...) what they are made of.
        sigmas, timesteps (`Tensor`):
            (R,) noise level, and what the network is told of it.
        samples, draws (`Tensor`):
            (R,) number of the sample in the rollout, and of the noise level among those of the sample.
        advantages (`Tensor`):
            (R,) of the samples.
        conditions ([`Conditions`]):
            R rows.
    """

    latents: Tensor
    clean_latents: Tensor
    noise: Tensor
    sigmas: Tensor
    timesteps: Tensor
    samples: Tensor
    draws: Tensor
    advantages: Tensor
    conditions: Conditions

    def __len__(self) -> int:
        return len(self.sigmas)


class NoisedBatches:
    """
    The network calls of one micro-batch, each stacked when it is asked for.

    Rows are ordered level by level, with all samples for each, so that the two of a pair stay neighbours.

    Args:
        clean_latents (`Sequence[Tensor]`):
            (...) of each sample.
        draws (`Sequence[Draws]`):
            Of each sample.
        samples (`Sequence[int]`):
            Number of each sample in the rollout.
        advantages (`Tensor`):
            (B,) of each sample.
        conditions ([`Conditions`]):
            A row for each sample.
        timesteps_per_forward (`int`):
            Noise levels in each network call; the last may have fewer.
    """

    def __init__(
        self,
        clean_latents: Sequence[Tensor],
        draws: Sequence[Draws],
        samples: Sequence[int],
        advantages: Tensor,
        conditions: Conditions,
        timesteps_per_forward: int,
    ) -> None:
        self._clean = torch.stack(list(clean_latents))
        self._draws, self._samples = draws, list(samples)
        self._advantages, self._conditions = advantages, conditions
        levels = range(len(draws[0].sigmas))
        self._columns = [levels[k : k + timesteps_per_forward] for k in levels[::timesteps_per_forward]]
        self.num_rows = len(self._samples) * len(levels)

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index: int) -> NoisedBatch:
        column, device = self._columns[index], self._clean.device
        chosen = [(draw, k) for k in column for draw in self._draws]
        rows = list(range(len(self._samples))) * len(column)
        sigmas = torch.stack([draw.sigmas[k] for draw, k in chosen]).to(device)
        noise = torch.stack([draw.noise[k] for draw, k in chosen]).to(device)
        clean = self._clean[rows]
        return NoisedBatch(
            latents=noised(clean, noise, sigmas),
            clean_latents=clean,
            noise=noise,
            sigmas=sigmas,
            timesteps=torch.stack([draw.timesteps[k] for draw, k in chosen]).to(device),
            samples=torch.tensor([self._samples[i] for i in rows], device=device),
            draws=torch.tensor([k for _, k in chosen], device=device),
            advantages=self._advantages.to(device)[rows],
            conditions=self._conditions[rows],
        )

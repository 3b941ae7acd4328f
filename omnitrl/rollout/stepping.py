# SPDX-License-Identifier: Apache-2.0
"""How a sample goes from step to step: the same code in this process and on a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omnitrl.algorithms import (
    SigmaTable,
    gaussian_log_prob,
    predicted_data,
    solver_step,
    solver_table,
    thin_tail,
    transition_mean,
    transition_std,
    transition_table,
    weighted_modalities,
)
from omnitrl.models import FlowModel
from omnitrl.rollout.noise import SampleNoise
from omnitrl.rollout.trajectory import SampleRequest, SamplingParams, Trajectory


def sampling_table(model: FlowModel, params: SamplingParams) -> SigmaTable:
    """The grid of a rollout: the family's own, with fewer steps at its end where `tail_ratio` says so."""
    table = model.sigmas(params.num_inference_steps, params.size)
    if params.tail_ratio < 1 and params.sde_steps:
        return thin_tail(table, max(params.sde_steps), params.tail_ratio)
    return table


class Sampler:
    """
    The tables of one way to sample, made once for all batches.

    Args:
        table ([`~omnitrl.algorithms.SigmaTable`]):
            The grid.
        params ([`SamplingParams`]):
            Which steps are stochastic, how, and what is kept of them.
        shape (`tuple[int, ...]`):
            Of the latents of one sample.
        modalities (`Mapping[str, slice]`, *optional*):
            Parts of the latents' first dimension, as [`FlowModel.modalities`] has them.

    Raises:
        `ValueError`: no such transition, solver or step.
    """

    def __init__(
        self,
        table: SigmaTable,
        params: SamplingParams,
        shape: tuple[int, ...],
        modalities: Mapping[str, slice] | None = None,
    ) -> None:
        self.table, self.params, self.shape = table, params, shape
        parts = modalities or {}
        self.modalities = weighted_modalities(parts, params.modality_weights)
        self.still = [parts[name] for name, weight in (params.modality_weights or {}).items() if weight == 0]
        self.transitions = transition_table(table.sigmas, params.sde_type, params.noise_level, params.sde_steps)
        ode_steps = [step for step, noisy in enumerate(self.transitions.stochastic.tolist()) if not noisy]
        self.solver = solver_table(table.sigmas, params.ode_solver, ode_steps)
        self.straight = transition_table(table.sigmas, "ode")
        self.multistep = bool(self.solver.needs_history.any())

    @property
    def first_noise(self) -> int:
        """The first stochastic step, 0 if there is none."""
        return int(self.transitions.stochastic.int().argmax())


class Walk:
    """
    One batch on its way through a sampler; `advance` is to be called step by step.

    Args:
        sampler ([`Sampler`]):
            The tables.
        noises (`Sequence[SampleNoise]`, *optional*):
            Of each sample; none are needed where no step is stochastic.
        record ([`Record`], *optional*):
            Where kept steps are written.
    """

    def __init__(self, sampler: Sampler, noises: Sequence[SampleNoise] = (), record: Record | None = None) -> None:
        self.sampler = sampler
        self.record = record
        self._noises = noises
        self._history: Tensor | None = None

    def advance(self, step: int, latents: Tensor, velocity: Tensor) -> Tensor:
        """Latents (B, ...) after `step`, from those before it and the velocity there."""
        sampler = self.sampler
        if sampler.transitions.stochastic[step]:
            self._history = None
            return self._draw(step, latents, velocity)
        following = solver_step(latents, velocity, self._history, sampler.solver, step)
        if sampler.multistep:
            self._history = predicted_data(latents, velocity, float(sampler.table.sigmas[step]))
        return following

    def _draw(self, step: int, latents: Tensor, velocity: Tensor) -> Tensor:
        """A stochastic step, recorded if it is to be kept."""
        sampler = self.sampler
        mean = transition_mean(latents, velocity, sampler.transitions, step)
        std = transition_std(latents, sampler.transitions, step)
        noise = torch.stack([noise.step(sampler.shape) for noise in self._noises]).to(latents.device)
        following = noise.mul_(std).add_(mean)
        if sampler.still:
            straight = transition_mean(latents, velocity, sampler.straight, step)
            for part in sampler.still:
                following[:, part] = straight[:, part]
        if self.record is not None and step in self.record.steps:
            params = sampler.params
            log_prob = gaussian_log_prob(
                following, mean, std, params.log_prob_reduction, params.log_prob_form, sampler.modalities
            )
            self.record.add(latents, following, mean, log_prob)
        return following


class Record:
    """
    The states around the kept steps of one batch, in memory that each sample owns.

    A state is copied there when it is made, so that no second copy is alive when the batch ends, and a sample can be
    freed without the rest of its batch. Consecutive steps share the state between them.
    """

    def __init__(self, steps: tuple[int, ...], count: int, keep_means: bool) -> None:
        self.steps = tuple(sorted(steps))
        self._count = count
        self._keep_means = keep_means
        self._recorded = 0
        self._consecutive = self.steps == tuple(range(self.steps[0], self.steps[-1] + 1)) if self.steps else False
        empty = torch.zeros(0)
        self._before = self._after = self._log_probs = [empty] * count  # per sample (K, ...), (K, ...), (K,)
        self._means: list[Tensor | None] = [None] * count

    def add(self, latents: Tensor, following: Tensor, mean: Tensor, log_prob: Tensor) -> None:
        """Records the next kept step: states before and after it and its mean (B, ...), and log-probs (B,)."""
        k = self._recorded
        if k == 0:
            self._allocate(following, log_prob)
        for i in range(self._count):
            if k == 0 or not self._consecutive:
                self._before[i][k] = latents[i]
            self._after[i][k] = following[i]
            self._log_probs[i][k] = log_prob[i]
        for means, row in zip(self._means, mean, strict=True):
            if means is not None:
                means[k] = row
        self._recorded = k + 1

    def _allocate(self, like: Tensor, log_prob: Tensor) -> None:
        steps, shape = len(self.steps), like.shape[1:]
        if self._consecutive:
            states = [like.new_empty(steps + 1, *shape) for _ in range(self._count)]
            self._before, self._after = [s[:-1] for s in states], [s[1:] for s in states]
        else:
            self._before = [like.new_empty(steps, *shape) for _ in range(self._count)]
            self._after = [like.new_empty(steps, *shape) for _ in range(self._count)]
        self._log_probs = [log_prob.new_empty(steps) for _ in range(self._count)]
        if self._keep_means:
            self._means = [like.new_empty(steps, *shape) for _ in range(self._count)]

    def trajectories(
        self,
        requests: Sequence[SampleRequest],
        media: list,
        table: SigmaTable,
        weight_version: int,
        clean: Tensor | None = None,
    ) -> list[Trajectory]:
        """One record per sample."""
        return [
            Trajectory(
                request,
                media[i],
                table,
                self.steps,
                self._before[i],
                self._after[i],
                self._log_probs[i],
                weight_version=weight_version,
                means=self._means[i],
                clean_latents=None if clean is None else clean[i].clone(),
            )
            for i, request in enumerate(requests)
        ]

# SPDX-License-Identifier: Apache-2.0
"""Rollouts in this process, with the trainer's own networks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

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
from omnitrl.models import Conditions, FlowModel
from omnitrl.rollout.noise import SampleNoise
from omnitrl.rollout.trajectory import SampleRequest, SamplingParams, Trajectory, WeightReport


def _do_nothing() -> None:
    return None


class LocalEngine:
    """
    A [`RolloutEngine`] that samples with the trainer's modules: no server, no copy of the weights.

    Args:
        model ([`FlowModel`]):
            The family, for encoding, sigmas and decoding.
        policy (`Callable[[], Callable]`, *optional*):
            Returns the module whose `forward` is the velocity; a function because Accelerate may replace the module.
            Defaults to `model.velocity` itself.
        batch_size (`int`, defaults to 8):
            Samples per network call.
        autocast (`Callable[[], ContextManager]`, *optional*):
            Precision context of the network calls.
        on_step (`Callable[[], None]`, *optional*):
            Called after each network call; may raise to interrupt.

    Example:

    ```python
    >>> engine = LocalEngine(load_flow_model(path), batch_size=4)
    >>> request = SampleRequest({"prompt": "a sign that says HELLO"}, group_id=0, member=0, seed=42)
    >>> [[trajectory]] = list(engine.generate([request], SamplingParams(num_inference_steps=28)))
    >>> trajectory.media.save("hello.png")
    ```
    """

    def __init__(
        self,
        model: FlowModel,
        policy: Callable[[], Callable[..., Tensor]] | None = None,
        batch_size: int = 8,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        on_step: Callable[[], None] = _do_nothing,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        self.model = model
        self.batch_size = batch_size
        self.forwards = 0
        self.weight_version = 0
        self._policy: Callable[[], Callable[..., Tensor]] = policy or (lambda: model.velocity)
        self._autocast = autocast
        self._on_step = on_step

    def generate(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Iterator[list[Trajectory]]:
        """Makes the samples batch by batch; see [`RolloutEngine.generate`]."""
        sampler = _Sampler(self.model, params)
        prefixes = self._shared_prefixes(requests, sampler) if params.shared_prefix else {}
        for start in range(0, len(requests), self.batch_size):
            yield self._generate_batch(requests[start : start + self.batch_size], sampler, prefixes)

    @torch.no_grad()
    def _generate_batch(
        self, requests: Sequence[SampleRequest], sampler: _Sampler, prefixes: dict[Hashable, Tensor]
    ) -> list[Trajectory]:
        model, params = self.model, sampler.params
        noises = [SampleNoise(request.seed, request.start_seed) for request in requests]
        conditions = self._encode(requests, params)
        if prefixes:
            latents, first = torch.stack([prefixes[_branch(request)] for request in requests]), sampler.first_noise
        else:
            latents, first = self._start(noises, sampler.shape), 0
        kept = _Kept(params.keep_steps, len(requests), params.keep_means)
        latents = self._sample(latents, conditions, sampler, range(first, sampler.table.num_steps), noises, kept)
        latents = model.final_latents(latents, conditions)
        media = model.decode(latents, params.size) if params.decode else [None] * len(requests)
        clean = latents if params.keep_clean else None
        return kept.trajectories(requests, media, sampler.table, self.weight_version, clean)

    def _shared_prefixes(self, requests: Sequence[SampleRequest], sampler: _Sampler) -> dict[Hashable, Tensor]:
        """Latents before the first stochastic step for each group and start noise, computed once."""
        distinct = list({_branch(request): request for request in requests}.values())
        if sampler.first_noise == 0:
            return {}
        if any(request.start_seed is None for request in distinct):
            raise ValueError("shared_prefix=True needs requests with a start_seed, which their group shares.")
        prefixes: dict[Hashable, Tensor] = {}
        for start in range(0, len(distinct), self.batch_size):
            part = distinct[start : start + self.batch_size]
            noises = [SampleNoise(request.seed, request.start_seed) for request in part]
            latents, conditions = self._start(noises, sampler.shape), self._encode(part, sampler.params)
            with torch.no_grad():
                latents = self._sample(latents, conditions, sampler, range(sampler.first_noise))
            prefixes |= {_branch(request): row.clone() for request, row in zip(part, latents, strict=True)}
        return prefixes

    def _start(self, noises: Sequence[SampleNoise], shape: tuple[int, ...]) -> Tensor:
        return self.model.init_latents(torch.stack([noise.start(shape) for noise in noises]).to(self.model.device))

    def _encode(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Conditions:
        guidance = self.model.needs_negative(params.guidance_scale)
        return self.model.encode([request.row for request in requests], guidance, params.size)

    def _sample(
        self,
        latents: Tensor,
        conditions: Conditions,
        sampler: _Sampler,
        steps: range,
        noises: Sequence[SampleNoise] = (),
        kept: _Kept | None = None,
    ) -> Tensor:
        """Latents (B, ...) after these steps of the sampler."""
        guidance, history = sampler.params.guidance_scale, None
        for step in steps:
            velocity = self._velocity(latents, sampler.timesteps[step], conditions, guidance)
            if sampler.transitions.stochastic[step]:
                latents, history = self._draw(latents, velocity, sampler, step, noises, kept), None
                continue
            following = solver_step(latents, velocity, history, sampler.solver, step)
            if sampler.multistep:
                history = predicted_data(latents, velocity, float(sampler.table.sigmas[step]))
            latents = following
        return latents

    def _draw(
        self,
        latents: Tensor,
        velocity: Tensor,
        sampler: _Sampler,
        step: int,
        noises: Sequence[SampleNoise],
        kept: _Kept | None,
    ) -> Tensor:
        """A stochastic step, recorded if it is to be kept."""
        mean = transition_mean(latents, velocity, sampler.transitions, step)
        std = transition_std(latents, sampler.transitions, step)
        noise = torch.stack([noise.step(sampler.shape) for noise in noises]).to(latents.device)
        following = noise.mul_(std).add_(mean)
        if sampler.still:
            straight = transition_mean(latents, velocity, sampler.straight, step)
            for part in sampler.still:
                following[:, part] = straight[:, part]
        if kept is not None and step in kept.steps:
            params = sampler.params
            log_prob = gaussian_log_prob(
                following, mean, std, params.log_prob_reduction, params.log_prob_form, sampler.modalities
            )
            kept.add(latents, following, mean, log_prob)
        return following

    def _velocity(self, latents: Tensor, timestep: Tensor, conditions: Conditions, guidance_scale: float) -> Tensor:
        with self._autocast():
            velocity = self._policy()(latents, timestep.expand(len(latents)), conditions, guidance_scale)
        self.forwards += len(latents) * self.model.evaluations(guidance_scale)
        self._on_step()
        return velocity

    def update_weights(self, version: int) -> WeightReport:
        """The modules are shared, so all of them have the new weights already."""
        self.weight_version = version
        expected = sum(1 for _ in self.model.networks.parameters())
        return WeightReport(version, bound=expected, expected=expected)

    def sleep(self) -> None:
        """Nothing to free: the networks are the trainer's."""

    def wake(self) -> None:
        """Nothing to do, see `sleep`."""

    def health(self) -> None:
        """Always able to generate."""

    def close(self) -> None:
        """Nothing to end."""


def _branch(request: SampleRequest) -> Hashable:
    """What samples have in common that may share their first steps: the prompt too, not the noise alone."""
    return request.group_id, request.start_seed


class _Sampler:
    """The tables of one way to sample, made once for all batches."""

    def __init__(self, model: FlowModel, params: SamplingParams) -> None:
        self.params = params
        self.shape = model.latent_shape(params.size)
        modalities = model.modalities(params.size)
        self.modalities = weighted_modalities(modalities, params.modality_weights)
        self.still = [modalities[name] for name, weight in (params.modality_weights or {}).items() if weight == 0]
        table = model.sigmas(params.num_inference_steps, params.size)
        if params.tail_ratio < 1 and params.sde_steps:
            table = thin_tail(table, max(params.sde_steps), params.tail_ratio)
        self.table = table
        self.timesteps = table.timesteps.to(model.device)
        self.transitions = transition_table(table.sigmas, params.sde_type, params.noise_level, params.sde_steps)
        ode_steps = [step for step, noisy in enumerate(self.transitions.stochastic.tolist()) if not noisy]
        self.solver = solver_table(table.sigmas, params.ode_solver, ode_steps)
        self.straight = transition_table(table.sigmas, "ode")
        self.multistep = bool(self.solver.needs_history.any())

    @property
    def first_noise(self) -> int:
        """The first stochastic step, 0 if there is none."""
        return int(self.transitions.stochastic.int().argmax())


class _Kept:
    """
    Records the states around the kept steps of one batch, in memory that each sample owns.

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

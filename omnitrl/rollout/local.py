# SPDX-License-Identifier: Apache-2.0
"""Rollouts in this process, with the trainer's own networks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from omnitrl.models import Conditions, FlowModel
from omnitrl.rollout.context import EngineContext
from omnitrl.rollout.noise import SampleNoise
from omnitrl.rollout.stepping import Record, Sampler, Walk, sampling_table
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

    @classmethod
    def from_trainer(cls, context: EngineContext) -> LocalEngine:
        """The engine of a trainer."""
        return cls(context.model, context.policy, context.batch_size, context.autocast, context.on_step)

    def generate(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Iterator[list[Trajectory]]:
        """Makes the samples batch by batch; see [`RolloutEngine.generate`]."""
        size = params.size
        sampler = Sampler(
            sampling_table(self.model, params), params, self.model.latent_shape(size), self.model.modalities(size)
        )
        prefixes = self._shared_prefixes(requests, sampler) if params.shared_prefix else {}
        for start in range(0, len(requests), self.batch_size):
            yield self._generate_batch(requests[start : start + self.batch_size], sampler, prefixes)

    @torch.no_grad()
    def _generate_batch(
        self, requests: Sequence[SampleRequest], sampler: Sampler, prefixes: dict[Hashable, Tensor]
    ) -> list[Trajectory]:
        model, params = self.model, sampler.params
        noises = [SampleNoise(request.seed, request.start_seed) for request in requests]
        conditions = self._encode(requests, params)
        if prefixes:
            latents, first = torch.stack([prefixes[_branch(request)] for request in requests]), sampler.first_noise
        else:
            latents, first = self._start(noises, sampler.shape), 0
        record = Record(params.keep_steps, len(requests), params.keep_means)
        walk = Walk(sampler, noises, record)
        latents = self._sample(latents, conditions, walk, range(first, sampler.table.num_steps))
        latents = model.final_latents(latents, conditions)
        media = model.decode(latents, params.size) if params.decode else [None] * len(requests)
        clean = latents if params.keep_clean else None
        return record.trajectories(requests, media, sampler.table, self.weight_version, clean)

    def _shared_prefixes(self, requests: Sequence[SampleRequest], sampler: Sampler) -> dict[Hashable, Tensor]:
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
                latents = self._sample(latents, conditions, Walk(sampler), range(sampler.first_noise))
            prefixes |= {_branch(request): row.clone() for request, row in zip(part, latents, strict=True)}
        return prefixes

    def _start(self, noises: Sequence[SampleNoise], shape: tuple[int, ...]) -> Tensor:
        return self.model.init_latents(torch.stack([noise.start(shape) for noise in noises]).to(self.model.device))

    def _encode(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Conditions:
        guidance = self.model.needs_negative(params.guidance_scale)
        return self.model.encode([request.row for request in requests], guidance, params.size)

    def _sample(self, latents: Tensor, conditions: Conditions, walk: Walk, steps: range) -> Tensor:
        """Latents (B, ...) after these steps of the sampler."""
        guidance = walk.sampler.params.guidance_scale
        timesteps = walk.sampler.table.timesteps.to(self.model.device)
        for step in steps:
            velocity = self._velocity(latents, timesteps[step], conditions, guidance)
            latents = walk.advance(step, latents, velocity)
        return latents

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

    def take_metrics(self) -> dict[str, float]:
        """Nothing that the trainer does not see itself."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


def _branch(request: SampleRequest) -> Hashable:
    """What samples have in common that may share their first steps: the prompt too, not the noise alone."""
    return request.group_id, request.start_seed

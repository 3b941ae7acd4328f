# SPDX-License-Identifier: Apache-2.0
"""Rollouts in this process, with the trainer's own networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from omnitrl.algorithms import (
    SigmaTable,
    TransitionTable,
    gaussian_log_prob,
    transition_mean,
    transition_std,
    transition_table,
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
        shape = self.model.latent_shape(params.height, params.width)
        table = self.model.sigmas(params.num_inference_steps, shape)
        transitions = transition_table(table.sigmas, params.sde_type, params.noise_level, params.sde_steps)
        for start in range(0, len(requests), self.batch_size):
            yield self._generate_batch(requests[start : start + self.batch_size], params, table, transitions, shape)

    @torch.no_grad()
    def _generate_batch(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        table: SigmaTable,
        transitions: TransitionTable,
        shape: tuple[int, ...],
    ) -> list[Trajectory]:
        device = self.model.device
        noises = [SampleNoise(request.seed, request.start_seed) for request in requests]
        conditions = self.model.encode([request.row for request in requests], guidance=params.guidance_scale > 1.0)
        latents = self.model.init_latents(torch.stack([noise.start(shape) for noise in noises]).to(device))
        timesteps = table.timesteps.to(device)
        kept = _Kept(params.keep_steps, len(requests))
        for step in range(table.num_steps):
            velocity = self._velocity(latents, timesteps[step], conditions, params.guidance_scale)
            mean = transition_mean(latents, velocity, transitions, step)
            if not transitions.stochastic[step]:
                latents = mean
                continue
            std = transition_std(latents, transitions, step)
            noise = torch.stack([noise.step(shape) for noise in noises]).to(device)
            following = noise.mul_(std).add_(mean)
            if step in kept.steps:
                kept.add(latents, following, gaussian_log_prob(following, mean, std, form=params.log_prob_form))
            latents = following
        media = self.model.decode(latents)
        return kept.trajectories(requests, media, table, self.weight_version)

    def _velocity(self, latents: Tensor, timestep: Tensor, conditions: Conditions, guidance_scale: float) -> Tensor:
        with self._autocast():
            velocity = self._policy()(latents, timestep.expand(len(latents)), conditions, guidance_scale)
        self.forwards += len(latents) * (2 if guidance_scale > 1.0 else 1)
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


class _Kept:
    """
    Records the states around the kept steps of one batch, in memory that each sample owns.

    A state is copied there when it is made, so that no second copy is alive when the batch ends, and a sample can be
    freed without the rest of its batch. Consecutive steps share the state between them.
    """

    def __init__(self, steps: tuple[int, ...], count: int) -> None:
        self.steps = tuple(sorted(steps))
        self._count = count
        self._recorded = 0
        self._consecutive = self.steps == tuple(range(self.steps[0], self.steps[-1] + 1)) if self.steps else False
        empty = torch.zeros(0)
        self._before = self._after = self._log_probs = [empty] * count  # per sample (K, ...), (K, ...), (K,)

    def add(self, latents: Tensor, following: Tensor, log_prob: Tensor) -> None:
        """Records the next kept step: states before and after it (B, ...), and log-probs (B,)."""
        k = self._recorded
        if k == 0:
            self._allocate(following, log_prob)
        for i in range(self._count):
            if k == 0 or not self._consecutive:
                self._before[i][k] = latents[i]
            self._after[i][k] = following[i]
            self._log_probs[i][k] = log_prob[i]
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

    def trajectories(
        self, requests: Sequence[SampleRequest], media: list, table: SigmaTable, weight_version: int
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
            )
            for i, request in enumerate(requests)
        ]

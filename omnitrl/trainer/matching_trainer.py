# SPDX-License-Identifier: Apache-2.0
"""Trainers that learn from the clean samples of their rollouts, by adding noise to them again."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from omnitrl.algorithms import SigmaTable, velocity_kl
from omnitrl.errors import RunError
from omnitrl.rollout import SampleRequest, stable_seed
from omnitrl.trainer.adapters import ReferencePolicy
from omnitrl.trainer.averages import PolicyAverage
from omnitrl.trainer.matching_config import MatchingConfig
from omnitrl.trainer.noising import NoisedBatch, NoisedBatches, NoiseLevels
from omnitrl.trainer.rollout_trainer import RolloutTrainer
from omnitrl.trainer.rollouts import RolloutBuffer


class MatchingTrainer(RolloutTrainer):
    """
    Deterministic rollouts, of which the final latents are kept; see [`SamplingTrainer`] for the arguments.

    Noise and noise levels are a function of the seed, the rollout, the group and the member, so that a loss can be
    compared with its value before an update.
    """

    args: MatchingConfig
    trains_guided = False
    draws_noise_levels = True

    def describe_run(self) -> str:
        args = self.args
        return f"trains {args.num_noise_levels} noise level(s) of each sample on {super().describe_run()}"

    def noise_key(self, request: SampleRequest) -> tuple[int, ...]:
        """Samples of a rollout with the same key are trained with the same noise and levels."""
        return (request.group_id, request.member)

    def noise_levels(self, table: SigmaTable) -> NoiseLevels:
        """At which noise levels samples are trained."""
        args = self.args
        bounds = (args.timestep_range[0], args.timestep_range[1])
        on_cpu = SigmaTable(*(t.cpu() for t in table))
        return NoiseLevels(args.sigma_sampling, args.num_noise_levels, bounds, on_cpu)

    def cut(self, buffer: RolloutBuffer, samples: list[int]) -> NoisedBatches:
        levels, seed = self.noise_levels(buffer.table), self.args.seed
        trajectories = [buffer.trajectories[i] for i in samples]
        keys = [self.noise_key(trajectory.request) for trajectory in trajectories]
        draws = {
            key: levels.draw(stable_seed(seed, "levels", buffer.index, *key), buffer.latent_shape, self.flow_model)
            for key in dict.fromkeys(keys)
        }
        return NoisedBatches(
            [t.clean_latents for t in trajectories if t.clean_latents is not None],
            [draws[key] for key in keys],
            samples,
            buffer.advantages[samples],
            buffer.conditions_of(samples),
            self.args.timesteps_per_forward,
        )

    # Checkpoints

    def _sampling(self, rollout: int) -> dict[str, Any]:
        args = self.args
        trained = {name: getattr(args, name) for name in ("num_noise_levels", "sigma_sampling", "timestep_range")}
        return {**super()._sampling(rollout), **trained}


class AveragingTrainer(MatchingTrainer):
    """
    A matching trainer that keeps a second set of the trained weights, their average over time, beside them.

    A subclass says in `_set_up_algorithm` whether there is one, and in `move_average` how it follows.
    """

    reference: ReferencePolicy | None = None
    keeps_average = True
    average: PolicyAverage | None = None
    """The second set, from the beginning of training on."""

    _average_is_trained = True
    """Whether the average equals the trained weights, so that a network call of one says what the other does."""

    @abstractmethod
    def move_average(self) -> None:
        """Called after each optimizer step, with the new weights in place; see `blend_average`."""

    def blend_average(self, decay: float) -> None:
        """`average = decay · average + (1 - decay) · trained`."""
        if self.average is not None:
            self.average.blend(self.trainable_parameters(), decay)
            self._average_is_trained = decay == 0

    def _begin(self) -> None:
        # Not before: the weights have been loaded, moved and sharded by now.
        self.average = PolicyAverage(self.trainable_parameters()) if self.keeps_average else None
        self._average_is_trained = True
        super()._begin()

    def _after_optimizer_step(self) -> None:
        self._average_is_trained = False
        self.move_average()  # before the step counts as done, and so as something that can be saved
        super()._after_optimizer_step()

    @property
    def is_rollout_done(self) -> bool:
        """Whether the last micro-batch was a rollout's last."""
        return self._micro_step % self.args.micro_steps_per_rollout == 0

    # Velocities of other weights; to be computed before the trained ones' forward, whose graph must not see them.

    def reference_velocity(self, model: nn.Module, batch: NoisedBatch) -> Tensor | None:
        """Velocity (R, ...) of the policy before training; `None` without a KL to it."""
        if self.reference is None:
            return None
        with self.reference.velocity(model) as velocity:
            return self.call_policy(velocity, batch)

    def average_velocity(self, model: nn.Module, batch: NoisedBatch) -> Tensor | None:
        """Velocity (R, ...) of the average; `None` where it is that of the trained weights, which comes anyway."""
        if self.average is None or self._average_is_trained:
            return None
        with self.average_weights(self.average), torch.no_grad():
            return self.call_policy(model, batch)

    def reference_kl(self, velocity: Tensor, reference: Tensor | None, beta: float) -> Tensor | float:
        """`beta` times the squared velocity difference (R,) from the reference, recorded as `kl`; 0 without one."""
        if reference is None:
            return 0.0
        kl = velocity_kl(velocity, reference)
        self.metrics.add("kl", kl)
        return beta * kl

    # Checkpoints

    def _state(self) -> dict[str, Any]:
        if self.average is None:
            return super()._state()
        average = {**self.average.state_dict(), "is_trained": self._average_is_trained}
        return {**super()._state(), "average": average}

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        if self.keeps_average and "average" not in state:
            raise RunError(
                f"{self._resumed_from} has no second set of weights, which {self._name} keeps: it was written by "
                "another trainer or with other options; start a new run from its weights."
            )

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        if self.average is not None:
            self.average.load_state_dict(state["average"])
            self._average_is_trained = state["average"]["is_trained"]

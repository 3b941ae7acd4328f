# SPDX-License-Identifier: Apache-2.0
"""Trainers that learn from the clean samples of their rollouts, by adding noise to them again."""

from __future__ import annotations

from omnitrl.algorithms import SigmaTable, TransitionTable, transition_table
from omnitrl.rollout import SampleRequest, SamplingParams, stable_seed
from omnitrl.trainer.matching_config import MatchingConfig
from omnitrl.trainer.noising import NoisedBatches, NoiseLevels
from omnitrl.trainer.rollout_trainer import RolloutTrainer
from omnitrl.trainer.rollouts import RolloutBuffer


class MatchingTrainer(RolloutTrainer):
    """
    Deterministic rollouts, of which the final latents are kept; see [`SamplingTrainer`] for the arguments.

    Noise and noise levels are a function of the seed, the rollout, the group and the member, so that a loss can be
    compared with its value before an update.
    """

    args: MatchingConfig

    @property
    def guidance_scale_train(self) -> float:
        """Guidance of the network calls that are trained: none by default."""
        given = self.args.guidance_scale_train
        return 1.0 if given is None else given

    def describe_run(self) -> str:
        args = self.args
        return f"trains {args.timesteps_per_sample} noise levels of each sample on {super().describe_run()}"

    def sampling_params(self, rollout: int) -> SamplingParams:
        args = self.args
        return SamplingParams(
            num_inference_steps=args.num_inference_steps,
            guidance_scale=self.guidance_scale,
            height=args.height,
            width=args.width,
            ode_solver=args.ode_solver,
            keep_clean=True,
            decode=self.scores_rollouts,
        )

    def tables(self, rollout: int) -> tuple[SigmaTable, TransitionTable]:
        table = self.flow_model.sigmas(self.args.num_inference_steps, self.latent_shape)
        transitions, device = transition_table(table.sigmas, "ode"), self.args.device
        return SigmaTable(*(t.to(device) for t in table)), TransitionTable(*(t.to(device) for t in transitions))

    def noise_key(self, request: SampleRequest) -> tuple[int, ...]:
        """Samples of a rollout with the same key are trained with the same noise and levels."""
        return (request.group_id, request.member)

    def noise_levels(self, table: SigmaTable) -> NoiseLevels:
        """At which noise levels samples are trained."""
        args = self.args
        bounds = (args.timestep_range[0], args.timestep_range[1])
        return NoiseLevels(args.sigma_sampling, args.timesteps_per_sample, bounds, table)

    def cut(self, buffer: RolloutBuffer, samples: list[int]) -> NoisedBatches:
        levels, seed = self.noise_levels(buffer.table), self.args.seed
        trajectories = [buffer.trajectories[i] for i in samples]
        draws = [
            levels.draw(
                stable_seed(seed, "levels", buffer.index, *self.noise_key(trajectory.request)),
                self.latent_shape,
                self.flow_model,
            )
            for trajectory in trajectories
        ]
        return NoisedBatches(
            [t.clean_latents for t in trajectories if t.clean_latents is not None],
            draws,
            samples,
            buffer.advantages[samples],
            buffer.conditions_of(samples),
            self.args.timesteps_per_forward,
        )

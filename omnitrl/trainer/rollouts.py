# SPDX-License-Identifier: Apache-2.0
"""Which samples a rollout is made of, and how it is cut into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable, TransitionTable
from omnitrl.data import PromptFeed
from omnitrl.models import Conditions, MediaSize
from omnitrl.rollout import SampleRequest, Trajectory, stable_seed


IMPORTANCE_WEIGHTS = "importance_weights"
"""Name among the extras of a rollout of the weights (N, K) of its steps."""

Units = list[tuple[int, ...]]
"""Sample numbers that are trained together: one sample each, or the two of a pair."""


@dataclass(frozen=True)
class RolloutPlan:
    """
    Which samples make a rollout: a pure function of the seed and the rollout's number, the same on 1 and on N ranks.

    Samples are numbered `g · num_generations + m` for member m of group g; a rank makes a contiguous stretch of them,
    so a group may lie on several ranks.

    Args:
        feed ([`~omnitrl.data.PromptFeed`]):
            Which rows each rollout takes, and of which size its media are.
        num_generations (`int`):
            Group size.
        seed (`int`):
            The run's seed.
        same_init_noise (`bool`):
            One start noise for a group.
        rank, world_size (`int`):
            This process and how many there are.
    """

    feed: PromptFeed
    num_generations: int
    seed: int
    same_init_noise: bool
    rank: int
    world_size: int

    @property
    def num_samples(self) -> int:
        """Samples of a rollout on all ranks."""
        return self.feed.prompts_per_rollout * self.num_generations

    @property
    def share(self) -> slice:
        """This rank's stretch of the samples."""
        size = self.num_samples // self.world_size
        return slice(self.rank * size, (self.rank + 1) * size)

    def group_ids(self) -> Tensor:
        """Group of every sample on all ranks, (num_samples,)."""
        return torch.arange(self.feed.prompts_per_rollout).repeat_interleave(self.num_generations)

    def requests(self, rollout: int) -> list[SampleRequest]:
        """This rank's samples of a rollout."""
        rows: dict[int, dict[str, Any]] = {}
        result = []
        for number in range(self.num_samples)[self.share]:
            group, member = divmod(number, self.num_generations)
            if group not in rows:
                rows[group] = self.feed.row(rollout, group)
            start = stable_seed(self.seed, "start", rollout, group) if self.same_init_noise else None
            seed = stable_seed(self.seed, "sample", rollout, group, member)
            result.append(SampleRequest(rows[group], group, member, seed, start))
        return result

    def other_row(self, rollout: int, group: int) -> dict[str, Any]:
        """A row of the same size that is not the group's, for controls in which prompts are mixed up."""
        return self.feed.other(rollout, group, stable_seed(self.seed, "control", rollout, group))

    def size(self, rollout: int) -> MediaSize:
        """Size of the media of a rollout."""
        return self.feed.size(rollout)


@dataclass
class ReplayBatch:
    """
    Rows for one network call of the replay; a row is one step of one sample.

    Args:
        latents, next_latents (`Tensor`):
            (R, ...) states before and after the step.
        steps (`Tensor`):
            (R,) step indices into the rollout's tables.
        timesteps (`Tensor`):
            (R,) what the network is told of the noise level.
        old_log_probs (`Tensor`):
            (R,).
        advantages (`Tensor`):
            (R,), or (R, A) for a trainer with several losses.
        conditions ([`Conditions`]):
            R rows.
        samples (`list[int]`):
            R numbers of the samples in the rollout.
        old_means (`Tensor`, *optional*):
            (R, ...) mean of the step when it was drawn, for trainers that keep it.
        importance_weights (`Tensor`, *optional*):
            (R,) factor of each row's loss, where the samples are corrected for the engine that drew them.
    """

    latents: Tensor
    next_latents: Tensor
    steps: Tensor
    timesteps: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    conditions: Conditions
    samples: list[int]
    old_means: Tensor | None = None
    importance_weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class RolloutBuffer:
    """
    A finished rollout on this rank, handed out in micro-batches.

    The states stay where the engine put them; nothing is stacked before a micro-batch needs it, so the memory of a
    rollout is that of its kept states.

    Args:
        index (`int`):
            Number of the rollout.
        trajectories (`list[Trajectory]`):
            This rank's samples, media already dropped.
        advantages (`Tensor`):
            (N,) of these samples, or (N, A) for a trainer with several losses.
        units (`list[tuple[int, ...]]`):
            What is trained of them: sample numbers that stay together in a micro-batch.
        conditions ([`Conditions`]):
            One row per sample, or per distinct prompt with `condition_rows`.
        condition_rows (`list[int]`):
            Row of `conditions` that each sample has.
        table ([`~omnitrl.algorithms.SigmaTable`]), transitions ([`~omnitrl.algorithms.TransitionTable`]):
            The grid.
        seed (`int`):
            Shuffles the units, anew in each iteration.
        modalities (`dict[str, slice]`):
            Which of the latents' first dimension each modality has, where there are several.
        extras (`dict[str, Tensor]`):
            What a trainer computes once of a rollout, each with the samples as first dimension.
    """

    index: int
    trajectories: list[Trajectory]
    advantages: Tensor
    units: Units
    conditions: Conditions
    condition_rows: list[int]
    table: SigmaTable
    transitions: TransitionTable
    seed: int
    modalities: dict[str, slice] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_trained(self) -> int:
        """Samples that are trained."""
        return sum(len(unit) for unit in self.units)

    @property
    def steps(self) -> tuple[int, ...]:
        """The trained steps."""
        return self.trajectories[0].steps

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents."""
        trajectory = self.trajectories[0]
        clean = trajectory.clean_latents
        return tuple(trajectory.latents.shape[1:] if clean is None else clean.shape)

    @property
    def latent_dim(self) -> int:
        """Elements D of one sample's latents."""
        return math.prod(self.latent_shape)

    def samples_of(self, position: int, batch_size: int) -> list[int]:
        """Sample numbers of micro-batch `position` of `batch_size` units, counted over all iterations."""
        per_iteration = len(self.units) // batch_size
        iteration, place = divmod(position, per_iteration)
        generator = torch.Generator().manual_seed(stable_seed(self.seed, "order", self.index, iteration))
        order = torch.randperm(len(self.units), generator=generator).tolist()
        return [sample for i in order[place * batch_size : (place + 1) * batch_size] for sample in self.units[i]]

    def conditions_of(self, samples: list[int]) -> Conditions:
        """A row of conditions for each of these samples."""
        return self.conditions[[self.condition_rows[i] for i in samples]]

    def replay(self, samples: list[int], timesteps_per_forward: int) -> ReplayBatches:
        """All trained steps of some samples, `timesteps_per_forward` of them in each batch."""
        return ReplayBatches(self, samples, timesteps_per_forward)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers that, with the plan, restore the buffer exactly."""
        return {
            "index": self.index,
            "prompts": [t.request.row["prompt"] for t in self.trajectories],
            "advantages": self.advantages,
            "units": [list(unit) for unit in self.units],
            "extras": self.extras,
            "steps": self.steps,
            # Two views of one storage per sample: torch.save keeps them so.
            "samples": [t.tensors() for t in self.trajectories],
            "weight_version": self.trajectories[0].weight_version,
        }


class ReplayBatches(Sequence[ReplayBatch]):
    """
    The network calls of one micro-batch.

    A batch is stacked when it is asked for and not before, so that the memory of a micro-batch does not grow with the
    number of trained steps.

    Args:
        buffer ([`RolloutBuffer`]):
            The rollout.
        samples (`list[int]`):
            Numbers of its samples.
        timesteps_per_forward (`int`):
            Trained steps in each batch; the last batch may have fewer.
    """

    def __init__(self, buffer: RolloutBuffer, samples: list[int], timesteps_per_forward: int) -> None:
        self._buffer = buffer
        self._samples = samples
        steps = range(len(buffer.steps))
        self._columns = [steps[s : s + timesteps_per_forward] for s in steps[::timesteps_per_forward]]

    @property
    def num_rows(self) -> int:
        """Rows R of all batches together."""
        return len(self._samples) * len(self._buffer.steps)

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index: int) -> ReplayBatch:  # type: ignore[override]
        trajectories, samples = self._buffer.trajectories, self._samples
        chosen = [(trajectories[i], k) for k in self._columns[index] for i in samples]
        weights = self._buffer.extras.get(IMPORTANCE_WEIGHTS)
        rows = samples * len(self._columns[index])
        device = trajectories[0].latents.device
        steps = torch.tensor([t.steps[k] for t, k in chosen], device=device)
        means = None if trajectories[0].means is None else [t.means[k] for t, k in chosen if t.means is not None]
        return ReplayBatch(
            latents=torch.stack([t.latents[k] for t, k in chosen]),
            next_latents=torch.stack([t.next_latents[k] for t, k in chosen]),
            steps=steps,
            timesteps=self._buffer.table.timesteps[steps],
            old_log_probs=torch.stack([t.log_probs[k] for t, k in chosen]),
            advantages=self._buffer.advantages[rows].to(device),
            conditions=self._buffer.conditions_of(rows),
            samples=rows,
            old_means=None if means is None else torch.stack(means),
            importance_weights=None if weights is None else weights[samples][:, self._columns[index]].T.flatten(),
        )

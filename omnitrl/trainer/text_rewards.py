# SPDX-License-Identifier: Apache-2.0
"""Rewards of texts: called by omnitrl's runner, handed to TRL's trainer as values that are there already."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from omnitrl.errors import InputError, RunError
from omnitrl.rewards import RewardError, RewardRunner
from omnitrl.rewards.weights import check_weights
from omnitrl.trainer.gspo_config import GSPOConfig


class Scored:
    """
    What stands for a reward in TRL's list: it answers with the values that the runner got from the reward.

    Args:
        name (`str`):
            Name of the reward, in metrics.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.values: list[float] = []

    def __call__(self, **arguments: Any) -> list[float | None]:
        """The values; NaN stands for a missing one."""
        return [None if value != value else value for value in self.values]


class TextRewards:
    """
    The rewards of a trainer of TRL, of which functions are called by a [`~omnitrl.rewards.RewardRunner`].

    So all of them run at the same time, failed calls are repeated, one that hangs or is away does not end the run, and
    a failed one is missing and never 0. Reward models (`nn.Module`s, and Hub ids of them) stay with TRL.

    Args:
        reward_funcs:
            One reward or several: functions, names of built-in rewards, paths of functions, models, or Hub ids.
        args ([`GSPOConfig`]):
            Options of the runner, and the weights.

    Attributes:
        for_trl (`list`): what TRL's trainer is given in the place of the rewards.
    """

    def __init__(self, reward_funcs: Any, args: GSPOConfig) -> None:
        given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        ours = [i for i, reward in enumerate(given) if not _is_model(reward)]
        weights = check_weights(args.reward_weights, [str(reward) for reward in given])
        self._runner = None
        self.for_trl: list[Any] = given
        self.scored: list[Scored] = []
        if not ours:
            return
        self._runner = RewardRunner(
            [given[i] for i in ours],
            max_retries=args.reward_max_retries,
            timeout=args.reward_timeout,
            max_failed_fraction=args.reward_max_failed_fraction,
            max_wait=args.reward_max_wait,
            num_processes=args.reward_num_processes,
        )
        if self._runner.needs_latents:
            raise InputError(
                "a reward looks at latents, which texts have not: use one of texts, such as 'exact_answer'."
            )
        self._runner.weights = [weights[i] for i in ours]  # all of them 0 where TRL trains on a model
        self._runner.watched = [not weight for weight in self._runner.weights]
        self._check_rollouts(args)
        self.scored = [Scored(name) for name in self._runner.names]
        for i, scored in zip(ours, self.scored, strict=True):
            self.for_trl[i] = scored

    def _check_rollouts(self, args: GSPOConfig) -> None:
        batch, members = args.per_device_train_batch_size, args.num_generations or 1
        rows, unit = batch * (args.steps_per_generation or 1), math.lcm(batch, members)
        fits = -(-rows // unit) * unit * args.world_size
        cure = f"generation_batch_size={fits} in the place of steps_per_generation={args.steps_per_generation}"
        self.check_whole_groups(rows, members, cure)

    def check_whole_groups(self, rows: int, members: int, cure: str) -> None:
        """
        Raises unless a process writes whole groups, which rewards need that compare the members of one.

        Args:
            rows (`int`):
                Answers that a process writes.
            members (`int`):
                Of a group.
            cure (`str`):
                An option that works, for the sentence.
        """
        names = [] if self._runner is None else self._runner.groupwise
        if names and rows % members:
            raise InputError(
                f"reward {names[0]!r} compares the members of a group, which must then be written by one process, but "
                f"{rows} answers a process are no whole groups of {members}: use {cure}."
            )

    def score(
        self, rows: Sequence[dict[str, Any]], completions: Sequence[Any], groups: Sequence[int], state: Any
    ) -> tuple[Tensor, dict[str, float], dict[str, list[Any]]]:
        """
        Calls the rewards of this rank; every rank calls it.

        Args:
            rows (`list[dict]`):
                Rows with `prompt` and every other column.
            completions (`list`):
                Texts, or lists of messages.
            groups (`list[int]`):
                The group of each row, for rewards that compare its members.
            state (`transformers.TrainerState`):
                Passed on to the rewards.

        Returns:
            (N,) bool, the rows that a weighted reward failed for; metrics; and columns for the table of completions.

        Raises:
            [`~omnitrl.rewards.RewardError`]: a reward of this rank is broken, or failed for too many rows.
            [`~omnitrl.errors.RunError`]: one of another rank is; the sentence is that rank's.
        """
        if self._runner is None:
            return torch.zeros(len(rows), dtype=torch.bool), {}, {}
        error = scored = None
        try:
            self._runner.submit(rows, completions, state, groups=groups)
            scored = self._runner.collect()
        except RewardError as raised:
            error = raised
        except BaseException:  # Ctrl-C, and a defect: what waits must not be taken for the next rollout's
            self._runner.discard()
            raise
        sentences = [sentence for sentence in gather_object([None if error is None else str(error)]) if sentence]
        if error is not None:
            raise error
        if sentences:
            raise RunError(f"Another process stopped: {sentences[0]}")
        assert scored is not None
        weighted = ~torch.tensor(self._runner.watched)
        for i, values in enumerate(self.scored):
            values.values = scored.rewards[:, i].tolist()
        return scored.failed[:, weighted].any(dim=1), scored.metrics, scored.extras


def _is_model(reward: Any) -> bool:
    """Whether TRL loads or calls it as a model that classifies sequences."""
    if isinstance(reward, str):
        return os.path.isdir(reward) or ("/" in reward and ":" not in reward)
    return isinstance(reward, torch.nn.Module)

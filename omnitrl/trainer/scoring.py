# SPDX-License-Identifier: Apache-2.0
"""Rewards of one rank's samples, started while the next are made, and waited for by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from omnitrl.errors import RunError
from omnitrl.rewards import RewardBatch, RewardError, RewardRunner
from omnitrl.rollout import Trajectory
from omnitrl.trainer.base_config import BaseConfig
from omnitrl.trainer.interrupts import Interrupts
from omnitrl.trainer.metrics import gather_list


def make_runner(
    reward_funcs: Any, args: BaseConfig, weights: Sequence[float] | None, final_weights: Sequence[float] | None = None
) -> RewardRunner:
    """
    The runner of some rewards, as the options say.

    Args:
        reward_funcs:
            One reward or several, or `None`.
        args ([`BaseConfig`]):
            Options.
        weights, final_weights (`list[float]`, *optional*):
            Weights of the rewards, and what they become in the course of the run.
    """
    return RewardRunner(
        [] if reward_funcs is None else reward_funcs,
        weights=weights,
        final_weights=final_weights,
        max_retries=args.reward_max_retries,
        timeout=args.reward_timeout,
        max_failed_fraction=args.reward_max_failed_fraction,
        max_wait=args.reward_max_wait,
        max_pending=args.reward_max_pending,
        cache_size=args.reward_cache_size,
        num_processes=args.reward_num_processes,
        device=args.reward_device,
    )


class Scoring:
    """
    One round of scoring: `submit` for each batch of samples, then `collect`.

    A reward that breaks on one rank ends the round on all of them, in `collect` and not before: sampling is collective
    when weights are sharded, and the other ranks would wait for ever for one that had left. A new object is made for
    each round, so that nothing of a round that was broken off is taken for the next one's.

    Args:
        rewards ([`~omnitrl.rewards.RewardRunner`], *optional*):
            Calls the rewards of this rank; without one, samples have no reward.
        interrupts ([`Interrupts`]):
            Ctrl-C, which ends the wait at once.
        world_size (`int`):
            Number of ranks.
        state (`TrainerState`):
            Passed on to the rewards.
        group_size (`int`):
            Members of a group, all of which are of this rank where a reward compares them.
    """

    def __init__(
        self, rewards: RewardRunner | None, interrupts: Interrupts, world_size: int, state: Any, group_size: int = 1
    ) -> None:
        if rewards is not None:
            rewards.discard()
        self._rewards = rewards
        self._interrupts = interrupts
        self._world_size = world_size
        self._state = state
        self._group_size = group_size
        self._error: RewardError | None = None
        self._submitted = 0

    def submit(self, batch: Sequence[Trajectory]) -> None:
        """Starts the rewards of a batch that has just been decoded; waits while too many samples wait for them."""
        self._submitted += len(batch)
        rewards = self._rewards
        if self._error is not None or rewards is None:
            return
        try:
            with self._interrupts.at_once():
                rewards.submit(
                    [t.request.row for t in batch],
                    [t.media for t in batch] if rewards.needs_media else None,
                    self._state,
                    latents=[t.clean_latents for t in batch] if rewards.needs_latents else None,
                    groups=[t.request.group_id for t in batch],
                    group_size=self._group_size,
                )
        except RewardError as error:
            if self._world_size == 1:
                raise
            self._error = error

    def collect(self) -> RewardBatch:
        """
        Waits for this rank's rewards; every rank calls it.

        A row for which a weighted reward failed is missing altogether: in a weighted sum, one that is left out would
        count as 0. Rewards are float32, so that one process and several compute the same.

        Raises:
            [`~omnitrl.rewards.RewardError`]: a reward of this rank is broken.
            [`~omnitrl.errors.RunError`]: one of another rank is; the sentence is that rank's.
        """
        if self._rewards is None:
            nothing = torch.zeros(self._submitted, 0)
            return RewardBatch(nothing, {}, {}, nothing.bool(), {})
        scored = None
        if self._error is None:
            try:
                with self._interrupts.at_once():
                    scored = self._rewards.collect()
            except RewardError as error:
                self._error = error
        sentences = gather_list([None if self._error is None else str(self._error)])
        if self._error is not None:
            raise self._error
        broken = [sentence for sentence in sentences if sentence is not None]
        if broken:
            raise RunError(f"Another process stopped: {broken[0]}")
        assert scored is not None
        weighted = ~torch.tensor(self._rewards.watched)
        scored.rewards[scored.failed[:, weighted].any(dim=1)] = float("nan")
        return replace(scored, rewards=scored.rewards.float())

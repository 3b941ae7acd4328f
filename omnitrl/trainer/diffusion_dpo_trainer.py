# SPDX-License-Identifier: Apache-2.0
"""Diffusion-DPO: preferences between pictures of a dataset, without a reward and without rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omnitrl.data import PreferenceRows, PromptStream, load_preferences, load_prompts, shard
from omnitrl.data.preferences import SIDES, has_pairs
from omnitrl.errors import InputError
from omnitrl.rollout import stable_seed
from omnitrl.trainer.adapters import ReferencePolicy
from omnitrl.trainer.checkpoints import check_same
from omnitrl.trainer.diffusion_dpo_config import DiffusionDPOConfig
from omnitrl.trainer.evaluation import evaluate_prompts
from omnitrl.trainer.metrics import gather_list
from omnitrl.trainer.noising import NoisedBatch, NoisedBatches, NoiseLevels
from omnitrl.trainer.pair_latents import PairLatents
from omnitrl.trainer.pair_loss import DPO_PAPER, PairLoss, pair_loss
from omnitrl.trainer.prompt_rows import finite, sizes_of
from omnitrl.trainer.sampling_trainer import SamplingTrainer


# Noise levels of a pair in evaluation: one says little of it, and all pairs of a set take a call for each.
EVAL_LEVELS = 4

# What decides which pairs an update has and their noise; it stays for a whole run.
_PLAN = (
    "seed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "shuffle_dataset",
    "shuffle_preferences",
)


class DiffusionDPOTrainer(SamplingTrainer):
    """
    Trainer for [Diffusion-DPO](https://huggingface.co/papers/2311.12908).

    The two pictures of a pair are noised with the same noise, to the same level. With the errors `e` of the predicted
    velocity of both, the loss of a pair is

    ```
    -log sigmoid(-beta/2 ((e - e_ref)(chosen) - (e - e_ref)(rejected)))
    ```

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs (*optional*):
            Rewards that score samples in evaluation; nothing is trained on them.
        args ([`DiffusionDPOConfig`], *optional*):
            Options.
        train_dataset:
            Pairs with `prompt`, `chosen` and `rejected` in any form that [`~omnitrl.data.load_preferences`] takes.
        eval_dataset:
            The same, or prompts where there are rewards, or a dict of named sets of either.
        callbacks, optimizers:
            As in `transformers.Trainer`.
        peft_config (`PeftConfig` or `str`, *optional*):
            Adapters to train; `None` trains all weights.

    Example:

    ```python
    >>> trainer = DiffusionDPOTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     args=DiffusionDPOConfig(output_dir="sd35-dpo"),
    ...     train_dataset=[{"prompt": "a cat", "chosen": "cat-1.png", "rejected": "cat-2.png"}],
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = DiffusionDPOConfig
    needs_rewards = False
    trains_guided = False
    draws_noise_levels = True
    control_option = "shuffle_preferences"
    _name = "DiffusionDPO"
    _tag_names = ("omnitrl", "diffusion-dpo")
    _paper: ClassVar[dict[str, str]] = DPO_PAPER
    args: DiffusionDPOConfig

    # Set-up

    def load_rows(self, dataset: Any) -> PreferenceRows:
        return load_preferences(dataset)

    def _load_eval(self, dataset: Any) -> Any:
        if dataset is None or isinstance(dataset, PreferenceRows):
            return dataset
        if isinstance(dataset, dict):
            return {name: self._load_eval(part) for name, part in dataset.items()}
        if self.rewards is not None and not has_pairs(dataset):
            return finite(load_prompts(dataset))
        return load_preferences(dataset)

    def _set_up_algorithm(self) -> None:
        args = self.args
        self.reference = ReferencePolicy(self.flow_model)
        self._table = self.flow_model.sigmas(args.num_inference_steps_eval, self.size)
        self.latents = PairLatents(self.flow_model, self.size)
        parts = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        for rows in (self.train_dataset, *parts):
            if isinstance(rows, PreferenceRows):
                self._check_one_size(rows)
                self.latents.check(rows)

    def _check_one_size(self, rows: PreferenceRows) -> None:
        for index, size in enumerate(sizes_of(self.flow_model, rows, self.args.media_size)):
            if size != self.size:
                raise InputError(
                    f"{type(self).__name__} brings all pictures to one size, {self.size}, but row "
                    f"{rows.number(index)} of {rows.name} asks for {size}: leave the columns of sizes out, and set "
                    "height and width instead, for example height=512, width=512."
                )

    @property
    def pairs_per_update(self) -> int:
        """Pairs of an optimizer step on all devices."""
        args = self.args
        return args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps

    def micro_steps_per_epoch(self) -> int:
        return math.ceil(len(self.train_rows) / self.pairs_per_update) * self.args.gradient_accumulation_steps

    def describe_run(self) -> str:
        return (
            f"{len(self.train_rows)} pairs, {self.pairs_per_update} an optimizer step, at "
            f"{self.args.timesteps_per_sample} noise level(s) each"
        )

    # Pairs

    @cached_property
    def _order(self) -> PromptStream:
        """An endless row of shuffled passes over the pairs."""
        return PromptStream(len(self.train_rows), 1, self.args.seed, self.args.shuffle_dataset)

    def next_micro_batch(self) -> tuple[list[int], NoisedBatches]:
        """
        Row numbers of the pairs, and their network calls.

        A place in the endless row of passes decides on the pair, its noise and its noise levels, so that they are the
        same however an update is spread over micro-batches and ranks.
        """
        args, size = self.args, self.args.per_device_train_batch_size
        if self.flow_model.networks.training:
            self.flow_model.networks.eval()  # with dropout the policy would differ from itself as the reference
        first = (self._micro_step * args.world_size + args.process_index) * size
        rows, draws = [], []
        for place in range(first, first + size):
            rows += self._order.indices(place)
            draws.append(stable_seed(args.seed, "levels", place))
        self._forwards = 0
        swapped = [self._is_swapped(row) for row in rows]
        return rows, self.noised(self.train_rows, rows, draws, args.timesteps_per_sample, swapped)

    def _is_swapped(self, row: int) -> bool:
        return self.args.shuffle_preferences and stable_seed(self.args.seed, "control", row) % 2 == 1

    def noised(
        self,
        pairs: PreferenceRows,
        rows: Sequence[int],
        seeds: Sequence[int],
        levels: int,
        swapped: Sequence[bool] | None = None,
    ) -> NoisedBatches:
        """
        The network calls for some pairs.

        Args:
            pairs ([`~omnitrl.data.PreferenceRows`]):
                The dataset.
            rows (`Sequence[int]`):
                Row numbers.
            seeds (`Sequence[int]`):
                Of the noise and the noise levels of each pair.
            levels (`int`):
                Noise levels of each pair.
            swapped (`Sequence[bool]`, *optional*):
                Pairs whose pictures change places.
        """
        args, device = self.args, self.args.device
        bounds = (args.timestep_range[0], args.timestep_range[1])
        noise = NoiseLevels(args.sigma_sampling, levels, bounds, self._table)
        clean: list[Tensor] = []
        for row, swap in zip(rows, swapped or [False] * len(rows), strict=True):
            pair = self.latents.of(pairs, row).to(device)
            clean += [pair[1], pair[0]] if swap else [pair[0], pair[1]]
        draws = [noise.draw(seed, self.latent_shape, self.flow_model) for seed in seeds]
        twice = [i for i in range(len(rows)) for _ in SIDES]
        guidance = self.flow_model.needs_negative(self.guidance_scale_train)
        conditions = self.flow_model.encode([pairs[row] for row in rows], guidance, self.size)
        return NoisedBatches(
            clean,
            [draws[i] for i in twice],
            [rows[i] for i in twice],
            torch.ones(len(twice)),
            conditions[twice],
            args.timesteps_per_forward,
        )

    # Loss

    def pair_loss(self, model: nn.Module, batch: NoisedBatch) -> PairLoss:
        """The loss of noised pairs."""
        with self.reference.velocity(model) as velocity:
            reference = self.call_policy(velocity, batch)
        return pair_loss(self.call_policy(model, batch), reference, batch, self.args.beta, self.args.loss_type)

    def compute_row_losses(self, model: nn.Module, batch: NoisedBatch, source: list[int]) -> Tensor:
        """The loss of its pair for each row, (R,)."""
        loss = self.pair_loss(model, batch)
        for name, value in loss.metrics.items():
            self.metrics.add(name, value)
        return loss.rows

    def after_micro_batch(self, source: list[int]) -> None:
        self.metrics.add("forwards_per_sample", self._forwards / (2 * len(source)))

    def describe_failure(self, loss: float, source: list[int], batches: Any) -> str:
        numbers = [self.train_rows.number(row) for row in source]
        return (
            f"The loss is {loss} at optimizer step {self.state.global_step}, on the pairs of rows {numbers}: the "
            "weights of the last step are kept. Lower learning_rate or beta, or use bf16 instead of fp16."
        )

    # Checkpoints

    def _plan(self) -> dict[str, Any]:
        return {**{name: getattr(self.args, name) for name in _PLAN}, "pairs in train_dataset": len(self.train_rows)}

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "plan": self._plan()}

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        check_same(str(self._resumed_from), state["plan"], self._plan(), "which pairs an update has")

    # Evaluation

    def evaluate_rows(self, dataset: Any, prefix: str) -> dict[str, float]:
        """
        The loss of held-out pairs at fixed noise, and samples of their prompts, scored where there are rewards.

        Without rewards only the samples that are pictured are made.
        """
        pairs = self._evaluate_pairs(dataset, prefix) if isinstance(dataset, PreferenceRows) else {}
        pictured = self.args.num_samples_to_save if self.args.save_report else 0
        shown = dataset if self.rewards is not None else dataset[:pictured]
        if not len(shown):
            return pairs
        return evaluate_prompts(self, shown, prefix, pairs)

    @torch.no_grad()
    def _evaluate_pairs(self, pairs: PreferenceRows, prefix: str) -> dict[str, float]:
        """Means over the pairs of all ranks. Ranks make as many network calls, which may be collective."""
        args, size = self.args, self.args.per_device_train_batch_size
        mine = list(shard(len(pairs), args.process_index, args.world_size))
        calls = math.ceil(math.ceil(len(pairs) / args.world_size) / size)
        found: list[dict[str, float]] = []
        before = self.num_forwards, self._forwards
        for call in range(calls):
            rows = mine[call * size : (call + 1) * size]
            padded = rows or [len(pairs) - 1]
            seeds = [stable_seed(args.seed, "eval_levels", row) for row in padded]
            found += self._scores(self.noised(pairs, padded, seeds, EVAL_LEVELS))[: len(rows)]
        self.num_forwards, self._forwards = before
        scores = gather_list(found)
        return {f"{prefix}_{name}": sum(score[name] for score in scores) / len(scores) for name in scores[0]}

    def _scores(self, batches: NoisedBatches) -> list[dict[str, float]]:
        """Loss and metrics of each pair, means over its noise levels."""
        model = self.current_policy()
        losses = [self.pair_loss(model, batches[i]) for i in range(len(batches))]
        columns = {"loss": [loss.rows[::2] for loss in losses]}
        columns |= {name: [loss.metrics[name] for loss in losses] for name in losses[0].metrics}
        # (levels, pairs), level by level
        means = {name: torch.cat(values).reshape(EVAL_LEVELS, -1).double().mean(0) for name, values in columns.items()}
        return [{name: float(mean[i]) for name, mean in means.items()} for i in range(len(means["loss"]))]

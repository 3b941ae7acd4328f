# SPDX-License-Identifier: Apache-2.0
"""SRPO: the gradient of a reward, through the decoder and one short step of the network, at any noise level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omnitrl.algorithms import (
    direct_align_recover,
    relative_preference,
    srpo_loss,
)
from omnitrl.errors import InputError
from omnitrl.media import read_picture
from omnitrl.models import MediaSize
from omnitrl.rewards import DifferentiableRewards, RewardRunner
from omnitrl.rollout import SampleNoise, SampleRequest, SamplingParams, Trajectory, stable_seed
from omnitrl.trainer.aligning import NUM_POINTS, AlignBatch, AlignBatches, AlignSample
from omnitrl.trainer.rollout_trainer import RolloutTrainer
from omnitrl.trainer.rollouts import RolloutBuffer
from omnitrl.trainer.sampling_trainer import MicroBatch, RewardLike
from omnitrl.trainer.scoring import Scoring, make_runner
from omnitrl.trainer.srpo_config import SRPOConfig


_HIGHEST_LEVEL = 0.99  # above it the recovery multiplies the network's error by more than 100


class SRPOTrainer(RolloutTrainer):
    """
    Trainer for [SRPO](https://huggingface.co/papers/2509.06942): Direct-Align with semantic relative preference.

    A sample `x0` of the policy is mixed with the very noise `z` that it was made from. The network takes one step from
    level `t` to `t'` with gradient, and the known noise is taken out in closed form, which gives back a sharp sample
    at any level. With the reward `r` of its decoded pixels under a prompt with a word of praise (`c1`) and of blame
    (`c2`), which change places in the branch `"inversion"`, the loss is

    ```
    x0' = (x + (t' - t) v - t' z) / (1 - t'),    x = (1 - t) x0 + t z
    relu(relative_margin - ((1 + k) r(x0', c1) - r(x0', c2)))
    ```

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One differentiable reward or several: called with `completions`, a tensor (B, 3, H, W) of pixels in [0, 1],
            and returning a tensor (B,). See [`omnitrl.rewards.differentiable`].
        args ([`SRPOConfig`], *optional*):
            Options.
        train_dataset:
            Prompts in any form that [`~omnitrl.data.load_prompts`] takes.
        eval_dataset:
            The same, or a dict of named sets.
        callbacks, optimizers:
            As in `transformers.Trainer`.
        peft_config (`PeftConfig` or `str`, *optional*):
            Adapters to train; `None` trains all weights.
        eval_reward_funcs (*optional*):
            Ordinary rewards for evaluation, such as `"ocr"`; `reward_funcs` by default.

    Raises:
        [`~omnitrl.errors.InputError`]: a reward returns numbers, or its gradient is missing or not finite.

    Example:

    ```python
    >>> trainer = SRPOTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs=lambda prompts, completions, **_: clip_similarity(prompts, completions),
    ...     args=SRPOConfig(output_dir="sd35-srpo"),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = SRPOConfig
    control_option = "shuffle_prompts"
    scores_rollouts = False
    _name = "SRPO"
    _tag_names = ("omnitrl", "srpo")
    _paper: ClassVar[dict[str, str]] = {
        "title": "Directly Aligning the Full Diffusion Trajectory with Fine-Grained Human Preference",
        "id": "2509.06942",
        "citation": (
            "@article{shen2025srpo,\n"
            "    title  = {Directly Aligning the Full Diffusion Trajectory with Fine-Grained Human Preference},\n"
            "    author = {Xiangwei Shen and Zhimin Li and Zhantao Yang and Shiyi Zhang and Yingfang Zhang and "
            "Donghao Li and Chunyu Wang and Qinglin Lu and Yansong Tang},\n"
            "    year   = {2025},\n"
            "    eprint = {arXiv:2509.06942},\n"
            "}"
        ),
    }
    args: SRPOConfig
    draws_noise_levels = True

    def __init__(
        self, *args: Any, eval_reward_funcs: RewardLike | Sequence[RewardLike] | None = None, **kwargs: Any
    ) -> None:
        self._eval_reward_funcs = eval_reward_funcs
        self._last_rewards: list[float] = []
        super().__init__(*args, **kwargs)

    # Set-up

    def _load_rewards(self, reward_funcs: Any, args: SRPOConfig) -> RewardRunner | None:  # type: ignore[override]
        """Keeps the differentiable rewards, and returns those of evaluation."""
        self.differentiable = DifferentiableRewards(
            [] if reward_funcs is None else reward_funcs, weights=args.reward_weights
        )
        given = self._eval_reward_funcs
        if given is None and args.eval_reward_weights is not None:
            raise InputError(
                f"eval_reward_weights={args.eval_reward_weights} are those of eval_reward_funcs, which were not "
                "given: use reward_weights."
            )
        return make_runner(
            self.differentiable.ordinary() if given is None else given,
            args,
            args.reward_weights if given is None else args.eval_reward_weights,
        )

    def _set_up_algorithm(self) -> None:
        args = self.args
        self._grids: dict[MediaSize, Tensor] = {}
        for size in self.sizes:
            self._check_grid(self._grid(size))
        if args.checkpoint_decoder:
            self.flow_model.pipeline.vae.enable_gradient_checkpointing()
        self.differentiable.to(args.device)
        if self.train_dataset is None:
            return
        self._check_columns()
        self._probe()

    def _grid(self, size: MediaSize) -> Tensor:
        """The noise levels (T+1,) that `align_range` counts, at a media size, on which they may depend."""
        if size not in self._grids:
            self._grids[size] = self.flow_model.sigmas(self.args.align_num_inference_steps, size).sigmas.cpu()
        return self._grids[size]

    def _check_grid(self, grid: Tensor) -> None:
        first, level = self.args.align_range[0], float(grid[self.args.align_range[0]])
        if level > _HIGHEST_LEVEL + 1e-6:
            works = int((grid <= _HIGHEST_LEVEL).int().argmax())
            raise InputError(
                f"align_range={self.args.align_range} begins at noise level {level:.4f} of this model, where too "
                f"little of a sample is left to be recovered: begin at step {works} of "
                f"{self.args.align_num_inference_steps} or later, not at {first}."
            )

    def _check_columns(self) -> None:
        args, rows = self.args, self.train_rows
        if args.image_column is not None and args.image_column not in rows.column_names:
            raise InputError(
                f"image_column={args.image_column!r} is no column of train_dataset, which has {rows.column_names}: "
                "name the one that holds the pictures, or use None to train on rollouts."
            )
        if args.shuffle_prompts:
            self.check_other_prompts()

    def _probe(self) -> None:
        """Asks the rewards for the gradient of an example of the decoder."""
        rows = (self.first_rows(2) * 2)[:2]
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(2, *self.latent_shape, generator=generator).to(self.args.device)
        with torch.no_grad():
            pixels = self.pixels_of(latents, self.size)
        self.differentiable.probe(pixels, rows)

    # Rollout

    def describe_run(self) -> str:
        args = self.args
        low, high = (float(self._grid(self.size)[step]) for step in reversed(args.align_range))
        return (
            f"trains {' and '.join(args.branches)} at noise levels {low:.2f} to {high:.2f} of each of "
            f"{super().describe_run()}"
        )

    def _sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, scoring: Scoring | None
    ) -> list[Trajectory]:
        column = self.args.image_column
        if column is None:
            return super()._sample(requests, params, scoring)
        table = self.flow_model.sigmas(params.num_inference_steps, params.size)
        nothing = torch.zeros(0)
        size = self.args.rollout_batch_size or self.args.per_device_train_batch_size
        trajectories: list[Trajectory] = []
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            names = [f"{column!r} of the prompt {request.row['prompt']!r}" for request in part]
            images = [read_picture(r.row[column], name) for r, name in zip(part, names, strict=True)]
            latents = self.flow_model.encode_images(images, params.size)
            for request, clean in zip(part, latents, strict=True):
                version = self.state.global_step
                trajectories.append(
                    Trajectory(request, None, table, (), nothing, nothing, nothing, version, clean_latents=clean)
                )
        return trajectories

    # Training

    def cut(self, buffer: RolloutBuffer, samples: list[int]) -> MicroBatch:
        args = self.args
        return AlignBatches(
            [self._align_sample(buffer.index, buffer.trajectories[i]) for i in samples],
            buffer.conditions_of(samples),
            args.branches,
            self._grid(self.size_of(buffer.index)),
            (args.align_range[0], args.align_range[1]),
            max(round((1 - args.groundtruth_ratio) * NUM_POINTS), 1),
            self.flow_model,
        )

    def _align_sample(self, rollout: int, trajectory: Trajectory) -> AlignSample:
        args, request = self.args, trajectory.request
        assert trajectory.clean_latents is not None
        noise = SampleNoise(request.seed, request.start_seed).start(tuple(trajectory.clean_latents.shape))
        seed = stable_seed(args.seed, "align", rollout, request.group_id, request.member)
        row = self._plan.other_row(rollout, request.group_id) if args.shuffle_prompts else request.row
        praised = blamed = row["prompt"]
        if args.positive_words and args.negative_words:
            turn = rollout * args.prompts_per_rollout + request.group_id
            praised, blamed = (
                args.control_word_format.format(word=words[turn % len(words)], prompt=row["prompt"])
                for words in (args.positive_words, args.negative_words)
            )
        return AlignSample(trajectory.clean_latents, noise, 1 + seed % (NUM_POINTS - 1), row, praised, blamed)

    def pixels_of(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Pixels (B, 3, H, W) in [0, 1] of clean latents (B, ...) of media of a size, with gradient."""
        seen = self.flow_model.visual_latents(latents, size)
        return (self.flow_model.decode_pixels(seen).float() / 2 + 0.5).clamp(0, 1)

    def compute_row_losses(self, model: nn.Module, batch: AlignBatch, source: RolloutBuffer) -> Tensor:
        """How far the preference of each recovered sample is below the margin, (R,)."""
        velocity = self.call_policy(model, batch)
        latents = direct_align_recover(batch.latents, velocity, batch.noise, batch.sigma_from, batch.sigma_to)
        pixels = self.pixels_of(latents, self.size_of(source.index))
        praised = self._rewards_of(pixels, batch, [sample.praised for sample in batch.samples])
        self._log_rewards(praised)
        preference = self._total(praised)
        if self.args.has_control_words:
            blamed = self._total(self._rewards_of(pixels, batch, [sample.blamed for sample in batch.samples]))
            pair = (preference, blamed) if batch.branch == "denoise" else (blamed, preference)
            preference = relative_preference(*pair, batch.strengths)
        losses = srpo_loss(preference, self.args.relative_margin)
        self.metrics.add("srpo/preference", preference.detach())
        self.metrics.add("srpo/below_margin", (losses.detach() > 0).float())
        return losses

    def _rewards_of(self, pixels: Tensor, batch: AlignBatch, prompts: list[str]) -> Tensor:
        rows = [sample.row for sample in batch.samples]
        return self.differentiable(prompts, pixels, rows, self.state, self.metrics.add)

    def _total(self, rewards: Tensor) -> Tensor:
        return rewards @ torch.tensor(self.differentiable.weights, device=rewards.device)

    def _log_rewards(self, rewards: Tensor) -> None:
        rewards = rewards.detach()
        total = self._total(rewards)
        self._last_rewards = total.tolist()
        self.metrics.add("reward", total)
        for name, values in zip(self.differentiable.names, rewards.unbind(1), strict=True):
            self.metrics.add(f"rewards/{name}/mean", values)

    def describe_failure(self, loss: float, source: RolloutBuffer, batches: MicroBatch) -> str:
        levels = [round(float(sigma), 4) for i in range(len(batches)) for sigma in batches[i].sigma_from]
        return (
            f"The loss is {loss} at optimizer step {self.state.global_step}, noise levels {levels}, rewards of the "
            f"last network call {[round(value, 4) for value in self._last_rewards]}: the weights of the last step are "
            "kept. Lower learning_rate, or check that the reward is finite for all pixels in [0, 1]."
        )

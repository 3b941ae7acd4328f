# SPDX-License-Identifier: Apache-2.0
"""Online Diffusion-DPO: preference pairs from the policy's own samples."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omnitrl.algorithms import combine_rewards, preference_pairs
from omnitrl.rollout import SampleRequest
from omnitrl.trainer.adapters import ReferencePolicy
from omnitrl.trainer.checkpoints import check_same
from omnitrl.trainer.matching_trainer import AveragingTrainer
from omnitrl.trainer.noising import NoisedBatch
from omnitrl.trainer.online_diffusion_dpo_config import OnlineDiffusionDPOConfig
from omnitrl.trainer.pair_loss import DPO_PAPER, pair_loss
from omnitrl.trainer.rollouts import RolloutBuffer, Units


class OnlineDiffusionDPOTrainer(AveragingTrainer):
    """
    Trainer for [Diffusion-DPO](https://huggingface.co/papers/2311.12908) on pairs from the policy's own samples.

    The best and the worst sample of a group are a pair. With the errors `e` of the predicted velocity of both, at the
    same noise and noise level, the loss of a pair is

    ```
    -log sigmoid(-beta/2 ((e - e_ref)(chosen) - (e - e_ref)(rejected)))
    ```

    A group whose rewards do not tell two samples apart has a loss of 0.

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`OnlineDiffusionDPOConfig`], *optional*):
            Options.
        train_dataset:
            Prompts in any form that [`~omnitrl.data.load_prompts`] takes.
        eval_dataset:
            The same, or a dict of named sets.
        callbacks, optimizers:
            As in `transformers.Trainer`.
        peft_config (`PeftConfig` or `str`, *optional*):
            Adapters to train; `None` trains all weights.

    Example:

    ```python
    >>> trainer = OnlineDiffusionDPOTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs="ocr",
    ...     args=OnlineDiffusionDPOConfig(output_dir="sd35-ocr", num_generations=24),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = OnlineDiffusionDPOConfig
    _name = "OnlineDiffusionDPO"
    _tag_names = ("omnitrl", "online-diffusion-dpo")
    _paper: ClassVar[dict[str, str]] = DPO_PAPER
    args: OnlineDiffusionDPOConfig

    def _set_up_algorithm(self) -> None:
        every = self.args.ref_update_steps
        self.keeps_average = every is not None
        self.reference = None if self.keeps_average else ReferencePolicy(self.flow_model)
        if self.keeps_average:
            self.check_averages(f"ref_update_steps={every}", ", or ref_update_steps=None")

    def move_average(self) -> None:
        """The policy becomes the reference after every `ref_update_steps`."""
        every = self.args.ref_update_steps
        if every is not None and self.state.global_step % every == 0:
            self.blend_average(0.0)

    # Pairs

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """The weighted sum of the rewards, (N,), NaN where they are missing: all that a pair asks for."""
        return combine_rewards(rewards, torch.tensor(self.trained_reward_weights))

    def select(self, advantages: Tensor) -> tuple[Units, Tensor]:
        """The best and the worst of each group, and the weight of the pair for either: 0 where they are tied."""
        groups = self._plan.group_ids()[self._plan.share]
        pairs = preference_pairs(advantages, groups, self.args.preference_margin)
        gaps = advantages[pairs.chosen] - advantages[pairs.rejected]
        self.metrics.add("frac_invalid_pairs", (~pairs.valid).float())
        self.metrics.add("reward_gap", gaps.masked_fill(~pairs.valid, math.nan))
        weights = torch.zeros(len(advantages))
        weights[pairs.chosen] = weights[pairs.rejected] = pairs.valid.float()
        return list(zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)), weights

    def noise_key(self, request: SampleRequest) -> tuple[int, ...]:
        """The two of a pair are of one group, and have the same noise."""
        return (request.group_id,)

    # Loss

    def compute_row_losses(self, model: nn.Module, batch: NoisedBatch, source: RolloutBuffer) -> Tensor:
        """The loss of its pair for each row, (R,)."""
        reference = self.reference_velocity(model, batch)
        if reference is None:
            reference = self.average_velocity(model, batch)
        velocity = self.call_policy(model, batch)
        if reference is None:  # the policy has just become it
            reference = velocity.detach()
        loss = pair_loss(velocity, reference, batch, self.args.beta, self.args.loss_type)
        for name, value in loss.metrics.items():
            self.metrics.add(name, value)
        return loss.rows

    # Checkpoints

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "reference": {"ref_update_steps": self.args.ref_update_steps}}

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        now = {"ref_update_steps": self.args.ref_update_steps}
        check_same(str(self._resumed_from), state["reference"], now, "what the reference is")

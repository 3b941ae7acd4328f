# SPDX-License-Identifier: Apache-2.0
"""DiffusionNFT: reinforcement on the forward process, with an old policy that is mixed with the trained one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from torch import Tensor, nn

from omnitrl.algorithms import nft_loss, old_policy_decay, optimality_probability, velocity_kl
from omnitrl.trainer.adapters import ReferencePolicy
from omnitrl.trainer.diffusion_nft_config import DiffusionNFTConfig
from omnitrl.trainer.matching_trainer import AveragingTrainer
from omnitrl.trainer.noising import NoisedBatch
from omnitrl.trainer.rollouts import RolloutBuffer


class DiffusionNFTTrainer(AveragingTrainer):
    """
    Trainer for [DiffusionNFT](https://huggingface.co/papers/2509.16117).

    An old policy, a slow copy of the trained one, makes samples with any ODE solver. Their advantages become
    probabilities q of being good. Each sample is noised again, and two policies around the old one are drawn to it,
    the better the sample the more the first: with v± = v_old ± mix_beta (v - v_old), the loss is the mean over samples
    and noise levels of

    ```
    advantage_clip (q error(v+) + (1 - q) error(v-)) / mix_beta + beta |v - v_ref|²
    ```

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`].
        args ([`DiffusionNFTConfig`], *optional*):
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
    >>> trainer = DiffusionNFTTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs="ocr",
    ...     args=DiffusionNFTConfig(output_dir="sd35-ocr", mix_beta=0.1, old_policy_schedule="delayed"),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     peft_config=LoraConfig(r=32, lora_alpha=64),
    ... )
    >>> trainer.train()
    ```
    """

    config_class = DiffusionNFTConfig
    _name = "DiffusionNFT"
    _tag_names = ("omnitrl", "diffusion-nft")
    _paper: ClassVar[dict[str, str]] = {
        "title": "DiffusionNFT: Online Diffusion Reinforcement with Forward Process",
        "id": "2509.16117",
        "citation": (
            "@article{zheng2025diffusionnft,\n"
            "    title  = {DiffusionNFT: Online Diffusion Reinforcement with Forward Process},\n"
            "    author = {Kaiwen Zheng and Huayu Chen and Haotian Ye and Haoxiang Wang and Qinsheng Zhang and "
            "Kai Jiang and Hang Su and Stefano Ermon and Jun Zhu and Ming-Yu Liu},\n"
            "    year   = {2025},\n"
            "    eprint = {arXiv:2509.16117},\n"
            "}"
        ),
    }
    args: DiffusionNFTConfig

    def _set_up_algorithm(self) -> None:
        self.check_averages("DiffusionNFT's old policy")
        self.reference = ReferencePolicy(self.flow_model) if self.args.beta else None

    # The old policy is `self.average`.

    def rollout_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average_weights(self.average)

    def move_average(self) -> None:
        """The old policy moves when its samples are used up, and is as it was in the midst of a rollout."""
        if self.is_rollout_done:
            args = self.args
            decay = old_policy_decay(args.old_policy_schedule, self.state.global_step, args.old_policy_decay)
            self.blend_average(decay)
            self.metrics.add("old_policy/decay", decay)

    def compute_row_losses(self, model: nn.Module, batch: NoisedBatch, source: RolloutBuffer) -> Tensor:
        """The negative-aware loss plus `beta` times the KL to the reference, (R,)."""
        args, bound = self.args, self.args.advantage_clip
        assert bound is not None  # the config refuses it
        reference, old = self.reference_velocity(model, batch), self.average_velocity(model, batch)
        velocity = self.call_policy(model, batch)
        old = velocity.detach() if old is None else old
        optimality = optimality_probability(batch.advantages, bound, args.nft_mode)
        nft = nft_loss(
            velocity,
            old,
            batch.latents,
            batch.clean_latents,
            batch.sigmas,
            optimality,
            args.mix_beta,
            args.adaptive_weights,
        )
        self.metrics.add("nft/optimality", optimality)
        self.metrics.add("nft/positive_error", nft.positive_error)
        self.metrics.add("nft/negative_error", nft.negative_error)
        self.metrics.add("old_policy/gap", velocity_kl(velocity.detach(), old))
        # The size of the gradient in the authors' recipes has the bound of the advantages in it.
        return bound * nft.loss + self.reference_kl(velocity, reference, args.beta)

# SPDX-License-Identifier: Apache-2.0
"""What trainers of models that read, see and hear add to those of TRL."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import transformers
from accelerate.utils import gather_object, is_peft_model
from transformers import PreTrainedModel, Trainer

from omnitrl.errors import InputError, RunError
from omnitrl.omni.thinker import freeze_routers, restore


logger = logging.getLogger(__name__)


class OmniTrainer(Trainer):
    """
    Routers that stay as they are, checkpoints of mixtures of experts, and media that ranks must have in common.

    It stands before a trainer of TRL among the bases of a class.
    """

    aux_loss_enabled: bool
    router_aux_loss_coef: float

    def freeze_routers(self) -> None:
        """Takes the routers of experts out of training, and says what then is left of the load-balancing loss."""
        model: Any = self.model
        if freeze_routers(model) and self.aux_loss_enabled:
            logger.warning(
                "router_aux_loss_coef=%s balances the load of experts, but with freeze_router=True it can only move "
                "what comes before the routers: set freeze_router=False.",
                self.router_aux_loss_coef,
            )

    def check_same_media(self, names: Iterable[str]) -> None:
        """
        Raises where weights are sharded and the towers that some ranks would gather are not used by others.

        Args:
            names (`Iterable[str]`):
                Inputs of the model in this batch that are of media.
        """
        if self.accelerator.num_processes == 1 or not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            return
        ours = sorted(names)
        everyone: list[list[str]] = gather_object([ours])
        if any(theirs != ours for theirs in everyone):
            raise RunError(
                f"Processes have media of different kinds in one batch ({everyone}), and with sharded weights they "
                "would wait for each other for ever: train on rows that have all the same kinds, or without FSDP and "
                "DeepSpeed."
            )

    # Checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        if self.is_fsdp_enabled or not isinstance(model, PreTrainedModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            restore(model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or self.is_fsdp_enabled or self.is_deepspeed_enabled or is_peft_model(self.model):
            super()._load_best_model()
        else:
            model: Any = self.model
            restore(model, best)


def check_parted(model: Any) -> None:
    """
    Raises where TRL cannot take log-probs from what a model returns before its head, without a tensor of all logits.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The model that is trained.

    Raises:
        [`~omnitrl.errors.InputError`]: the version of Transformers has its body and head in one.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    if base.base_model is base:
        raise InputError(
            f"{type(base).__name__} of transformers {transformers.__version__} is not parted into a body and a head: "
            "pip install 'transformers>=5.21'."
        )


def init_options(args: Any) -> dict[str, Any]:
    """The arguments of `from_pretrained` that a config of TRL has."""
    options = args.model_init_kwargs
    return dict(options) if isinstance(options, dict) else {}


def remote_options(args: Any) -> dict[str, Any]:
    """Those of them that say which files of a Hub id are read."""
    given = {"trust_remote_code": args.trust_remote_code, **init_options(args)}
    return {key: given[key] for key in ("revision", "trust_remote_code") if key in given}

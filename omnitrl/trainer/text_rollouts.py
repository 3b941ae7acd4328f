# SPDX-License-Identifier: Apache-2.0
"""What a trainer of models that write text asks of vLLM-Omni servers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor
from transformers import ProcessorMixin

from omnitrl.errors import InputError
from omnitrl.omni.processing import RowInputs
from omnitrl.omni.thinker import published_name


if TYPE_CHECKING:
    from omnitrl.trainer.gspo_trainer import GSPOTrainer


logger = logging.getLogger(__name__)

SERVED = ("Qwen3OmniMoeThinkerForConditionalGeneration",)
"""Classes of models that `omnitrl vllm-serve` serves."""

LARGE_DIFFERENCE = 0.1
"""Mean difference of log-probs above which a warning says what to look at."""

_LOCAL = "use rollout_engine='local'"


class ServerRollouts:
    """
    The answers that a [`GSPOTrainer`] has its servers write, with the adapter or the weights that it trains.

    Args:
        trainer ([`GSPOTrainer`]):
            With its model.

    Raises:
        [`~omnitrl.errors.InputError`]: servers cannot do what the trainer asks for, or one of them is the wrong one.
        [`~omnitrl.errors.RunError`]: there is no server.
    """

    def __init__(self, trainer: GSPOTrainer) -> None:
        from omnitrl.rollout.vllm_omni.text_engine import TextEngine

        self._trainer = trainer
        self._sent: tuple[int, int] | None = None
        self._warned = False
        _check(trainer)
        args, accelerator, model = trainer.args, trainer.accelerator, self._model
        model = model.get_base_model() if is_peft_model(model) else model
        sizes = vars(model.config.get_text_config())
        self.engine = TextEngine(
            args.server_urls,
            type(model).__name__,
            sizes,
            concurrency=args.vllm_max_concurrency,
            patience=args.vllm_server_timeout,
            timeout=args.vllm_request_timeout,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            gather=gather_object,
        )

    @property
    def _model(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def generate(self, rows: Sequence[RowInputs]) -> tuple[list[list[int]], list[list[float]]]:
        """
        An answer to each row; every process calls it.

        Args:
            rows (`list[RowInputs]`):
                The rows of a batch; neighbours that are one object are asked for together.

        Returns:
            `tuple`: token ids of each answer, and the log-prob of each token.
        """
        from omnitrl.rollout.vllm_omni.text_engine import TextPrompt

        self._bring_weights()
        seeds = torch.randint(2**31, (len(rows),)).tolist()
        prompts: list[TextPrompt] = []
        last: RowInputs | None = None
        for row, seed in zip(rows, seeds, strict=True):
            if row is last:
                prompts[-1].seeds.append(seed)
            else:
                prompts.append(TextPrompt(row.input_ids, row.media, [seed]))
                last = row
        answers = [answer for group in self.engine.generate(prompts, self._sampling()) for answer in group]
        return [answer.token_ids for answer in answers], [answer.log_probs for answer in answers]

    def _sampling(self) -> Any:
        from omnitrl.rollout.vllm_omni.text_wire import TextSampling

        trainer: Any = self._trainer
        return TextSampling(
            max_tokens=trainer.max_completion_length,
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k or 0,
            min_p=trainer.min_p or 0.0,
            repetition_penalty=trainer.repetition_penalty,
            stop_token_ids=list(trainer.eos_token_ids),
            suppress_tokens=list(trainer.generation_kwargs["suppress_tokens"]),
        )

    def _bring_weights(self) -> None:
        """Sends what is trained, unless the servers have it as it is."""
        model = self._model
        changes = sum(parameter._version for parameter in model.parameters() if parameter.requires_grad)
        state = (self._trainer.state.global_step, changes)
        if state != self._sent:
            if is_peft_model(model):
                self.engine.update_weights(model.peft_config[model.active_adapter], adapter_of(model))
            else:  # those of the first process are sent
                self.engine.update_weights(
                    None, weights_of(model) if self._trainer.accelerator.is_main_process else {}
                )
            self._sent = state

    def look_at(self, difference: float) -> None:
        """Warns once where the servers' log-probs are far from the trainer's own."""
        if difference > LARGE_DIFFERENCE and not self._warned:
            self._warned = True
            logger.warning(
                "The servers' log-probs differ from the trainer's by %.3g in the mean "
                "(sampling/sampling_logp_difference): serve the checkpoint that is trained, with --dtype as the "
                "trainer computes.",
                difference,
            )


def adapter_of(model: Any) -> dict[str, Tensor]:
    """
    The active adapter of a Thinker, as servers take it: by the names of a checkpoint, and scaled.

    Args:
        model ([`~peft.PeftModel`]):
            With a LoRA.

    Returns:
        `dict[str, Tensor]`: `lora_A.weight` and `lora_B.weight` of each module; the factor of LoRA is in the second.
    """
    from peft import get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

    adapter = model.active_adapter
    scales = {name: module.scaling[adapter] for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    tensors = {}
    for name, tensor in get_peft_model_state_dict(model, adapter_name=adapter).items():
        module, found, _ = name.partition(".lora_B.")
        value = tensor.float() * scales[module] if found else tensor
        tensors[published_name(name.removeprefix("base_model.model."))] = value
    return tensors


def weights_of(model: Any) -> dict[str, Tensor]:
    """
    What is trained of a Thinker without adapters, by the names of a checkpoint, which has each expert by itself.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Some of its parameters are trained.

    Returns:
        `dict[str, Tensor]`: without the `thinker.` that whole checkpoints have before them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    trained = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    published = revert_weight_conversion(model, trained)
    return {published_name(name.removeprefix("thinker.")): weight for name, weight in published.items()}


def _check(trainer: GSPOTrainer) -> None:
    """Raises for what servers cannot do."""
    from omnitrl.rollout.vllm_omni.weights import check_config

    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    base = type(model.get_base_model() if is_peft_model(model) else model).__name__
    if base not in SERVED:
        raise InputError(
            f"rollout_engine='vllm_omni' is for the Thinker of Qwen3-Omni, and the model is a {base}: {_LOCAL}, or, "
            "for language models, TRL's engine with use_vllm=True."
        )
    if is_peft_model(model):
        check_config(model.peft_config[model.active_adapter], "model")
    if not isinstance(trainer.processing_class, ProcessorMixin):
        raise InputError(
            f"rollout_engine='vllm_omni' sends what a processor makes of rows, and processing_class is a "
            f"{type(trainer.processing_class).__name__}: give the processor of the model, or {_LOCAL}."
        )
    if trainer._has_own_rollouts:
        raise InputError(
            "rollout_engine='vllm_omni' has its servers answer once: leave out tools, environments and rollout_func, "
            f"or {_LOCAL}."
        )
    plugin = trainer.accelerator.state.deepspeed_plugin
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        raise InputError(
            "rollout_engine='vllm_omni' has not been tested with sharded weights: train with DDP or ZeRO-2, or "
            f"{_LOCAL}."
        )
    odd = sorted({*(args.generation_kwargs or {})} - {"suppress_tokens"})
    if odd or args.vllm_structured_outputs_regex:
        name = f"generation_kwargs {odd}" if odd else "vllm_structured_outputs_regex"
        raise InputError(f"rollout_engine='vllm_omni' does not pass on {name}: leave it out, or {_LOCAL}.")

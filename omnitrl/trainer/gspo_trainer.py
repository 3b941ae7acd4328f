# SPDX-License-Identifier: Apache-2.0
"""GSPO: one ratio and one clip for each sequence, on models that read, see and hear."""

from __future__ import annotations

import logging
import os
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather, is_peft_model
from torch import Tensor
from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from omnitrl.algorithms import sequence_log_ratio
from omnitrl.errors import InputError
from omnitrl.omni.decoding import VideoLimits
from omnitrl.omni.processing import OmniProcessor, RowInputs, collate, pad_token_fields, text_messages
from omnitrl.omni.rows import COLUMNS, MEDIA_COLUMNS, ROW_COLUMN, OmniRow, numbered, read_row, undecoded
from omnitrl.omni.thinker import check_adapted, has_thinker, load_thinker, media_tokens
from omnitrl.trainer.gspo_config import GSPOConfig
from omnitrl.trainer.omni_base import OmniTrainer, check_parted, init_options, remote_options
from omnitrl.trainer.text_rewards import TextRewards
from omnitrl.trainer.text_rollouts import ServerRollouts


logger = logging.getLogger(__name__)

# What a checkpoint has of a rollout that is not used up, one file for each process.
_ROLLOUT_FILE = "rollout_{rank}.pt"


class GSPOTrainer(OmniTrainer, GRPOTrainer):
    """
    Trains a model that writes text, on rewards of what it writes, with
    [GSPO](https://huggingface.co/papers/2507.18071).

    It is TRL's [`~trl.GRPOTrainer`] with one ratio per sequence, and takes rows with pictures, videos and sounds: for
    Qwen3-Omni and Qwen2.5-Omni, of which the Thinker is loaded, for vision-language models, and for language models.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Folder or Hub id, or a model.
        reward_funcs:
            One reward or a list: functions `(*, prompts, completions, **columns) -> list[float | None]`, also
            asynchronous, names of built-in rewards, dotted paths, sequence classifiers, or Hub ids of these.
        args ([`GSPOConfig`], *optional*):
            Options.
        train_dataset, eval_dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            Rows with `prompt`, a text or chat messages, and the columns `images`, `videos` and `audios` that the
            messages have places for. Each row may have any of them, or none.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            That of the checkpoint by default.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Adapter to train in the place of the weights.
        options:
            Every other argument of [`~trl.GRPOTrainer`].

    Raises:
        [`~omnitrl.errors.InputError`]: options, data or model do not go together; the message says what would.

    Example:

    ```python
    from omnitrl import GSPOConfig, GSPOTrainer

    trainer = GSPOTrainer(
        model="Qwen/Qwen3-Omni-30B-A3B-Instruct",
        reward_funcs="multiple_choice",
        args=GSPOConfig("qwen3-omni-gspo"),
        train_dataset=dataset,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules=ATTENTION, exclude_modules=TOWERS),
    )
    trainer.train()
    ```
    """

    config_class: ClassVar[type[GSPOConfig]] = GSPOConfig

    args: GSPOConfig
    model: Any
    _signature_columns: Any

    _tag_names = ["omnitrl", "gspo"]
    _name = "GSPO"
    _paper = {
        "title": "Group Sequence Policy Optimization",
        "id": "2507.18071",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{zheng2025group,
                title        = {{Group Sequence Policy Optimization}},
                author       = {Chujie Zheng and Shixuan Liu and Mingze Li and Xiong-Hui Chen and Bowen Yu and
                                Chang Gao and Kai Dang and Yuqiong Liu and Rui Men and An Yang and Jingren Zhou and
                                Junyang Lin},
                year         = 2025,
                eprint       = {arXiv:2507.18071},
            }"""),
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GSPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: ProcessorMixin | PreTrainedTokenizerBase | None = None,
        peft_config: Any = None,
        **options: Any,
    ) -> None:
        args = self._checked(args, model, processing_class)
        _check_size(train_dataset, args)
        self._batch: list[RowInputs] = []
        self._batch_rows: list[OmniRow] = []
        self._given: list[dict[str, Any]] = []
        self._media: list[RowInputs] = []
        self._log_probs: Tensor | None = None
        self._rewards = TextRewards(reward_funcs, args) if reward_funcs is not None else None
        targets = getattr(peft_config, "target_modules", None)  # PEFT changes them in place
        own = any(options.get(name) for name in ("tools", "rollout_func", "environment_factory"))
        loaded, kept = self._loaded(model, args, peft_config, options), args.model_init_kwargs
        if loaded is not model:
            if processing_class is None:
                sides = {"truncation_side": "left", "padding_side": "left"}
                processing_class = AutoProcessor.from_pretrained(model, **sides, **remote_options(args))
            args.model_init_kwargs = None  # used up
        super().__init__(
            model=loaded,
            reward_funcs=None if self._rewards is None else self._rewards.for_trl,
            args=args,
            train_dataset=_prepared(train_dataset, own),
            eval_dataset=_prepared(eval_dataset, own),
            processing_class=processing_class,
            peft_config=peft_config,
            **options,
        )
        args.model_init_kwargs = kept
        check_parted(self.model)
        check_adapted(self.model, targets)
        limits = VideoLimits(args.video_fps, args.video_max_frames)
        self.omni = OmniProcessor(self._processor, limits, self._template_options)
        self._by_row = isinstance(self.processing_class, ProcessorMixin) and not self._has_own_rollouts
        if args.freeze_router:
            self.freeze_routers()
        self._suppress_media_tokens()
        self._server: ServerRollouts | None = None
        if args.rollout_engine == "vllm_omni":
            self._server = ServerRollouts(self)
            self.use_vllm = True  # for TRL, whose correction of log-probs that come from elsewhere it turns on

    # Set-up, in the order of __init__

    def _checked(self, args: GSPOConfig | None, model: Any, processing_class: Any) -> GSPOConfig:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GSPOConfig(f"{Path(name).name}-GSPO")
        if not isinstance(args, GSPOConfig):
            raise InputError(f"args is a {type(args).__name__}: use GSPOConfig(output_dir='out').")
        if args.use_transformers_continuous_batching and isinstance(processing_class, ProcessorMixin):
            raise InputError(
                "use_transformers_continuous_batching=True writes answers to tokens, and a processor makes pictures "
                "and sounds of a row too: give processing_class=processor.tokenizer where all rows are text, or "
                "use_transformers_continuous_batching=False."
            )
        return args

    def _loaded(self, model: Any, args: GSPOConfig, peft_config: Any, options: dict[str, Any]) -> Any:
        """The Thinker of a whole checkpoint; what TRL can load or has been loaded is left as it is."""
        given, remote = init_options(args), remote_options(args)
        where = model if isinstance(model, str) else model.config._name_or_path
        adapted = peft_config is not None or (not isinstance(model, str) and is_peft_model(model))
        compares = args.beta and not adapted  # then TRL loads `where` again
        if not (isinstance(model, str) or compares) or (where and not has_thinker(where, **remote)):
            return model
        if compares:
            raise InputError(
                f"beta={args.beta} compares with the model at the start, of which a Thinker that is trained as a "
                "whole keeps no copy, nor does a model that is in no folder: give a peft_config, whose adapter is "
                "turned off for that, or beta=0.0."
            )
        quantization = options.pop("quantization_config", None)
        if quantization is not None:
            given["quantization_config"] = quantization
        if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            given["device_map"] = None
        return load_thinker(model, **{**given, **remote})

    @property
    def _processor(self) -> Any:
        """What TRL took, or loaded, as processing_class."""
        return self.processing_class

    @property
    def _template_options(self) -> Any:
        """Arguments of the chat template."""
        return self.chat_template_kwargs

    @property
    def _has_own_rollouts(self) -> bool:
        """Whether tools, environments or a function make the rollouts, which TRL does in its own way."""
        return bool(self.tools) or self.rollout_func is not None or self.environment_factories is not None

    def _suppress_media_tokens(self) -> None:
        """A sampled placeholder would be taken for a picture or a sound that is not there."""
        known = media_tokens(self.model.config)
        if self.use_vllm or not known:
            return
        tokens = sorted({*(self.generation_kwargs.get("suppress_tokens") or []), *known})
        self.generation_kwargs["suppress_tokens"] = self.generation_config.suppress_tokens = tokens

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["prompt", *MEDIA_COLUMNS, ROW_COLUMN]

    # Rollouts

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, on rows without their media, which are kept here for the model and for the rewards."""
        numbers = [row.get(ROW_COLUMN) for row in inputs]
        self._given = [{name: value for name, value in row.items() if name != ROW_COLUMN} for row in inputs]
        self._batch_rows, self._batch = [], []
        if self._has_own_rollouts:
            for i, (row, number) in enumerate(zip(self._given, numbers, strict=True)):
                _check_seen_by_trl(row, self._name_of(number, i))
            return self._controlled(super()._generate_and_score_completions(self._given))
        self._batch_rows = [
            read_row(row, self._name_of(number, i))
            for i, (row, number) in enumerate(zip(self._given, numbers, strict=True))
        ]
        self._batch = self._media = self._processed(numbers)
        output = super()._generate_and_score_completions(self._without_media())
        output["media"] = [row.media for row in self._batch]  # lists go through TRL's shuffle and split as tensors do
        output["token_fields"] = [row.token_fields for row in self._batch]
        if self._server is not None and self.vllm_importance_sampling_correction:
            metrics = self._metrics["train" if self.model.training else "eval"]
            self._server.look_at(metrics["sampling/sampling_logp_difference/mean"][-1])
        return self._controlled(output)

    def _name_of(self, number: int | None, position: int) -> str:
        dataset = "train_dataset" if self.model.training else "eval_dataset"
        return f"row {position} of a batch" if number is None else f"row {number} of {dataset}"

    def _processed(self, numbers: Sequence[int | None]) -> list[RowInputs]:
        """Inputs of the rows of a batch; the members of a group share theirs."""
        if not self._by_row:
            return [self._text_alone(row) for row in self._batch_rows]
        known: dict[int, RowInputs] = {}
        for i, row in enumerate(self._batch_rows):
            key = -1 - i if numbers[i] is None else int(numbers[i] or 0)
            if key not in known:
                known[key] = self.omni(row)
        return [known[-1 - i if n is None else int(n)] for i, n in enumerate(numbers)]

    def _text_alone(self, row: OmniRow) -> RowInputs:
        """A row for a language model, which TRL tokenizes."""
        return RowInputs([]) if not row.kinds else self.omni(row)

    def _without_media(self) -> list[dict[str, Any]]:
        """The rows as TRL is given them: messages with places for media, and the columns that are no media."""
        rows = []
        for given, row in zip(self._given, self._batch_rows, strict=True):
            kept = {name: value for name, value in given.items() if name not in MEDIA_COLUMNS}
            rows.append({**kept, "prompt": row.messages if self._by_row else text_messages(row.messages)})
        return rows

    def _controlled(self, output: dict[str, Any]) -> dict[str, Any]:
        """With the advantages of other samples, in a control experiment."""
        if self.args.shuffle_advantages and self.model.training:
            advantages = output["advantages"]
            output["advantages"] = advantages[torch.randperm(len(advantages), device=advantages.device)]
        return output

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, dict[str, Any]]:
        if not (self._by_row and self._batch):
            return super()._tokenize_prompts(prompts)
        fields: dict[str, Any] = collate([row.media for row in self._batch])
        for name in dict.fromkeys(name for row in self._batch for name in row.token_fields):
            fields[name] = [row.token_fields.get(name, [0] * len(row.input_ids)) for row in self._batch]
        return [row.input_ids for row in self._batch], None, fields

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[Any, Any]:
        if self._server is not None:
            return self._server.generate(self._batch)
        if self.use_vllm and self._by_row and self._batch_rows:
            images = self._pictures()
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, has_tool_images)

    def _pictures(self) -> list[list[Any] | None] | None:
        """The pictures of each row of the batch, which is all that TRL's engine of vLLM takes."""
        for row in self._batch_rows:
            others = [kind for kind in row.kinds if kind != "image"]
            if others:
                raise InputError(
                    f"{row.where[0].upper()}{row.where[1:]} has {others[0]}, but use_vllm=True is TRL's engine, which "
                    "is given pictures only: use use_vllm=False, where the model's own generate is."
                )
        pictures = [self.omni.decoded(row).images or None for row in self._batch_rows]
        return pictures if any(pictures) else None

    # Rewards

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> Tensor:
        """TRL's, of which functions have been called by the runner, with all columns of the dataset."""
        if self._rewards is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rows = [
            {**given, **row, "prompt": prompt, "completion_ids": ids}
            for given, row, prompt, ids in zip(self._given, inputs, prompts, completion_ids_list, strict=True)
        ]
        for row in rows:
            row.pop("completion", None)
        if self.environments is not None:
            rows = [{**row, "environments": e} for row, e in zip(rows, self.environments, strict=True)]
        size = self.num_generations if self.model.training else self.num_generations_eval
        assert size is not None
        self._rewards.check_whole_groups(len(rows), size, f"a multiple of {size} as per_device_eval_batch_size")
        first = self.accelerator.process_index * len(rows)
        groups = [(first + i) // size for i in range(len(rows))]
        failed, metrics, extras = self._rewards.score(rows, completions, groups, self.state)
        for name, value in metrics.items():  # TRL takes the mean over processes
            self._log_metric(name, value * self.accelerator.num_processes if name.endswith("/failed") else value)
        for column, entries in extras.items():
            self._log_completion_extra(column, entries)
        if self._by_row:  # for reward models, which read texts
            prompts = [text_messages(prompt) for prompt in prompts]
        rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids_list)
        # A failed reward that is left out of a sum would count as 0, so the whole row is missing.
        rewards[gather(failed.to(rewards.device))] = torch.nan
        return rewards

    # Loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **fields: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's, with the media of the rows that are looked at."""
        chunk = partial(
            super()._get_per_token_logps_and_entropies,
            logits_to_keep=logits_to_keep,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
        )
        if not self._by_row:
            self._log_probs, *others = chunk(model, input_ids, attention_mask, batch_size=batch_size, **fields)
            return self._log_probs, others[0], others[1]
        size = batch_size or len(input_ids)
        parts = []
        for start in range(0, len(input_ids), size):
            rows, span = self._media[start : start + size], slice(start, start + size)
            media = self._inputs_of(rows, input_ids.shape[1] - logits_to_keep, input_ids)
            parts.append(chunk(partial(model, **media), input_ids[span], attention_mask[span]))
        log_probs, entropies, aux_losses = zip(*parts, strict=True)
        self._log_probs = torch.cat(log_probs)
        return (
            self._log_probs,
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def _inputs_of(self, rows: Sequence[RowInputs], prompt_width: int, input_ids: Tensor) -> dict[str, Tensor]:
        """What the model is given of some rows besides their tokens."""
        device = input_ids.device
        self.check_same_media({name for row in rows for name in row.media})
        fields = pad_token_fields([row.token_fields for row in rows], prompt_width, input_ids.shape[1], device)
        return {**collate([row.media for row in rows], device), **fields}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's, with the media of this micro-batch, and the log of its ratios."""
        media, fields = inputs.get("media"), inputs.get("token_fields")
        if media is not None and fields is not None:
            self._media = [RowInputs([], *pair) for pair in zip(media, fields, strict=True)]
        loss = super()._compute_loss(model, inputs)
        self._log_ratios(inputs)
        return loss

    @torch.no_grad()
    def _log_ratios(self, inputs: Mapping[str, Any]) -> None:
        assert self._log_probs is not None
        log_probs = self._log_probs.detach()
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        old = inputs.get("old_per_token_logps")
        ratio = sequence_log_ratio(log_probs, log_probs if old is None else old, mask.bool()).exp()
        ratio = self.accelerator.gather(ratio)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in (("mean", ratio.mean()), ("min", ratio.min()), ("max", ratio.max())):
            metrics[f"ratio/{name}"].append(value.item())

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Transformers' checkpoint, and the rollout that is in use, so that a run can go on in its middle."""
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        micro_steps = (self.args.steps_per_generation or 1) * self.num_iterations
        in_use = None if self._step % micro_steps == 0 else self._buffered_inputs
        path = folder / _ROLLOUT_FILE.format(rank=self.accelerator.process_index)
        torch.save({"step": self._step, "rollout": in_use, "cut": self._cut}, path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, _ROLLOUT_FILE.format(rank=self.accelerator.process_index))
        if not os.path.exists(path):
            return
        saved = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        if saved.get("cut", self._cut) == self._cut:
            self._step, self._buffered_inputs = saved["step"], saved["rollout"]
        elif saved["rollout"] is not None:
            logger.warning(
                "The rollout that was in use in %s is left out, since it is cut into other batches than this run has "
                "(processes, per_device_train_batch_size, steps_per_generation, num_iterations): %s and not %s.",
                checkpoint, saved["cut"], self._cut,
            )  # fmt: skip

    @property
    def _cut(self) -> list[int]:
        """What says which part of a rollout a process uses at which step."""
        batch, steps = self.args.per_device_train_batch_size, self.args.steps_per_generation or 1
        return [self.accelerator.num_processes, batch, steps, self.num_iterations]


def _check_size(train_dataset: Any, args: GSPOConfig) -> None:
    """Raises where not one rollout can be filled: TRL leaves out what is left over, and would end at once."""
    size, members = args.generation_batch_size or 0, args.num_generations or 1  # both are set by now
    taken = size // members
    if hasattr(train_dataset, "__len__") and len(train_dataset) < taken:
        raise InputError(
            f"train_dataset has {len(train_dataset)} rows and a rollout takes {taken} of them, with "
            f"{members} answers each: use generation_batch_size={len(train_dataset) * members} or less, or more rows."
        )


def _prepared(dataset: Any, own_rollouts: bool) -> Any:
    """A dataset, or several by name, with rows that have numbers and, but for TRL's rollouts, media not decoded."""
    from datasets import Dataset, IterableDataset

    if isinstance(dataset, Mapping):
        return {name: _prepared(part, own_rollouts) for name, part in dataset.items()}
    if not isinstance(dataset, Dataset | IterableDataset):
        return dataset
    return numbered(dataset if own_rollouts else undecoded(dataset))


def _check_seen_by_trl(row: Mapping[str, Any], where: str) -> None:
    """Raises for media that TRL's rollouts would leave out, which take pictures alone."""
    for name in (*COLUMNS["video"], *COLUMNS["audio"]):
        if row.get(name) is not None and row[name] != []:
            raise InputError(
                f"{where[0].upper()}{where[1:]} has {name}, but tools, environments and rollout_func are TRL's, which "
                "takes pictures only: leave them out, or the row."
            )

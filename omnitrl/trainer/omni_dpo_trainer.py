# SPDX-License-Identifier: Apache-2.0
"""DPO for models that see and hear: preferences between answers to prompts with pictures, videos and sounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate.utils import is_peft_model
from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import AutoProcessor, PreTrainedModel, ProcessorMixin, TrainerCallback
from trl import DPOTrainer
from trl.trainer.utils import create_model_from_path, get_config_model_id

from omnitrl.errors import InputError
from omnitrl.omni.pairs import ANSWERS, REFERENCE_COLUMNS, PairCollator, PairProcessor, read_pair
from omnitrl.omni.rows import MEDIA_COLUMNS, ROW_COLUMN, numbered, undecoded
from omnitrl.omni.thinker import check_adapted, has_thinker, load_thinker
from omnitrl.trainer.omni_base import OmniTrainer, check_parted, init_options, remote_options
from omnitrl.trainer.omni_dpo_config import OmniDPOConfig


if TYPE_CHECKING:
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedTokenizerBase

# What the collator takes of a row.
_COLUMNS = ["prompt", *ANSWERS, *MEDIA_COLUMNS, "tools", "chat_template_kwargs", ROW_COLUMN, *REFERENCE_COLUMNS]

# Inputs of the model that every batch has.
_ALWAYS = {"input_ids", "attention_mask", "completion_mask", *REFERENCE_COLUMNS}

# Rows whose messages and files are compared before training begins; later ones are when they are used.
CHECKED_ROWS = 256


class OmniDPOTrainer(OmniTrainer, DPOTrainer):
    """
    Direct preference optimisation of the Thinker of Qwen3-Omni or Qwen2.5-Omni, or of a vision-language or language
    model, on pairs of answers.

    It is [`~trl.DPOTrainer`] for prompts with any mix of pictures, videos and sounds. Media are read when a batch is
    made. The reference is the model without its adapter, or a copy of the model where all weights are trained.

    Args:
        model (`str`, `Path`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Folder or Hub id, or a model. Of an omni-modality checkpoint the Thinker alone is loaded.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Another reference.
        args ([`OmniDPOConfig`], *optional*):
            Options.
        data_collator (`Callable`, *optional*):
            What makes a batch of rows, in the place of [`~omnitrl.omni.PairCollator`].
        train_dataset, eval_dataset (`datasets.Dataset` or `datasets.IterableDataset`):
            Rows with `prompt`, `chosen` and `rejected`, and media in `images`, `videos` and `audios`; see
            [`~omnitrl.omni.read_pair`].
        processing_class (`transformers.ProcessorMixin` or `transformers.PreTrainedTokenizerBase`, *optional*):
            That of the checkpoint by default.
        callbacks, optimizers, compute_metrics, quantization_config:
            As in [`~trl.DPOTrainer`].
        peft_config (`PeftConfig`, *optional*):
            A new adapter; `None` trains all weights, or the adapter that `model` has.

    Raises:
        [`~omnitrl.errors.InputError`]: an option, or one of the first rows, cannot be used.

    Example:

    ```python
    >>> trainer = OmniDPOTrainer(
    ...     model="Qwen/Qwen3-Omni-30B-A3B-Instruct",
    ...     args=OmniDPOConfig(output_dir="omni-dpo"),
    ...     train_dataset=dataset,
    ...     peft_config=LoraConfig(
    ...         r=32, lora_alpha=64, target_modules=ATTENTION, exclude_modules=TOWERS, target_parameters=EXPERTS
    ...     ),
    ... )  # doctest: +SKIP
    ```
    """

    args: OmniDPOConfig
    config_class: ClassVar[type[OmniDPOConfig]] = OmniDPOConfig
    _name = "OmniDPO"
    _tag_names = ["omnitrl", "trl", "dpo"]
    _paper = {
        "title": "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "id": "2305.18290",
        "citation": (
            "@article{rafailov2023dpo,\n"
            "    title  = {Direct Preference Optimization: Your Language Model is Secretly a Reward Model},\n"
            "    author = {Rafael Rafailov and Archit Sharma and Eric Mitchell and Stefano Ermon and "
            "Christopher D. Manning and Chelsea Finn},\n"
            "    year   = {2023},\n"
            "    eprint = {arXiv:2305.18290},\n"
            "}"
        ),
    }

    def __init__(
        self,
        model: str | Path | PreTrainedModel | PeftModel,
        ref_model: PreTrainedModel | None = None,
        args: OmniDPOConfig | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: ProcessorMixin | PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        where = str(model) if isinstance(model, str | Path) else get_config_model_id(model.config)
        args = OmniDPOConfig(f"{Path(where).name}-OmniDPO") if args is None else args
        if not isinstance(args, OmniDPOConfig):
            raise InputError(f"args is a {type(args).__name__}: use OmniDPOConfig(output_dir='out').")
        train_dataset = self._prepare_dataset(train_dataset, None, args, "train")
        if processing_class is None:
            processing_class = AutoProcessor.from_pretrained(where, **remote_options(args))
        if data_collator is None:
            processor, multiple = PairProcessor(processing_class, args.limits), args.pad_to_multiple_of
            data_collator = PairCollator(processor, args.max_length, None if multiple is None else int(multiple))
        targets = getattr(peft_config, "target_modules", None)  # PEFT changes them in place
        loaded: Any = _load(where, args, quantization_config) if isinstance(model, str | Path) else model
        check_parted(loaded)
        copied = ref_model is None and peft_config is None and not is_peft_model(loaded) and _keeps_reference(args)
        if copied:
            ref_model = _reference(model, loaded, args, quantization_config)
        with _already_loaded(args, isinstance(model, str | Path)):
            super().__init__(
                model=loaded,
                ref_model=ref_model,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                compute_metrics=compute_metrics,
                callbacks=list(callbacks or []),
                optimizers=optimizers,
                quantization_config=None if isinstance(model, str | Path) else quantization_config,
                peft_config=peft_config,
            )
        trained: Any = self.model
        check_adapted(trained, targets)
        if copied and args.precompute_ref_log_probs:
            self.ref_model = None  # all that was wanted of it is in the datasets
        if args.freeze_router:
            self.freeze_routers()
        self._smooth_labels()

    def _smooth_labels(self) -> None:
        """
        Label smoothing for the sigmoid loss, which TRL has for others only.

        With a share ε of the labels wrong, the loss is -(1 - ε) log σ(x) - ε log σ(-x). That is TRL's 'robust' loss,
        which undoes such a mixture, at the ε' of which the weights (1 - ε') / (1 - 2 ε') and -ε' / (1 - 2 ε') are
        these: ε' = -ε / (1 - 2 ε).
        """
        epsilon = self.args.label_smoothing
        if epsilon and "sigmoid" in self.loss_types:
            self.loss_types = ["robust" if name == "sigmoid" else name for name in self.loss_types]
            self.label_smoothing = -epsilon / (1 - 2 * epsilon)

    # Data

    @property
    def _is_vision_dataset(self) -> bool:
        """False: rows with pictures go the same way as all others, which TRL's switch would part."""
        return False

    @_is_vision_dataset.setter
    def _is_vision_dataset(self, value: bool) -> None:
        pass

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """The rows with their numbers and with media as they are stored; the collator does the rest."""
        name = {"train": "train_dataset", "eval": "eval_dataset"}.get(dataset_name, dataset_name)
        if dataset is None:
            raise InputError(
                f"{name} is missing: give a datasets.Dataset with the columns prompt, {', '.join(ANSWERS)}."
            )
        if not hasattr(dataset, "column_names"):
            raise InputError(
                f"{name} is a {type(dataset).__name__}: give a datasets.Dataset, such as "
                "datasets.Dataset.from_list(rows)."
            )
        if ROW_COLUMN in (dataset.column_names or []):
            return dataset
        dataset = numbered(undecoded(dataset))
        _check_rows(dataset, name)
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns: Any = _COLUMNS

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """With what decides about the tokens in the key of the cache, which TRL has only the rows in."""
        dataset = copy.copy(dataset)
        key = [dataset._fingerprint, self.args.max_length, self.args.limits, _settings(self.processing_class)]
        dataset._fingerprint = Hasher.hash(key)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    # Loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        self.check_same_media(inputs.keys() - _ALWAYS)
        return super()._compute_loss(model, inputs, return_outputs)


def _settings(processing_class: Any) -> list[Any]:
    """What of a processor or a tokenizer decides about the tokens and tensors of a row."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    media = processing_class.to_json_string() if isinstance(processing_class, ProcessorMixin) else None
    return [processing_class.chat_template, tokenizer.chat_template, len(tokenizer), media]


def _load(where: str, args: OmniDPOConfig, quantization_config: Any) -> PreTrainedModel:
    """The model of a checkpoint, or its Thinker."""
    options = {**init_options(args), **remote_options(args)}
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None  # 'auto' would spread the model over all of them
    return (load_thinker if has_thinker(where, **remote_options(args)) else create_model_from_path)(where, **options)


def _keeps_reference(args: OmniDPOConfig) -> bool:
    """Whether a second model is needed: TRL shards the first one only when training begins."""
    return not args.precompute_ref_log_probs or bool(args.fsdp)


def _reference(model: Any, loaded: Any, args: OmniDPOConfig, quantization_config: Any) -> PreTrainedModel:
    """The model as it is before training, where all of its weights are trained."""
    if isinstance(model, str | Path):
        return _load(str(model), args, quantization_config).requires_grad_(False)
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        raise InputError(
            "DeepSpeed ZeRO-3 has parted the weights of model, so that there is no copying it as the reference: give "
            "model as a folder or Hub id, or a ref_model, or a peft_config."
        )
    copied: PreTrainedModel = copy.deepcopy(loaded)
    return copied.requires_grad_(False).eval()


@contextmanager
def _already_loaded(args: OmniDPOConfig, ours: bool) -> Iterator[None]:
    """TRL warns of `model_init_kwargs` beside a model, which here have been used."""
    kept = args.model_init_kwargs
    if ours:
        args.model_init_kwargs = None
    try:
        yield
    finally:
        args.model_init_kwargs = kept


def _check_rows(dataset: Any, name: str) -> None:
    """Refuses what is wrong in the messages of the first rows; no medium is read."""
    rows = iter(dataset) if not isinstance(dataset, Dataset) else (dataset[i] for i in range(len(dataset)))
    first = CHECKED_ROWS if isinstance(dataset, Dataset) else 1
    count = 0
    for count, row in enumerate(islice(rows, first), 1):
        pair = read_pair(row, f"row {row.get(ROW_COLUMN, count - 1)} of {name}")
        for kind in pair.prompt.kinds:
            _check_files(kind, pair.prompt.media[kind], pair.prompt.where)
    if not count:
        raise InputError(f"{name} has no rows: give at least as many as a batch has.")


def _check_files(kind: str, files: Sequence[Any], where: str) -> None:
    for i, value in enumerate(files):
        path = value.get("path") if isinstance(value, dict) and value.get("bytes") is None else value
        if isinstance(path, str) and "://" not in path and not Path(path).is_file():
            raise InputError(
                f"{kind.capitalize()} {i} of {where} is the file {path}, which does not exist; the working folder is "
                f"{Path.cwd()}."
            )

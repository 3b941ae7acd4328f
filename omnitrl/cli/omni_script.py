# SPDX-License-Identifier: Apache-2.0
"""What the example scripts of models that write text share: their own options, and what these mean."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


# End of a file's name → builder of `datasets`.
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class OmniScriptArguments:
    """What a trainer is given beside its config."""

    model: str = field(metadata={"help": "Folder or Hub id of Qwen3-Omni, Qwen2.5-Omni, a vision or language model."})
    dataset: str = field(
        metadata={"help": "Rows: a .jsonl, .json, .csv or .parquet file, a saved dataset, or a Hub id."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Configuration of a Hub id that has several."})
    dataset_split: str = field(default="train", metadata={"help": "Split of `dataset`, where it has several."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out rows, in the forms of `dataset`."})
    eval_split: str = field(default="test", metadata={"help": "Split of `eval_dataset`, where it has several."})
    lora_r: int = field(default=32, metadata={"help": "Rank of the LoRA adapter; 0 trains all weights instead."})
    lora_alpha: int = field(default=64, metadata={"help": "Alpha of the LoRA adapter, which is scaled by alpha / r."})
    lora_experts: bool = field(
        default=False, metadata={"help": "Adapt experts beside attention, of models that have them."}
    )
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in `output_dir`."})


def rows_of(source: str | None, split: str, name: str | None = None) -> Any:
    """
    Rows from wherever an option says.

    Args:
        source (`str`, *optional*):
            A file, a folder of `Dataset.save_to_disk`, or a Hub id; `None` gives `None`.
        split (`str`):
            Of a dataset that has several; a file has none.
        name (`str`, *optional*):
            Configuration of a Hub id.
    """
    from datasets import Dataset, load_dataset, load_from_disk

    if source is None:
        return None
    if Path(source).is_dir():
        saved = load_from_disk(source)
        return saved if isinstance(saved, Dataset) else saved[split]
    builder = BUILDERS.get(Path(source).suffix)
    if builder is None:
        return load_dataset(source, name, split=split)
    return load_dataset(builder, data_files=source, split="train")


def peft_config_of(script_args: OmniScriptArguments) -> Any:
    """An adapter on the attention of the language model, and on its experts; `None` for none."""
    from peft import LoraConfig

    from omnitrl.omni.thinker import ATTENTION, EXPERTS, TOWERS

    if script_args.lora_r == 0:
        return None
    return LoraConfig(
        r=script_args.lora_r,
        lora_alpha=script_args.lora_alpha,
        target_modules=ATTENTION,
        exclude_modules=TOWERS,
        target_parameters=EXPERTS if script_args.lora_experts else None,
    )


def train(trainer: Any, script_args: OmniScriptArguments) -> None:
    """Trains, evaluates, saves and, with `push_to_hub`, pushes."""
    trainer.train(resume_from_checkpoint=script_args.resume or trainer.args.resume_from_checkpoint)
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    trainer.save_model()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()

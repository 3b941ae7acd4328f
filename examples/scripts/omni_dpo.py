# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[omni]"]
# ///
"""
Train a model that reads, sees and hears with DPO (https://huggingface.co/papers/2305.18290) on preferred and rejected
answers.

A small language model on pairs of a Hub id, on one GPU:

```bash
python examples/scripts/omni_dpo.py \
    --model Qwen/Qwen3-0.6B --dataset trl-lib/ultrafeedback_binarized \
    --output_dir qwen3-dpo \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 8 \
    --learning_rate 1e-5 --max_steps 200
```

The Thinker of Qwen3-Omni-30B-A3B on four GPUs of 80 GB, on pairs about pictures, videos and sounds: lines of JSON with
`prompt`, `chosen` and `rejected`, and media in `images`, `videos` and `audios`. An adapter on attention and experts,
32 pairs an update:

```bash
accelerate launch --num_processes 4 examples/scripts/omni_dpo.py \
    --model Qwen/Qwen3-Omni-30B-A3B-Instruct --model_init_kwargs '{"dtype": "bfloat16"}' \
    --dataset pairs.jsonl --eval_dataset heldout_pairs.jsonl --eval_strategy steps --eval_steps 50 \
    --output_dir qwen3-omni-dpo \
    --lora_experts true --beta 0.1 --label_smoothing 0.1 --max_length 4096 \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 8 \
    --learning_rate 1e-6 --lr_scheduler_type cosine --warmup_steps 0.03 --max_steps 200
```

Options on the command line win over those of a file (`--config`). `--resume` goes on from the last checkpoint.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnitrl import OmniDPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import make_parser


# End of a file's name → builder of `datasets`.
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class OmniPairArguments:
    """Options of the script."""

    model: str = field(metadata={"help": "Folder or Hub id of Qwen3-Omni, Qwen2.5-Omni, a vision or language model."})
    dataset: str = field(
        metadata={"help": "Preference pairs: a .jsonl, .json, .csv or .parquet file, a saved dataset, or a Hub id."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of `dataset`, where it has several."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out pairs, in the forms of `dataset`."})
    eval_split: str = field(default="test", metadata={"help": "Split of `eval_dataset`, where it has several."})
    lora_r: int = field(default=32, metadata={"help": "Rank of the LoRA adapter; 0 trains all weights instead."})
    lora_alpha: int = field(default=64, metadata={"help": "Alpha of the LoRA adapter, which is scaled by alpha / r."})
    lora_experts: bool = field(
        default=False, metadata={"help": "Adapt experts beside attention, of models that have them."}
    )
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in `output_dir`."})


def pairs_of(source: str | None, split: str) -> Any:
    """Rows from wherever an option says, `None` for no option."""
    from datasets import Dataset, load_dataset, load_from_disk

    if source is None:
        return None
    if Path(source).is_dir():
        saved = load_from_disk(source)
        return saved if isinstance(saved, Dataset) else saved[split]
    builder = BUILDERS.get(Path(source).suffix)
    if builder is None:
        return load_dataset(source, split=split)
    return load_dataset(builder, data_files=source, split="train")


def peft_config_of(script_args: OmniPairArguments) -> Any:
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


def main(script_args: OmniPairArguments, training_args: OmniDPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import OmniDPOTrainer

    trainer = OmniDPOTrainer(
        model=script_args.model,
        args=training_args,
        train_dataset=pairs_of(script_args.dataset, script_args.dataset_split),
        eval_dataset=pairs_of(script_args.eval_dataset, script_args.eval_split),
        peft_config=peft_config_of(script_args),
    )
    trainer.train(resume_from_checkpoint=script_args.resume or training_args.resume_from_checkpoint)
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(OmniDPOConfig, OmniPairArguments).parse_args_and_config())

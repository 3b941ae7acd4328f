# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Train a flow-matching model with Diffusion-DPO (https://huggingface.co/papers/2311.12908) on preferred and rejected
pictures.

The model that ships with omnitrl, on a laptop without a GPU; it draws the pairs itself before training begins:

```bash
python examples/scripts/diffusion_dpo.py \
    --model glyphs --dataset glyphs:train --eval_dataset glyphs:heldout --rewards ocr \
    --output_dir glyphs-dpo \
    --height 32 --width 64 --max_sequence_length 1 --num_inference_steps_eval 6 --guidance_scale 1.0 \
    --per_device_train_batch_size 16 --timesteps_per_sample 2 --timesteps_per_forward 2 \
    --learning_rate 3e-4 --max_steps 60 --lora_r 16 --lora_alpha 32
```

Stable Diffusion 3.5 Medium on one node with 8 GPUs, on pairs of a Parquet file or a Hub id with the columns `prompt`,
`chosen` and `rejected`, or `caption`, `jpg_0`, `jpg_1` and `label_0` as Pick-a-Pic has them. Held-out pairs are
measured every 100 steps:

```bash
accelerate launch --num_processes 8 examples/scripts/diffusion_dpo.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset train_pairs.parquet --eval_dataset test_pairs.parquet --eval_strategy steps --eval_steps 100 \
    --output_dir sd35-dpo \
    --height 512 --width 512 --bf16 true \
    --beta 100 --per_device_train_batch_size 2 \
    --learning_rate 2e-4 --max_steps 2000
```

Options on the command line win over those of a file (`--config`). `--resume` goes on from the last checkpoint.
"""

from dataclasses import dataclass, field
from typing import Any

from omnitrl import DiffusionDPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train


@dataclass
class PairArguments(ScriptArguments):
    """Options of the script, of which the datasets hold pairs."""

    dataset: str = field(
        metadata={
            "help": "Preference pairs: a .parquet, .jsonl, .json or .csv file, a saved dataset, or a Hub id. "
            "'glyphs:train' is drawn by the model that ships with omnitrl."
        }
    )
    rewards: list[str] | None = field(
        default=None, metadata={"help": "Rewards by name or path that score samples in evaluation; none are needed."}
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Held-out pairs, or prompts where there are rewards."}
    )


def pairs_of(source: str, split: str) -> Any:
    """Preference pairs from wherever an option says."""
    from omnitrl import load_preferences
    from omnitrl.quickstart import preference_pairs

    if source.startswith("glyphs:"):
        return preference_pairs(source.removeprefix("glyphs:"))  # type: ignore[arg-type]
    return load_preferences(source, split)


def held_out(source: str | None, split: str) -> Any:
    """Pairs or prompts to evaluate."""
    from omnitrl.data.preferences import has_pairs

    if source is None or source.startswith("glyphs:") or not has_pairs(source, split):
        return prompts_of(source, split)
    return pairs_of(source, split)


def main(script_args: PairArguments, training_args: DiffusionDPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import DiffusionDPOTrainer

    trainer = DiffusionDPOTrainer(
        model=model_of(script_args.model),
        reward_funcs=script_args.rewards,
        args=training_args,
        train_dataset=pairs_of(script_args.dataset, script_args.dataset_split),
        eval_dataset=held_out(script_args.eval_dataset, script_args.eval_split),
        peft_config=peft_config_of(script_args),
    )
    train(trainer, script_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(DiffusionDPOConfig, PairArguments).parse_args_and_config())

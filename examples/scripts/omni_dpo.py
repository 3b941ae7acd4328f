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

from omnitrl import OmniDPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.omni_script import OmniScriptArguments, peft_config_of, rows_of, train
from omnitrl.cli.script import make_parser


def main(script_args: OmniScriptArguments, training_args: OmniDPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import OmniDPOTrainer

    trainer = OmniDPOTrainer(
        model=script_args.model,
        args=training_args,
        train_dataset=rows_of(script_args.dataset, script_args.dataset_split, script_args.dataset_name),
        eval_dataset=rows_of(script_args.eval_dataset, script_args.eval_split, script_args.dataset_name),
        peft_config=peft_config_of(script_args),
    )
    train(trainer, script_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(OmniDPOConfig, OmniScriptArguments).parse_args_and_config())

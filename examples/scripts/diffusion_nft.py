# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Train a flow-matching model with DiffusionNFT (https://huggingface.co/papers/2509.16117).

The model that ships with omnitrl, on a laptop without a GPU:

```bash
python examples/scripts/diffusion_nft.py \
    --model glyphs --dataset glyphs:train --eval_dataset glyphs:heldout --rewards ocr \
    --output_dir glyphs-nft \
    --height 32 --width 64 --max_sequence_length 1 --num_inference_steps 6 --num_inference_steps_eval 6 \
    --num_generations 16 --generation_batch_size 128 --per_device_train_batch_size 32 --timesteps_per_forward 2 \
    --timesteps_per_sample 2 --mix_beta 0.1 --beta 0.0 \
    --learning_rate 7e-4 --max_steps 240 --lora_r 16 --lora_alpha 32
```

Stable Diffusion 3.5 Medium on one node with 8 GPUs, with the authors' settings for text rendering; the prompts are
lines such as `a shop front with a sign that says "Fresh Bread"`:

```bash
accelerate launch --num_processes 8 examples/scripts/diffusion_nft.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset train_prompts.txt \
    --rewards ocr \
    --output_dir sd35-nft \
    --height 512 --width 512 --fp16 true \
    --num_generations 24 --generation_batch_size 1152 --per_device_train_batch_size 9 --gradient_accumulation_steps 8 \
    --mix_beta 0.1 --old_policy_schedule delayed --ema_decay 0.9 \
    --max_steps 500
```

Options on the command line win over those of a file (`--config`). `--resume` goes on from the last checkpoint.
"""

from omnitrl import DiffusionNFTConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train


def main(script_args: ScriptArguments, training_args: DiffusionNFTConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import DiffusionNFTTrainer

    trainer = DiffusionNFTTrainer(
        model=model_of(script_args.model),
        reward_funcs=script_args.rewards,
        args=training_args,
        train_dataset=prompts_of(script_args.dataset, script_args.dataset_split),
        eval_dataset=prompts_of(script_args.eval_dataset, script_args.eval_split),
        peft_config=peft_config_of(script_args),
    )
    train(trainer, script_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(DiffusionNFTConfig).parse_args_and_config())

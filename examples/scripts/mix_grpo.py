# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Train a flow-matching model with MixGRPO (https://huggingface.co/papers/2507.21802).

The model that ships with omnitrl, on a laptop without a GPU:

```bash
python examples/scripts/mix_grpo.py \
    --model glyphs --dataset glyphs:train --eval_dataset glyphs:heldout --rewards ocr \
    --output_dir glyphs-mix \
    --height 32 --width 64 --max_sequence_length 1 --num_inference_steps 6 --guidance_scale 1.0 \
    --num_generations 16 --generation_batch_size 128 --per_device_train_batch_size 32 --timesteps_per_forward 2 \
    --sde_window_size 2 --sde_window_range 0 4 --sde_window_interval 20 --shared_prefix true --epsilon 5e-3 \
    --learning_rate 7e-4 --max_steps 240 --lora_r 16 --lora_alpha 32
```

Stable Diffusion 3.5 Medium on one node with 8 GPUs, as MixGRPO-Flash and with groups that branch; the prompts are
lines such as `a shop front with a sign that says "Fresh Bread"`:

```bash
accelerate launch --num_processes 8 examples/scripts/mix_grpo.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset train_prompts.txt \
    --rewards ocr \
    --output_dir sd35-mix \
    --height 512 --width 512 --bf16 true \
    --ode_solver dpmpp_2m --tail_ratio 0.4 --shared_prefix true \
    --num_generations 12 --per_device_train_batch_size 6 --gradient_accumulation_steps 4 --steps_per_generation 16 \
    --max_steps 500
```

Options on the command line win over those of a file (`--config`). `--resume` goes on from the last checkpoint.
"""

from omnitrl import MixGRPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train


def main(script_args: ScriptArguments, training_args: MixGRPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import MixGRPOTrainer

    trainer = MixGRPOTrainer(
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
        main(*make_parser(MixGRPOConfig).parse_args_and_config())

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Train a flow-matching model with Diffusion-DPO (https://huggingface.co/papers/2311.12908) on pairs of its own samples.

The model that ships with omnitrl, on a laptop without a GPU:

```bash
python examples/scripts/online_diffusion_dpo.py \
    --model glyphs --dataset glyphs:train --eval_dataset glyphs:heldout --rewards ocr \
    --output_dir glyphs-online-dpo \
    --height 32 --width 64 --max_sequence_length 1 --num_inference_steps 6 --num_inference_steps_eval 6 \
    --guidance_scale 1.0 --num_generations 8 --generation_batch_size 64 --per_device_train_batch_size 8 \
    --rollout_batch_size 64 --timesteps_per_sample 2 --timesteps_per_forward 2 \
    --learning_rate 3e-4 --max_steps 120 --lora_r 16 --lora_alpha 32
```

Stable Diffusion 3.5 Medium on one node with 8 GPUs, with the settings of flow_grpo: one pair of 24 samples, and a
reference that follows the policy. The prompts are lines of a text file:

```bash
accelerate launch --num_processes 8 examples/scripts/online_diffusion_dpo.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset train_prompts.txt \
    --rewards ocr \
    --output_dir sd35-online-dpo \
    --height 512 --width 512 --bf16 true \
    --num_inference_steps 40 --num_generations 24 --generation_batch_size 1152 \
    --per_device_train_batch_size 3 --rollout_batch_size 12 --gradient_accumulation_steps 2 \
    --timesteps_per_sample 39 --ref_update_steps 40 \
    --learning_rate 3e-4 --max_steps 500
```

Options on the command line win over those of a file (`--config`). `--resume` goes on from the last checkpoint.
"""

from omnitrl import OnlineDiffusionDPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train


def main(script_args: ScriptArguments, training_args: OnlineDiffusionDPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import OnlineDiffusionDPOTrainer

    trainer = OnlineDiffusionDPOTrainer(
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
        main(*make_parser(OnlineDiffusionDPOConfig).parse_args_and_config())

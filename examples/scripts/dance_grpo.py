# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Train a flow-matching model with DanceGRPO (https://huggingface.co/papers/2505.07818).

The model that ships with omnitrl, on a laptop without a GPU (`omnitrl quickstart --algo dance_grpo` does this and
shows more):

```bash
python examples/scripts/dance_grpo.py \
    --model glyphs --dataset glyphs:train --eval_dataset glyphs:heldout --rewards ocr \
    --output_dir glyphs-dance --use_cpu true --max_steps 160 --learning_rate 5e-4 \
    --height 32 --width 64 --max_sequence_length 1 --guidance_scale 1.0 \
    --num_inference_steps 6 --num_inference_steps_eval 6 --noise_level 0.7 --epsilon 5e-3 \
    --num_generations 16 --generation_batch_size 128 --per_device_train_batch_size 32 --timesteps_per_forward 2 \
    --sde_window_strategy first --sde_window_size 2 --timestep_fraction 1.0 \
    --lora_r 16 --lora_alpha 32
```

Stable Diffusion 3.5 Medium on one node with 8 GPUs, with the adapter of the authors' LoRA recipe. The step to the last
level of this model's grid is left to the ODE (docs/source/dance_grpo_trainer.md says why):

```bash
accelerate launch --num_processes 8 examples/scripts/dance_grpo.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset prompts.txt --rewards ocr \
    --output_dir sd35-dance \
    --height 720 --width 720 --bf16 true --guidance_scale 1.0 \
    --sde_window_range 0 14 --learning_rate 3e-4 --lora_r 128 --lora_alpha 256 \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --max_steps 300
```

The 4 best and the 4 worst of 24 samples of a prompt are trained, with a loss for each of two rewards:

```bash
accelerate launch --num_processes 8 examples/scripts/dance_grpo.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset prompts.txt --rewards ocr jpeg_compressibility --reward_weights 1.0 0.5 \
    --output_dir sd35-dance-best \
    --num_generations 24 --best_of_n 8 --per_reward_loss true \
    --per_device_train_batch_size 4 --max_steps 300
```

`--resume true` goes on from the last checkpoint in `output_dir`.
"""

from omnitrl import DanceGRPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train


def main(script_args: ScriptArguments, training_args: DanceGRPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import DanceGRPOTrainer

    trainer = DanceGRPOTrainer(
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
        main(*make_parser(DanceGRPOConfig).parse_args_and_config())

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Distil a teacher into a student at the student's own states (https://huggingface.co/papers/2605.15055).

The model that ships with omnitrl, on a laptop without a GPU. The teacher is an adapter that `srpo.py` has trained, and
the OCR reward is watched only:

```bash
python examples/scripts/diffusion_opd.py \
    --model glyphs --dataset glyphs:train --eval_dataset glyphs:heldout --rewards ocr \
    --teacher_adapter glyphs-srpo \
    --output_dir glyphs-student --use_cpu true --max_steps 40 --learning_rate 1e-3 \
    --height 32 --width 64 --max_sequence_length 1 --guidance_scale 1.0 \
    --num_inference_steps 6 --num_inference_steps_eval 6 --timesteps_per_forward 5 \
    --generation_batch_size 64 --per_device_train_batch_size 32 --lora_r 16 --lora_alpha 32
```

Stable Diffusion 3.5 Medium on one node with 8 GPUs: what guidance does, into a student that needs none, so that it
samples at half the cost:

```bash
accelerate launch --num_processes 8 examples/scripts/diffusion_opd.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --teacher_model stabilityai/stable-diffusion-3.5-medium --teacher_guidance_scale 4.5 --guidance_scale 1.0 \
    --dataset prompts.txt \
    --output_dir sd35-unguided \
    --height 512 --width 512 --bf16 true \
    --per_device_train_batch_size 8 --learning_rate 1e-4 --max_steps 500
```

`--resume true` goes on from the last checkpoint in `output_dir`.
"""

from dataclasses import dataclass, field

from omnitrl import DiffusionOPDConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train


@dataclass
class DistillationScriptArguments(ScriptArguments):
    """Options of this script."""

    teacher_model: str | None = field(
        default=None, metadata={"help": "The teacher: Hub id or folder of a pipeline of the student's family."}
    )
    teacher_adapter: str | None = field(
        default=None, metadata={"help": "In its place: folder or Hub id of an adapter on the student's base."}
    )


def main(script_args: DistillationScriptArguments, training_args: DiffusionOPDConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import DiffusionOPDTrainer

    teacher = script_args.teacher_model
    trainer = DiffusionOPDTrainer(
        model=model_of(script_args.model),
        reward_funcs=script_args.rewards,
        args=training_args,
        train_dataset=prompts_of(script_args.dataset, script_args.dataset_split),
        eval_dataset=prompts_of(script_args.eval_dataset, script_args.eval_split),
        peft_config=peft_config_of(script_args),
        teacher_model=None if teacher is None else model_of(teacher),
        teacher_adapter=script_args.teacher_adapter,
    )
    train(trainer, script_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(DiffusionOPDConfig, DistillationScriptArguments).parse_args_and_config())

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[judge]"]
# ///
"""
Train a flow-matching model with Flow-GRPO (https://huggingface.co/papers/2505.05470) and a vision-language judge.

The judge is behind any endpoint that speaks OpenAI's API. This starts one, on a GPU of its own:

```bash
vllm serve Qwen/Qwen2.5-VL-7B-Instruct --port 8001
```

How likely the judge is to say that a picture shows what its prompt asks for, on seven other GPUs:

```bash
accelerate launch --num_processes 7 examples/scripts/flow_grpo_judge.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset train_prompts.txt \
    --judge_url http://localhost:8001/v1 \
    --output_dir sd35-judged \
    --height 512 --width 512 --bf16 \
    --num_generations 21 --per_device_train_batch_size 9 --gradient_accumulation_steps 8 --steps_per_generation 16 \
    --max_steps 500
```

With a list of questions for each prompt, in lines such as
`{"prompt": "two dogs", "questions": ["Does the image show two dogs?"]}`, and the size of JPEGs as a figure to watch:

```bash
accelerate launch --num_processes 7 examples/scripts/flow_grpo_judge.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset questions.jsonl \
    --judge_url http://localhost:8001/v1 --judge_template questions \
    --rewards jpeg_incompressibility --reward_weights 0.0 1.0 \
    --output_dir sd35-questions \
    --height 512 --width 512 --bf16 \
    --num_generations 21 --per_device_train_batch_size 9 --gradient_accumulation_steps 8 --steps_per_generation 16 \
    --max_steps 500
```

The weight of the judge is the last one of `--reward_weights`. `--resume true` goes on from the last checkpoint in
`output_dir`.
"""

from dataclasses import dataclass, field
from typing import Any

from omnitrl import FlowGRPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train
from omnitrl.errors import InputError


@dataclass
class JudgeScriptArguments(ScriptArguments):
    """Options of this script."""

    judge_url: str | None = field(
        default=None, metadata={"help": "Endpoint of the judge; by default the environment's OPENAI_BASE_URL."}
    )
    judge_model: str | None = field(
        default=None, metadata={"help": "Name of its model; by default the only one that it has."}
    )
    judge_template: str = field(
        default="yes_no", metadata={"help": "What it is asked: 'yes_no', 'score', 'ocr', 'questions' or 'pairwise'."}
    )
    judge_concurrency: int = field(default=32, metadata={"help": "Most requests at a time of one process."})


def judge_of(script_args: JudgeScriptArguments) -> Any:
    """The judge that the options describe."""
    from omnitrl.rewards import (
        OCRTemplate,
        PairwiseTemplate,
        QuestionsTemplate,
        ScoreTemplate,
        VLMJudge,
        YesNoTemplate,
    )

    templates = {
        "yes_no": YesNoTemplate,
        "score": ScoreTemplate,
        "ocr": OCRTemplate,
        "questions": QuestionsTemplate,
        "pairwise": PairwiseTemplate,
    }
    name = script_args.judge_template
    if name not in templates:
        raise InputError(f"--judge_template {name} is unknown: use one of {', '.join(templates)}.")
    return VLMJudge(
        templates[name](),
        base_url=script_args.judge_url,
        model=script_args.judge_model,
        concurrency=script_args.judge_concurrency,
    )


def main(script_args: JudgeScriptArguments, training_args: FlowGRPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import FlowGRPOTrainer

    trainer = FlowGRPOTrainer(
        model=model_of(script_args.model),
        reward_funcs=[*(script_args.rewards or []), judge_of(script_args)],
        args=training_args,
        train_dataset=prompts_of(script_args.dataset, script_args.dataset_split),
        eval_dataset=prompts_of(script_args.eval_dataset, script_args.eval_split),
        peft_config=peft_config_of(script_args),
    )
    train(trainer, script_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(FlowGRPOConfig, JudgeScriptArguments).parse_args_and_config())

# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[math,omni]"]
# ///
"""
Train a model that reads, sees and hears with GSPO (https://huggingface.co/papers/2507.18071), on one of three tasks.

Mathematics in text, with a small language model on one GPU. The dataset has its questions in the column `question`:

```bash
python examples/scripts/gspo.py \
    --task math --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --dataset_name main --question_column question \
    --output_dir qwen3-gsm8k \
    --num_generations 8 --per_device_train_batch_size 8 --gradient_accumulation_steps 8 \
    --max_completion_length 1024 --learning_rate 1e-5 --max_steps 200
```

Multiple-choice questions about pictures, with the Thinker of Qwen3-Omni-30B-A3B on four GPUs of 80 GB. Lines of JSON
have `question`, `choices` (a list of texts), `answer` (a letter) and `images` (a list of paths). 128 questions of 16
answers a rollout, 16 questions an update:

```bash
accelerate launch --num_processes 4 examples/scripts/gspo.py \
    --task choice --model Qwen/Qwen3-Omni-30B-A3B-Instruct --model_init_kwargs '{"dtype": "bfloat16"}' \
    --dataset pictures.jsonl --eval_dataset heldout.jsonl --eval_strategy steps --eval_steps 20 \
    --output_dir qwen3-omni-choice \
    --num_generations 16 --generation_batch_size 2048 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 32 --per_device_eval_batch_size 4 \
    --max_completion_length 8192 --learning_rate 3e-6 --weight_decay 0.01 --delta 10.0
```

Questions about sounds; lines of JSON have `question`, `answer` and `audios` (a list of paths):

```bash
accelerate launch --num_processes 4 examples/scripts/gspo.py \
    --task audio --model Qwen/Qwen2.5-Omni-7B --model_init_kwargs '{"dtype": "bfloat16"}' \
    --dataset sounds.jsonl --output_dir qwen25-omni-audio \
    --num_generations 16 --generation_batch_size 512 --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 8 --max_completion_length 1024 --learning_rate 3e-6
```

Answers can come from a server of Qwen3-Omni on other GPUs, which is sent the adapter before each rollout. There

```bash
omnitrl vllm-serve Qwen/Qwen3-Omni-30B-A3B-Instruct --port 8000 --dtype bfloat16 --max-model-len 12288
```

and above `--rollout_engine vllm_omni --vllm_server_base_url http://other-machine:8000`, or several addresses.

A dataset that has `prompt` already, as chat messages, is taken as it is. `--resume true` goes on from the last
checkpoint in `output_dir`.
"""

from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

from omnitrl import GSPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.omni_script import OmniScriptArguments, peft_config_of, rows_of, train
from omnitrl.cli.script import make_parser
from omnitrl.errors import InputError, did_you_mean


# Task → its reward, and what is asked of an answer.
TASKS = {
    "choice": (
        "multiple_choice",
        "Think it over, and end with the letter of the right choice, as in <answer>B</answer>.",
    ),
    "audio": ("audio_answer", "Listen, think it over, and end with a short answer, as in <answer>a dog</answer>."),
    "math": ("math_answer", "Think step by step, and put the result into \\boxed{}."),
}


@dataclass
class GSPOScriptArguments(OmniScriptArguments):
    """Options of this script."""

    task: str = field(default="math", metadata={"help": "What is asked: 'choice', 'audio' or 'math'."})
    rewards: list[str] | None = field(
        default=None, metadata={"help": "Rewards by name or path in the place of the task's own."}
    )
    question_column: str = field(default="question", metadata={"help": "Column with the questions."})


def chat_of(row: dict[str, Any], question_column: str, instruction: str) -> dict[str, Any]:
    """
    The prompt of a row: its question, its choices with letters, and what is asked of the answer.

    Args:
        row (`dict`):
            A row with the question, and `choices` where there are any.
        question_column (`str`):
            Where the question is.
        instruction (`str`):
            What is asked.
    """
    given = row.get("choices") or []
    texts = given["text"] if isinstance(given, dict) else given  # ARC has a dictionary, with labels
    choices = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, texts, strict=False)]
    text = "\n".join([row[question_column], *choices, instruction])
    return {"prompt": [{"role": "user", "content": text}]}


def prompts_of(rows: Any, script_args: GSPOScriptArguments) -> Any:
    """The rows with chat messages in the column `prompt`."""
    if rows is None or "prompt" in rows.column_names:
        return rows
    if script_args.question_column not in rows.column_names:
        names = rows.column_names
        raise InputError(
            f"question_column={script_args.question_column!r} is none of the dataset's columns ({', '.join(names)})."
            f"{did_you_mean(script_args.question_column, names)}"
        )
    _, instruction = TASKS[script_args.task]
    return rows.map(chat_of, fn_kwargs={"question_column": script_args.question_column, "instruction": instruction})


def main(script_args: GSPOScriptArguments, training_args: GSPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import GSPOTrainer

    if script_args.task not in TASKS:
        near = did_you_mean(script_args.task, TASKS)
        raise InputError(f"task={script_args.task!r} is unknown: use one of {', '.join(TASKS)}.{near}")
    rows = rows_of(script_args.dataset, script_args.dataset_split, script_args.dataset_name)
    held_out = rows_of(script_args.eval_dataset, script_args.eval_split, script_args.dataset_name)
    trainer = GSPOTrainer(
        model=script_args.model,
        reward_funcs=script_args.rewards or [TASKS[script_args.task][0]],
        args=training_args,
        train_dataset=prompts_of(rows, script_args),
        eval_dataset=prompts_of(held_out, script_args),
        peft_config=peft_config_of(script_args),
    )
    train(trainer, script_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(GSPOConfig, GSPOScriptArguments).parse_args_and_config())

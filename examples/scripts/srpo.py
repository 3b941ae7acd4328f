# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Train a flow-matching model with SRPO (https://huggingface.co/papers/2509.06942): along the gradient of a reward.

The model that ships with omnitrl, on a laptop without a GPU; the reward is a small network that reads, trained at its
first call, and evaluation asks an OCR network (`omnitrl quickstart --algo srpo` does this and shows more):

```bash
python examples/scripts/srpo.py \
    --model glyphs --dataset glyphs:train --eval_dataset glyphs:heldout \
    --rewards omnitrl.quickstart.reader:reader_reward --eval_rewards ocr \
    --config examples/scripts/recipes/glyphs_srpo.yaml
```

Stable Diffusion 3.5 Medium on one node with 8 GPUs, with control words and a reward of your own: `similarity` in
`my_rewards.py` takes `prompts` and `completions`, a tensor (B, 3, H, W) in [0, 1], and returns a tensor (B,) in units
of a cosine similarity:

```bash
PYTHONPATH=. accelerate launch --num_processes 8 examples/scripts/srpo.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset prompts.txt --rewards my_rewards:similarity \
    --output_dir sd35-srpo \
    --height 512 --width 512 --bf16 true --checkpoint_decoder true \
    --positive_words "Realistic photo" "Film photo" --negative_words "CG Render" "Cartoon" \
    --per_device_train_batch_size 4 --learning_rate 1e-4 --max_grad_norm 0.1 --max_steps 200
```

`--resume true` goes on from the last checkpoint in `output_dir`.
"""

from dataclasses import dataclass, field

from omnitrl import SRPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train


@dataclass
class SRPOScriptArguments(ScriptArguments):
    """Options of this script."""

    eval_rewards: list[str] | None = field(
        default=None, metadata={"help": "Rewards of evaluation, which need no gradient; `rewards` by default."}
    )


def main(script_args: SRPOScriptArguments, training_args: SRPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import SRPOTrainer

    trainer = SRPOTrainer(
        model=model_of(script_args.model),
        reward_funcs=script_args.rewards,
        args=training_args,
        train_dataset=prompts_of(script_args.dataset, script_args.dataset_split),
        eval_dataset=prompts_of(script_args.eval_dataset, script_args.eval_split),
        peft_config=peft_config_of(script_args),
        eval_reward_funcs=script_args.eval_rewards,
    )
    train(trainer, script_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(SRPOConfig, SRPOScriptArguments).parse_args_and_config())

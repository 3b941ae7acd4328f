# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Train a flow-matching model with Flow-GRPO (https://huggingface.co/papers/2505.05470).

The model that ships with omnitrl, on a laptop without a GPU (`make quickstart` does this and shows more):

```bash
python examples/scripts/flow_grpo.py --config examples/scripts/recipes/glyphs_ocr.yaml
```

Stable Diffusion 3.5 Medium on one node with 8 GPUs, with the paper's settings for text rendering; the prompts are
lines such as `a shop front with a sign that says "Fresh Bread"`:

```bash
accelerate launch --num_processes 8 examples/scripts/flow_grpo.py \
    --config examples/scripts/recipes/sd35_ocr.yaml \
    --dataset train_prompts.txt \
    --eval_dataset test_prompts.txt
```

The same without a file, with a reward of your own in `my_rewards.py`:

```bash
PYTHONPATH=. accelerate launch --num_processes 8 examples/scripts/flow_grpo.py \
    --model stabilityai/stable-diffusion-3.5-medium \
    --dataset prompts.txt \
    --rewards my_rewards:sharpness \
    --output_dir sd35-sharp \
    --height 512 --width 512 --bf16 \
    --num_generations 24 --per_device_train_batch_size 9 --gradient_accumulation_steps 8 --steps_per_generation 16 \
    --max_steps 500
```

Options on the command line win over those of the file. `--resume` goes on from the last checkpoint in `output_dir`.
"""

from dataclasses import dataclass, field

from omnitrl import FlowGRPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.parser import OmniParser


@dataclass
class ScriptArguments:
    """What the trainer is given beside its config."""

    model: str = field(
        metadata={"help": "Hub id or folder of a diffusers pipeline; 'glyphs' is the one that ships with omnitrl."}
    )
    dataset: str = field(
        metadata={
            "help": "Prompts: a .txt, .jsonl, .json, .csv or .parquet file, a saved dataset, or a Hub id. "
            "'glyphs:train', 'glyphs:heldout' and 'glyphs:unseen' are the words that ship with omnitrl."
        }
    )
    rewards: list[str] = field(
        metadata={"help": "Rewards by name ('ocr', 'jpeg_compressibility', …) or path ('package.module:function')."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of `dataset`, where it has several."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out prompts, in the forms of `dataset`."})
    eval_split: str = field(default="test", metadata={"help": "Split of `eval_dataset`, where it has several."})
    lora_r: int = field(default=32, metadata={"help": "Rank of the LoRA adapter; 0 trains all weights instead."})
    lora_alpha: int = field(default=64, metadata={"help": "Alpha of the LoRA adapter, which is scaled by alpha / r."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Ends of the names of the layers to adapt; the model family's by default."}
    )
    adapter: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of an adapter to go on with; excludes the lora_ options."}
    )
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in `output_dir`."})


def make_parser() -> OmniParser:
    """The parser for the options of this script and of [`FlowGRPOConfig`]."""
    return OmniParser((ScriptArguments, FlowGRPOConfig))


def peft_config_of(script_args: ScriptArguments):
    """What the trainer takes as `peft_config`: a new adapter, the place of an old one, or none."""
    from peft import LoraConfig

    if script_args.adapter is not None or script_args.lora_r == 0:
        return script_args.adapter
    return LoraConfig(
        r=script_args.lora_r,
        lora_alpha=script_args.lora_alpha,
        target_modules=script_args.lora_target_modules,
        init_lora_weights="gaussian",  # as in Flow-GRPO
    )


def prompts_of(source: str | None, split: str):
    """Prompts from wherever an option says, `None` for no option."""
    from omnitrl import load_prompts
    from omnitrl.quickstart import rows

    if source is None:
        return None
    if source.startswith("glyphs:"):
        return rows(source.removeprefix("glyphs:"))
    return load_prompts(source, split)


def main(script_args: ScriptArguments, training_args: FlowGRPOConfig) -> None:
    """Trains, evaluates and saves."""
    from omnitrl import FlowGRPOTrainer
    from omnitrl.quickstart import GLYPHS

    trainer = FlowGRPOTrainer(
        model=GLYPHS if script_args.model == "glyphs" else script_args.model,
        reward_funcs=script_args.rewards,
        args=training_args,
        train_dataset=prompts_of(script_args.dataset, script_args.dataset_split),
        eval_dataset=prompts_of(script_args.eval_dataset, script_args.eval_split),
        peft_config=peft_config_of(script_args),
    )
    trainer.train(resume_from_checkpoint=script_args.resume or training_args.resume_from_checkpoint)
    last_rows = [row for row in trainer.state.log_history if row["step"] == trainer.state.global_step]
    if trainer.eval_dataset is not None and not any("eval_reward" in row for row in last_rows):
        trainer.evaluate()
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser().parse_args_and_config())

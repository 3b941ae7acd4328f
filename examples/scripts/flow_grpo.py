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

The same with samples from a vLLM-Omni server, on other devices or another machine; the first line is for that one:

```bash
omnitrl vllm-serve stabilityai/stable-diffusion-3.5-medium --port 8000
accelerate launch --num_processes 4 examples/scripts/flow_grpo.py \
    --config examples/scripts/recipes/sd35_ocr.yaml \
    --dataset train_prompts.txt \
    --rollout_engine vllm_omni \
    --vllm_server_base_url http://localhost:8000
```

Options on the command line win over those of the file. `--resume` goes on from the last checkpoint in `output_dir`.
"""

from omnitrl import FlowGRPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train


def main(script_args: ScriptArguments, training_args: FlowGRPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import FlowGRPOTrainer

    trainer = FlowGRPOTrainer(
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
        main(*make_parser(FlowGRPOConfig).parse_args_and_config())

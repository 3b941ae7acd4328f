# SPDX-License-Identifier: Apache-2.0
"""What the example scripts share: their own options, and what these mean."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from omnitrl.cli.parser import OmniParser


if TYPE_CHECKING:
    from omnitrl.quickstart.words import Split


@dataclass
class ScriptArguments:
    """What a trainer is given beside its config."""

    model: str = field(
        metadata={"help": "Hub id or folder of a diffusers pipeline; 'glyphs' is the one that ships with omnitrl."}
    )
    dataset: str = field(
        metadata={
            "help": "Prompts: a .txt, .jsonl, .json, .csv or .parquet file, a saved dataset, or a Hub id. "
            "'glyphs:train', 'glyphs:heldout' and 'glyphs:unseen' are the words that ship with omnitrl."
        }
    )
    rewards: list[str] | None = field(
        default=None,
        metadata={"help": "Rewards by name ('ocr', 'jpeg_compressibility', …) or path ('package.module:function')."},
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


def make_parser(config_class: type, script_class: type = ScriptArguments) -> OmniParser:
    """
    The parser for the options of a script and of a trainer's config, from the command line and a YAML file.

    Args:
        config_class (`type`):
            The trainer's config.
        script_class (`type`, defaults to `ScriptArguments`):
            Options of the script, a subclass of [`ScriptArguments`] where it has more.
    """
    return OmniParser((script_class, config_class))


def model_of(source: str) -> Any:
    """What the trainer takes as `model`."""
    from omnitrl.quickstart import GLYPHS

    return GLYPHS if source == "glyphs" else source


def prompts_of(source: str | None, split: str) -> Any:
    """Prompts from wherever an option says, `None` for no option."""
    from omnitrl import load_prompts
    from omnitrl.quickstart import rows

    if source is None:
        return None
    if source.startswith("glyphs:"):
        return rows(cast("Split", source.removeprefix("glyphs:")))  # which refuses a split that there is not
    return load_prompts(source, split)


def peft_config_of(script_args: ScriptArguments) -> Any:
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


def train(trainer: Any, script_args: ScriptArguments) -> None:
    """Trains, evaluates, saves and, with `push_to_hub`, pushes."""
    trainer.train(resume_from_checkpoint=script_args.resume or trainer.args.resume_from_checkpoint)
    last_rows = [row for row in trainer.state.log_history if row["step"] == trainer.state.global_step]
    if trainer.eval_dataset is not None and not any("eval_reward" in row for row in last_rows):
        trainer.evaluate()
    trainer.save_model()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()

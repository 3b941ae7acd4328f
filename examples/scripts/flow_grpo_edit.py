# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["omnitrl[ocr]"]
# ///
"""
Train a model that edits images, with Flow-GRPO (https://huggingface.co/papers/2505.05470).

Any model family with condition images will do, such as FLUX.1-Kontext, Qwen-Image-Edit or FLUX.2. The dataset has an
instruction and an image in each row, here a file `edits.jsonl` beside a folder of photos:

```
{"prompt": "change the sign to \"OPEN\"", "image": "photos/shop.jpg"}
```

A reward that looks at the result alone is best satisfied by a result that has nothing to do with the image. So this
script adds a reward for what is kept of it, with the weight `--preservation_weight`:

```bash
accelerate launch --num_processes 8 examples/scripts/flow_grpo_edit.py \
    --config examples/scripts/recipes/kontext_edit.yaml \
    --dataset edits.jsonl \
    --rewards ocr
```

A dataset of the Hub whose columns have other names, with a reward of your own in `my_rewards.py`:

```bash
PYTHONPATH=. accelerate launch --num_processes 8 examples/scripts/flow_grpo_edit.py \
    --config examples/scripts/recipes/kontext_edit.yaml \
    --dataset timbrooks/instructpix2pix-clip-filtered --prompt_column edit_prompt --image_column original_image \
    --rewards my_rewards:follows_instruction --preservation_weight 0.3
```

`--resume true` goes on from the last checkpoint in `output_dir`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from omnitrl import FlowGRPOConfig
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, train
from omnitrl.errors import InputError


BLOCK = 8  # pixels: what structural similarity takes mean and variance of
LONGEST_SIDE = 256  # pixels: a larger image is compared at this size, so that fine texture does not count


@dataclass
class EditScriptArguments(ScriptArguments):
    """Options of this script."""

    prompt_column: str = field(default="prompt", metadata={"help": "Column with the instruction."})
    image_column: str = field(
        default="image", metadata={"help": "Column with the image that is edited, or with a list of images."}
    )
    preservation_weight: float = field(
        default=0.5, metadata={"help": "Weight of what is kept of the image, beside `rewards`; 0 logs it only."}
    )


def structural_similarity(first: np.ndarray, second: np.ndarray) -> float:
    """
    Mean structural similarity (https://doi.org/10.1109/TIP.2003.819861) of two grey images over blocks of 8 × 8.

    Args:
        first, second (`np.ndarray`):
            (H, W) from 0 to 1, of the same shape.

    Returns:
        `float`: 1 for equal images, about 0 for unrelated ones, negative where light and dark are exchanged.
    """
    height, width = (side // BLOCK for side in first.shape)

    def blocks(image: np.ndarray) -> np.ndarray:
        whole = image[: height * BLOCK, : width * BLOCK].reshape(height, BLOCK, width, BLOCK)
        return whole.swapaxes(1, 2).reshape(height * width, BLOCK * BLOCK)

    a, b = blocks(first), blocks(second)
    means, variances = (a.mean(axis=1), b.mean(axis=1)), (a.var(axis=1), b.var(axis=1))
    covariance = (a * b).mean(axis=1) - means[0] * means[1]
    luminance = (2 * means[0] * means[1] + 0.01**2) / (means[0] ** 2 + means[1] ** 2 + 0.01**2)
    structure = (2 * covariance + 0.03**2) / (variances[0] + variances[1] + 0.03**2)
    return float((luminance * structure).mean())


def preservation_reward(
    completions: Sequence[Any], image: Sequence[Any] | None = None, images: Sequence[Any] | None = None, **kwargs: Any
) -> list[float]:
    """
    How much of the image that was edited is still there: structural similarity of the brightness, up to 1.

    Args:
        completions (`list`):
            Edited images.
        image (`list`, *optional*):
            The images that were edited, in any form that a dataset has them in.
        images (`list[list]`, *optional*):
            Lists of images, of which the first is compared.
    """
    from omnitrl.media import read_picture
    from omnitrl.rewards import to_pil

    given = image if images is None else [several[0] for several in images]
    if given is None:
        raise InputError("The dataset has no column 'image': name the one with the images, --image_column input.")
    values = []
    for result, before in zip(completions, given, strict=True):
        after = to_pil(result).convert("L")
        scale = min(1.0, LONGEST_SIDE / max(after.size))
        size = max(round(after.width * scale), BLOCK), max(round(after.height * scale), BLOCK)
        pair = [picture.convert("L").resize(size) for picture in (read_picture(before, "The image"), after)]
        values.append(structural_similarity(*(np.asarray(picture, dtype=np.float64) / 255 for picture in pair)))
    return values


def edits_of(source: str | None, split: str, script_args: EditScriptArguments) -> Any:
    """Rows with `prompt` and `image` or `images` from wherever an option says, `None` for no option."""
    from omnitrl import load_prompts
    from omnitrl.data.prompts import load_named, pick_split
    from omnitrl.data.rows import with_paths

    if source is None:
        return None
    rows: Any = load_named(source, split)
    rows = pick_split(rows, split, source) if isinstance(rows, dict) else rows
    several = script_args.image_column == "images"
    names = {script_args.prompt_column: "prompt", script_args.image_column: "images" if several else "image"}
    for name in names:
        if name not in rows.column_names:
            raise InputError(f"{source} has no column {name!r}, it has {rows.column_names}: name another one.")
    # A column that has the name already is another one, as that of captions beside that of instructions.
    others = [new for old, new in names.items() if old != new and new in rows.column_names]
    rows = rows.remove_columns(others).rename_columns({old: new for old, new in names.items() if old != new})
    path = Path(source)
    return load_prompts(with_paths(rows, path.parent) if path.is_file() else rows)


def main(script_args: EditScriptArguments, training_args: FlowGRPOConfig) -> None:
    """Builds the trainer, trains, evaluates and saves."""
    from omnitrl import FlowGRPOTrainer

    rewards = script_args.rewards or []
    weights = training_args.reward_weights or [1.0] * len(rewards)
    training_args.reward_weights = [*weights, script_args.preservation_weight]
    trainer = FlowGRPOTrainer(
        model=model_of(script_args.model),
        reward_funcs=[*rewards, preservation_reward],
        args=training_args,
        train_dataset=edits_of(script_args.dataset, script_args.dataset_split, script_args),
        eval_dataset=edits_of(script_args.eval_dataset, script_args.eval_split, script_args),
        peft_config=peft_config_of(script_args),
    )
    if trainer.flow_model.num_images[1] == 0:
        raise InputError(
            f"{type(trainer.flow_model.pipeline).__name__} takes no images: use a model that edits, such as "
            "--model black-forest-labs/FLUX.1-Kontext-dev."
        )
    train(trainer, script_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*make_parser(FlowGRPOConfig, EditScriptArguments).parse_args_and_config())

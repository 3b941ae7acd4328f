# SPDX-License-Identifier: Apache-2.0
"""Options and metrics are documented: each that exists, and none that does not."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import TrainingArguments

from omnitrl import FlowGRPOConfig, FlowGRPOTrainer
from omnitrl.quickstart import GLYPHS


ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "source" / "flow_grpo_trainer.md").read_text("utf-8")
INHERITED = {field.name: field for field in dataclasses.fields(TrainingArguments)}
FIELDS = {field.name: field for field in dataclasses.fields(FlowGRPOConfig)}


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def table_rows(text):
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_has_help(name):
    text = FIELDS[name].metadata["help"]
    if name not in INHERITED:
        assert len(text) > 10
        assert text.endswith("."), text


def test_options_that_take_json_are_listed():
    """HfArgumentParser hands a dict on the command line over as a string, and only listed fields are parsed."""
    ours = [name for name, field in FIELDS.items() if "dict" in str(field.type) and name not in INHERITED]
    assert ours == ["model_init_kwargs"]
    assert set(ours) <= set(FlowGRPOConfig._VALID_DICT_FIELDS)
    args = FlowGRPOConfig(output_dir="out", model_init_kwargs='{"revision": "main", "text_encoder_3": null}')
    assert args.model_init_kwargs == {"revision": "main", "text_encoder_3": None}


def test_the_table_of_options_is_complete_and_right():
    documented = {}
    for option, default, _ in table_rows(section("Options")):
        documented[option.strip("`")] = ast.literal_eval(default.strip("`"))
    ours = {
        name: field.default
        for name, field in FIELDS.items()
        if name not in INHERITED or INHERITED[name].default != field.default
    }
    assert documented == ours


def log_sharpness(prompts, completions, log_metric, **kwargs):
    log_metric("sharpness", 1.0)
    return [None if prompt == "SKY" else float(i) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Names of all metrics of a short run with every part that logs something, as the page writes them."""
    folder = tmp_path_factory.mktemp("run")
    args = FlowGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        height=32,
        width=64,
        max_sequence_length=1,
        num_inference_steps=3,
        num_inference_steps_eval=2,
        guidance_scale=1.0,
        num_generations=2,
        generation_batch_size=4,
        per_device_train_batch_size=2,
        beta=0.01,
        ema_decay=0.9,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer = FlowGRPOTrainer(
        model=GLYPHS,
        reward_funcs=log_sharpness,
        args=args,
        train_dataset=["CAT", "DOG"],
        eval_dataset={"heldout": ["SUN", "SKY"]},
        peft_config=LoraConfig(r=2),
    )
    trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    return {name.replace("log_sharpness", "{name}").replace("eval_heldout_", "eval_") for name in names}


@pytest.mark.slow
def test_every_logged_metric_is_documented(logged):
    documented = set(re.findall(r"`([^`]+)`", section("Logged metrics")))
    assert {"reward", "kl", "ratio/sum_log_std", "time/save", "eval_reward", "sharpness"} <= logged
    assert sorted(logged - documented - {"sharpness"}) == []


@pytest.mark.slow
def test_every_documented_metric_is_logged(logged):
    first_cells = [row[0] for row in table_rows(section("Logged metrics")) if "log_metric" not in row[0]]
    documented = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert sorted(documented - logged) == []

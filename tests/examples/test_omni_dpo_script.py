# SPDX-License-Identifier: Apache-2.0
"""The script of DPO for models that read, see and hear: its commands, its help, and a run on a tiny language model."""

import json

import pytest
import torch
from peft import PeftModel

from omnitrl.cli.omni_script import OmniScriptArguments, peft_config_of
from omnitrl.cli.script import make_parser
from omnitrl.omni.thinker import ATTENTION, EXPERTS, TOWERS
from omnitrl.trainer.omni_dpo_config import OmniDPOConfig
from tests.examples.test_trainer_scripts import ROOT, SCRIPTS, commands_of, load, num_processes
from tests.omni import tiny


script = load("omni_dpo")


def parsed(*words):
    parser = make_parser(OmniDPOConfig, OmniScriptArguments)  # a file leaves its values in a parser as defaults
    return parser.parse_args_and_config([*words, "--use_cpu", "true", "--bf16", "false"])


def test_the_commands_of_the_docstring_make_a_config(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = list(commands_of("omni_dpo"))
    assert len(commands) == 2
    made = [parsed(*words[words.index("examples/scripts/omni_dpo.py") + 1 :]) for words in commands]
    recipe, args = made[1]
    assert args.model_init_kwargs == {"dtype": "bfloat16"}
    assert (args.beta, args.label_smoothing, args.max_length) == (0.1, 0.1, 4096)
    assert (args.learning_rate, args.lr_scheduler_type, args.warmup_steps) == (1e-6, "cosine", 0.03)
    assert num_processes(commands[1]) * args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    lora = peft_config_of(recipe)
    assert (lora.r, lora.lora_alpha, lora.target_parameters) == (32, 64, EXPERTS)
    assert (lora.target_modules, lora.exclude_modules) == (set(ATTENTION), TOWERS)


def test_all_weights_and_attention_alone():
    for options, parameters in ((["--lora_r", "0"], "no adapter"), ([], None)):
        script_args, _ = parsed("--model", "m", "--dataset", "d", "--output_dir", "o", *options)
        lora = peft_config_of(script_args)
        assert ("no adapter" if lora is None else lora.target_parameters) == parameters


def test_the_script_says_what_it_needs():
    source = (SCRIPTS / "omni_dpo.py").read_text("utf-8")
    assert source.startswith("# SPDX-License-Identifier: Apache-2.0\n# /// script\n")
    assert "[`omni_dpo.py`](omni_dpo.py)" in (SCRIPTS / "README.md").read_text("utf-8")
    text = make_parser(OmniDPOConfig, OmniScriptArguments).format_help()
    for option in ("--model", "--dataset", "--label_smoothing", "--video_max_frames", "--push_to_hub"):
        assert f"{option} " in text


@pytest.mark.slow
def test_the_script_trains_evaluates_and_saves(tmp_path):
    model = tiny.language_model()
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + 1?"}], "chosen": str(i + 1), "rejected": str(i)}
        for i in range(4)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    out = tmp_path / "out"
    data = tmp_path / "pairs.jsonl"
    words = f"--model {tmp_path / 'model'} --dataset {data} --eval_dataset {data} --logging_steps 1"
    words += f" --output_dir {out} --max_steps 4 --learning_rate 1e-2 --per_device_train_batch_size 4 --lora_r 4"
    script.main(*parsed(*words.split(), "--report_to", "none", "--save_steps", "2"))
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text("utf-8"))
    losses = [row["loss"] for row in state["log_history"] if "loss" in row]
    assert len(losses) == state["global_step"] == 4
    assert losses[-1] < losses[0]
    adapted = PeftModel.from_pretrained(tiny.language_model(), out)
    tokens = torch.arange(60, 80)[None]
    with torch.no_grad():
        assert (adapted(tokens).logits - model(tokens).logits).abs().max() > 1e-3

# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from omnitrl import FlowGRPOConfig
from omnitrl.cli import quickstart
from omnitrl.cli.script import make_parser, peft_config_of
from omnitrl.models.sd3 import SD3Model


ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "examples" / "scripts" / "flow_grpo.py"
RECIPES = SCRIPT.parent / "recipes"


def parse(*words):
    return make_parser(FlowGRPOConfig).parse_args_and_config([str(word) for word in words])


def run(*words, timeout=280):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)], env=env, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.slow
def test_it_trains_evaluates_saves_and_resumes(tmp_path):
    out = tmp_path / "out"
    small = ["--num_generations", 4, "--generation_batch_size", 8, "--per_device_train_batch_size", 4]
    often = ["--eval_on_start", "false", "--eval_strategy", "no", "--save_steps", 1, "--lora_r", 4]
    words = ["--config", RECIPES / "glyphs_ocr.yaml", "--output_dir", out, "--use_cpu", "true", *small, *often]
    done = run(*words, "--max_steps", 2)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "grad_norm" in row] == [1, 2]
    (evaluation,) = [row for row in rows if "eval_reward" in row]
    assert evaluation["step"] == 2
    assert 0 < evaluation["eval_rewards/ocr_exact_reward/mean"] < evaluation["eval_reward"] < 1
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 32)  # the command line wins over the file
    assert "ff.net.2" in adapter["target_modules"]
    assert (out / "pytorch_lora_weights.safetensors").is_file()

    done = run(*words, "--max_steps", 3, "--resume", "true")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "grad_norm" in row] == [1, 2, 3]


@pytest.mark.slow
def test_help_lists_the_options_of_the_script_and_of_the_trainer():
    done = run("--help", timeout=120)
    assert done.returncode == 0
    for option in ("--model MODEL", "--lora_target_modules", "--sde_window_size", "--learning_rate", "--push_to_hub"):
        assert option in done.stdout


@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("model: glyphs\ndataset: glyphs:train\nrewards: [ocr]\nnum_generatoins: 4\n")
    done = run("--config", file, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: {file} has an unknown key 'num_generatoins'. Did you mean 'num_generations'?"
    )
    assert "Traceback" not in done.stderr


def test_the_recipe_of_the_small_model():
    script_args, args = parse("--config", RECIPES / "glyphs_ocr.yaml")
    assert script_args.rewards == ["ocr", "ocr_exact"]
    assert args.reward_weights == [1.0, 0.0]
    assert args.trained_steps(0) == (0, 1)
    assert (args.prompts_per_rollout, args.updates_per_rollout) == (8, 4)
    config = peft_config_of(script_args)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0)


def test_the_recipe_of_the_small_model_is_that_of_the_quickstart():
    values = yaml.safe_load((RECIPES / "glyphs_ocr.yaml").read_text("utf-8"))
    settings = quickstart.SHARED | quickstart.RECIPES["flow_grpo"]
    elsewhere = {"logging_steps", "report_to"}  # how a run is shown, not what it does
    assert {key: values.get(key) for key in settings if key not in elsewhere} == {
        key: value for key, value in settings.items() if key not in elsewhere
    }
    assert (values["lora_r"], values["lora_alpha"]) == (quickstart.LORA_RANK, quickstart.LORA_ALPHA)
    assert values["lora_target_modules"] == [*SD3Model.default_lora_targets, "ff.net.0.proj", "ff.net.2"]


def test_the_recipe_of_the_paper_makes_its_batch_on_eight_devices(monkeypatch):
    monkeypatch.setattr(FlowGRPOConfig, "world_size", 8)
    script_args, args = parse("--config", RECIPES / "sd35_ocr.yaml", "--dataset", "prompts.txt")
    assert args.generation_batch_size == 48 * 24
    assert args.prompts_per_rollout == 48
    assert args.updates_per_rollout == 2
    assert args.trained_steps(0) == tuple(range(9))
    assert (args.epsilon, args.beta, args.noise_level, args.guidance_scale) == (1e-4, 0.04, 0.7, 4.5)
    assert script_args.dataset == "prompts.txt"


def test_the_recipe_of_flux_makes_its_batch_on_eight_devices(monkeypatch):
    monkeypatch.setattr(FlowGRPOConfig, "world_size", 8)
    _, args = parse("--config", RECIPES / "flux_ocr.yaml", "--dataset", "prompts.txt", "--use_cpu", "true")
    assert args.generation_batch_size == 48 * 24
    assert (args.prompts_per_rollout, args.updates_per_rollout) == (48, 2)
    assert args.trained_steps(0) == tuple(range(5))
    assert (args.epsilon, args.beta, args.noise_level, args.guidance_scale) == (1e-4, 0.0, 0.9, 3.5)


def test_the_recipe_of_qwen_image_makes_its_batch_on_four_devices(monkeypatch):
    monkeypatch.setattr(FlowGRPOConfig, "world_size", 4)
    _, args = parse("--config", RECIPES / "qwen_image_ocr.yaml", "--dataset", "prompts.txt", "--use_cpu", "true")
    assert args.generation_batch_size == 32 * 16
    assert (args.prompts_per_rollout, args.updates_per_rollout) == (32, 2)
    assert args.max_steps == 300 * args.updates_per_rollout
    windows = {args.trained_steps(rollout) for rollout in range(50)}
    assert windows == {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert (args.epsilon, args.beta, args.noise_level, args.guidance_scale) == (1e-5, 0.0, 1.2, 4.0)


def test_the_recipe_of_ltx_makes_its_batch_on_eight_devices(monkeypatch):
    monkeypatch.setattr(FlowGRPOConfig, "world_size", 8)
    _, args = parse("--config", RECIPES / "ltx23_sound.yaml", "--dataset", "prompts.txt", "--use_cpu", "true")
    assert args.generation_batch_size == 32 * 8
    assert (args.prompts_per_rollout, args.updates_per_rollout) == (32, 2)
    assert args.max_steps == 100 * args.updates_per_rollout
    windows = [args.trained_steps(rollout) for rollout in range(40)]
    assert all(len(window) == 3 and set(window) <= set(range(10)) for window in windows)
    assert set().union(*windows) == set(range(10))
    assert any(window[2] - window[0] > 2 for window in windows)
    assert args.weights_of_modalities is None


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_say_what_they_train(recipe):
    values = yaml.safe_load(recipe.read_text("utf-8"))
    assert {"model", "rewards", "output_dir", "max_steps", "learning_rate"} <= set(values)

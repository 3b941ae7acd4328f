# SPDX-License-Identifier: Apache-2.0
"""`omnitrl quickstart`, cut short: what it writes and what its numbers are called."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from omnitrl.cli.main import main
from omnitrl.cli.quickstart import RECIPES, make_trainer, summarize
from omnitrl.models import load_flow_model
from omnitrl.quickstart import GLYPHS
from omnitrl.report import EvaluationRecord, read_metrics
from omnitrl.trainer import TRAINERS


def test_every_recipe_is_of_a_trainer():
    assert RECIPES.keys() <= TRAINERS.keys()


def test_an_unknown_algorithm_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["quickstart", "--algo", "flow_grp"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        f"error: --algo flow_grp has no quickstart; there is {', '.join(RECIPES)}. Did you mean 'flow_grpo'?\n"
    )


@pytest.mark.parametrize("words", [["--algo", "diffusion_opd"], ["--algo", "awm", "--teacher", "there"]])
def test_a_teacher_is_for_distillation_alone(capsys, words):
    with pytest.raises(SystemExit) as exit_:
        main(["quickstart", *words])
    assert exit_.value.code == 2
    assert "such as --algo diffusion_opd --teacher quickstart-output" in capsys.readouterr().err


def test_the_summary_takes_the_first_and_the_last_evaluation():
    def record(step, name, reward):
        metrics = {f"{name}_reward": reward, f"{name}_rewards/ocr_exact_reward/mean": reward / 2}
        return EvaluationRecord(step=step, name=name, metrics=metrics)

    records = [record(8, "eval", 0.9), record(0, "eval", 0.5), record(4, "eval", 0.1)]
    records += [record(s, n, r) for n in ("eval_train", "eval_unseen") for s, r in ((0, 0.25), (8, 0.75))]
    results = summarize(records)
    assert results["eval/reward_before"] == 0.5
    assert results["eval/reward_after"] == 0.9
    assert results["eval/exact_after"] == 0.45
    assert results["eval_unseen/reward_after"] == 0.75
    assert len(results) == 12


def save_teacher(folder):
    """An adapter on the shipped model, as a quickstart leaves one."""
    network = load_flow_model(GLYPHS, dtype=torch.float32).transformer
    config = LoraConfig(r=2, lora_alpha=1, target_modules=["attn.to_q", "attn.to_out.0"], init_lora_weights=False)
    get_peft_model(network, config).save_pretrained(folder)
    return str(folder)


# What the command does is the same for all; of these, each is given its data, rewards or teacher in its own way. One
# of them with the oldest libraries too; there, tiny models show that the others run.
OWN_WAY = ("diffusion_dpo", "srpo", "diffusion_opd")
RUNS = [pytest.param("flow_grpo", marks=pytest.mark.compat), *OWN_WAY]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(RECIPES.keys() - {"flow_grpo", *OWN_WAY}))
def test_the_recipe_makes_an_update_of_the_shipped_model(tmp_path, algorithm):
    small = {"generation_batch_size": 16, "per_device_train_batch_size": 2, "rollout_batch_size": 16}
    never = {"eval_strategy": "no", "save_strategy": "no"}
    given = {"output_dir": str(tmp_path), "max_steps": 1, "logging_steps": 1, "use_cpu": True, "seed": 1}
    trainer = make_trainer(algorithm, {**given, **small, **never, "num_generations": 8})
    before = [weight.detach().clone() for weight in trainer.trainable_parameters()]
    trainer.train()
    assert trainer.state.global_step == 1
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert 0.2 < rewards[0] < 0.8
    after = trainer.trainable_parameters()
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", RUNS)
def test_a_short_run_writes_everything_it_says(tmp_path, algorithm):
    folder = tmp_path / "run"
    words = ["--steps", "4", "--seed", "1"]
    if algorithm == "diffusion_opd":
        words += ["--teacher", save_teacher(tmp_path / "teacher")]
    assert main(["quickstart", "--algo", algorithm, "--output-dir", str(folder), *words]) == 0
    results = read_metrics(folder / "metrics.jsonl")[-1]
    assert 0.3 < results["eval/reward_before"] < 0.7
    assert 0.3 < results["eval/reward_after"] < 0.8
    assert 0 < results["eval/exact_before"] < 0.4
    assert 0 < results["train_seconds"] < results["wall_seconds"]
    for name in (
        "report.html",
        "before_after.png",
        "reward_curve.png",
        "README.md",
        "pytorch_lora_weights.safetensors",
        "adapter_model.safetensors",
        "checkpoint-4/trainer_state.json",
    ):
        assert (folder / name).stat().st_size > 0
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 16

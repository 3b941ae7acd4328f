# SPDX-License-Identifier: Apache-2.0
"""The script with a judge: its options, and runs on a tiny checkpoint against a server with scripted answers."""

import inspect
import json
import math

import pytest

from omnitrl import FlowGRPOConfig
from omnitrl.cli.script import make_parser
from omnitrl.errors import InputError
from tests.examples.test_trainer_scripts import ROOT, SCRIPTS, commands_of, load, num_processes
from tests.rewards.judge_server import JudgeServer, Reply
from tests.tiny.sd3 import tiny_sd3


NAME = "flow_grpo_judge"
SCRIPT = load(NAME)


def parse(*words):
    parser = make_parser(FlowGRPOConfig, SCRIPT.JudgeScriptArguments)
    return parser.parse_args_and_config([str(word) for word in words])


def run(tmp_path, *words):
    tiny_sd3().save_pretrained(tmp_path / "model")
    rows = [{"prompt": prompt, "questions": ["Is it?", "Is it so?"]} for prompt in ("a cat", "a map", "a sun")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script_args, args = parse(
        *("--model", tmp_path / "model", "--dataset", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "out"),
        *("--height", 64, "--width", 64, "--max_sequence_length", 16, "--num_inference_steps", 3, "--lora_r", 2),
        *("--num_generations", 2, "--generation_batch_size", 4, "--per_device_train_batch_size", 2),
        *("--max_steps", 2, "--use_cpu", "true", "--save_report", "false", *words),
    )
    SCRIPT.main(script_args, args)
    return [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]


def answers(request, number):
    """Of which each differs from the one before."""
    return Reply("Yes" if number % 4 else "No", first_token={"Yes": -0.1 - 0.1 * number, "No": -1.0})


# Templates, and the requests that they make for a sample.
TEMPLATES = [
    ("yes_no", 1),
    pytest.param("questions", 2, marks=pytest.mark.slow),
    pytest.param("pairwise", 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("template", "requests"), TEMPLATES)
def test_it_trains_with_the_judge_and_saves_its_adapter(template, requests, tmp_path):
    pytest.importorskip("openai", reason='needs `pip install "omnitrl[judge]"`')

    def script(request, number):
        return (
            Reply("Answer: A" if number % 2 else "Answer: Tie") if template == "pairwise" else answers(request, number)
        )

    with JudgeServer(script, models=("a", "b")) as server:
        metrics = run(
            tmp_path,
            *("--judge_url", server.url, "--judge_model", "b", "--judge_template", template),
            *("--rewards", "brightness", "--reward_weights", 0.0, 2.0),
        )
    steps = [row for row in metrics if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert len(server.requests) == 4 * requests
    assert {request["model"] for request in server.requests} == {"b"}
    mean = steps[0][f"rewards/judge_{template}/mean"]
    assert 0 < mean < 1
    assert steps[0]["reward"] == pytest.approx(2 * mean, abs=1e-6)
    assert steps[0][f"judge_{template}/failed_share"] == 0.0
    assert not math.isnan(steps[0]["rewards/brightness_reward/mean"])
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_an_unknown_template_is_refused():
    script_args, _ = parse(
        *("--model", "m", "--dataset", "d", "--output_dir", "o", "--use_cpu", "true", "--judge_template", "yes")
    )
    with pytest.raises(InputError, match="--judge_template yes is unknown: use one of yes_no, score, ocr, questions"):
        SCRIPT.judge_of(script_args)


def test_its_commands_make_a_config(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = list(commands_of(NAME))
    assert len(commands) == 2
    for words in commands:
        monkeypatch.setattr(FlowGRPOConfig, "world_size", num_processes(words))
        options = words[words.index(f"examples/scripts/{NAME}.py") + 1 :]
        script_args, args = parse(*options, "--use_cpu", "true")
        assert SCRIPT.judge_of(script_args).__name__ == f"judge_{script_args.judge_template}"
        assert args.generation_batch_size == 7 * 9 * 16
        assert args.prompts_per_rollout == 48
        assert args.updates_per_rollout == 2


def test_it_is_listed_and_says_what_it_needs():
    source = inspect.getsource(SCRIPT)
    assert source.startswith("# SPDX-License-Identifier: Apache-2.0\n# /// script\n")
    assert f"[`{NAME}.py`]({NAME}.py)" in (SCRIPTS / "README.md").read_text("utf-8")

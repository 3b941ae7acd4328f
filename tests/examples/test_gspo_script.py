# SPDX-License-Identifier: Apache-2.0
"""The script of GSPO: its commands, its help, what it makes of rows, and a run on a tiny language model."""

import json

import datasets
import pytest
from safetensors.torch import load_file

from omnitrl.cli.omni_script import peft_config_of
from omnitrl.cli.script import make_parser
from omnitrl.errors import InputError
from omnitrl.omni.thinker import ATTENTION, EXPERTS, TOWERS
from omnitrl.rewards import BUILTIN_REWARDS
from omnitrl.trainer.gspo_config import GSPOConfig
from tests.examples.test_trainer_scripts import ROOT, SCRIPTS, commands_of, load, num_processes
from tests.omni import tiny


script = load("gspo")


def parsed(*words):
    parser = make_parser(GSPOConfig, script.GSPOScriptArguments)  # a file leaves its values in a parser as defaults
    return parser.parse_args_and_config([*words, "--use_cpu", "true", "--bf16", "false"])


def test_the_commands_of_the_docstring_make_a_config(monkeypatch):
    monkeypatch.chdir(ROOT)
    made = {}
    for words in commands_of("gspo"):
        monkeypatch.setattr(GSPOConfig, "world_size", num_processes(words))
        script_args, args = parsed(*words[words.index("examples/scripts/gspo.py") + 1 :])
        made[script_args.task] = args
        lora = peft_config_of(script_args)
        assert (lora.r, lora.lora_alpha, lora.target_modules) == (32, 64, set(ATTENTION))
        assert (lora.exclude_modules, lora.target_parameters) == (TOWERS, None)
    assert made.keys() == script.TASKS.keys()
    recipe = made["choice"]
    assert (recipe.learning_rate, recipe.weight_decay, recipe.delta) == (3e-6, 0.01, 10.0)
    assert (recipe.generation_batch_size, recipe.num_generations) == (128 * 16, 16)
    assert 4 * recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps == 16 * 16
    assert (recipe.epsilon, recipe.epsilon_high, recipe.max_completion_length) == (3e-4, 4e-4, 8192)


def test_each_task_has_a_reward_that_there_is():
    assert {reward for reward, _ in script.TASKS.values()} <= set(BUILTIN_REWARDS)


def test_experts_and_all_weights():
    given = ["--model", "m", "--dataset", "d", "--output_dir", "o"]
    assert peft_config_of(parsed(*given, "--lora_experts", "true")[0]).target_parameters == EXPERTS
    assert peft_config_of(parsed(*given, "--lora_r", "0")[0]) is None


def test_a_question_becomes_a_chat():
    for choices in (["a cat", "a dog"], {"text": ["a cat", "a dog"], "label": ["1", "2"]}):
        row = {"question": "Which animal?", "choices": choices, "images": ["0.png"]}
        (message,) = script.chat_of(row, "question", "Say the letter.")["prompt"]
        assert message == {"role": "user", "content": "Which animal?\nA. a cat\nB. a dog\nSay the letter."}
    many = {"question": "Which?", "choices": list(range(12))}
    assert "\nL. 11\nSay it." in script.chat_of(many, "question", "Say it.")["prompt"][0]["content"]


def test_a_column_of_questions_that_there_is_not():
    rows = datasets.Dataset.from_dict({"questions": ["?"]})
    args, _ = parsed("--model", "m", "--dataset", "d", "--output_dir", "o")
    with pytest.raises(InputError, match=r"question_column='question' is none .* Did you mean 'questions'\?"):
        script.prompts_of(rows, args)
    chats = rows.add_column("prompt", ["x"])
    assert script.prompts_of(chats, args) is chats


def test_a_task_that_there_is_not():
    with pytest.raises(
        InputError, match=r"task='maths' is unknown: use one of choice, audio, math\. Did you mean 'math'"
    ):
        script.main(*parsed("--task", "maths", "--model", "m", "--dataset", "d", "--output_dir", "o"))


def test_the_script_says_what_it_needs():
    source = (SCRIPTS / "gspo.py").read_text("utf-8")
    assert source.startswith("# SPDX-License-Identifier: Apache-2.0\n# /// script\n")
    assert "[`gspo.py`](gspo.py)" in (SCRIPTS / "README.md").read_text("utf-8")
    text = make_parser(GSPOConfig, script.GSPOScriptArguments).format_help()
    for option in ("--model", "--task", "--epsilon_high", "--video_max_frames", "--push_to_hub"):
        assert f"{option} " in text


@pytest.mark.slow
def test_the_script_trains_evaluates_and_saves(tmp_path):
    model = tiny.language_model()
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"question": f"{i} or {i + 1}?", "choices": [str(i), str(i + 1)], "answer": "A"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script.main(
        *parsed(
            "--task", "choice", "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl"),
            "--eval_dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "out"),
            "--max_steps", "2", "--num_generations", "2", "--per_device_train_batch_size", "2",
            "--per_device_eval_batch_size", "2", "--steps_per_generation", "2", "--max_completion_length", "4",
            "--logging_steps", "1", "--report_to", "none", "--save_strategy", "steps", "--save_steps", "1",
            "--learning_rate", "1e-2",
        )
    )  # fmt: skip
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any("lora_B" in name for name in weights)
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert "rewards/multiple_choice_reward/mean" in state["log_history"][0]

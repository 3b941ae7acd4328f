# SPDX-License-Identifier: Apache-2.0
"""What the example scripts share: options, prompts, adapters, and the order of training, evaluating and saving."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict

from omnitrl import FlowGRPOConfig
from omnitrl.cli.script import ScriptArguments, make_parser, model_of, peft_config_of, prompts_of, train
from omnitrl.errors import InputError
from omnitrl.quickstart import GLYPHS


WORDS = ["--model", "glyphs", "--dataset", "glyphs:train", "--rewards", "ocr", "--output_dir", "out"]


def parse(*words):
    return make_parser(FlowGRPOConfig).parse_args_and_config([*WORDS, *words])


def test_options_of_the_script_and_of_the_trainer_are_read_together():
    script_args, args = parse("--lora_r", "8", "--noise_level", "0.5")
    assert (script_args.model, script_args.rewards, script_args.lora_r) == ("glyphs", ["ocr"], 8)
    assert (args.output_dir, args.noise_level) == ("out", 0.5)


def test_required_options_are_asked_for():
    with pytest.raises(InputError, match="--dataset"):
        make_parser(FlowGRPOConfig).parse_args_and_config(["--model", "glyphs", "--rewards", "ocr"])


def test_a_script_with_more_options_names_its_class():
    @dataclass
    class More(ScriptArguments):
        teacher: str | None = field(default=None, metadata={"help": "Folder of another adapter."})

    script_args, _ = make_parser(FlowGRPOConfig, More).parse_args_and_config([*WORDS, "--teacher", "there"])
    assert (script_args.teacher, script_args.dataset) == ("there", "glyphs:train")


def test_a_rank_means_a_new_adapter_of_it():
    config = peft_config_of(parse("--lora_r", "8", "--lora_alpha", "12", "--lora_target_modules", "to_q", "to_k")[0])
    assert (config.r, config.lora_alpha, config.target_modules) == (8, 12, {"to_q", "to_k"})
    assert config.init_lora_weights == "gaussian"


def test_no_rank_means_all_weights_and_a_folder_means_that_adapter():
    assert peft_config_of(parse("--lora_r", "0")[0]) is None
    assert peft_config_of(parse("--adapter", "some/adapter")[0]) == "some/adapter"


def test_the_model_that_ships_with_the_package_has_a_short_name():
    assert model_of("glyphs") == GLYPHS
    assert model_of("some/folder") == "some/folder"


def test_words_that_ship_with_the_package_are_a_dataset():
    assert prompts_of("glyphs:heldout", "train")[0] == {"prompt": "CAT"}
    with pytest.raises(InputError, match="'test' is not one of 'train', 'heldout', 'unseen'"):
        prompts_of("glyphs:test", "train")


def test_prompts_come_from_a_file_and_from_the_split_of_a_dataset(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\ntwo dogs\n")
    assert list(prompts_of(str(tmp_path / "prompts.txt"), "train")["prompt"]) == ["a cat", "two dogs"]
    splits = {name: Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert list(prompts_of(str(tmp_path / "saved"), "test")["prompt"]) == ["test"]


def test_no_dataset_is_none():
    assert prompts_of(None, "test") is None


class Recorder:
    """Stands for a trainer, and writes down what is asked of it."""

    def __init__(self, log_history=(), eval_dataset=None, push_to_hub=False):
        self.args = SimpleNamespace(resume_from_checkpoint=None, push_to_hub=push_to_hub)
        self.state = SimpleNamespace(global_step=4, log_history=list(log_history))
        self.eval_dataset = eval_dataset
        self.calls = []

    def train(self, resume_from_checkpoint):
        self.calls.append(f"train {resume_from_checkpoint}")

    def evaluate(self):
        self.calls.append("evaluate")

    def save_model(self):
        self.calls.append("save")

    def push_to_hub(self):
        self.calls.append("push")


EARLIER, NOW = ([{"step": step, "eval_reward": 1.0}] for step in (2, 4))


@pytest.mark.parametrize(
    ("words", "given", "calls"),
    [
        ([], {}, ["train None", "save"]),
        (["--resume"], {"push_to_hub": True}, ["train True", "save", "push"]),
        ([], {"eval_dataset": ["a"]}, ["train None", "evaluate", "save"]),
        (
            [],
            {"eval_dataset": ["a"], "log_history": EARLIER},
            ["train None", "evaluate", "save"],
        ),
        ([], {"eval_dataset": ["a"], "log_history": NOW}, ["train None", "save"]),
    ],
)
def test_what_was_trained_is_evaluated_once_saved_and_pushed(words, given, calls):
    recorder = Recorder(**given)
    train(recorder, parse(*words)[0])
    assert recorder.calls == calls

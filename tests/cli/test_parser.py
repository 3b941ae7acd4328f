# SPDX-License-Identifier: Apache-2.0
import os
import re
from dataclasses import dataclass, field
from typing import Literal

import pytest
from transformers import TrainingArguments

from omnitrl.cli.parser import OmniParser
from omnitrl.errors import InputError


pytestmark = pytest.mark.compat


@dataclass
class ScriptConfig:
    model: str = "tiny"
    sde_type: Literal["flow_sde", "cps"] = "flow_sde"
    targets: list[str] = field(default_factory=lambda: ["to_q"])


@dataclass
class Config(TrainingArguments):
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "reward_kwargs"]

    noise_level: float = 0.7
    num_generations: int = 4
    epsilon_high: float | None = None
    same_init_noise: bool = True
    reward_kwargs: dict | str | None = None


def parse(*words, **kwargs):
    return OmniParser([ScriptConfig, Config]).parse_args_and_config(["--output_dir", "out", *words], **kwargs)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "train.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_command_line_over_file_over_defaults(yaml_file):
    path = yaml_file(
        "model: sd3\nlearning_rate: 1e-4\nnum_generations: 8\nepsilon_high: 1\nsame_init_noise: false\n"
        "reward_kwargs: {language: en}\ntargets: [to_k, to_v]\nrun_name: 7\nsde_type: cps\n"
        "env: {OMNITRL_TEST_PARSER: 5}\n"
    )
    script, config = parse("--config", path, "--num_generations", "16", "--warmup-steps", "3")
    assert script == ScriptConfig(model="sd3", sde_type="cps", targets=["to_k", "to_v"])
    assert (config.learning_rate, config.num_generations, config.warmup_steps) == (1e-4, 16, 3)
    assert (config.epsilon_high, config.same_init_noise, config.noise_level) == (1.0, False, 0.7)
    assert (config.reward_kwargs, config.run_name) == ({"language": "en"}, "7")
    assert os.environ.pop("OMNITRL_TEST_PARSER") == "5"
    assert parse(f"--config={path}")[1].num_generations == 8


def test_options_without_a_file():
    script, config = parse("--no_same_init_noise", "--reward_kwargs", '{"a": 1}', "--targets", "a", "b")
    assert (config.same_init_noise, config.reward_kwargs, script.targets) == (False, {"a": 1}, ["a", "b"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--noise_levl", "0.5"], "Unknown option --noise_levl. Did you mean '--noise_level'?"),
        (["--noise-levl=0.5"], "Unknown option --noise-levl. Did you mean '--noise_level'?"),
        (["noise_level=0.5"], "Unknown option noise_level. Did you mean '--noise_level'?"),
        (["--learning_rat", "1"], "Unknown option --learning_rat. Did you mean '--learning_rate'?"),
        (["--zzzzzzzzzz", "1"], "Unknown option --zzzzzzzzzz."),
        (["--num_generations", "four"], "Argument --num_generations/--num-generations: invalid int value: 'four'"),
        (["--sde_type", "dance"], "'flow_sde', 'cps'"),
        (["--config"], "--config needs the path of a YAML file"),
        (["--config", "a", "--config", "b"], "--config stands twice"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml cannot be read: No such file or directory."),
    ],
)
def test_a_mistake_on_the_command_line(words, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        parse(*words)
    assert "\n" not in str(caught.value)


def test_a_misspelt_option_is_named_before_what_follows_from_it():
    with pytest.raises(InputError, match="Did you mean '--eval_strategy'"):
        parse("--eval_strateg", "steps", "--load_best_model_at_end")  # which TrainingArguments refuses by itself


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("noise_levl: 0.5", "has an unknown key 'noise_levl'. Did you mean 'noise_level'?"),
        ("noise-level: 0.5", "has an unknown key 'noise-level'. Did you mean 'noise_level'?"),
        ("num_generations: 4.5", "num_generations cannot be 4.5"),
        ("num_generations: true", "num_generations cannot be True"),
        ("num_generations: [4]", "num_generations cannot be [4]"),
        ("noise_level: high", "noise_level cannot be 'high'"),
        ("same_init_noise: maybe", "same_init_noise cannot be 'maybe'"),
        ("targets: to_q", "targets must be a list, got 'to_q': write targets: [to_q]."),
        ("sde_type: dance", "sde_type must be one of flow_sde, cps, got 'dance'"),
        ("sde_type: cpss", "Did you mean 'cps'?"),
        ("eval_strategy: no", 'YAML reads yes, no, on and off as booleans: write eval_strategy: "no".'),
        ("beta1: 1\nbeta1: 2", "has the key 'beta1' twice, the second time in line 2"),
        ("- 1", "must be a YAML mapping"),
        ("", "must be a YAML mapping"),
        ("a: [1", "is not YAML"),
    ],
)
def test_a_mistake_in_the_file(yaml_file, text, message):
    path = yaml_file(text)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        parse("--config", path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_remaining_strings_are_returned_on_request(yaml_file):
    path = yaml_file("unknown: 1\nmodel: sd3")
    script, config, from_file, from_line = parse(
        "--config", path, "--other", "2", return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (script.model, config.output_dir) == ("sd3", "out")
    assert (from_file, from_line) == (["--unknown", "1"], ["--other", "2"])


def test_a_missing_required_option():
    @dataclass
    class Needs:
        model: str

    with pytest.raises(InputError, match="The following arguments are required: --model"):
        OmniParser(Needs).parse_args_and_config([])

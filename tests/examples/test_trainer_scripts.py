# SPDX-License-Identifier: Apache-2.0
"""Each algorithm has an example script whose own commands are read by its parser and make a config."""

import importlib.util
import inspect
import itertools
import re
import shlex
import sys
from pathlib import Path

import pytest

from omnitrl.cli.script import ScriptArguments, make_parser
from omnitrl.trainer import TRAINERS, get_trainer


ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "examples" / "scripts"


def load(name):
    """The script as a module, without running it."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def classes_of(name):
    """What `main` of the script takes: the class of its own options, and the config."""
    return list(inspect.get_annotations(load(name).main, eval_str=True).values())[:2]


def commands_of(name):
    """The commands of the script's docstring, as words."""
    for block in re.findall(r"```bash\n(.*?)```", load(name).__doc__, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if f"examples/scripts/{name}.py" in words:
                yield words


def num_processes(words):
    return next((int(n) for flag, n in itertools.pairwise(words) if flag.startswith("--num_processes")), 1)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_script_is_for_the_trainer_of_its_name(name):
    script_class, config_class = classes_of(name)
    assert issubclass(script_class, ScriptArguments)
    assert config_class is get_trainer(name).config_class
    assert TRAINERS[name] in inspect.getsource(load(name).main)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_commands_of_the_docstring_make_a_config(name, monkeypatch):
    script_class, config_class = classes_of(name)
    monkeypatch.chdir(ROOT)
    commands = list(commands_of(name))
    assert commands, "the docstring shows no command"
    for words in commands:
        monkeypatch.setattr(config_class, "world_size", num_processes(words))
        options = words[words.index(f"examples/scripts/{name}.py") + 1 :]
        parser = make_parser(config_class, script_class)  # a file leaves its values in a parser as defaults
        script_args, args = parser.parse_args_and_config([*options, "--use_cpu", "true"])  # which may have no bf16
        assert script_args.model
        assert args.output_dir


@pytest.mark.parametrize("name", TRAINERS)
def test_help_describes_every_option(name):
    script_class, config_class = classes_of(name)
    text = make_parser(config_class, script_class).format_help()
    for option in ("--model", "--dataset", "--learning_rate", "--rollout_engine", "--push_to_hub"):
        assert f"{option} " in text


@pytest.mark.parametrize("name", TRAINERS)
def test_the_script_runs_from_a_file_that_says_what_it_needs(name):
    source = (SCRIPTS / f"{name}.py").read_text("utf-8")
    assert source.startswith("# SPDX-License-Identifier: Apache-2.0\n# /// script\n")
    assert f"make_parser({get_trainer(name).config_class.__name__}" in source
    assert f"[`{name}.py`]({name}.py)" in (SCRIPTS / "README.md").read_text("utf-8")

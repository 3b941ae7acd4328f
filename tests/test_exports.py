# SPDX-License-Identifier: Apache-2.0
"""Public names: what is imported lazily, what static checkers are told and what registries list are the same."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import omnitrl
import omnitrl.trainer
from omnitrl.errors import InputError
from omnitrl.trainer import ALL_TRAINERS, OMNI_TRAINERS, TRAINERS, get_trainer


LAZY_PACKAGES = ["omnitrl", "omnitrl.trainer"]


def told_to_checkers(package):
    """Name → module, of the imports under `if TYPE_CHECKING`."""
    tree = ast.parse(Path(package.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {alias.name: node.module for node in block.body for alias in node.names}


@pytest.mark.parametrize("name", LAZY_PACKAGES)
def test_static_checkers_are_told_the_lazy_names(name):
    package = import_module(name)
    full = {key: module if "." in module else f"{name}.{module}" for key, module in package._LAZY.items()}
    assert told_to_checkers(package) == full


@pytest.mark.parametrize("name", LAZY_PACKAGES)
def test_lazy_names_are_public(name):
    package = import_module(name)
    assert set(package._LAZY) <= set(package.__all__)
    assert len(set(package.__all__)) == len(package.__all__)


def test_the_trainers_of_the_package_are_those_that_are_listed():
    assert set(TRAINERS).isdisjoint(OMNI_TRAINERS)
    trainers = set(ALL_TRAINERS.values())
    configs = {get_trainer(name).config_class.__name__ for name in ALL_TRAINERS}
    assert {name for name in omnitrl.__all__ if name.endswith(("Trainer", "Config"))} == trainers | configs


@pytest.mark.parametrize("algorithm", ALL_TRAINERS)
def test_an_algorithm_is_a_class_and_its_config(algorithm):
    name = ALL_TRAINERS[algorithm]
    trainer_class = get_trainer(algorithm)
    config_class = trainer_class.config_class
    assert (trainer_class.__name__, config_class.__name__) == (name, name.removesuffix("Trainer") + "Config")
    for public in (trainer_class, config_class):
        assert getattr(omnitrl, public.__name__) is getattr(omnitrl.trainer, public.__name__) is public
    assert trainer_class.__module__ == f"omnitrl.trainer.{algorithm}_trainer"
    assert config_class.__module__ == f"omnitrl.trainer.{algorithm}_config"


@pytest.mark.parametrize("algorithm", ALL_TRAINERS)
def test_a_trainer_says_what_it_is_called_and_whose_it_is(algorithm):
    trainer_class = get_trainer(algorithm)
    assert trainer_class._name == ALL_TRAINERS[algorithm].removesuffix("Trainer")
    assert trainer_class._tag_names[0] == "omnitrl"
    paper = trainer_class._paper
    assert set(paper) == {"title", "id", "citation"}
    assert f"arXiv:{paper['id']}" in paper["citation"]
    assert paper["title"] in paper["citation"].replace("{", "").replace("}", "")


def test_an_unknown_algorithm_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"There is no algorithm 'flow_grp', but flow_grpo.*Did you mean 'flow_grpo'"):
        get_trainer("flow_grp")

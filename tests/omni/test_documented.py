# SPDX-License-Identifier: Apache-2.0
"""Trainers of models that write text are documented: each has a page with its options and metrics, and is linked."""

import pytest
import yaml
from trl import DPOConfig, GRPOConfig

from omnitrl.trainer import OMNI_TRAINERS, get_trainer
from tests.omni import chats
from tests.test_documented import (
    DOCS,
    ROOT,
    defaults,
    documented_options,
    entries_of_the_paper_index,
    first_cells,
    locals_of,
    page,
    section,
)


# Whose options a page does not repeat.
OF_TRL = (GRPOConfig, DPOConfig)


def added_or_changed(config_class):
    before = defaults(next(parent for parent in config_class.__mro__[1:] if parent in OF_TRL))
    given = defaults(config_class)
    return {name: value for name, value in given.items() if name not in before or before[name] != value}


@pytest.mark.parametrize("name", OMNI_TRAINERS)
def test_the_page_of_a_trainer_has_the_options_that_it_adds_or_changes(name):
    config_class = get_trainer(name).config_class
    assert documented_options(section(page(f"{name}_trainer"), "Options")) == added_or_changed(config_class)


@pytest.mark.parametrize("name", OMNI_TRAINERS)
def test_a_trainer_has_a_page_and_is_where_people_look(name):
    assert f"{name}_trainer" in set(locals_of(yaml.safe_load((DOCS / "_toctree.yml").read_text("utf-8"))))
    text, trainer_class = page(f"{name}_trainer"), get_trainer(name)
    assert f"https://huggingface.co/papers/{trainer_class._paper['id']}" in text
    for documented in (OMNI_TRAINERS[name], trainer_class.config_class.__name__):
        assert f"[[autodoc]] {documented}\n" in text
    assert f"[`{OMNI_TRAINERS[name]}`](docs/source/{name}_trainer.md)" in (ROOT / "README.md").read_text("utf-8")
    assert f"`{OMNI_TRAINERS[name]}`" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"({name}_trainer.md)" in page("index")


@pytest.mark.parametrize("name", OMNI_TRAINERS)
def test_the_paper_of_a_trainer_is_in_the_index(name):
    trainer_class = get_trainer(name)
    entry = entries_of_the_paper_index()[trainer_class._paper["title"]]
    assert f"https://huggingface.co/papers/{trainer_class._paper['id']}" in entry
    assert f"{trainer_class.config_class.__name__}(" in entry
    assert f"[`{OMNI_TRAINERS[name]}`]" in entry


@pytest.mark.slow
def test_metrics_of_gspo_that_trl_has_not_are_documented(tmp_path):
    trained = chats.trainer(tmp_path, max_steps=1)
    trained.train()
    logged = {name.replace("vowels", "{name}") for row in trained.state.log_history for name in row}
    documented = first_cells(section(page("gspo_trainer"), "Logged metrics"))
    assert documented == {name for name in logged if name.startswith("ratio/") or name.endswith("/failed")}

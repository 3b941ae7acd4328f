# SPDX-License-Identifier: Apache-2.0
"""The guide 'Add your model in an afternoon' does what it says: its code runs, its figures are those of the files."""

import json
import re
from pathlib import Path

import pytest

from omnitrl.models import registry


ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "source" / "add_a_model.md").read_text("utf-8")


def code_of(title):
    """The complete programs below a heading, those that leave no arguments out."""
    below = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [code for code in re.findall(r"```python\n(.*?)```", below, re.DOTALL) if ", ...)" not in code]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the code of 'A model of your own' leaves behind, and where it ran."""
    folder = tmp_path_factory.mktemp("guide")
    made = {"__name__": "guide"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        training, checks = code_of("A model of your own")
        exec(compile(training, "add_a_model.md", "exec"), made)
        exec(compile(checks, "add_a_model.md (checks)", "exec"), made)
    return folder, made


def test_a_model_of_ones_own_is_trained_and_saved(ran):
    folder, made = ran
    log = [row for row in made["trainer"].state.log_history if "grad_norm" in row]
    assert made["trainer"].state.global_step == 2
    assert log[-1]["grad_norm"] > 0
    config = json.loads((folder / "painter" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"layers.0", "layers.2"}


def test_its_checks_find_a_mistake(ran):
    """A network that does not look at the mask."""
    _, made = ran
    checks = code_of("A model of your own")[1]
    painter = made["Painter"]
    wrong = type(
        "Wrong",
        (painter,),
        {"forward": lambda self, x, t, letters, mask: painter.forward(self, x, t, letters, mask | True)},
    )
    with pytest.raises(AssertionError):
        exec(compile(checks, "checks", "exec"), {**made, "Painter": wrong})


def test_its_family_can_be_registered(ran, monkeypatch):
    _, made = ran
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_PIPELINES", {})
    made["register_family"](made["PainterPipeline"], made["PainterModel"])
    assert type(registry.load_flow_model(made["pipeline"])) is made["PainterModel"]


def test_the_lines_of_the_addition_are_counted():
    table = dict(re.findall(r"^\| `(\S+)` \| (\d+) \|$", TEXT, re.MULTILINE))
    assert set(table) == {
        "omnitrl/models/lumina2.py",
        "tests/tiny/lumina2.py",
        "tests/models/test_lumina2.py",
        "docs/source/models/lumina2.md",
    }
    for path, lines in table.items():
        assert len((ROOT / path).read_text("utf-8").splitlines()) == int(lines), path


def test_the_predict_of_the_guide_is_that_of_the_family():
    shown = re.search(r"```python\n(def predict\(self.*?)```", TEXT, re.DOTALL)[1]
    source = (ROOT / "omnitrl" / "models" / "lumina2.py").read_text("utf-8")
    for line in shown.splitlines():
        if "=" in line and "def " not in line:
            written = line.strip().replace("self.transformer", "network").replace("self.dtype", "dtype")
            assert written in source, line


def test_every_test_that_the_guide_explains_exists():
    tests = (ROOT / "tests" / "models" / "test_families.py").read_text("utf-8")
    explained = re.findall(r"^\| `(\w+)` \|", TEXT.split("what fails")[1].split("###")[0], re.MULTILINE)
    assert len(explained) >= 9
    for name in explained:
        assert f"def test_{name}" in tests, name

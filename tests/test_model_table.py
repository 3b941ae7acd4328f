# SPDX-License-Identifier: Apache-2.0
"""The page of models: its tables are what the families say, and a long file has a reason."""

import re

import pytest

from docs import model_table
from omnitrl.models import FAMILIES


TEXT = model_table.PAGE.read_text("utf-8")
TABLES = {match["name"]: match[0] for match in model_table.MARK.finditer(TEXT)}


@pytest.mark.slow
def test_the_tables_are_up_to_date():
    """Run `python docs/model_table.py` if they are not."""
    assert model_table.page(TEXT) == TEXT


def test_every_pipeline_class_has_a_row():
    listed = re.findall(r"`(\w+Pipeline)`", TABLES["makes"])
    assert sorted(listed) == sorted(FAMILIES)


def test_lines_are_those_of_the_files():
    counted = dict(re.findall(r"^\| `(\w+\.py)` \|.*\| (\d+) \|$", TABLES["lines"], re.MULTILINE))
    modules = {target.split(":")[0].split(".")[-1] + ".py" for target in FAMILIES.values()}
    assert modules <= set(counted)
    for name, lines in counted.items():
        assert len((model_table.MODELS / name).read_text("utf-8").splitlines()) == int(lines), name
        if int(lines) > model_table.LONG:
            assert f"- `{name}`: " in TEXT.split("## Lines of code")[1], (
                f"{name} is long: give the reason below the table"
            )

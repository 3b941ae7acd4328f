# SPDX-License-Identifier: Apache-2.0
"""The versions that run are those that setup.py promises, and `make test-compat` runs the oldest of them."""

import ast
import importlib
import os
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


pytestmark = pytest.mark.compat
ROOT = Path(__file__).parent.parent
OLDEST = ("transformers", "diffusers", "accelerate", "peft")


def requirements():
    for node in ast.parse((ROOT / "setup.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "INSTALL_REQUIRES":
            return {parsed.name: parsed for parsed in map(Requirement, ast.literal_eval(node.value))}
    raise AssertionError("setup.py has no INSTALL_REQUIRES")


@pytest.mark.parametrize("name", requirements())
def test_what_is_installed_is_what_setup_promises(name):
    assert requirements()[name].specifier.contains(version(name), prereleases=True)


@pytest.mark.skipif(".compat" not in os.environ.get("PYTHONPATH", ""), reason="only in `make test-compat`")
@pytest.mark.parametrize("name", OLDEST)
def test_the_oldest_version_is_the_one_that_runs(name):
    lowest = next(spec.version for spec in requirements()[name].specifier if spec.operator == ">=")
    running = Version(importlib.import_module(name).__version__)
    assert (running.major, running.minor) == Version(lowest).release[:2]

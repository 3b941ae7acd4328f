# SPDX-License-Identifier: Apache-2.0
"""The laws of the code that a program can check: who imports whom, where devices are named, how long things are."""

import ast
import functools
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "omnitrl"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = MODULES + sorted(
    path for folder in ("tests", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)
SOURCES.append(ROOT / "setup.py")

LEAVES = {"errors", "version", "devices", "media", "messages"}  # these import nothing of omnitrl but each other
EVERYTHING = None
MAY_IMPORT = {
    "algorithms": set(),
    "models": {"algorithms"} | LEAVES,
    "rollout": {"algorithms", "models"} | LEAVES,
    "trainer": {"algorithms", "models", "omni", "rollout", "rewards", "data", "report", "templates"} | LEAVES,
    "omni": LEAVES,
    "rewards": LEAVES,
    "data": LEAVES,
    "report": LEAVES,
    "quickstart": EVERYTHING,
    "cli": EVERYTHING,
    "errors": LEAVES,
    "version": set(),
    "devices": LEAVES,
    "media": LEAVES,
    "messages": set(),
    "__init__": EVERYTHING,
}
DEVICE_FILE = PACKAGE / "devices.py"
MAX_FUNCTION_LINES, MAX_FILE_LINES = 80, 600


def name_of(path):
    return str(path.relative_to(ROOT))


def part_of(path):
    """The part of the package that a file belongs to: its folder, or its name where it lies on top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def imported_modules(path):
    """Full names of all that a file imports, wherever the statement stands; relative ones are resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path):
    part = part_of(path)
    assert part in MAY_IMPORT, f"say in MAY_IMPORT what omnitrl/{part} may import"
    if MAY_IMPORT[part] is EVERYTHING:
        return
    allowed = MAY_IMPORT[part] | {part}
    parts = {name.split(".")[1] for name in imported_modules(path) if name.startswith("omnitrl.")}
    assert parts <= allowed, f"omnitrl.{part} may import {sorted(allowed)} of omnitrl"


@pytest.mark.parametrize("path", sorted((PACKAGE / "algorithms").rglob("*.py")), ids=name_of)
def test_algorithms_import_torch_and_the_standard_library(path):
    roots = {name.split(".")[0] for name in imported_modules(path) if name}
    assert roots <= sys.stdlib_module_names | {"torch", "omnitrl"}


@pytest.mark.parametrize("path", [path for path in MODULES if path != DEVICE_FILE], ids=name_of)
def test_no_device_is_named_outside_devices(path):
    """Neither `"cuda"`, `"npu:0"` nor `torch.cuda`; a sentence for people may mention one."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value.strip().lower().split(":")[0]
            assert word not in ("cuda", "npu", "xpu", "mps"), f"line {node.lineno}: {node.value!r}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("cuda", "npu", "xpu", "mps"), f"line {node.lineno}: .{node.attr}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_licence_stands_first(path):
    lines = path.read_text("utf-8").splitlines()
    first = next((line for line in lines if not line.startswith("#!")), None)
    assert first is None or first == "# SPDX-License-Identifier: Apache-2.0"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_are_short(path):
    assert len(path.read_text("utf-8").splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) != "cli"], ids=name_of)
def test_the_package_prints_nothing_outside_the_command_line(path):
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    assert [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"] == []


def test_the_checks_see_what_they_look_for(tmp_path, monkeypatch):
    """The import check on a file that breaks it, in each spelling."""
    folder = tmp_path / "omnitrl" / "models"
    folder.mkdir(parents=True)
    (folder / "bad.py").write_text("import omnitrl.trainer.x\nfrom ..cli import y\nfrom omnitrl import rollout\n")
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "ROOT", tmp_path)
    monkeypatch.setattr(here, "PACKAGE", tmp_path / "omnitrl")
    names = set(imported_modules(folder / "bad.py"))
    assert {"omnitrl.trainer.x", "omnitrl.cli.y", "omnitrl.rollout"} <= names
    with pytest.raises(AssertionError, match=r"omnitrl\.models may import"):
        test_imports_point_one_way(folder / "bad.py")

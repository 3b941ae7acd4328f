# SPDX-License-Identifier: Apache-2.0
"""The documentation builds: every page is there, every link leads somewhere, every documented name exists."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("mkdocs", reason="the documentation needs the extra `docs`")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def docs(tmp_path):
    """A copy of the sources, since the build writes beside them."""
    return shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("build"))


def build(docs):
    return subprocess.run(
        [sys.executable, str(docs / "build.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )


@pytest.mark.slow
def test_the_documentation_builds(docs):
    done = build(docs)
    assert done.returncode == 0, done.stderr
    page = (docs / "build" / "html" / "index.html").read_text("utf-8")
    assert '<a href="datasets.html#load_prompts"><code>load_prompts</code></a>' in page
    page = (docs / "build" / "html" / "datasets.html").read_text("utf-8")
    assert "<strong>source</strong> (<code>Dataset</code>" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n[there](nowhere.md)\n", "link 'nowhere.md'"),
        ("\n[there](index.md#nowhere)\n", "link 'index.md#nowhere', but there is no such anchor"),
        ("\n[[autodoc]] load_promts\n", "the package has no such name"),
    ],
)
def test_a_broken_page_fails_the_build(docs, text, message):
    for page in docs.glob("source/**/*.md"):
        if page != docs / "source" / "index.md":
            page.unlink()
    (docs / "source" / "_toctree.yml").write_text("- local: index\n  title: omnitrl\n")
    (docs / "source" / "index.md").write_text("# omnitrl\n" + text)
    done = build(docs)
    assert done.returncode == 1
    assert message in done.stderr


def test_pages_and_table_of_contents_agree(docs):
    (docs / "source" / "stray.md").write_text("# stray\n")
    done = build(docs)
    assert done.returncode == 1
    assert "stray" in done.stderr

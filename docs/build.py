# SPDX-License-Identifier: Apache-2.0
"""Builds docs/source into a site with MkDocs. A broken link, a missing page or an unknown name fails the build.

The sources are written for the Hugging Face doc-builder: `_toctree.yml` is the table of contents, `[[autodoc]] Name`
stands for the signature and docstring of an object of the package (an indented list below it for its methods), and
[`Name`] is a link to where that object is documented.
"""

import inspect
import logging
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import MkDocsException


DOCS = Path(__file__).parent
SOURCE = DOCS / "source"
PAGES = DOCS / "build" / "pages"
SITE = DOCS / "build" / "html"

AUTODOC = re.compile(r"^\[\[autodoc\]\] (?P<name>[\w.]+)\n(?P<members>(?: +- \w+\n)*)", re.MULTILINE)
REFERENCE = re.compile(r"\[`~?(?P<name>[\w.]+)`\](?!\()")
SECTION = re.compile(r"(Args|Parameters|Returns|Yields|Raises|Attributes|Examples?|Notes?|References?):")
CODE = re.compile(r"(```.*?```|~~~.*?~~~)", re.DOTALL)


class DocsError(Exception):
    """Something in the sources that the author has to put right."""


def main() -> int:
    """Builds the site and returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        toctree = yaml.safe_load((SOURCE / "_toctree.yml").read_text("utf-8"))
        pages = read_pages(toctree)
        write_pages(pages)
        build(load_config(write_config(toctree)))
    except (DocsError, MkDocsException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(pages)} pages in {SITE}")
    return 0


def locals_of(entries: list[dict[str, Any]]) -> list[str]:
    """Names of the pages in a table of contents, in order."""
    names: list[str] = []
    for entry in entries:
        names += locals_of(entry["sections"]) if "sections" in entry else [entry["local"]]
    return names


def read_pages(toctree: list[dict[str, Any]]) -> dict[str, str]:
    """Texts of all pages; the table of contents and the folder must agree."""
    listed = locals_of(toctree)
    present = [path.relative_to(SOURCE).with_suffix("").as_posix() for path in SOURCE.rglob("*.md")]
    if set(listed) != set(present):
        missing, stray = sorted(set(listed) - set(present)), sorted(set(present) - set(listed))
        raise DocsError(f"_toctree.yml and the folder differ: without a page {missing}, without an entry {stray}")
    return {name: (SOURCE / f"{name}.md").read_text("utf-8") for name in listed}


def write_pages(pages: dict[str, str]) -> None:
    """Writes the pages as MkDocs wants them, and copies what else lies in the folder."""
    shutil.rmtree(DOCS / "build", ignore_errors=True)
    shutil.copytree(SOURCE, PAGES, ignore=shutil.ignore_patterns("*.md", "_toctree.yml"))
    anchors = {match["name"]: page for page, text in pages.items() for match in AUTODOC.finditer(text)}
    for page, text in pages.items():
        path = PAGES / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            text = AUTODOC.sub(lambda match: document(match["name"], match["members"]), text)
        except DocsError as error:
            raise DocsError(f"{page}.md: {error}") from error
        path.write_text(link_references(text, page, anchors), "utf-8")


def resolve(name: str) -> Any:
    """The object of a dotted name, relative to the package."""
    parts = ["omnitrl", *name.removeprefix("omnitrl.").split(".")]
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            value = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith("omnitrl"):
                raise
            continue
        try:
            for part in parts[split:]:
                value = getattr(value, part)
        except AttributeError:
            continue
        return value
    raise DocsError(f"[[autodoc]] {name}: the package has no such name")


def document(name: str, members: str) -> str:
    """Markdown for an object and the methods asked for."""
    value = resolve(name)
    blocks = [describe(name, value, level=3)]
    for member in re.findall(r"- (\w+)", members):
        blocks.append(describe(f"{name}.{member}", resolve(f"{name}.{member}"), level=4))
    return "\n\n".join(blocks) + "\n"


def describe(name: str, value: Any, level: int) -> str:
    docstring = inspect.getdoc(value)
    if not docstring:
        raise DocsError(f"[[autodoc]] {name}: it has no docstring")
    short = name.split(".")[-1]
    signature = f"class {short}" if isinstance(value, type) else short
    signature += signature_of(value)
    heading = f'{"#" * level} <a id="{name}"></a>`{short}`'
    return f"{heading}\n\n```python\n{signature}\n```\n\n{markdown_of(docstring)}"


def signature_of(value: Any) -> str:
    if not callable(value):
        return ""
    try:
        parsed = inspect.signature(value)
    except ValueError:  # exceptions that take what `Exception` takes
        return ""
    signature = str(parsed)
    if len(signature) > 80:
        lines = "".join(f"    {parameter},\n" for parameter in parsed.parameters.values())
        signature = f"(\n{lines})"
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)  # annotations that are written as strings


def markdown_of(docstring: str) -> str:
    """A docstring in the Hugging Face style as Markdown: its sections become headed lists."""
    return "".join(
        part if part.lstrip().startswith(("```", "~~~")) else sections_of(part) for part in CODE.split(docstring)
    )


def sections_of(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        section = SECTION.fullmatch(line)
        if section:
            inside = True
            lines += ["", f"**{section[1]}**", ""]
        elif inside and re.match(r" {4}[^ ]", line) and line.rstrip().endswith(":"):
            name, _, rest = line.strip().partition(" ")  # `name (`type`):`, with its text below
            lines += ["", f"- **{name}** {rest}"]
        elif inside and line and not line.startswith(" "):
            inside = False
            lines += ["", line]
        else:
            lines.append(line[4:] if inside else line)
    return "\n".join(lines)


def link_references(text: str, page: str, anchors: dict[str, str]) -> str:
    """[`Name`] as a link where the object is documented, and as plain code where it is not."""
    by_last = {name.split(".")[-1]: name for name in anchors}
    up = "../" * page.count("/")

    def link(match: re.Match[str]) -> str:
        last = match["name"].split(".")[-1]
        name = by_last.get(last)
        return f"[`{last}`]({up}{anchors[name]}.md#{name})" if name else f"`{last}`"

    parts = CODE.split(text)
    return "".join(part if part.startswith(("```", "~~~")) else REFERENCE.sub(link, part) for part in parts)


def write_config(toctree: list[dict[str, Any]]) -> str:
    """Writes MkDocs' configuration and returns its path; `strict` turns warnings into a failure."""
    config = {
        "site_name": "omnitrl",
        "docs_dir": str(PAGES),
        "site_dir": str(SITE),
        "nav": navigation(toctree),
        "theme": "readthedocs",
        "extra_css": ["assets/tables.css"],
        "plugins": ["search"],
        "markdown_extensions": ["fenced_code", "tables", "toc", "attr_list", "admonition", "sane_lists"],
        "use_directory_urls": False,
        "strict": True,
        "validation": {"links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"}},
    }
    path = DOCS / "build" / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True, sort_keys=False), "utf-8")
    return str(path)


def navigation(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {entry["title"]: navigation(entry["sections"]) if "sections" in entry else f"{entry['local']}.md"}
        for entry in entries
    ]


if __name__ == "__main__":
    sys.exit(main())

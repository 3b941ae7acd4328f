# SPDX-License-Identifier: Apache-2.0
"""
Writes the tables of `docs/source/models/index.md` from the families themselves and their tiny checkpoints.

What a checkpoint decides, such as whether guidance is embedded, is read off the checkpoints of the tests, and several
answers stand beside each other. `tests/test_model_table.py` fails while the page has other tables.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "source" / "models" / "index.md"
MARK = re.compile(r"(<!-- (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MODELS = ROOT / "omnitrl" / "models"
IMPORT = re.compile(r"^from omnitrl\.models\.(\w+) import", re.MULTILINE)
COMMON = {"base", "video", "audio", "conditions", "size"}  # what every family builds on
LONG = 200  # lines of a family's file, above which the page gives a reason

sys.path.insert(0, str(ROOT))

from omnitrl.models import FAMILIES, AudioModel, FlowModel, Policy, VideoModel, family_of  # noqa: E402
from tests.tiny import CHECKPOINTS  # noqa: E402


Models = list[tuple[Any, FlowModel]]  # tiny checkpoints of a family, each with its model


def main() -> int:
    """Writes the page."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    print(f"{len(FAMILIES)} pipeline classes in {PAGE}")
    return 0


def page(text: str) -> str:
    """The text of the page with its tables made anew."""
    families = models_by_family()
    tables = {
        "makes": table(
            families,
            {"pipelines": pipelines, "makes": makes, "guidance": guidance, "padding of the prompt": padding},
        ),
        "trains": table(
            families,
            {
                "trained": trained,
                "LoRA targets": targets,
                "FSDP wraps": wraps,
                "sequence parallel": plan,
                "`load_lora_weights`": loader,
            },
        ),
        "lines": lines(families),
    }
    return MARK.sub(lambda match: match[1] + tables[match["name"]] + "\n" + match[3], text)


def models_by_family() -> dict[type[FlowModel], Models]:
    """Every family with its tiny checkpoints, in the order of their names."""
    found: dict[type[FlowModel], Models] = {family_of(name): [] for name in FAMILIES}
    for tiny in CHECKPOINTS.values():
        model = tiny.model()
        found[type(model)].append((tiny, model))
    return dict(sorted(found.items(), key=lambda item: short(item[0]).lower()))


def table(families: dict[type[FlowModel], Models], columns: dict[str, Callable[[Models], str]]) -> str:
    """A table with a row for each family."""
    rows = [["family", *columns], ["---"] * (len(columns) + 1)]
    rows += [[title(family), *(cell(models) for cell in columns.values())] for family, models in families.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def lines(families: dict[type[FlowModel], Models]) -> str:
    """A table of the files, with what they have in them, and of what some of them share."""
    files: dict[str, list[str]] = {}
    for family in families:
        files.setdefault(file_of(family).name, []).append(f"`{family.__name__}`")
    for name in list(files):
        for other in IMPORT.findall((MODELS / name).read_text("utf-8")):
            if f"{other}.py" not in files and other not in COMMON:
                files[f"{other}.py"] = ["shared"]
    rows = [["file", "families", "lines"], ["---"] * 3]
    for name in sorted(files):
        count = len((MODELS / name).read_text("utf-8").splitlines())
        rows.append([f"`{name}`", ", ".join(sorted(files[name])), str(count)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def short(family: type[FlowModel]) -> str:
    """The name of a family."""
    return family.__name__.removesuffix("Model")


def file_of(family: type[FlowModel]) -> Path:
    """Where a family is written."""
    return ROOT / f"{family.__module__.replace('.', '/')}.py"


def title(family: type[FlowModel]) -> str:
    """A link to the page that documents a family."""
    name = f"{family.__module__.removeprefix('omnitrl.')}.{family.__name__}"
    for path in sorted(PAGE.parent.glob("*.md")):
        if f"[[autodoc]] {name}\n" in path.read_text("utf-8"):
            return f"[{short(family)}]({path.name})"
    raise SystemExit(f"No page of docs/source/models documents {name} with [[autodoc]].")


# Cells


def pipelines(models: Models) -> str:
    """Pipeline classes."""
    return code(sorted(models[0][1].pipeline_classes))


def makes(models: Models) -> str:
    """From what to what."""
    words = []
    for tiny, model in models:
        least, most = model.num_images
        count = f"{least}" if least == most else f"{least} to {most}"
        given = "text" if most == 0 else f"text and {count} image{'' if count == '1' else 's'}"
        made = "picture"
        if isinstance(model, VideoModel):
            made = "video with sound" if model.modalities(tiny.size) else "video"
        elif isinstance(model, AudioModel):
            made = "sound"
        words.append(f"{given} → {made}")
    return "; ".join(unique(words))


def guidance(models: Models) -> str:
    """How it guides, with the default scale."""
    words = []
    for _, model in models:
        kind = "classifier-free" if model.needs_negative(4.0) else "embedded" if model.embeds_guidance else "none"
        own = kind == "classifier-free" and type(model).guide is not FlowModel.guide
        words.append(f"{kind}{' (own formula)' if own else ''}, {model.default_guidance_scale:g}")
    return "; ".join(unique(words))


def padding(models: Models) -> str:
    """Whether the network has a mask for the padding of prompts."""
    masked = []
    for tiny, model in models:
        names = model.encode([tiny.row("a cat")], size=tiny.size).positive
        masked.append("masked" if "prompt_embeds_mask" in names else "as the pipeline pads")
    return "; ".join(unique(masked))


def trained(models: Models) -> str:
    """Components of the pipeline that are trained."""
    return "; ".join(unique(code(model.networks) for _, model in models))


def targets(models: Models) -> str:
    """LoRA targets."""
    return "; ".join(unique(code(model.default_lora_targets) for _, model in models))


def wraps(models: Models) -> str:
    """Classes of the layers that FSDP wraps one by one."""
    return "; ".join(unique(code(Policy(model)._no_split_modules) for _, model in models))


def plan(models: Models) -> str:
    """Whether diffusers has a plan to split the sequence."""
    return "; ".join(
        unique("yes" if all(map(model.sequence_parallel_plan, model.networks)) else "no" for _, model in models)
    )


def loader(models: Models) -> str:
    """Whether the pipeline loads adapters itself."""
    return "; ".join(unique("yes" if model.loads_lora else "no" for _, model in models))


def code(names: Iterable[str]) -> str:
    """Names as code."""
    return ", ".join(f"`{name}`" for name in names)


def unique(words: Iterable[str]) -> list[str]:
    """Each once, in the order of its first."""
    return list(dict.fromkeys(words))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The model card of a result: what it is, how it was made, what it scored and how to load it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from omnitrl.errors import InputError
from omnitrl.report.page import TEMPLATES
from omnitrl.report.recipe import recipe_rows
from omnitrl.report.records import RunSummary, format_number, headlines, set_label


if TYPE_CHECKING:
    from huggingface_hub import ModelCard

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")

LIBRARY_CITATION = """@software{omnitrl,
  title  = {omnitrl: reinforcement learning for diffusion and omni-modality models},
  author = {{The omnitrl contributors}},
  year   = {2026}
}"""


def model_card(
    run: RunSummary,
    base_model: str,
    adapter: bool,
    paper: Mapping[str, str] | None = None,
    tags: Iterable[str] = (),
    images: Mapping[str, str] | None = None,
    pipeline_tag: str = "text-to-image",
    repo_id: str | None = None,
) -> ModelCard:
    """
    Write the card of a trained model, without asking the network.

    No licence is stated: it is that of the base model and of the training data, which the owner knows.

    Args:
        run ([`RunSummary`]):
            The run: results, recipe, versions, and the code that loads the result.
        base_model (`str`):
            Hub id or folder of the model that was trained. A folder is named in the text and left out of the metadata,
            where the Hub takes only ids.
        adapter (`bool`):
            Whether the result is a LoRA adapter, or else a whole model.
        paper (`Mapping[str, str]`, *optional*):
            `title`, `id` on arXiv and `citation` in BibTeX of the paper of the algorithm, each optional.
        tags (`Iterable[str]`, *optional*):
            Tags beside those that follow from the run.
        images (`Mapping[str, str]`, *optional*):
            Caption → path of a picture, relative to the card.
        pipeline_tag (`str`, *optional*, defaults to `"text-to-image"`):
            The Hub's name of the task.
        repo_id (`str`, *optional*):
            Hub id that the result will have, for the usage code of a run without `load_snippet`.

    Returns:
        `huggingface_hub.ModelCard`: `str(card)` is the text, `card.save(path)` writes it.

    Raises:
        InputError: the path of a picture is not relative, so that nobody else could see it.

    Example:

    ```python
    >>> card = model_card(run, "stabilityai/stable-diffusion-3.5-medium", adapter=True)
    >>> card.data.library_name
    'diffusers'
    ```
    """
    from huggingface_hub import ModelCard, ModelCardData
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    all_tags = ["omnitrl", _tag(run.algorithm), *(["lora"] if adapter else []), pipeline_tag, "diffusers", *tags]
    on_hub = _is_hub_id(base_model)
    data = ModelCardData(
        base_model=base_model if on_hub else None,
        library_name="diffusers",
        pipeline_tag=pipeline_tag,
        tags=list(dict.fromkeys(tag for tag in all_tags if tag)),
    )
    if on_hub:
        data["base_model_relation"] = "adapter" if adapter else "finetune"
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("model_card.md.j2").render(
        card_data=data.to_yaml(),
        title=_inline(run.title),
        intro=_intro(run, base_model, adapter),
        notes=[_inline(note) for note in run.notes],
        snippet=run.load_snippet.strip() or _snippet(base_model, adapter, repo_id),
        results=_results(run),
        images=[(_inline(caption), _relative(path)) for caption, path in (images or {}).items()],
        recipe=[(name, _inline(value)) for name, value in recipe_rows(run.config)],
        environment=[(_inline(name), _inline(value)) for name, value in run.environment.items()],
        algorithm=_inline(run.algorithm),
        paper=_paper(paper),
        library_citation=LIBRARY_CITATION,
    )
    return ModelCard(text)


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.match(name)) and not Path(name).exists()


def _tag(algorithm: str) -> str:
    """`"FlowGRPO"` → `"flow-grpo"`, `"DiffusionNFT"` → `"diffusion-nft"`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", algorithm).replace(" ", "-").lower()


def _intro(run: RunSummary, base_model: str, adapter: bool) -> str:
    base = f"[{base_model}](https://huggingface.co/{base_model})" if _is_hub_id(base_model) else f"`{base_model}`"
    what = f"A LoRA adapter for {base}" if adapter else f"A fine-tuned version of {base}"
    status = f" Status of the run: {_inline(run.status)}." if run.status else ""
    return f"{what}, trained with {_inline(run.algorithm)} in omnitrl.{status}"


def _snippet(base_model: str, adapter: bool, repo_id: str | None) -> str:
    result = repo_id or "path/to/this/folder"
    lines = ["from diffusers import DiffusionPipeline", ""]
    lines.append(f'pipe = DiffusionPipeline.from_pretrained("{base_model if adapter else result}")')
    if adapter:
        lines.append(f'pipe.load_lora_weights("{result}")')
    return "\n".join([*lines, 'image = pipe("a prompt").images[0]'])


def _results(run: RunSummary) -> list[dict[str, str]]:
    return [
        {
            "prompts": _inline(set_label(line.set_name)),
            "metric": f"`{_inline(line.metric)}`",
            "before": format_number(line.before),
            "after": format_number(line.after),
        }
        for line in headlines(run)
        if line.before_step != line.after_step
    ]


def _paper(paper: Mapping[str, str] | None) -> dict[str, str] | None:
    if not paper:
        return None
    title = _inline(paper.get("title", "this paper"))
    link = f"[{title}](https://huggingface.co/papers/{paper['id']})" if paper.get("id") else title
    return {"link": link, "citation": paper.get("citation", "").strip()}


def _relative(path: str) -> str:
    if PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute() or ".." in Path(path).parts:
        raise InputError(
            f"The picture {path!r} of the model card must lie beside the card: give a relative path, for example "
            "'before_after.png'."
        )
    return path


def _inline(text: str) -> str:
    """Text for one line or table cell: no line breaks, and nothing that Markdown or HTML would act on."""
    flat = " ".join(str(text).split())
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|")

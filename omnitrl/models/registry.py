# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to its model family."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrl.errors import InputError
from omnitrl.models.base import FlowModel


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


# Pipeline class of a checkpoint's model_index.json -> family. A new family is one line here.
FAMILIES: dict[str, str] = {
    "Flux2KleinPipeline": "omnitrl.models.flux2:Flux2KleinModel",
    "Flux2Pipeline": "omnitrl.models.flux2:Flux2Model",
    "FluxKontextPipeline": "omnitrl.models.flux:FluxKontextModel",
    "FluxPipeline": "omnitrl.models.flux:FluxModel",
    "HunyuanImagePipeline": "omnitrl.models.hunyuan_image:HunyuanImageModel",
    "HunyuanVideo15ImageToVideoPipeline": "omnitrl.models.hunyuan_video15:HunyuanVideo15ImageModel",
    "HunyuanVideo15Pipeline": "omnitrl.models.hunyuan_video15:HunyuanVideo15Model",
    "LTX2Pipeline": "omnitrl.models.ltx2:LTX2Model",
    "Lumina2Pipeline": "omnitrl.models.lumina2:Lumina2Model",
    "QwenImageEditPipeline": "omnitrl.models.qwen_image_edit:QwenImageEditModel",
    "QwenImageEditPlusPipeline": "omnitrl.models.qwen_image_edit:QwenImageEditPlusModel",
    "QwenImagePipeline": "omnitrl.models.qwen_image:QwenImageModel",
    "StableAudio3Pipeline": "omnitrl.models.stable_audio3:StableAudio3Model",
    "StableDiffusion3Pipeline": "omnitrl.models.sd3:SD3Model",
    "WanImageToVideoPipeline": "omnitrl.models.wan_i2v:WanImageToVideoModel",
    "WanPipeline": "omnitrl.models.wan:WanModel",
    "ZImagePipeline": "omnitrl.models.z_image:ZImageModel",
}

INDEX = "model_index.json"


GUIDE = "docs/source/add_a_model.md"

# What `register_family` has added: families and pipeline classes by the name of the pipeline class.
_REGISTERED: dict[str, type[FlowModel]] = {}
_PIPELINES: dict[str, type] = {}


def register_family(pipeline_class: str | type, family: type[FlowModel]) -> None:
    """
    Makes `family` the one that serves a pipeline class, for checkpoints, loaded pipelines and the command line.

    Args:
        pipeline_class (`str` or `type`):
            A pipeline class of diffusers by name, or one of your own, which then loads its checkpoints too. A known
            one is served by `family` from now on.
        family (`type[FlowModel]`):
            What serves it.

    Raises:
        [`~omnitrl.errors.InputError`]: `family` is no subclass of [`FlowModel`], or lacks a part of one.

    Example:

    ```python
    >>> register_family("AuraFlowPipeline", AuraFlowModel)
    >>> model = load_flow_model("fal/AuraFlow-v0.3")
    ```
    """
    if not (isinstance(family, type) and issubclass(family, FlowModel)):
        raise InputError(f"family={family!r} is no subclass of `FlowModel`: see {GUIDE}.")
    missing = sorted(family.__abstractmethods__)
    if missing:
        raise InputError(f"{family.__name__} does not implement {', '.join(missing)}: see {GUIDE}.")
    if isinstance(pipeline_class, type):
        _PIPELINES[pipeline_class.__name__] = pipeline_class
        pipeline_class = pipeline_class.__name__
    _REGISTERED[pipeline_class] = family


def family_of(pipeline_class: str, where: str = "the pipeline") -> type[FlowModel]:
    """The [`FlowModel`] class that serves a diffusers pipeline class, or an error that lists the known ones."""
    if pipeline_class in _REGISTERED:
        return _REGISTERED[pipeline_class]
    if pipeline_class not in FAMILIES:
        raise InputError(
            f"{where} is a {pipeline_class!r}, a family that omnitrl does not know. Known are: "
            f"{', '.join(sorted(FAMILIES | _REGISTERED))}. {GUIDE} shows how to add one: pass a `FlowModel` of your "
            "own as model, or name its class with `register_family`."
        )
    module, _, name = FAMILIES[pipeline_class].partition(":")
    return getattr(import_module(module), name)


def load_flow_model(
    model: str | Path | DiffusionPipeline | FlowModel, max_sequence_length: int | None = None, **kwargs: Any
) -> FlowModel:
    """
    The [`FlowModel`] of a checkpoint; its family is read from `model_index.json`.

    Args:
        model (`str`, `Path`, `DiffusionPipeline` or [`FlowModel`]):
            A Hub id, a folder, a loaded pipeline, or a `FlowModel`, which is returned as it is.
        max_sequence_length (`int`, *optional*):
            Token length of prompts, see [`FlowModel`].
        kwargs:
            Passed to the pipeline's `from_pretrained` (`dtype`, `revision`, ...).

    Raises:
        [`~omnitrl.errors.InputError`]: unknown family; arguments that do not fit what was given; a checkpoint that is
            not there, cannot be reached, or has no weights.

    Example:

    ```python
    >>> model = load_flow_model("stabilityai/stable-diffusion-3.5-medium", dtype=torch.bfloat16)
    ```
    """
    if isinstance(model, str | Path):
        pipeline = _load_pipeline(str(model), kwargs)
    elif kwargs:
        raise InputError(f"{sorted(kwargs)} apply when a checkpoint is loaded, but model is a {type(model).__name__}.")
    elif isinstance(model, FlowModel):
        if max_sequence_length is not None:
            model.set_max_sequence_length(max_sequence_length)
        return model
    elif isinstance(model, _pipeline_class()):
        pipeline = model
    else:
        raise InputError(
            f"model is of type {type(model).__name__}: pass a Hub id, a folder, a loaded diffusers pipeline or a "
            "`FlowModel`."
        )
    return family_of(type(pipeline).__name__)(pipeline, max_sequence_length=max_sequence_length)


def _pipeline_class() -> type:
    from diffusers import DiffusionPipeline

    return DiffusionPipeline


def _load_pipeline(model: str, kwargs: dict[str, Any]) -> DiffusionPipeline:
    index = read_model_index(model, kwargs.get("revision"))
    name = index["_class_name"]
    family_of(name, where=f"{model!r}")
    pipeline_class = _class_of(name, model)
    # diffusers saves an absent component as [null, null] but refuses to load one that is not named as None.
    absent = {key: None for key, value in index.items() if isinstance(value, list) and value[0] is None}
    try:
        return pipeline_class.from_pretrained(model, **{**absent, **kwargs})
    except OSError as error:
        raise InputError(
            f"The weights of {model!r} cannot be loaded ({_first_line(error)}): check that the folder holds each "
            f"component that its {INDEX} lists, or download the checkpoint again."
        ) from error


def _class_of(name: str, model: str) -> Any:
    """The pipeline class of that name: one that was registered, or that of the installed diffusers."""
    import diffusers

    if name in _PIPELINES:
        return _PIPELINES[name]
    try:
        return getattr(diffusers, name)
    except AttributeError as error:
        raise InputError(
            f"{model!r} is a {name!r}, which diffusers {diffusers.__version__} does not have: use a newer one, "
            "`pip install --upgrade diffusers`, or register your own class with `register_family`."
        ) from error


def read_model_index(model: str, revision: str | None = None) -> dict[str, Any]:
    """`model_index.json` of a folder or a Hub id."""
    folder = Path(model)
    if folder.is_dir():
        path = folder / INDEX
        if not path.is_file():
            raise InputError(
                f"{model!r} is a folder without {INDEX}, so it is no diffusers pipeline: pass the folder that "
                "`pipeline.save_pretrained` wrote, or a Hub id."
            )
    elif folder.is_absolute() or model.startswith("."):
        raise InputError(f"There is no folder {model!r}: check the path, or pass a Hub id like 'owner/name'.")
    else:
        path = _download_index(model, revision)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}): download the checkpoint again.") from error
    if not isinstance(index, dict) or "_class_name" not in index:
        raise InputError(f"{path} names no pipeline class (_class_name), so it is no diffusers pipeline's.")
    return index


def _download_index(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(hf_hub_download(model, INDEX, revision=revision))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(
            f"{model!r} is neither a folder here nor a repository on the Hub (private ones need `hf auth login`)."
        ) from error
    except EntryNotFoundError as error:  # also LocalEntryNotFoundError, its subclass: offline and not cached
        if "LocalEntryNotFound" in type(error).__name__:
            raise InputError(_offline(model)) from error
        raise InputError(f"{model!r} has no {INDEX}, so it is no diffusers pipeline.") from error
    except (HfHubHTTPError, OSError) as error:
        raise InputError(_offline(model)) from error


def _offline(model: str) -> str:
    return (
        f"{model!r} is not in the local cache and the Hub cannot be reached: connect once and run "
        f"`hf download {model}`, or pass a local folder."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")

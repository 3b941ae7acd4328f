# SPDX-License-Identifier: Apache-2.0
"""What differs between the model families that a server makes rollouts with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.models.patches import packed, unpacked
from omnitrl.rollout.vllm_omni.wire import WireRequest


_MODELS = "vllm_omni.diffusion.models"
BATCHINGS = ("serial", "request", "step")


def _guided(request: WireRequest, embeds_guidance: bool) -> dict[str, Any]:
    """Guidance as most native pipelines take it; of 1 and less there is none."""
    return {"guidance_scale": request.params.guidance_scale}


def _guided_apart(request: WireRequest, embeds_guidance: bool) -> dict[str, Any]:
    """`guidance_scale` for what a network embeds, `true_cfg_scale` for classifier-free guidance."""
    guidance = request.params.guidance_scale
    if embeds_guidance:
        return {"guidance_scale": guidance, "true_cfg_scale": 1.0}
    return {"guidance_scale": 1.0, "true_cfg_scale": max(guidance, 1.0)}


def _guided_twice(request: WireRequest, embeds_guidance: bool) -> dict[str, Any]:
    """The guidance of each of two networks."""
    first, second = request.params.guidance_scale, request.guidance_scale_2
    second = first if second is None or first <= 1 else second
    return {"guidance_scale": first, "guidance_scale_2": second}


def _like_diffusers_wan(pipeline: Any) -> None:
    """The boundary of the two networks as the checkpoint has it, and prompts that are cleaned as diffusers does."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    pipeline._prompt_clean = prompt_clean
    if pipeline.boundary_ratio is None:
        pipeline.boundary_ratio = model_index(pipeline.od_config.model).get("boundary_ratio")


def _with_fused_names(pipeline: Any) -> None:
    """What adapters call the parts of fused layers, which the native network does not say (0.30)."""
    fused = {".to_qkv": (".to_q", ".to_k", ".to_v"), ".add_kv_proj": (".add_q_proj", ".add_k_proj", ".add_v_proj")}
    pipeline.transformer.stacked_params_mapping = [
        (whole, part, shard) for whole, parts in fused.items() for part, shard in zip(parts, "qkv", strict=True)
    ]


def _in_one_precision(pipeline: Any) -> None:
    """The text encoder in the network's precision: the native pipeline leaves it as the checkpoint has it (0.30)."""
    pipeline.text_encoder.to(pipeline.od_config.dtype)


def _nothing(pipeline: Any) -> None:
    return None


def _frame_rate_of_wan(pipeline: Any) -> float:
    return 24.0 if pipeline.expand_timesteps else 16.0


@dataclass(frozen=True)
class Family:
    """
    How a native pipeline is called to make what the trainer's model makes.

    Args:
        native (`str`):
            Module and class of the native pipeline.
        batchings (`tuple[str, ...]`):
            Ways of [`BATCHINGS`] in which it makes several samples at the same time, the best one first.
        guidance (`Callable`):
            From a request, and whether the network embeds guidance, to native sampling parameters.
        packs (`bool`):
            Whether the network sees latents as tokens of 2 × 2.
        exact_timesteps (`bool`):
            Whether the trainer's network gets timesteps in float32, which the native pipeline rounds.
        adjust (`Callable`):
            Brings what is left of a loaded native pipeline in line with the stock one.
        frame_rate (`Callable`, *optional*):
            Frames per second of the videos of a pipeline; `None` for pictures.
        num_images (`tuple[int, int]`):
            Fewest and most condition images.
    """

    native: str
    batchings: tuple[str, ...]
    guidance: Callable[[WireRequest, bool], dict[str, Any]] = _guided
    packs: bool = False
    exact_timesteps: bool = False
    adjust: Callable[[Any], None] = _nothing
    frame_rate: Callable[[Any], float] | None = None
    num_images: tuple[int, int] = (0, 0)

    def to_native(self, latents: Tensor) -> Tensor:
        """Latents (B, C, H, W) as the native pipeline has them."""
        return packed(latents) if self.packs else latents

    def from_native(self, latents: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The opposite, for samples of `shape`."""
        return unpacked(latents, shape[-2] // 2, shape[-1] // 2) if self.packs else latents


# Class of the diffusers pipeline -> what a server knows of it.
FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(
        f"{_MODELS}.sd3.pipeline_sd3.StableDiffusion3Pipeline", ("request", "serial"), exact_timesteps=True
    ),
    "QwenImagePipeline": Family(
        f"{_MODELS}.qwen_image.pipeline_qwen_image.QwenImagePipeline",
        ("step", "request", "serial"),
        guidance=_guided_apart,
        packs=True,
        adjust=_in_one_precision,
    ),
    "QwenImageEditPipeline": Family(
        f"{_MODELS}.qwen_image.pipeline_qwen_image_edit.QwenImageEditPipeline",
        ("serial",),
        guidance=_guided_apart,
        packs=True,
        adjust=_in_one_precision,
        num_images=(1, 1),
    ),
    "FluxPipeline": Family(
        f"{_MODELS}.flux.pipeline_flux.FluxPipeline",
        ("request", "serial"),
        guidance=_guided_apart,
        packs=True,
        adjust=_with_fused_names,
    ),
    "WanPipeline": Family(
        f"{_MODELS}.wan2_2.pipeline_wan2_2.Wan22Pipeline",
        ("request", "serial"),
        guidance=_guided_twice,
        adjust=_like_diffusers_wan,
        frame_rate=_frame_rate_of_wan,
    ),
}


# Model type of a checkpoint -> vLLM-Omni's name of its Thinker alone.
THINKER_PIPELINES = {"qwen3_omni_moe": "qwen3_omni_moe_thinker_only"}


def family_of_server(pipeline_class: str) -> Family:
    """
    The family of a diffusers pipeline.

    Raises:
        [`~omnitrl.errors.InputError`]: servers make no rollouts with it.
    """
    if pipeline_class not in FAMILIES:
        raise InputError(
            f"vLLM-Omni servers make no rollouts with {pipeline_class}; they do with {', '.join(FAMILIES)}: serve one "
            "of these, or train with rollout_engine='local'."
        )
    return FAMILIES[pipeline_class]


def model_index(model: str) -> dict[str, Any]:
    """
    The `model_index.json` of a checkpoint, a folder or a name on the Hub.

    Raises:
        [`~omnitrl.errors.InputError`]: it has none.
    """
    found, reason = read_json(model, "model_index.json")
    if found is None and not Path(model).is_dir():
        raise InputError(
            f"{model!r} is neither a folder nor a diffusers pipeline on the Hub ({reason}): give one that has a "
            "model_index.json."
        )
    if found is None:
        raise InputError(
            f"{model!r} has no model_index.json: give the folder of a diffusers pipeline, that its save_pretrained "
            "makes."
        )
    return found


def thinker_pipeline(model: str) -> str | None:
    """
    What vLLM-Omni calls the Thinker alone of a checkpoint; `None` for one that is no omni-modality model.

    Args:
        model (`str`):
            A folder or a name on the Hub.

    Raises:
        [`~omnitrl.errors.InputError`]: servers make no rollouts with it.
    """
    if Path(model).is_dir() and (Path(model) / "model_index.json").is_file():
        return None
    config, _ = read_json(model, "config.json")
    kind = None if config is None else config.get("model_type")
    if kind is None or kind in THINKER_PIPELINES:
        return THINKER_PIPELINES.get(kind or "")
    raise InputError(
        f"{model} is a {kind}, and vllm-serve serves diffusers pipelines and {', '.join(THINKER_PIPELINES)}: train "
        "Qwen2.5-Omni with rollout_engine='local', and start servers of language models with `vllm serve`, for "
        "use_vllm=True."
    )


def read_json(model: str, name: str) -> tuple[dict[str, Any] | None, str]:
    """A file of a checkpoint, a folder or a name on the Hub, or `None` and why there is none."""
    path = Path(model) / name
    if not Path(model).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(model, name))
        except Exception as error:  # whatever the Hub says, and there are many kinds of it
            return None, _first_line(error)
    if not path.is_file():
        return None, "it is not there"
    return json.loads(path.read_text("utf-8")), ""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

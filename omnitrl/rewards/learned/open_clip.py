# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of open_clip as weights of `transformers.CLIPModel`."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..contract import RewardError


# What open_clip calls it, and what transformers does, outside the layers of the two transformers.
_OUTSIDE = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
_TRANSPOSED = ("text_projection", "visual.proj")  # these multiply from the right
_LAYER = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
_INSIDE = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def clip_from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    Renames the weights of a CLIP of open_clip, and parts those that hold queries, keys and values in one.

    Args:
        state (`Mapping[str, Tensor]`):
            Weights of an `open_clip.CLIP` with a vision transformer.

    Returns:
        `dict[str, Tensor]`: weights of a `transformers.CLIPModel`.

    Raises:
        [`~omnitrl.rewards.RewardError`]: a name that such a model does not have.
    """
    converted: dict[str, Any] = {}
    for name, value in state.items():
        if name == "attn_mask":  # old versions save the causal mask
            continue
        if name in _OUTSIDE:
            converted[_OUTSIDE[name]] = value.T.contiguous() if name in _TRANSPOSED else value
            continue
        match = _LAYER.fullmatch(name)
        if match is None:
            raise RewardError(f"the weight {name!r} is none of a CLIP of open_clip with a vision transformer.")
        tower = "vision_model" if match[1] else "text_model"
        converted |= _layer_weights(f"{tower}.encoder.layers.{match[2]}", match[3], value)
    return converted


def _layer_weights(layer: str, name: str, value: Tensor) -> dict[str, Tensor]:
    if name in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = name.removeprefix("attn.in_proj_")
        parts = zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True)
        return {f"{layer}.self_attn.{part}.{kind}": chunk.clone() for part, chunk in parts}
    module, _, kind = name.rpartition(".")
    if module not in _INSIDE:
        raise RewardError(f"the weight {name!r} of a layer is none of a CLIP of open_clip.")
    return {f"{layer}.{_INSIDE[module]}.{kind}": value}

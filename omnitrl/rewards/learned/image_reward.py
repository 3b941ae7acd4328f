# SPDX-License-Identifier: Apache-2.0
"""ImageReward: a BLIP that reads the prompt with the image before its eyes, and a head on what it makes of both."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ..contract import RewardError
from .aesthetic import linear_head
from .base import LearnedReward
from .preprocessing import Preprocessing
from .weights import fill_model, load_part, read_checkpoint


# Mean and deviation of the head's values over the authors' validation set, which the score is standardised with.
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072
_TEXT_LENGTH = 35
_HEAD_WIDTH = 64  # of each attention head, in both networks

# Names of BLIP's own code and those of transformers.
_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
    "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
    "norm.weight": "post_layernorm.weight",
    "norm.bias": "post_layernorm.bias",
}
_VISION_LAYER = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


class _ImageRewardNetwork(nn.Module):
    def __init__(self, vision: Any, text: Any, head: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.head = head
        self.tokenizer = tokenizer
        self.preprocessing = Preprocessing(vision.config.image_size, rounds_half=True)


class ImageRewardModel(LearnedReward):
    r"""
    ImageReward: how people would rate the image for the prompt.

    A BLIP (ViT-L/16 and a BERT that attends to it) of [ImageReward](https://huggingface.co/papers/2304.05977), whose
    first text vector goes through five linear layers; the result is standardised with the authors' mean 0.1672 and
    deviation 1.0333. Usual values are -2 to 2, and higher is better.

    Pictures are resized to a shorter side of 224 pixels (bicubic) and cut to the square in the middle. Of a prompt 35
    tokens are read, fewer than by the others.

    Args:
        model (`str`, *optional*, defaults to `"THUDM/ImageReward"`):
            Hub id, folder or file of the checkpoint `ImageReward.pt`.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*, defaults to `"google-bert/bert-base-uncased"`):
            Hub id or folder of the tokenizer, or the tokenizer.
        device, dtype, batch_size, scale:
            See [`LearnedReward`].

    Example:

    ```python
    >>> from omnitrl.rewards import ImageRewardModel

    >>> reward = ImageRewardModel(device="cpu", batch_size=4)
    ```
    """

    def __init__(
        self,
        model: str = "THUDM/ImageReward",
        tokenizer: Any = "google-bert/bert-base-uncased",
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        batch_size: int = 16,
        scale: float = 1.0,
    ) -> None:
        super().__init__(device, dtype, batch_size, scale)
        self.model = model
        self.tokenizer = tokenizer

    def _build(self) -> nn.Module:
        from transformers import AutoTokenizer, BlipTextConfig, BlipVisionConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        name = type(self).__name__
        checkpoint = read_checkpoint(self.model, "ImageReward.pt", name)
        parts = {part: _under(checkpoint, part) for part in ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")}
        empty = [part for part, state in parts.items() if not state]
        if empty:
            raise RewardError(
                f"{name}: {self.model!r} has {len(checkpoint)} weights and none of them begins with {empty[0]!r}: "
                f"give the file 'ImageReward.pt' of 'THUDM/ImageReward'."
            )
        vision_state, text_state, head_state = parts.values()
        vision_state = _vision_weights(vision_state)
        text_state.pop("embeddings.position_ids", None)  # a range of numbers
        vision_config = BlipVisionConfig(**_vision_shape(vision_state, name, self.model), layer_norm_eps=1e-6)
        text_config = BlipTextConfig(
            **_text_shape(text_state, name, self.model), encoder_hidden_size=vision_config.hidden_size
        )
        vision = fill_model(BlipVisionModel, vision_config, vision_state, name, self.model)
        text = fill_model(BlipTextModel, text_config, text_state, name, self.model, add_pooling_layer=False)
        head = linear_head(head_state, self.model, name)
        tokenizer = self.tokenizer
        if isinstance(tokenizer, str):
            tokenizer = load_part(AutoTokenizer, tokenizer, name)
        return _ImageRewardNetwork(vision, text, head, tokenizer)

    def _place(self, network: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
        network.to(device, dtype)
        network.head.to(torch.float32)
        return network

    def _score(self, network: Any, prompts: Sequence[str], media: list[Image.Image]) -> Tensor:
        device, dtype = network.vision.device, network.vision.dtype
        tokens, rows = self._tokens(network.tokenizer, prompts, _TEXT_LENGTH, padding="max_length")
        pixels = network.preprocessing.pictures(media).to(device, dtype)
        seen = network.vision(pixels).last_hidden_state  # (B, patches + 1, D)
        read = network.text(
            input_ids=tokens["input_ids"][rows].to(device),
            attention_mask=tokens["attention_mask"][rows].to(device),
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=device),
            is_decoder=False,  # reads in both directions
        ).last_hidden_state
        return (network.head(read[:, 0].float()).squeeze(-1) - _MEAN) / _STD


def _under(checkpoint: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in checkpoint.items() if name.startswith(prefix)}


def _vision_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    converted = {}
    for name, value in state.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if match is not None and match[2] in _VISION_LAYER:
            converted[f"encoder.layers.{match[1]}.{_VISION_LAYER[match[2]]}.{match[3]}"] = value
        else:  # one without a place is refused when the model is filled
            converted[_VISION.get(name, name)] = value
    return converted


def _vision_shape(state: Mapping[str, Tensor], reward: str, source: str) -> dict[str, Any]:
    """The options of a `BlipVisionConfig` that weights show."""
    try:
        width, _, patch, _ = state["embeddings.patch_embedding.weight"].shape
        positions = state["embeddings.position_embedding"].shape[1] - 1
        middle = state["encoder.layers.0.mlp.fc1.weight"].shape[0]
    except KeyError as error:
        raise _unreadable(reward, source, error, len(state)) from error
    return {
        "hidden_size": width,
        "intermediate_size": middle,
        "num_hidden_layers": _count(state, r"encoder\.layers\.(\d+)\..+"),
        "num_attention_heads": width // _HEAD_WIDTH,
        "patch_size": patch,
        "image_size": round(positions**0.5) * patch,
    }


def _text_shape(state: Mapping[str, Tensor], reward: str, source: str) -> dict[str, Any]:
    """The options of a `BlipTextConfig` that weights show."""
    try:
        words, width = state["embeddings.word_embeddings.weight"].shape
        positions = state["embeddings.position_embeddings.weight"].shape[0]
        middle = state["encoder.layer.0.intermediate.dense.weight"].shape[0]
    except KeyError as error:
        raise _unreadable(reward, source, error, len(state)) from error
    return {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": middle,
        "num_hidden_layers": _count(state, r"encoder\.layer\.(\d+)\..+"),
        "num_attention_heads": width // _HEAD_WIDTH,
        "max_position_embeddings": positions,
    }


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    return len({match[1] for name in state if (match := re.fullmatch(pattern, name))})


def _unreadable(reward: str, source: str, error: KeyError, count: int) -> RewardError:
    return RewardError(
        f"{reward}: {source!r} lacks the weight {error} among {count}: give the file 'ImageReward.pt' of "
        f"'THUDM/ImageReward'."
    )


imagereward_reward = ImageRewardModel()

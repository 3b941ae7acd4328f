# SPDX-License-Identifier: Apache-2.0
"""HPS v3: a vision-language model that was trained to say how people would rank an image."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ..contract import RewardError
from .base import LearnedReward
from .hpsv3_prompt import REWARD_TOKEN, hpsv3_prompt
from .weights import fill_model, load_part, read_checkpoint


_PIXELS = 256 * 28 * 28  # of every picture, within the multiples of 28 that keep its shape
_HEAD_LAYERS = (0, 3, 5)  # between them: ReLU and dropout


class _HPSv3Network(nn.Module):
    def __init__(self, body: Any, head: nn.Module, tokenizer: Any, processor: Any) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.tokenizer = tokenizer
        self.processor = processor
        self.reward_id = int(tokenizer.convert_tokens_to_ids(REWARD_TOKEN))


class HPSv3Reward(LearnedReward):
    """
    HPS v3: how people would rank the image for the prompt.

    A Qwen2-VL-7B that was trained on [HPD v3](https://huggingface.co/papers/2508.03789). It is shown the image and the
    prompt, and a head reads a mean and a deviation off a token `<|Reward|>`; the mean is the reward. It has no bounds:
    the authors' benchmark has means of -0.24 (Stable Diffusion 2) to 10.55 (Kolors). verl-omni multiplies it by 0.1:
    `scale=0.1`.

    Pictures are resized (bicubic) to about 200,704 pixels in multiples of 28 that keep their shape, 448×448 for a
    square. The network runs in bfloat16 and its head in float32, as the original.

    Args:
        model (`str`, *optional*, defaults to `"MizzenAI/HPSv3"`):
            Hub id, folder or file of the checkpoint `HPSv3.safetensors`.
        backbone (`str`, *optional*, defaults to `"Qwen/Qwen2-VL-7B-Instruct"`):
            Hub id or folder whose configuration and tokenizer are read.
        device, dtype, batch_size, scale:
            See [`LearnedReward`].

    Example:

    ```python
    >>> from omnitrl.rewards import HPSv3Reward

    >>> reward = HPSv3Reward(scale=0.1, batch_size=4)
    ```
    """

    default_dtype = torch.bfloat16

    def __init__(
        self,
        model: str = "MizzenAI/HPSv3",
        backbone: str = "Qwen/Qwen2-VL-7B-Instruct",
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        batch_size: int = 8,
        scale: float = 1.0,
    ) -> None:
        super().__init__(device, dtype, batch_size, scale)
        self.model = model
        self.backbone = backbone

    def _build(self) -> nn.Module:
        from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLModel
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        name = type(self).__name__
        config = load_part(Qwen2VLConfig, self.backbone, name)
        tokenizer = load_part(AutoTokenizer, self.backbone, name)
        tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
        checkpoint = read_checkpoint(self.model, "HPSv3.safetensors", name)
        body_state, head_state = _parted(checkpoint.get("model", checkpoint))
        words = body_state.get("language_model.embed_tokens.weight")
        if words is None or len(words) != len(tokenizer):  # the authors resize it to the tokenizer and their token
            rows = "no" if words is None else str(len(words))
            raise RewardError(
                f"{name}: {self.model!r} has vectors of {rows} tokens, and the tokenizer of {self.backbone!r} has "
                f"{len(tokenizer)} with {REWARD_TOKEN}: give as `backbone` the model that the checkpoint was trained "
                f"from, 'Qwen/Qwen2-VL-7B-Instruct' for 'MizzenAI/HPSv3'."
            )
        config.text_config.vocab_size = len(words)
        body = fill_model(Qwen2VLModel, config, body_state, name, self.model)
        vision = config.vision_config
        processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": _PIXELS, "longest_edge": _PIXELS},
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
        )
        return _HPSv3Network(body, _head(head_state, self.model, name), tokenizer, processor)

    def _place(self, network: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
        network.body.to(device, dtype)
        network.head.to(device, torch.float32)
        return network

    def _score(self, network: Any, prompts: Sequence[str], media: list[Image.Image]) -> Tensor:
        body = network.body
        images = network.processor(media, return_tensors="pt")
        grid = images["image_grid_thw"]  # (B, 3): patches in time, height, width
        counts = (grid.prod(dim=-1) // network.processor.merge_size**2).tolist()
        texts = [hpsv3_prompt(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        tokens = network.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        ids = tokens["input_ids"].to(body.device)
        rewarded = ids == network.reward_id
        wrong = [row for row, found in enumerate(rewarded.sum(dim=-1).tolist()) if found != 1]
        if wrong:
            raise RewardError(
                f"{type(self).__name__}: a prompt must not hold {REWARD_TOKEN}, which the reward is read off: "
                f"{prompts[wrong[0]]!r:.80}."
            )
        # The authors' class calls the network in a way that numbers all tokens in a row, those of the image too, where
        # Qwen2-VL would count them by height and width; the weights were trained so.
        positions = torch.arange(ids.shape[1], device=body.device).expand(3, *ids.shape)  # time, height, width
        hidden = body(
            input_ids=ids,
            attention_mask=tokens["attention_mask"].to(body.device),
            pixel_values=images["pixel_values"].to(body.device, body.dtype),
            image_grid_thw=grid.to(body.device),
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state  # (B, L, D)
        return network.head(hidden[rewarded].float())[:, 0]


def _parted(checkpoint: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """
    The weights of `Qwen2VLModel` and those of the head.

    transformers before 4.52 called the parts `visual.` and `model.`, later ones `model.visual.` and
    `model.language_model.`; the layer that makes words is not used.
    """
    body, head = {}, {}
    for name, value in checkpoint.items():
        if name.startswith("rm_head."):
            head[name.removeprefix("rm_head.")] = value
        elif name.startswith(("model.visual.", "model.language_model.")):
            body[name.removeprefix("model.")] = value
        elif name.startswith("model."):
            body[f"language_model.{name.removeprefix('model.')}"] = value
        elif name != "lm_head.weight":
            body[name] = value
    return body, head


def _head(state: Mapping[str, Tensor], source: str, reward: str) -> nn.Sequential:
    expected = {f"{i}.{kind}" for i in _HEAD_LAYERS for kind in ("weight", "bias")}
    if set(state) != expected:
        raise RewardError(
            f"{reward}: {source!r} has {len(set(state) & expected)} of the {len(expected)} weights of the reward head "
            f"(rm_head.0.weight, …) and {len(set(state) - expected)} others: give 'HPSv3.safetensors' of "
            f"'MizzenAI/HPSv3'."
        )
    linear = [nn.Linear(state[f"{i}.weight"].shape[1], state[f"{i}.weight"].shape[0]) for i in _HEAD_LAYERS]
    head = nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])
    places = zip((0, 2, 4), _HEAD_LAYERS, strict=True)
    head.load_state_dict({f"{k}.{kind}": state[f"{i}.{kind}"] for k, i in places for kind in ("weight", "bias")})
    return head


hpsv3_reward = HPSv3Reward()

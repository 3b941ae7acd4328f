# SPDX-License-Identifier: Apache-2.0
"""Rewards that are a cosine between an image and its prompt in the space of a CLIP: CLIP score and PickScore."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from .base import DifferentiableReward
from .preprocessing import Preprocessing
from .weights import load_model, load_part


class ClipNetwork(nn.Module):
    """
    A CLIP with what it takes to feed it.

    Args:
        model (`transformers.CLIPModel`):
            The network.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Its tokenizer, for rewards that look at prompts.
        **preprocessing:
            Options of [`Preprocessing`]; the size is the model's.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **preprocessing: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.preprocessing = Preprocessing(model.config.vision_config.image_size, **preprocessing)

    @property
    def text_length(self) -> int:
        """Tokens of a prompt that are read, with those at its beginning and end."""
        return int(self.model.config.text_config.max_position_embeddings)

    def picture_embeds(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Unit vectors (B, D) of pictures."""
        return self._image_embeds(self.preprocessing.pictures(pictures))

    def pixel_embeds(self, pixels: Tensor) -> Tensor:
        """Unit vectors (B, D) of pixels (B, 3, H, W) in [0, 1], with a gradient."""
        return self._image_embeds(self.preprocessing.pixels(pixels.to(self.model.device)))

    def text_embeds(self, tokens: dict[str, Tensor]) -> Tensor:
        """Unit vectors (B, D) of tokenized prompts."""
        inputs = {name: value.to(self.model.device) for name, value in tokens.items()}
        return functional.normalize(self.model.get_text_features(**inputs).pooler_output.float(), dim=-1)

    def _image_embeds(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.model.device, self.model.dtype)
        return functional.normalize(self.model.get_image_features(inputs).pooler_output.float(), dim=-1)


class ClipCosineReward(DifferentiableReward):
    """What the rewards share that are a function of the cosine between image and prompt."""

    def _value(self, network: ClipNetwork, cosine: Tensor) -> Tensor:
        """The value of a cosine (B,), before the scale."""
        return cosine

    def _text(self, prompt: str) -> str:
        """A prompt as it is tokenized."""
        return prompt

    def _score(self, network: ClipNetwork, prompts: Sequence[str], media: list[Image.Image]) -> Tensor:
        return self._compared(network, prompts, network.picture_embeds(media))

    def _score_pixels(self, network: ClipNetwork, prompts: Sequence[str], pixels: Tensor) -> Tensor:
        return self._compared(network, prompts, network.pixel_embeds(pixels))

    def _compared(self, network: ClipNetwork, prompts: Sequence[str], images: Tensor) -> Tensor:
        texts = [self._text(prompt) for prompt in prompts]
        tokens, rows = self._tokens(network.tokenizer, texts, network.text_length, padding=True)
        with torch.no_grad():
            embeds = network.text_embeds(tokens)[rows.to(images.device)]
        return self._value(network, (images * embeds).sum(dim=-1))


class CLIPReward(ClipCosineReward):
    r"""
    CLIP score: how well an image fits its prompt.

    \\( \max(100 \cos(E_\text{image}, E_\text{prompt}), 0) \\), as in [CLIPScore](https://huggingface.co/papers/2104.08718)
    with the factor of torchmetrics. Range [0, 100]; images that fit have 25 to 35. Of a prompt 77 tokens are read.

    Pictures are resized to a shorter side of 224 pixels (bicubic) and cut to the square in the middle. The
    differentiable form is that of SRPO; its values are those of pictures but for the rounding to 8 bit.

    Args:
        model (`str` or `transformers.CLIPModel`, *optional*, defaults to `"openai/clip-vit-large-patch14"`):
            Hub id, folder, or a network.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*):
            The same of its tokenizer; that of `model` by default.
        clamp (`bool`, *optional*, defaults to `True`):
            Whether negative values are 0. They have no gradient then.
        device, dtype, batch_size:
            See [`LearnedReward`].
        scale (`float`, *optional*, defaults to 100.0):
            Factor on the cosine; 1.0 for the cosine itself.

    Example:

    ```python
    >>> from omnitrl.rewards import CLIPReward

    >>> reward = CLIPReward("openai/clip-vit-base-patch32", scale=1.0)  # nothing is loaded yet
    >>> reward.traits.media
    ('image',)
    ```
    """

    def __init__(
        self,
        model: Any = "openai/clip-vit-large-patch14",
        tokenizer: Any = None,
        clamp: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        batch_size: int = 16,
        scale: float = 100.0,
    ) -> None:
        super().__init__(device, dtype, batch_size, scale)
        self.model = model
        self.tokenizer = tokenizer
        self.clamp = clamp

    def _build(self) -> ClipNetwork:
        return build_clip(self.model, self.tokenizer, type(self).__name__)

    def _value(self, network: ClipNetwork, cosine: Tensor) -> Tensor:
        return cosine.clamp(min=0) if self.clamp else cosine


class PickScoreReward(ClipCosineReward):
    r"""
    PickScore: which image people would pick for the prompt.

    \\( e^{s} \cos(E_\text{image}, E_\text{prompt}) \\) of a CLIP ViT-H/14 that was trained on the choices of
    [Pick-a-Pic](https://huggingface.co/papers/2305.01569), with its logit scale \\( e^{s} = 100 \\). Usual values are
    17 to 24. flow_grpo, DiffusionNFT and Flow-Factory divide them by 26: `scale=1 / 26`.

    Pictures are prepared as for [`CLIPReward`]. Of a prompt 77 tokens are read.

    Args:
        model (`str` or `transformers.CLIPModel`, *optional*, defaults to `"yuvalkirstain/PickScore_v1"`):
            Hub id, folder, or a network.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*):
            The same of its tokenizer, `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"` by default.
        device, dtype, batch_size, scale:
            See [`LearnedReward`].

    Example:

    ```python
    >>> from omnitrl.rewards import PickScoreReward

    >>> reward = PickScoreReward(scale=1 / 26)  # as flow_grpo
    ```
    """

    def __init__(
        self,
        model: Any = "yuvalkirstain/PickScore_v1",
        tokenizer: Any = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        batch_size: int = 16,
        scale: float = 1.0,
    ) -> None:
        super().__init__(device, dtype, batch_size, scale)
        self.model = model
        self.tokenizer = tokenizer

    def _build(self) -> ClipNetwork:
        return build_clip(self.model, self.tokenizer, type(self).__name__)

    def _value(self, network: ClipNetwork, cosine: Tensor) -> Tensor:
        return network.model.logit_scale.float().exp() * cosine


def build_clip(model: Any, tokenizer: Any, reward: str, **preprocessing: Any) -> ClipNetwork:
    """A CLIP and its tokenizer, each given as it is or by the name where it is found."""
    from transformers import AutoTokenizer, CLIPModel

    source = model if isinstance(model, str) else model.config.name_or_path
    if isinstance(model, str):
        model = load_model(CLIPModel, model, reward)
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = load_part(AutoTokenizer, tokenizer or source, reward)
    return ClipNetwork(model, tokenizer, **preprocessing)


clip_reward = CLIPReward()
pickscore_reward = PickScoreReward()

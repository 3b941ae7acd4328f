# SPDX-License-Identifier: Apache-2.0
"""The aesthetic predictor of LAION: a head on the image vectors of a CLIP."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ..contract import RewardError
from .base import DifferentiableReward
from .clip import ClipNetwork
from .weights import load_model, read_checkpoint


_LINEAR_LAYERS = 5


class _AestheticNetwork(nn.Module):
    def __init__(self, clip: ClipNetwork, head: nn.Module) -> None:
        super().__init__()
        self.clip = clip
        self.head = head


class AestheticReward(DifferentiableReward):
    """
    LAION's aesthetic predictor: how beautiful people would find the image. The prompt plays no part.

    Five linear layers without activations (768-1024-128-64-16-1), in float32, on the *unit* vector of the image in
    CLIP ViT-L/14 ([improved-aesthetic-predictor](https://github.com/christophschuhmann/improved-aesthetic-predictor),
    trained on SAC, Logos and AVA). Range about 0 to 10; usual values are 4 to 7. The reward of
    [DDPO](https://huggingface.co/papers/2305.13301).

    Pictures are prepared as for [`CLIPReward`].

    Args:
        model (`str`, *optional*, defaults to `"trl-lib/ddpo-aesthetic-predictor"`):
            Hub id, folder or file of the head; LAION's `sac+logos+ava1-l14-linearMSE.pth` has the same layout.
        backbone (`str` or `transformers.CLIPModel`, *optional*, defaults to `"openai/clip-vit-large-patch14"`):
            Hub id or folder of the CLIP, or the network.
        device, dtype, batch_size, scale:
            See [`LearnedReward`].

    Example:

    ```python
    >>> from omnitrl.rewards import AestheticReward

    >>> reward = AestheticReward(scale=0.1)  # 0 to 1
    ```
    """

    def __init__(
        self,
        model: str = "trl-lib/ddpo-aesthetic-predictor",
        backbone: Any = "openai/clip-vit-large-patch14",
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        batch_size: int = 16,
        scale: float = 1.0,
    ) -> None:
        super().__init__(device, dtype, batch_size, scale)
        self.model = model
        self.backbone = backbone

    def _build(self) -> nn.Module:
        from transformers import CLIPModel

        name = type(self).__name__
        head = linear_head(read_checkpoint(self.model, "aesthetic-model.pth", name), self.model, name)
        clip = load_model(CLIPModel, self.backbone, name) if isinstance(self.backbone, str) else self.backbone
        width, wanted = clip.config.projection_dim, head[0].in_features
        if width != wanted:
            raise RewardError(
                f"{name}: the head {self.model!r} takes vectors of {wanted} numbers and the CLIP makes {width}: use "
                f"backbone='openai/clip-vit-large-patch14', which makes 768."
            )
        return _AestheticNetwork(ClipNetwork(clip), head)

    def _place(self, network: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
        network.clip.to(device, dtype)
        network.head.to(device, torch.float32)
        return network

    def _score(self, network: Any, prompts: Sequence[str], media: list[Image.Image]) -> Tensor:
        return network.head(network.clip.picture_embeds(media)).squeeze(-1)

    def _score_pixels(self, network: Any, prompts: Sequence[str], pixels: Tensor) -> Tensor:
        return network.head(network.clip.pixel_embeds(pixels)).squeeze(-1)


def linear_head(state: Mapping[str, Tensor], source: str, reward: str) -> nn.Sequential:
    """
    The head of a checkpoint, whose layers are `layers.0`, `.2`, `.4`, `.6` and `.7`: those between drop out.

    Raises:
        [`~omnitrl.rewards.RewardError`]: other layers than these, or shapes that do not follow on each other.
    """
    numbers = sorted({int(match[1]) for name in state if (match := re.fullmatch(r"layers\.(\d+)\.weight", name))})
    expected = {f"layers.{i}.{kind}" for i in numbers for kind in ("weight", "bias")}
    if len(numbers) != _LINEAR_LAYERS or set(state) != expected:
        raise RewardError(
            f"{reward}: the head in {source!r} has {len(numbers)} linear layers in {len(state)} weights, and should "
            f"have {_LINEAR_LAYERS} in {2 * _LINEAR_LAYERS} (layers.0.weight, layers.0.bias, …): give the checkpoint "
            f"that the reward was made for."
        )
    shapes = [tuple(state[f"layers.{i}.weight"].shape) for i in numbers]  # each (out, in)
    if any(one[0] != other[1] for one, other in itertools.pairwise(shapes)) or shapes[-1][0] != 1:
        raise RewardError(f"{reward}: the layers of the head in {source!r} do not follow on each other: {shapes}.")
    head = nn.Sequential(*[nn.Linear(inputs, outputs) for outputs, inputs in shapes])
    weights = {
        f"{k}.{kind}": state[f"layers.{i}.{kind}"] for k, i in enumerate(numbers) for kind in ("weight", "bias")
    }
    head.load_state_dict(weights)
    return head


aesthetic_reward = AestheticReward()

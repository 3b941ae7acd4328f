# SPDX-License-Identifier: Apache-2.0
"""HPS v2 and v2.1: a CLIP of open_clip that was trained on people's rankings."""

import html
from typing import Any

import torch

from omnitrl.errors import InputError

from .clip import ClipCosineReward, ClipNetwork
from .open_clip import clip_from_open_clip
from .weights import fill_model, load_part, read_checkpoint


_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}


class HPSv2Reward(ClipCosineReward):
    r"""
    HPS v2: how people would rank the image for the prompt.

    \\( \cos(E_\text{image}, E_\text{prompt}) \\) of a CLIP ViT-H/14 that was trained on the rankings of
    [HPD v2](https://huggingface.co/papers/2306.09341). Usual values are 0.2 to 0.4; the benchmark of the paper shows
    them times 100. v2.1 was trained on cleaner data, is what RL recipes use (DanceGRPO, MixGRPO, SRPO), and is not
    comparable with v2.0.

    The whole picture is seen: its longer side is made 224 pixels and the rest is black. That is done in floating
    point, with anti-aliasing, by the original too (since torchvision 0.17), so that the differentiable form is the
    same computation. Of a prompt 77 tokens are read.

    Args:
        model (`str`, *optional*, defaults to `"xswu/HPSv2"`):
            Hub id, folder or file of the checkpoint, in the layout of open_clip.
        version (`str`, *optional*, defaults to `"v2.1"`):
            `"v2.0"` or `"v2.1"`: which file of the repository or folder.
        backbone (`str`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
            Hub id or folder of the same CLIP for transformers: its configuration and tokenizer are read.
        device, dtype, batch_size, scale:
            See [`LearnedReward`].

    Example:

    ```python
    >>> from omnitrl.rewards import HPSv2Reward

    >>> reward = HPSv2Reward(version="v2.0")
    ```
    """

    def __init__(
        self,
        model: str = "xswu/HPSv2",
        version: str = "v2.1",
        backbone: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        batch_size: int = 16,
        scale: float = 1.0,
    ) -> None:
        if version not in _FILES:
            raise InputError(f"version={version!r} is unknown: use 'v2.1' or 'v2.0', or HPSv3Reward for v3.")
        super().__init__(device, dtype, batch_size, scale)
        self.model = model
        self.version = version
        self.backbone = backbone

    def _build(self) -> ClipNetwork:
        from transformers import AutoTokenizer, CLIPConfig, CLIPModel

        name = type(self).__name__
        config = load_part(CLIPConfig, self.backbone, name)
        tokenizer = load_part(AutoTokenizer, self.backbone, name)
        checkpoint: dict[str, Any] = read_checkpoint(self.model, _FILES[self.version], name)
        state = clip_from_open_clip(checkpoint.get("state_dict", checkpoint))
        return ClipNetwork(fill_model(CLIPModel, config, state, name, self.model), tokenizer, fit="pad")

    def _text(self, prompt: str) -> str:
        # open_clip cleans prompts so; its repair of wrongly decoded characters is left out.
        return html.unescape(html.unescape(prompt)).strip()


hpsv2_reward = HPSv2Reward()

# SPDX-License-Identifier: Apache-2.0
"""Wan2.1 and Wan2.2: image to video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.models.conditions import Conditions
from omnitrl.models.size import MediaSize
from omnitrl.models.wan import WanModel


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class WanImageToVideoModel(WanModel):
    """
    `WanImageToVideoPipeline`: Wan2.1, which sees the first frame through CLIP too, Wan2.2 A14B, and TI2V-5B.

    The condition image is the first frame; where the checkpoint takes two, the other one is the last. TI2V-5B puts the
    first frame's latents in place of its own, where it stays clean.

    Example:

    ```python
    >>> model = load_flow_model("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("WanImageToVideoPipeline",)

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        super().__init__(pipeline, max_sequence_length)
        config = self.transformer.config
        self.sees_images = config.image_dim is not None
        if self.sees_images:
            self.default_lora_targets = (*self.default_lora_targets, "add_k_proj", "add_v_proj")
        takes_two = config.pos_embed_seq_len is not None  # Wan2.1 FLF2V
        takes_one = not takes_two and (self.sees_images or self.expands_timesteps)
        self.num_images = (2 if takes_two else 1, 1 if takes_one else 2)
        self._last: tuple[Any, dict[str, Tensor]] = (None, {})

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """
        The prompt's tensors, `condition` (1, C, F, H, W), and `image_embeds` (1, N, L, D) of N images where the
        network looks at them.
        """
        if self.sees_images and self.max_sequence_length != 512:
            raise InputError(
                f"max_sequence_length={self.max_sequence_length} does not fit this checkpoint, which tells text and "
                "image apart by counting: leave it out, or use max_sequence_length=512."
            )
        # A row's negative prompt comes with the same images, whose encoding takes far longer than the text's.
        key = (self.device, *self.cache_key(row, size)[1:])
        if self._last[0] != key:
            self._last = (key, self._encoded_images(self.images(row), size))
        return Conditions({**super().encode_row(row, size).positive, **self._last[1]})

    def _encoded_images(self, images: list[Any], size: MediaSize) -> dict[str, Tensor]:
        pipe, device, shape = self.pipeline, self.device, self.latent_shape(size)
        first, *rest = (
            pipe.video_processor.preprocess(image, height=size.height, width=size.width).to(device, torch.float32)
            for image in images
        )
        unused = torch.zeros(1, *shape, device=device)
        condition = pipe.prepare_latents(
            first,
            1,
            shape[0],
            size.height,
            size.width,
            size.num_frames,
            torch.float32,
            device,
            latents=unused,
            last_image=rest[0] if rest else None,
        )[1]
        if not self.sees_images:
            return {"condition": condition}
        return {"condition": condition, "image_embeds": pipe.encode_image(images, device)[None]}

    def network_input(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """The latents beside the condition, or with the first frame in its place."""
        condition = inputs["condition"].to(latents.dtype)
        if self.expands_timesteps:
            return torch.cat([condition, latents[:, :, 1:]], dim=2)
        return torch.cat([latents, condition], dim=1)

    def network_options(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What CLIP saw."""
        embeds = inputs.get("image_embeds")
        return {} if embeds is None else {"encoder_hidden_states_image": embeds.flatten(0, 1).to(self.dtype)}

    def token_timesteps(self, latents: Tensor, timesteps: Tensor) -> Tensor:
        """(B, tokens) timesteps, 0 in the first frame, which is clean."""
        tokens = super().token_timesteps(latents, timesteps).unflatten(1, (latents.shape[2], -1))
        return torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, 1:]], dim=1).flatten(1)

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """
        The network's velocity; in a first frame that is given, the one that leads straight to it.

        What the network says there is thrown away by the stock pipeline. So no gradient comes from there, a clean
        sample has its frame whatever the noise on the way was, and all members of a group have the same.
        """
        velocity = super().predict(latents, timesteps, inputs, layout)
        if not self.expands_timesteps:
            return velocity
        sigmas = (timesteps / self.pipeline.scheduler.config.num_train_timesteps).view(-1, 1, 1, 1, 1)
        known = (latents[:, :, :1] - inputs["condition"].to(latents.dtype)) / sigmas.to(latents.dtype)
        return torch.cat([known, velocity[:, :, 1:]], dim=2)

    def final_latents(self, latents: Tensor, conditions: Conditions) -> Tensor:
        """With the first frame that was given, which timesteps rounded to integers miss by a thousandth."""
        if not self.expands_timesteps:
            return latents
        return torch.cat([conditions.positive["condition"].to(latents.dtype), latents[:, :, 1:]], dim=2)

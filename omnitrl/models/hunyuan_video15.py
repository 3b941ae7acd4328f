# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo-1.5: text to video, and image to video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omnitrl.models.conditions import Conditions
from omnitrl.models.hunyuan import HunyuanModel
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, check_multiple, sides_of
from omnitrl.models.video import VideoModel


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class HunyuanVideo15Model(HunyuanModel, VideoModel):
    """
    `HunyuanVideo15Pipeline`: videos of a prompt and of the text that it quotes.

    The guidance scale is that of the checkpoint's guider by default: 6, or 1 for those distilled to need none.

    Example:

    ```python
    >>> checkpoint = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    >>> model = load_flow_model(checkpoint, dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("HunyuanVideo15Pipeline",)
    default_guidance_scale = 6.0
    frame_rate = 24.0

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        super().__init__(pipeline, max_sequence_length)
        self.default_guidance_scale = float(self.pipeline.guider.guidance_scale)
        self.pipeline.vae.enable_slicing()  # its attention takes one video at a time only

    @property
    def default_size(self) -> MediaSize:
        """121 frames of 16 : 9, of about as many pixels as the checkpoint was made for (480p or 720p)."""
        pipe = self.pipeline
        height, width = pipe.video_processor.calculate_default_height_width(9, 16, pipe.target_size)
        return MediaSize(height, width, num_frames=121)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(C, (num_frames - 1) / t + 1, height / f, width / f) with the VAE's factors t and f."""
        pipe, config, size = self.pipeline, self.transformer.config, size.filled(self.default_size)
        factor, time_factor = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal
        height, width = sides_of(size, factor * config.patch_size)
        frames = check_multiple("num_frames", size.num_frames, time_factor, offset=1)
        return (pipe.num_channels_latents, (frames - 1) // time_factor + 1, height // factor, width // factor)

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """
        One call of `HunyuanVideo15Transformer3DModel`, with timesteps rounded to its dtype.

        A first frame comes beside the latents, with a channel that says where there is one. Without a picture, the
        stock pipeline gives the network a masked token for each of a picture's patches; here it gets none.
        """
        dtype, width = self.dtype, self.transformer.config.image_embed_dim
        frame = latents.new_zeros(latents.shape[0], latents.shape[1] + 1, *latents.shape[2:])
        if "first_frame" in inputs:
            frame[:, :-1, :1] = inputs["first_frame"]
            frame[:, -1, 0] = 1
        velocity = self.transformer(
            hidden_states=torch.cat([latents, frame], dim=1).to(dtype),
            timestep=timesteps.to(dtype),
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            encoder_attention_mask=inputs["prompt_embeds_mask"],
            encoder_hidden_states_2=inputs["glyph_embeds"].to(dtype),
            encoder_attention_mask_2=inputs["glyph_embeds_mask"],
            image_embeds=inputs.get("image_embeds", latents.new_zeros(latents.shape[0], 0, width)).to(dtype),
            return_dict=False,
        )[0]
        return velocity.to(latents.dtype)


class HunyuanVideo15ImageModel(HunyuanVideo15Model):
    """
    `HunyuanVideo15ImageToVideoPipeline`: videos that begin with a picture, which a vision encoder sees too.

    Pictures are resized and cut to the media size, as the stock pipeline does.

    Example:

    ```python
    >>> checkpoint = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v"
    >>> model = load_flow_model(checkpoint, dtype=torch.bfloat16)
    >>> conditions = model.encode([{"prompt": "it waves", "image": "cat.png"}])
    ```
    """

    pipeline_classes = ("HunyuanVideo15ImageToVideoPipeline",)
    num_images = (1, 1)

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """The text's conditions, `image_embeds` (1, P, V) and `first_frame` (1, C, 1, h, w)."""
        pipe, height, width = self.pipeline, size.height, size.width
        (image,) = self.images(row)
        image = pipe.video_processor.resize(image, height=height, width=width, resize_mode="crop")
        embeds = pipe.encode_image(image, batch_size=1, device=self.device, dtype=self.dtype)
        pixels = pipe.video_processor.preprocess(image, height=height, width=width).to(self.device)
        first_frame = self.encode_pixels(pixels.unsqueeze(2))
        return Conditions({**self.text_conditions(row["prompt"]), "image_embeds": embeds, "first_frame": first_frame})

# SPDX-License-Identifier: Apache-2.0
"""Stable Audio 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import InputError
from omnitrl.models.audio import AudioModel
from omnitrl.models.base import stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


LOGSNR_MIN, LOGSNR_MAX = -6.2, 2.0  # defaults of the stock call; the checkpoint has them nowhere


class StableAudio3Model(AudioModel):
    """
    `StableAudio3Pipeline`: stereo music and sound effects of any length up to the checkpoint's, from a prompt.

    The base checkpoint is guided, 7.0 by default. The distilled one has its guidance in the weights, and its scheduler
    replaces all noise at each step; that sampler is `sde_type="cps"` with `noise_level=1.0` on all steps, while
    deterministic steps follow the ODE of the same velocities. No public recipe trains it with reinforcement learning.

    Example:

    ```python
    >>> model = load_flow_model("stable-audio-3-medium-base-diffusers", dtype=torch.bfloat16)
    >>> model.latent_shape(MediaSize(audio_length=10.0))
    (256, 108)
    ```
    """

    pipeline_classes = ("StableAudio3Pipeline",)
    default_lora_targets = (
        "self_attn.to_qkv",
        "self_attn.to_out",
        "cross_attn.to_q",
        "cross_attn.to_kv",
        "cross_attn.to_out",
    )
    unused_modules = ("to_local_embed",)  # for inpainting
    default_guidance_scale = 7.0
    default_max_sequence_length = 256

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        super().__init__(pipeline, max_sequence_length)
        if self.pipeline.scheduler.config.stochastic_sampling:
            self.default_guidance_scale = 1.0  # distilled to need none

    @property
    def sampling_rate(self) -> int:
        """The autoencoder's, 44,100 for the public checkpoints."""
        return self.pipeline.vae.config.sampling_rate

    @property
    def default_size(self) -> MediaSize:
        """Ten seconds, as in the stock pipeline."""
        return MediaSize(audio_length=10.0)

    def cache_key(self, row: dict[str, Any], size: MediaSize) -> tuple:
        """The length is a part of what the network is told."""
        return (row["prompt"], size.audio_length)

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """
        `prompt_embeds` (1, L + 1, D): the text and a token for the length; `duration` (1, D): that token again.

        The network puts a learned vector in the place of what `is_text` (1, L + 1) is false for, and attends to it: so
        the padding is a part of what it sees, and stays.
        """
        pipe = self.pipeline
        length = min(self.max_sequence_length, pipe.tokenizer.model_max_length)
        tokens = pipe.tokenizer(
            [row["prompt"]], padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).to(self.device)
        text = pipe.text_encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        duration = pipe.encode_duration(size.audio_length, self.device, 1, 1)
        embeds, is_text = pipe.prepare_cross_attention(text, tokens.attention_mask, duration)
        return Conditions({"prompt_embeds": embeds, "is_text": is_text.bool(), "duration": duration})

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(C, L): the length in blocks of the autoencoder, 93 ms each, rounded up."""
        length, vae = size.filled(self.default_size).audio_length, self.pipeline.vae
        longest = self.pipeline.duration_embedder.config.max_val
        if length is None or not 1 / self.sampling_rate <= length <= longest:
            raise InputError(
                f"audio_length={length} does not fit this checkpoint: it makes sounds of up to {longest:g} seconds, "
                "for example audio_length=10.0."
            )
        return (vae.config.latent_dim, math.ceil(length * self.sampling_rate / vae.downsampling_ratio))

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """Levels at equal distances of the log signal-to-noise ratio, by the pipeline's own function."""
        from diffusers.pipelines.stable_audio_3.pipeline_stable_audio_3 import logsnr_sigma_schedule

        sigmas = logsnr_sigma_schedule(num_steps, LOGSNR_MIN, LOGSNR_MAX)
        return stock_sigma_table(self.pipeline.scheduler, num_steps, sigmas=sigmas)

    def timesteps_of(self, sigmas: Tensor) -> Tensor:
        """In the scheduler's unit, which is 1 for this network."""
        return self.pipeline.scheduler.config.num_train_timesteps * sigmas

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """One call of `StableAudio3DiTModel`."""
        network, dtype = self.transformer, self.dtype
        velocity = network(
            latents.to(dtype),
            timesteps,
            encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
            global_hidden_states=inputs["duration"].to(dtype),
            encoder_attention_mask=inputs["is_text"],
            return_dict=False,
        )[0]
        return velocity.to(latents.dtype)

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """Waveforms (B, channels, samples) in whole blocks, not cut to the length."""
        vae = self.pipeline.vae
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Latents of waveforms; this autoencoder has no randomness."""
        vae = self.pipeline.vae
        return vae.encode(pixels.to(vae.dtype), return_dict=False)[0]

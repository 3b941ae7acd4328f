# SPDX-License-Identifier: Apache-2.0
"""LTX-2 and LTX-2.3: videos with sound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import InputError
from omnitrl.media import Audio
from omnitrl.models.base import stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.levels import even_levels, shift_by_tokens
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, check_multiple, sides_of
from omnitrl.models.video import VideoModel


class LTX2Model(VideoModel):
    """
    `LTX2Pipeline`: a prompt becomes a video and its sound, which one network makes together.

    Latents are one vector (D,): those of the video, (C, F, H, W), and behind them those of the sound, (c, L, M) with
    `M` mel bins, both as the stock pipeline draws them. [`~FlowModel.modalities`] says where each begins and ends.
    Recipe defaults are those of verl-omni for LTX-2.3: guidance 4, LoRA on all attention and feed-forward layers.

    Example:

    ```python
    >>> model = load_flow_model("Lightricks/LTX-2", dtype=torch.bfloat16)
    >>> model.modalities(MediaSize(256, 384, 81))
    {'video': slice(0, 135168, None), 'audio': slice(135168, 145920, None)}
    ```
    """

    pipeline_classes = ("LTX2Pipeline",)
    default_lora_targets = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "ff.net.0.proj",
        "ff.net.2",
        "audio_ff.net.0.proj",
        "audio_ff.net.2",
    )
    default_guidance_scale = 4.0
    noise_levels = {"cps": 0.8}
    default_max_sequence_length = 1024
    default_size = MediaSize(512, 768, 121)  # of the stock call; a checkpoint names none
    frame_rate = 24.0

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """
        `prompt_embeds` (1, L, D) and `audio_prompt_embeds` (1, L, d), what the connectors make of Gemma's layers.

        L is `max_sequence_length`: the connectors put learnt registers in the place of padding, and the network
        attends to them.
        """
        pipe = self.pipeline
        registers = pipe.connectors.config.video_connector_num_learnable_registers
        if registers and self.max_sequence_length % registers:
            nearest = max(self.max_sequence_length // registers, 1) * registers
            raise InputError(
                f"max_sequence_length={self.max_sequence_length} does not fit this checkpoint: it takes multiples of "
                f"its {registers} text registers, for example {nearest}."
            )
        embeds, mask, *_ = pipe.encode_prompt(
            row["prompt"],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=pipe.text_encoder.device,
        )
        video, audio, mask = pipe.connectors(embeds, mask, padding_side=pipe.tokenizer.padding_side)
        tensors = {"prompt_embeds": video, "audio_prompt_embeds": audio, "prompt_embeds_mask": mask.bool()}
        return Conditions(tensors, layouts=(self._grid(size),))

    def cache_key(self, row: dict[str, Any], size: MediaSize) -> tuple:
        """The prompt, and the size, which is the layout."""
        return (row["prompt"], self._grid(size))

    def _grid(self, size: MediaSize) -> tuple[int, int, int, int]:
        """Latent frames, height and width of a video, and latent frames of its sound."""
        pipe, size = self.pipeline, size.filled(self.default_size)
        space, time = pipe.vae_spatial_compression_ratio, pipe.vae_temporal_compression_ratio
        multiple = lcm(32, space)  # the stock pipeline asks for 32 whatever its VAE
        height, width = sides_of(size, multiple)
        frames = check_multiple("num_frames", size.num_frames, time, offset=1)
        rate = pipe.audio_sampling_rate / pipe.audio_hop_length / float(pipe.audio_vae_temporal_compression_ratio)
        length = round(frames / self.frame_rate * rate)
        return (frames - 1) // time + 1, height // space, width // space, length

    def _shapes(self, grid: tuple[int, int, int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the latents of a video and of its sound."""
        audio, (*video, length) = self.pipeline.audio_vae.config, grid
        mel_bins = audio.mel_bins // self.pipeline.audio_vae_mel_compression_ratio
        return (self.transformer.config.in_channels, *video), (audio.latent_channels, length, mel_bins)

    def _split(self, latents: Tensor, grid: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
        """Latents (B, C, F, H, W) of the video and (B, c, L, M) of the sound."""
        video, audio = self._shapes(grid)
        parts = latents.split([prod(video), prod(audio)], dim=1)
        return parts[0].unflatten(1, video), parts[1].unflatten(1, audio)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(D,), the elements of both modalities."""
        return (sum(map(prod, self._shapes(self._grid(size)))),)

    def modalities(self, size: MediaSize = CHECKPOINT_SIZE) -> dict[str, slice]:
        """`video` and `audio`."""
        video, audio = map(prod, self._shapes(self._grid(size)))
        return {"video": slice(0, video), "audio": slice(video, video + audio)}

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """The scheduler's grid, shifted for the number of video tokens; video and sound share it."""
        from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift

        config, (frames, height, width, _) = self.pipeline.scheduler.config, self._grid(size)
        tokens = frames * height * width
        mu = shift_by_tokens(config, calculate_shift, tokens, base_tokens=1024, shifts=(0.95, 2.05))
        return stock_sigma_table(self.pipeline.scheduler, num_steps, sigmas=even_levels(num_steps), mu=mu)

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """One call of `LTX2VideoTransformer3DModel`."""
        video, audio = self._split(latents.to(self.dtype), layout)
        frames, height, width, length = layout
        velocities = self.transformer(
            hidden_states=video.flatten(2).transpose(1, 2),
            audio_hidden_states=audio.transpose(1, 2).flatten(2),
            encoder_hidden_states=inputs["prompt_embeds"].to(self.dtype),
            audio_encoder_hidden_states=inputs["audio_prompt_embeds"].to(self.dtype),
            timestep=timesteps,
            sigma=timesteps,
            encoder_attention_mask=inputs["prompt_embeds_mask"],
            audio_encoder_attention_mask=inputs["prompt_embeds_mask"],
            num_frames=frames,
            height=height,
            width=width,
            fps=self.frame_rate,
            audio_num_frames=length,
            return_dict=False,
        )
        video_velocity = velocities[0].transpose(1, 2).flatten(1)
        audio_velocity = velocities[1].unflatten(2, (audio.shape[1], audio.shape[3])).transpose(1, 2).flatten(1)
        return torch.cat([video_velocity, audio_velocity], dim=1).to(latents.dtype)

    def visual_latents(self, latents: Tensor, size: MediaSize = CHECKPOINT_SIZE) -> Tensor:
        """Latents (B, C, F, H, W) of the video."""
        return self._split(latents, self._grid(size))[0]

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize = CHECKPOINT_SIZE) -> list[Any]:
        """A [`~omnitrl.media.Video`] with sound of each row, `None` where frames or sound are not finite."""
        video, sound = self._split(latents, self._grid(size))
        sounds = [self._audio(row) for row in sound.split(1)]
        return [
            None if silent is None or audio is None else replace(silent, audio=audio)
            for silent, audio in zip(super().decode(video, size), sounds, strict=True)
        ]

    def _audio(self, latents: Tensor) -> Audio | None:
        """The sound of latents (1, c, L, M)."""
        wave = self.decode_sound(latents)[0].float().cpu()
        rate = self.pipeline.vocoder.config.output_sampling_rate
        return Audio(wave.numpy(), rate) if bool(wave.isfinite().all()) else None

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """The VAE's decoder, of [`~FlowModel.visual_latents`]."""
        vae = self.pipeline.vae
        raw = latents * _channels(vae.latents_std, latents) / vae.config.scaling_factor
        raw = raw + _channels(vae.latents_mean, latents)
        # Decoders with a timestep get the stock call's 0, at which it mixes no noise in either.
        timestep = latents.new_zeros(len(latents), dtype=vae.dtype) if vae.config.timestep_conditioning else None
        return vae.decode(raw.to(vae.dtype), timestep, return_dict=False)[0]

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """The mode of the VAE's encoder, normalised as the network wants it: latents of the video alone."""
        vae = self.pipeline.vae
        raw = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()
        return (raw - _channels(vae.latents_mean, raw)) * vae.config.scaling_factor / _channels(vae.latents_std, raw)

    def decode_sound(self, latents: Tensor) -> Tensor:
        """Waveforms (B, channels, samples) of the sound's latents (B, c, L, M): the audio VAE, then the vocoder."""
        vae, (channels, _, mel_bins) = self.pipeline.audio_vae, latents.shape[1:]
        std, mean = (values.to(latents).view(channels, 1, mel_bins) for values in (vae.latents_std, vae.latents_mean))
        return self.pipeline.vocoder(vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0])


def _channels(values: Tensor, latents: Tensor) -> Tensor:
    """Statistics of channels (C,) as they broadcast with latents (B, C, F, H, W)."""
    return values.to(latents).view(1, -1, 1, 1, 1)

# SPDX-License-Identifier: Apache-2.0
"""Wan2.1 and Wan2.2: text to video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.models.base import stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize, check_multiple
from omnitrl.models.video import VideoModel


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class WanModel(VideoModel):
    """
    `WanPipeline`: Wan2.1 (1.3B, 14B), Wan2.2 TI2V-5B and Wan2.2 A14B, whose second network has the low noise levels.

    Latents are (B, 16 or 48, F, H, W). Recipe defaults are those of Flow-GRPO (https://arxiv.org/abs/2505.05470):
    guidance 4.5, LoRA on self- and cross-attention.

    Attributes:
        boundary (`float`): Timestep from which upwards the first of two networks is called.

    Example:

    ```python
    >>> model = load_flow_model("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("WanPipeline",)
    default_lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    default_guidance_scale = 4.5
    default_max_sequence_length = 512

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        pipe: Any = pipeline
        ratio = pipe.config.boundary_ratio
        self.boundary = 0.0 if ratio is None else float(ratio * pipe.scheduler.config.num_train_timesteps)
        names = ("transformer",) if ratio is None else ("transformer", "transformer_2")
        self.network_names = tuple(name for name in names if pipe.components[name] is not None)
        self.expands_timesteps = bool(pipe.config.expand_timesteps)
        self.frame_rate = 24.0 if self.expands_timesteps else 16.0
        super().__init__(pipeline, max_sequence_length)

    # Sizes and noise levels

    @property
    def default_size(self) -> MediaSize:
        """832 × 480 and 81 frames as in the stock pipeline, for TI2V-5B what it was made for."""
        return MediaSize(704, 1280, 121) if self.expands_timesteps else MediaSize(480, 832, 81)

    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """(C, 1 + (num_frames - 1) / 4, height / f, width / f) with the VAE's factor f, 8 or 16."""
        config, pipe, size = self.transformer.config, self.pipeline, size.filled(self.default_size)
        factor, steps, longest = pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal, config.rope_max_seq_len
        frames = check_multiple("num_frames", size.num_frames, steps, 1 + steps * (longest - 1), offset=1)
        sides = zip(("height", "width"), (size.height, size.width), config.patch_size[1:], strict=True)
        height, width = (check_multiple(name, side, factor * p, longest * factor * p) for name, side, p in sides)
        return (pipe.vae.config.z_dim, 1 + (frames - 1) // steps, height // factor, width // factor)

    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """The grid of the checkpoint's scheduler; it does not depend on the size."""
        return stock_sigma_table(self.pipeline.scheduler, num_steps)

    # Conditions

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """
        `prompt_embeds` (1, L, D) without padding.

        The network attends to `max_sequence_length` tokens, of which those after the prompt are zeros; `predict` puts
        them there, so that they need no memory.
        """
        pipe = self.pipeline
        embeds, _ = pipe.encode_prompt(
            [row["prompt"]],
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=pipe.text_encoder.device,
        )
        mask = embeds.ne(0).any(dim=-1)
        length = max(int(mask.sum()), 1)
        return Conditions({"prompt_embeds": embeds[:, :length].clone(), "prompt_embeds_mask": mask[:, :length]})

    # The networks

    @property
    def dtype(self) -> torch.dtype:
        """That of the convolution that latents enter: some parameters stay in float32 whatever is loaded."""
        return self.transformer.patch_embedding.weight.dtype

    def networks_at(self, timesteps: Tensor) -> list[str]:
        """The first network's are those of the boundary and above."""
        return [self.network_names[-1 if late else 0] for late in (timesteps < self.boundary).tolist()]

    def lora_arguments(self, network_name: str) -> dict[str, Any]:
        """The stock loader has a switch for the second network."""
        return {"load_into_transformer_2": True} if network_name == "transformer_2" else {}

    def guide(self, negative: Tensor, positive: Tensor, guidance_scale: float, timesteps: Tensor) -> Tensor:
        """Classifier-free guidance, for the rows of the second network by `guidance_scale_2` if there is one."""
        if self.guidance_scale_2 is None:
            return super().guide(negative, positive, guidance_scale, timesteps)
        scale = torch.full_like(timesteps, guidance_scale, dtype=negative.dtype)
        scale[timesteps < self.boundary] = self.guidance_scale_2
        return negative + scale.view(-1, 1, 1, 1, 1) * (positive - negative)

    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """One call of `WanTransformer3DModel`, or two where rows lie on both sides of the boundary."""
        if len(self.networks) == 1:
            return self._predict_with(self.transformer, latents, timesteps, inputs)
        # By step, the same on all ranks: a rank that skipped a sharded network would leave the others waiting.
        names = self.networks_at(timesteps)
        if len(set(names)) == 1:
            return self._predict_with(self.networks[names[0]], latents, timesteps, inputs)
        parts, order = [], []
        for name in self.network_names:
            rows = torch.tensor([i for i, other in enumerate(names) if other == name], device=latents.device)
            part = {key: tensor[rows] for key, tensor in inputs.items()}
            parts.append(self._predict_with(self.networks[name], latents[rows], timesteps[rows], part))
            order.append(rows)
        return torch.cat(parts)[torch.cat(order).argsort()]

    def _predict_with(self, network: Any, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        dtype, text = self.dtype, inputs["prompt_embeds"]
        velocity = network(
            hidden_states=self.network_input(latents, inputs).to(dtype),
            timestep=self.token_timesteps(latents, timesteps) if self.expands_timesteps else timesteps,
            encoder_hidden_states=torch.nn.functional.pad(
                text.to(dtype), (0, 0, 0, self.max_sequence_length - text.shape[1])
            ),
            return_dict=False,
            **self.network_options(inputs),
        )[0]
        return velocity.to(latents.dtype)

    def network_input(self, latents: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """What the network sees as the video."""
        return latents

    def network_options(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Further arguments of the network."""
        return {}

    def token_timesteps(self, latents: Tensor, timesteps: Tensor) -> Tensor:
        """(B, tokens) timesteps of TI2V-5B, which has one for each token."""
        grid = latents[:, 0, :, ::2, ::2]
        return timesteps.view(-1, 1, 1, 1).expand(grid.shape).flatten(1)

    # The VAE

    def decode_pixels(self, latents: Tensor) -> Tensor:
        """(B, 3, F, H, W): the VAE's decoder, which goes through the video frame by frame."""
        vae = self.pipeline.vae
        mean, std = self._moments(latents)
        return vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """The mode of the VAE's encoder, normalised as the network wants it."""
        vae = self.pipeline.vae
        latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()
        mean, std = self._moments(latents)
        return (latents - mean) / std

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of the VAE's latents by channel."""
        config = self.pipeline.vae.config
        mean, std = (like.new_tensor(list(m)).view(1, -1, 1, 1, 1) for m in (config.latents_mean, config.latents_std))
        return mean, std

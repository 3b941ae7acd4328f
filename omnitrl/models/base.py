# SPDX-License-Identifier: Apache-2.0
"""What a model family knows: encode a prompt, predict a velocity, decode a latent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from omnitrl.algorithms import SigmaTable, make_sigma_table
from omnitrl.models.conditions import Conditions


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


# Encoded prompts are kept up to this size, so that small prompt sets are encoded once per run and large ones, once
# per rollout, without memory growing with the dataset.
PROMPT_CACHE_BYTES = 256 * 2**20


def stock_sigma_table(scheduler: Any, num_steps: int, **set_timesteps_kwargs: Any) -> SigmaTable:
    """
    The sigma table that a stock diffusers scheduler uses for `num_steps`.

    The table is read from a fresh copy of the scheduler after `set_timesteps`, never recomputed: with a static shift
    diffusers shifts the end of the grid twice, and sampling must match the stock pipeline
    (https://github.com/huggingface/diffusers/issues/13243).

    Args:
        scheduler (`SchedulerMixin`):
            A flow-matching scheduler; it is not modified.
        num_steps (`int`):
            Number of network evaluations T.
        set_timesteps_kwargs:
            Passed on, for example `mu` for schedulers with a dynamic shift.

    Returns:
        [`~omnitrl.algorithms.SigmaTable`]: sigmas (T+1,), timesteps (T,).
    """
    if num_steps < 1:
        raise ValueError(f"num_inference_steps must be at least 1, got {num_steps}.")
    fresh = type(scheduler).from_config(scheduler.config)
    fresh.set_timesteps(num_steps, **set_timesteps_kwargs)
    return make_sigma_table(fresh.sigmas.float(), fresh.timesteps.float(), num_steps=num_steps)


def images_of(pixels: Tensor, processor: Any) -> list[Any]:
    """
    PIL images of decoded pixels, `None` for a row with NaN or infinity, which would otherwise become a black image.

    Args:
        pixels (`Tensor`):
            (B, 3, H, W) in [-1, 1].
        processor (`VaeImageProcessor`):
            The pipeline's own.

    Returns:
        `list`: B images; rewards count a missing one as failed.
    """
    finite = pixels.isfinite().flatten(1).all(dim=1).tolist()
    images = processor.postprocess(pixels.float().nan_to_num(), output_type="pil")
    return [image if ok else None for image, ok in zip(images, finite, strict=True)]


class FlowModel(ABC):
    """
    A flow-matching model family: a stock diffusers pipeline, cut where reinforcement learning needs it.

    A family states which pipelines it serves and implements `encode_rows`, `latent_shape`, `sigmas`, `predict`,
    `decode_pixels` and `encode_pixels`; everything else is shared. The sampler's time arguments are rows of the
    family's own [`~omnitrl.algorithms.SigmaTable`], looked up by step index.

    Args:
        pipeline (`DiffusionPipeline`):
            The loaded pipeline. Text encoders and VAE are frozen.
        max_sequence_length (`int`, *optional*):
            Token length of prompts; `None` means the stock pipeline's default.

    Attributes:
        networks (`nn.ModuleDict`): The trainable networks by component name, one for most families.
    """

    pipeline_classes: ClassVar[tuple[str, ...]]
    network_names: ClassVar[tuple[str, ...]] = ("transformer",)
    default_lora_targets: ClassVar[tuple[str, ...]]
    default_guidance_scale: ClassVar[float]
    default_max_sequence_length: ClassVar[int]

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        self.pipeline: Any = pipeline  # its components differ from class to class
        self.max_sequence_length = max_sequence_length or self.default_max_sequence_length
        self.networks = nn.ModuleDict({name: getattr(pipeline, name) for name in self.network_names})
        self._cache: OrderedDict[tuple, Conditions] = OrderedDict()
        self._cache_bytes = 0
        for module in self.frozen_modules:
            module.requires_grad_(False).eval()
        self.networks.requires_grad_(False).eval()

    # What a family implements

    @abstractmethod
    def encode_rows(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Network inputs of the rows' `prompt`s, each tensor with `len(rows)` as first dimension."""

    @abstractmethod
    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        """Shape of one sample's latents, without the batch; `None` means the checkpoint's own size."""

    @abstractmethod
    def sigmas(self, num_steps: int, latent_shape: tuple[int, ...]) -> SigmaTable:
        """The one table that rollout, replay and evaluation read; it is the stock pipeline's own."""

    @abstractmethod
    def predict(self, latents: Tensor, timesteps: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """One network call: velocity (B, ...) of `latents` (B, ...) at `timesteps` (B,), without guidance."""

    @abstractmethod
    def decode_pixels(self, latents: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) in [-1, 1] of clean latents (B, ...), with a gradient where one is asked for."""

    @abstractmethod
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Clean latents (B, ...) of pixels (B, 3, H, W) in [-1, 1], without randomness: the mode of the encoder."""

    # What all families share

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """The pipeline's modules that are never trained (text encoders, VAE)."""
        components = self.pipeline.components.items()
        return [c for name, c in components if isinstance(c, nn.Module) and name not in self.network_names]

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(self.networks.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What the networks compute in. Asking a network costs diffusers a walk over all of its modules, each time."""
        return next(p.dtype for p in self.networks.parameters() if p.is_floating_point())

    @property
    def transformer(self) -> Any:
        """The (first) network, possibly wrapped by PEFT."""
        return self.networks[self.network_names[0]]

    @property
    def name(self) -> str:
        """Where the checkpoint came from, a Hub id or a folder; empty for a pipeline that was built in code."""
        return str(self.pipeline.config.get("_name_or_path") or "")

    def to(self, device: torch.device | str) -> FlowModel:
        """Moves networks and frozen modules."""
        for module in (self.networks, *self.frozen_modules):
            module.to(device)
        return self

    def timesteps_of(self, sigmas: Tensor) -> Tensor:
        """What the network is told at noise levels (B,) that need not be on a sampler's grid: 1000 sigma."""
        return 1000 * sigmas

    @torch.no_grad()
    def decode(self, latents: Tensor) -> list[Any]:
        """Media of clean latents (B, ...): a PIL image per row, `None` where the decoder's output is not finite."""
        return images_of(self.decode_pixels(latents), self.pipeline.image_processor)

    @torch.no_grad()
    def encode_images(self, images: Sequence[Any], height: int | None = None, width: int | None = None) -> Tensor:
        """
        Clean latents of images, resized to the media size.

        Args:
            images (`Sequence[PIL.Image.Image]`):
                B images of any size.
            height, width (`int`, *optional*):
                Media size in pixels; the checkpoint's own by default.

        Returns:
            `Tensor`: (B, ...) float32, as `latent_shape(height, width)` says.
        """
        shape, factor = self.latent_shape(height, width), self.pipeline.vae_scale_factor
        pixels = self.pipeline.image_processor.preprocess(
            [image.convert("RGB") for image in images], height=shape[-2] * factor, width=shape[-1] * factor
        )
        return self.encode_pixels(pixels.to(self.device)).float()

    def init_latents(self, noise: Tensor) -> Tensor:
        """Latents at the first sigma from unit noise (B, ...). At sigma = 1 that is the noise itself."""
        return noise

    def cache_key(self, row: dict[str, Any]) -> tuple:
        """What of a dataset row decides what `encode_rows` makes of it."""
        return (row["prompt"],)

    @torch.no_grad()
    def encode(self, rows: Sequence[dict[str, Any]], guidance: bool = False) -> Conditions:
        """
        Encodes dataset rows, each distinct prompt once.

        Args:
            rows (`Sequence[dict]`):
                Rows with `prompt` and, optionally, `negative_prompt`.
            guidance (`bool`, defaults to `False`):
                Whether negative conditions are needed too.

        Returns:
            [`Conditions`] of `len(rows)` rows.
        """
        keys: list[tuple] = []
        parts: dict[tuple, Conditions] = {}
        for row in rows:
            negative = {**row, "prompt": row.get("negative_prompt") or ""} if guidance else None
            keys.append((self.cache_key(row), negative and self.cache_key(negative)))
            if keys[-1] not in parts:
                positive = self._encoded(row).positive
                parts[keys[-1]] = Conditions(positive, self._encoded(negative).positive if negative else {})
        joined = Conditions.cat(list(parts.values()))
        if len(parts) == len(keys):
            return joined
        position = {key: i for i, key in enumerate(parts)}
        return joined[[position[key] for key in keys]]

    def _encoded(self, row: dict[str, Any]) -> Conditions:
        """
        The row's own conditions, from the cache if they are there.

        Rows are encoded one at a time: in a batch the last bits would depend on the other prompts, and a run that is
        resumed, or has other ranks, on how its prompts happened to be batched.
        """
        key = (self.device, self.max_sequence_length, *self.cache_key(row))
        if key not in self._cache:
            encoded = Conditions(self.encode_rows([row]))
            if encoded.num_bytes > PROMPT_CACHE_BYTES:
                return encoded
            self._cache[key] = encoded
            self._cache_bytes += encoded.num_bytes
        self._cache.move_to_end(key)
        found = self._cache[key]
        while self._cache_bytes > PROMPT_CACHE_BYTES:
            self._cache_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return found

    def velocity(
        self, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance_scale: float = 1.0
    ) -> Tensor:
        """
        The (guided) velocity `v_neg + w (v_pos - v_neg)`, negative and positive rows in one network call.

        Rollout, replay and evaluation all call this method, which is what keeps the on-policy ratio at 1.

        Args:
            latents (`Tensor`):
                (B, ...) float32.
            timesteps (`Tensor`):
                (B,) rows of the sigma table's `timesteps`.
            conditions ([`Conditions`]):
                B rows; with negatives if `guidance_scale > 1`.
            guidance_scale (`float`, defaults to 1.0):
                Classifier-free guidance w; 1 or less means none.

        Returns:
            `Tensor`: (B, ...) float32, or float64 for float64 networks.
        """
        if guidance_scale <= 1.0:
            return self.predict(latents, timesteps, conditions.positive)
        doubled = self.predict(torch.cat([latents] * 2), torch.cat([timesteps] * 2), conditions.guided())
        negative, positive = doubled.chunk(2)
        return negative + guidance_scale * (positive - negative)

    def example_inputs(self, batch_size: int = 2, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of [`~FlowModel.velocity`] for tests: random latents, a mid-grid step, short prompts."""
        shape = self.latent_shape(None, None)
        generator = torch.Generator().manual_seed(seed)
        table = self.sigmas(4, shape)
        return {
            "latents": torch.randn(batch_size, *shape, generator=generator).to(self.device),
            "timesteps": table.timesteps[1].expand(batch_size).to(self.device),
            "conditions": self.encode([{"prompt": f"example {i}"} for i in range(batch_size)], guidance=True),
        }


class Policy(nn.Module):
    """
    The trainable networks of a [`FlowModel`] as one module, which is what DDP, FSDP and DeepSpeed wrap.

    `forward` is [`FlowModel.velocity`], so a wrapper sees every network call.
    """

    def __init__(self, model: FlowModel) -> None:
        super().__init__()
        self.networks = model.networks
        self._velocity = model.velocity
        blocks = {name for net in model.networks.values() for name in (_wrap_classes(net))}
        self._no_split_modules = sorted(blocks)

    def forward(
        self, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance_scale: float = 1.0
    ) -> Tensor:
        """See [`FlowModel.velocity`]."""
        return self._velocity(latents, timesteps, conditions, guidance_scale)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict | None = None, **_: Any) -> None:
        """Called by `transformers.Trainer`; diffusers networks have their own switch (non-reentrant by default)."""
        network: Any
        for network in self.networks.values():
            network.enable_gradient_checkpointing()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **_: Any) -> None:
        """The name that transformers < 5.20 calls."""
        self.activation_checkpointing_enable()


def _wrap_classes(network: Any) -> list[str]:
    return list(network._no_split_modules or [])  # every diffusers network has the attribute; None where unknown

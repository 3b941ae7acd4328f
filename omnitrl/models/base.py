# SPDX-License-Identifier: Apache-2.0
"""What a model family knows: encode a prompt, predict a velocity, decode a latent."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from omnitrl.algorithms import DEFAULT_NOISE_LEVEL, SigmaTable, make_sigma_table
from omnitrl.errors import InputError
from omnitrl.media import read_picture
from omnitrl.models.conditions import Conditions, trimmed
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


# Encoded prompts are kept up to this size, so that small prompt sets are encoded once per run and large ones, once
# per rollout, without memory growing with the dataset.
PROMPT_CACHE_BYTES = 256 * 2**20

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Layers of an attention over text and media together, by the names that diffusers gives them."""

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The name that `load_lora_weights` looks for."""


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

    A family states which pipelines it serves and implements `default_size`, `latent_shape`, `sigmas`, `encode_row`,
    `predict`, `decode_pixels` and `encode_pixels`; everything else is shared. The sampler's time arguments are rows of
    the family's own [`~omnitrl.algorithms.SigmaTable`], looked up by step index.

    This class is for families whose media are pictures; see [`VideoModel`] and [`AudioModel`] for others.

    Args:
        pipeline (`DiffusionPipeline`):
            The loaded pipeline. Text encoders and VAE are frozen.
        max_sequence_length (`int`, *optional*):
            Token length of prompts; `None` means the stock pipeline's default.

    Attributes:
        networks (`nn.ModuleDict`): The trainable networks by component name, one for most families.
    """

    pipeline_classes: ClassVar[tuple[str, ...]]
    # These three are of the class, or of a checkpoint that needs others.
    network_names: tuple[str, ...] = ("transformer",)
    default_lora_targets: tuple[str, ...]
    default_guidance_scale: float
    default_max_sequence_length: ClassVar[int]
    longest_prompt: ClassVar[int | None] = None
    """Prompt tokens that the stock pipeline takes at most, where it says so."""
    default_negative_prompt: ClassVar[str] = ""
    """What guidance leads away from where a row has no `negative_prompt`."""
    noise_levels: ClassVar[Mapping[str, float]] = {}
    """Noise of stochastic steps in the family's recipes by the kind of transition, where it is not the usual 0.7."""
    num_images: tuple[int, int] = (0, 0)
    """Fewest and most condition images that a row has, in its column `image` or `images`."""
    guidance_scale_2: float | None = None
    """Guidance of the second of two networks, where it is another than that of the first."""
    unused_modules: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of modules that the pipeline never calls; frozen too where all weights are trained."""

    def __init__(self, pipeline: DiffusionPipeline, max_sequence_length: int | None = None) -> None:
        self.pipeline: Any = pipeline  # its components differ from class to class
        self.set_max_sequence_length(max_sequence_length or self.default_max_sequence_length)
        self.networks = nn.ModuleDict({name: getattr(pipeline, name) for name in self.network_names})
        self._cache: OrderedDict[tuple, Conditions] = OrderedDict()
        self._cache_bytes = 0
        for module in self.frozen_modules:
            module.requires_grad_(False).eval()
        self.networks.requires_grad_(False).eval()

    def set_max_sequence_length(self, length: int) -> None:
        """
        Sets the token length of prompts.

        Raises:
            [`~omnitrl.errors.InputError`]: the pipeline does not take so many.
        """
        if self.longest_prompt is not None and length > self.longest_prompt:
            raise InputError(
                f"max_sequence_length={length} is more than {type(self.pipeline).__name__} takes: use "
                f"max_sequence_length={self.longest_prompt} or less."
            )
        self.max_sequence_length = length

    # What a family implements

    @property
    @abstractmethod
    def default_size(self) -> MediaSize:
        """The size that the checkpoint was made for, as the stock pipeline has it."""

    @abstractmethod
    def latent_shape(self, size: MediaSize = CHECKPOINT_SIZE) -> tuple[int, ...]:
        """
        Shape of one sample's latents, without the batch; open parts of `size` are those of `default_size`.

        Raises:
            [`~omnitrl.errors.InputError`]: the VAE or the network cannot take the size; names the nearest that works.
        """

    @abstractmethod
    def sigmas(self, num_steps: int, size: MediaSize = CHECKPOINT_SIZE) -> SigmaTable:
        """The one table that rollout, replay and evaluation read; it is the stock pipeline's own."""

    @abstractmethod
    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """
        Network inputs of a row's `prompt` (and images) as one row of positive conditions.

        Prompts are encoded to their own length with a mask where the network has masks, so that no padding is carried
        along. What the network needs to know and is no tensor, such as the sizes of condition images, is the row's
        layout.
        """

    @abstractmethod
    def predict(self, latents: Tensor, timesteps: Tensor, inputs: Mapping[str, Tensor], layout: Any = None) -> Tensor:
        """
        One network call: velocity (B, ...) of `latents` (B, ...) at `timesteps` (B,), without guidance.

        `inputs` are the conditions of B rows, which all have the same `layout`. Where the network embeds the guidance
        scale, it is `inputs["guidance"]`, (B,).
        """

    @abstractmethod
    def decode_pixels(self, latents: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) in [-1, 1] of `visual_latents` (B, ...), with a gradient where one is asked for."""

    @abstractmethod
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Clean latents (B, ...) of pixels (B, 3, H, W) in [-1, 1], without randomness: the mode of the encoder."""

    # What a family may change

    @property
    def embeds_guidance(self) -> bool:
        """Whether the network takes the guidance scale as an input (guidance-distilled checkpoints)."""
        return False

    def needs_negative(self, guidance_scale: float) -> bool:
        """Whether a guided velocity takes a second network evaluation, of the negative prompt."""
        return guidance_scale > 1.0 and not self.embeds_guidance

    def evaluations(self, guidance_scale: float) -> int:
        """Network evaluations of a guided velocity, for each row."""
        return 2 if self.needs_negative(guidance_scale) else 1

    def guide(self, negative: Tensor, positive: Tensor, guidance_scale: float, timesteps: Tensor) -> Tensor:
        """Guided velocity (B, ...) of the two velocities (B, ...) at `timesteps` (B,)."""
        return negative + guidance_scale * (positive - negative)

    def default_noise_level(self, sde_type: str) -> float:
        """Noise level of stochastic steps of this kind, a key of `omnitrl.algorithms.SDE_TYPES`."""
        return self.noise_levels.get(sde_type, DEFAULT_NOISE_LEVEL)

    def modalities(self, size: MediaSize = CHECKPOINT_SIZE) -> dict[str, slice]:
        """Which of the latents' first dimension each modality has; empty where there is one modality only."""
        return {}

    def visual_latents(self, latents: Tensor, size: MediaSize = CHECKPOINT_SIZE) -> Tensor:
        """What `decode_pixels` takes of latents (B, ...): all, or of several modalities the one that is seen."""
        return latents

    def size_of(self, row: dict[str, Any], size: MediaSize = CHECKPOINT_SIZE) -> MediaSize:
        """
        The whole size of a row's media: its own columns, else `size`, else the checkpoint's.

        A family whose size follows from the condition images asks them where columns and `size` leave it open. It
        needs no more than `images(row, whole=False)`, and must do without images where the row has none.
        """
        return size.of_row(row).filled(self.default_size)

    # What all families share

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """The pipeline's modules that are never trained (text encoders, VAE)."""
        components = self.pipeline.components.items()
        return [c for name, c in components if isinstance(c, nn.Module) and name not in self.network_names]

    @property
    def trained_networks(self) -> dict[str, Any]:
        """The networks that have trainable weights, by name: all or some of them."""
        return {name: net for name, net in self.networks.items() if any(p.requires_grad for p in net.parameters())}

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

    def sequence_parallel_plan(self, network_name: str) -> dict[str, Any]:
        """How diffusers splits a network's sequence over devices (`_cp_plan`); empty where it has no plan for it."""
        network = self.networks[network_name]
        return dict(unwrapped(network)._cp_plan or {}) if is_of_diffusers(network) else {}

    @property
    def loads_lora(self) -> bool:
        """Whether the pipeline has a `load_lora_weights`; PEFT loads adapters in any case."""
        from diffusers.loaders.lora_base import LoraBaseMixin

        return isinstance(self.pipeline, LoraBaseMixin)

    def lora_loading(self, folder: Any) -> list[dict[str, Any]]:
        """Arguments, beside the folder, of the `load_lora_weights` calls that put saved adapters in the pipeline."""
        if len(self.networks) == 1:
            return [self.lora_arguments(self.network_names[0])]
        files = {name: self.lora_file(name) for name in self.network_names}
        saved = [name for name in files if (Path(folder) / files[name]).is_file()]
        return [{"weight_name": files[name], **self.lora_arguments(name)} for name in saved]

    def lora_arguments(self, network_name: str) -> dict[str, Any]:
        """Arguments of `load_lora_weights`, beside the place, that put an adapter in this network."""
        return {}

    def lora_file(self, network_name: str, first: str = LORA_FILE) -> str:
        """Name of the file for `load_lora_weights` with this network's adapter: `first` is that of the first."""
        return first if network_name == self.network_names[0] else first.replace(".", f"_{network_name}.")

    def timesteps_of(self, sigmas: Tensor) -> Tensor:
        """What the network is told at noise levels (B,) that need not be on a sampler's grid: 1000 sigma."""
        return 1000 * sigmas

    @torch.no_grad()
    def decode(self, latents: Tensor, size: MediaSize = CHECKPOINT_SIZE) -> list[Any]:
        """
        Media of clean latents (B, ...): a PIL image per row, `None` where the decoder's output is not finite.

        `size` is that of the media, for families whose latents do not tell it.
        """
        return images_of(self.decode_pixels(latents), self.pipeline.image_processor)

    @torch.no_grad()
    def encode_images(self, images: Sequence[Any], size: MediaSize = CHECKPOINT_SIZE) -> Tensor:
        """
        Clean latents of images, resized to the media size.

        Args:
            images (`Sequence[PIL.Image.Image]`):
                B images of any size.
            size ([`MediaSize`], *optional*):
                Media size; the checkpoint's own by default.

        Returns:
            `Tensor`: (B, ...) float32, as `latent_shape(size)` says.
        """
        self.latent_shape(size)
        size = size.filled(self.default_size)
        pixels = self.pipeline.image_processor.preprocess(
            [image.convert("RGB") for image in images], height=size.height, width=size.width
        )
        return self.encode_pixels(pixels.to(self.device)).float()

    def networks_at(self, timesteps: Tensor) -> list[str]:
        """Name of the network that each of the timesteps (B,) is for."""
        return [self.network_names[0]] * len(timesteps)

    def init_latents(self, noise: Tensor) -> Tensor:
        """Latents at the first sigma from unit noise (B, ...). At sigma = 1 that is the noise itself."""
        return noise

    def final_latents(self, latents: Tensor, conditions: Conditions) -> Tensor:
        """Clean latents of those (B, ...) after the last step, for families that then put a part of them in place."""
        return latents

    def images(self, row: dict[str, Any], whole: bool = True) -> list[Any]:
        """
        Condition images of a row, from its column `image` or `images`, as RGB PIL images.

        With `whole=False` files are read up to their headers only, which say how large the images are.

        Raises:
            [`~omnitrl.errors.InputError`]: an image is missing, too many are there, or one cannot be read.
        """
        given = given_images(row)
        least, most = self.num_images
        if not least <= len(given) <= most:
            expected = str(least) if least == most else f"{least} to {most}"
            raise InputError(
                f"The row with the prompt {row['prompt']!r} has {len(given)} condition image(s), but "
                f"{type(self.pipeline).__name__} takes {expected}: use a column 'image', or a list in 'images'."
            )
        where = f"of the prompt {row['prompt']!r}"
        return [read_picture(value, f"Image {i} {where}", whole) for i, value in enumerate(given)]

    def cache_key(self, row: dict[str, Any], size: MediaSize) -> tuple:
        """What of a dataset row decides what `encode_row` makes of it."""
        if self.num_images[1] == 0:
            return (row["prompt"],)
        pictures = tuple((image.size, hashlib.blake2b(image.tobytes()).digest()) for image in self.images(row))
        return (row["prompt"], size, pictures)

    def negative_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row whose conditions guidance leads away from: another prompt in the place of the row's own."""
        return {**row, "prompt": row.get("negative_prompt") or self.default_negative_prompt}

    @torch.no_grad()
    def encode(
        self, rows: Sequence[dict[str, Any]], guidance: bool = False, size: MediaSize = CHECKPOINT_SIZE
    ) -> Conditions:
        """
        Encodes dataset rows, each distinct prompt once.

        Args:
            rows (`Sequence[dict]`):
                Rows with `prompt` and, optionally, `negative_prompt` and condition images.
            guidance (`bool`, defaults to `False`):
                Whether negative conditions are needed too.
            size ([`MediaSize`], *optional*):
                Of the media, on which condition images may depend; the checkpoint's own by default.

        Returns:
            [`Conditions`] of `len(rows)` rows.
        """
        size = size.filled(self.default_size)
        keys: dict[int, tuple] = {}
        parts: dict[tuple, Conditions] = {}
        for number, row in {id(row): row for row in rows}.items():  # the members of a group have one row
            if self.num_images[1]:
                row = {**row, "images": self.images(row)}  # read once for all that follows
            both = (row, self.negative_row(row)) if guidance else (row,)
            keys[number] = tuple(self.cache_key(one, size) for one in both)
            if keys[number] not in parts:
                encoded = [self._encoded(one, size, key) for one, key in zip(both, keys[number], strict=True)]
                negative = encoded[1].positive if guidance else {}
                parts[keys[number]] = Conditions(encoded[0].positive, negative, encoded[0].layouts)
        joined = Conditions.cat(list(parts.values()))
        if len(parts) == len(rows):
            return joined
        position = {key: i for i, key in enumerate(parts)}
        return joined[[position[keys[id(row)]] for row in rows]]

    def _encoded(self, row: dict[str, Any], size: MediaSize, row_key: tuple) -> Conditions:
        """
        The row's own conditions, from the cache if they are there.

        Rows are encoded one at a time: in a batch the last bits would depend on the other prompts, and a run that is
        resumed, or has other ranks, on how its prompts happened to be batched.
        """
        key = (self.device, self.max_sequence_length, *row_key)
        if key not in self._cache:
            encoded = self.encode_row(row, size)
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
        The (guided) velocity, negative and positive rows in one network call.

        Rollout, replay and evaluation all call this method, which is what keeps the on-policy ratio at 1.

        Args:
            latents (`Tensor`):
                (B, ...) float32.
            timesteps (`Tensor`):
                (B,) rows of the sigma table's `timesteps`.
            conditions ([`Conditions`]):
                B rows; with negatives if `needs_negative(guidance_scale)`.
            guidance_scale (`float`, defaults to 1.0):
                Guidance: an input of networks that embed it, and otherwise classifier-free, where 1 or less is none.

        Returns:
            `Tensor`: (B, ...) float32, or float64 for float64 networks.
        """
        if not self.needs_negative(guidance_scale):
            return self._predict(latents, timesteps, conditions.positive, conditions.layouts, guidance_scale)
        doubled = self._predict(
            torch.cat([latents] * 2),
            torch.cat([timesteps] * 2),
            conditions.guided(),
            conditions.layouts * 2,
            guidance_scale,
        )
        negative, positive = doubled.chunk(2)
        return self.guide(negative, positive, guidance_scale, timesteps)

    def _predict(
        self,
        latents: Tensor,
        timesteps: Tensor,
        inputs: Mapping[str, Tensor],
        layouts: tuple[Any, ...],
        guidance_scale: float,
    ) -> Tensor:
        """Network calls for the rows, those of one layout together: a network takes rows of one layout only."""
        if self.embeds_guidance:
            inputs = {**inputs, "guidance": torch.full_like(timesteps, guidance_scale, dtype=torch.float32)}
        if len(set(layouts)) <= 1:
            return self.predict(latents, timesteps, inputs, layouts[0] if layouts else None)
        parts, order = [], []
        for layout in dict.fromkeys(layouts):
            rows = [i for i, other in enumerate(layouts) if other == layout]
            index = torch.tensor(rows, device=latents.device)
            chosen = {key: tensor[index] for key, tensor in inputs.items()}
            parts.append(self.predict(latents[index], timesteps[index], trimmed(chosen), layout))
            order += rows
        return torch.cat(parts)[torch.tensor(order, device=latents.device).argsort()]

    def example_inputs(self, batch_size: int = 2, seed: int = 0, size: MediaSize = CHECKPOINT_SIZE) -> dict[str, Any]:
        """Keyword arguments of [`~FlowModel.velocity`] for tests: random latents, a mid-grid step, short prompts."""
        shape, table = self.latent_shape(size), self.sigmas(4, size)
        generator = torch.Generator().manual_seed(seed)
        rows = [{"prompt": f"example {i}", **self._example_images(size)} for i in range(batch_size)]
        return {
            "latents": torch.randn(batch_size, *shape, generator=generator).to(self.device),
            "timesteps": table.timesteps[1].expand(batch_size).to(self.device),
            "conditions": self.encode(rows, True, size),
        }

    def _example_images(self, size: MediaSize) -> dict[str, Any]:
        from PIL import Image

        size = size.filled(self.default_size)
        one = Image.linear_gradient("L").convert("RGB").resize((size.width or 64, size.height or 64))
        return {"images": [one] * self.num_images[0]} if self.num_images[0] else {}


def given_images(row: Mapping[str, Any]) -> list[Any]:
    """What a row has in `image` or `images`, as a list."""
    given = row.get("images")
    given = row.get("image") if given is None else given
    if given is None:
        return []
    depth = _depth(given)
    return list(given) if depth in (1, 4) else [given]


def _depth(value: Any) -> int:
    """How deeply lists are nested: 0 for a picture, 1 for several, 3 for the array of one, 4 for arrays of several."""
    if isinstance(value, list | tuple):
        return 1 + (_depth(value[0]) if value else 0)
    return value.ndim if isinstance(value, np.ndarray | Tensor) else 0


def is_of_diffusers(network: Any) -> bool:
    """Whether a network is a diffusers model, possibly in a `PeftModel`, rather than any torch module."""
    from diffusers import ModelMixin

    return isinstance(unwrapped(network), ModelMixin)


def unwrapped(network: Any) -> Any:
    """The network in a `PeftModel`."""
    from peft import PeftModel

    return network.get_base_model() if isinstance(network, PeftModel) else network

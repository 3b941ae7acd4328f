# SPDX-License-Identifier: Apache-2.0
"""What all rewards have in common whose value a network gives: loaded late and once, called in batches."""

import logging
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omnitrl.devices import process_device
from omnitrl.errors import InputError

from ..contract import RewardError
from ..media import pictures
from ..traits import RewardTraits


logger = logging.getLogger(__name__)


class LearnedReward:
    """
    A reward whose value a network gives. See its subclasses, such as [`PickScoreReward`].

    Nothing is read before the first call, or before [`~LearnedReward.load`]. The network is frozen, is in evaluation
    mode, and computes in its own precision whatever autocast is on.

    Args:
        device (`torch.device` or `str`, *optional*):
            Where the network is. By default the device of this process, or that of a network that is given.
        dtype (`torch.dtype` or `str`, *optional*):
            Its precision, such as `"bfloat16"`, which is faster and coarser: of a cosine near 0.25 it keeps steps of
            0.001. The default is that of the original.
        batch_size (`int`, *optional*, defaults to 16):
            Most samples of one call of the network.
        scale (`float`, *optional*, defaults to 1.0):
            Factor on the value.
    """

    media: ClassVar[str] = "image"
    default_dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        batch_size: int = 16,
        scale: float = 1.0,
    ) -> None:
        self.device = None if device is None else torch.device(device)
        self.dtype = _dtype(dtype)
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size} must be at least 1: use 16.")
        self.batch_size = batch_size
        self.scale = scale
        # Batches are cut here and not by the runner: it would join samples of several batches of a rollout as time
        # has it, and a network's last bits, with them a resumed run, would depend on which samples met.
        self.traits = RewardTraits(media=(self.media,), deterministic=True)
        self._network: nn.Module | None = None
        self._loading = threading.Lock()
        self._has_warned = False

    def load(self) -> "LearnedReward":
        """
        Reads the network if that has not been done, and returns the reward.

        Raises:
            [`~omnitrl.rewards.RewardError`]: weights that cannot be had, or that lack a part.
        """
        self._loaded()
        return self

    def to(self, device: torch.device | str) -> "LearnedReward":
        """Moves the network, or says where it will be loaded, and returns the reward."""
        with self._loading:
            self.device = torch.device(device)
            if self._network is not None:
                self._network.to(self.device)
        return self

    def __call__(self, prompts: Sequence[str], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """
        Scores what was generated.

        Args:
            prompts (`list[str]`):
                Prompts.
            completions (`list`):
                Images, or whatever [`to_pil`] takes; of [`CLAPReward`] sounds.
            **kwargs:
                Ignored.

        Returns:
            `list[float]`: one number for each.
        """
        self._check_prompts(prompts, len(completions))
        media = self._read(completions)
        network = self._loaded()
        scores: list[float] = []
        with torch.no_grad(), _own_precision(network):
            for start in range(0, len(media), self.batch_size):
                part = slice(start, start + self.batch_size)
                values = self._score(network, prompts[part], media[part])
                scores.extend((values.float() * self.scale).tolist())
        return scores

    # What a subclass says

    def _build(self) -> nn.Module:
        """Makes the network with its weights, on the CPU."""
        raise NotImplementedError

    def _score(self, network: Any, prompts: Sequence[str], media: list[Any]) -> Tensor:
        """The values (B,) of media that `_read` has made, before the scale."""
        raise NotImplementedError

    def _read(self, completions: Sequence[Any]) -> list[Any]:
        """The completions as what `_score` takes."""
        return pictures(completions)

    def _place(self, network: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return network.to(device, dtype)

    # What they share

    def _loaded(self, device: torch.device | None = None) -> Any:
        with self._loading:  # the rewards of training and of evaluation run in threads of their own
            if self._network is None:
                network = self._build()
                given = self._given_module()
                if given is not None:  # stays as it is, but for what was asked for
                    parameter = next(given.parameters())
                    chosen, dtype = self.device or parameter.device, self.dtype or parameter.dtype
                else:
                    chosen, dtype = self.device or device or process_device(), self.dtype or self.default_dtype
                self._network = self._place(network, chosen, dtype).requires_grad_(False).eval()
        return self._network

    def _given_module(self) -> nn.Module | None:
        """The network that the user has passed, if it was not a name."""
        given = getattr(self, "model", None)
        return given if isinstance(given, nn.Module) else None

    def _check_prompts(self, prompts: Sequence[str], count: int) -> None:
        wrong = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if wrong:
            raise RewardError(
                f"{type(self).__name__} compares with prompts as text, got {wrong[0]!r:.80} of type "
                f"{type(wrong[0]).__name__}: give for example ''."
            )
        if len(prompts) != count:
            raise RewardError(f"{type(self).__name__} got {len(prompts)} prompts for {count} samples: give one each.")

    def _tokens(
        self, tokenizer: Any, prompts: Sequence[str], limit: int, **options: Any
    ) -> tuple[dict[str, Tensor], Tensor]:
        """
        Tokens of the *different* ones among the prompts, cut at `limit`, and the row of each prompt among them (B,).

        The first time that something is cut off, a warning says so.
        """
        different = list(dict.fromkeys(prompts))
        if not self._has_warned:
            lengths = [len(ids) for ids in tokenizer(different, verbose=False)["input_ids"]]
            if max(lengths) > limit:
                self._has_warned = True
                logger.warning(
                    "%s reads %d tokens of a prompt, and %d of %d prompts have more (%d at most): it does not see "
                    "what stands after them.",
                    type(self).__name__,
                    limit,
                    sum(length > limit for length in lengths),
                    len(lengths),
                    max(lengths),
                )
        tokens = tokenizer(different, truncation=True, max_length=limit, return_tensors="pt", **options)
        rows = torch.tensor([different.index(prompt) for prompt in prompts])
        return dict(tokens), rows


class DifferentiableReward(LearnedReward):
    """
    A [`LearnedReward`] of images that also has a gradient, for [`SRPOTrainer`].
    """

    def differentiable(self, prompts: Sequence[str], completions: Tensor, **kwargs: Any) -> Tensor:
        """
        The same reward as a function of pixels that a gradient is taken through.

        Images are resized and normalised with torch. Where the original resizes 8-bit pixels, which Pillow rounds once
        for each direction, the resized pixels differ from its by about 1/255 at most.

        Args:
            prompts (`list[str]`):
                B prompts.
            completions (`torch.Tensor`):
                (B, 3, H, W) in [0, 1].
            **kwargs:
                Ignored.

        Returns:
            `torch.Tensor`: (B,) float32.
        """
        if not isinstance(completions, Tensor) or completions.ndim != 4 or completions.shape[1] != 3:
            shape = f"shape {tuple(completions.shape)}" if isinstance(completions, Tensor) else "no tensor"
            raise RewardError(
                f"{type(self).__name__}.differentiable takes pixels as a tensor (B, 3, H, W) in [0, 1], got {shape} "
                f"of type {type(completions).__name__}: call the reward itself for pictures."
            )
        self._check_prompts(prompts, len(completions))
        network = self._loaded(completions.device)
        with _own_precision(network):
            values = self._score_pixels(network, prompts, completions.float())
        return (values.float() * self.scale).to(completions.device)

    def _score_pixels(self, network: Any, prompts: Sequence[str], pixels: Tensor) -> Tensor:
        """The values (B,) of pixels (B, 3, H, W) in [0, 1], before the scale."""
        raise NotImplementedError


def _own_precision(network: nn.Module) -> torch.autocast:
    """Autocast of a trainer would run the network in the trainer's precision."""
    return torch.autocast(next(network.parameters()).device.type, enabled=False)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise InputError(f"dtype={dtype!r} is unknown: use 'float32', 'bfloat16' or 'float16'.")
        return found
    return dtype

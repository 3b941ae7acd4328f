# SPDX-License-Identifier: Apache-2.0
"""The trainable networks as one module."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from omnitrl.models.base import FlowModel, is_of_diffusers, unwrapped
from omnitrl.models.conditions import Conditions


class Policy(nn.Module):
    """
    The trainable networks of a [`FlowModel`] as one module, which is what DDP, FSDP and DeepSpeed wrap.

    `forward` is [`FlowModel.velocity`], so a wrapper sees every network call.
    """

    def __init__(self, model: FlowModel) -> None:
        super().__init__()
        self.networks = model.networks
        self._velocity = model.velocity
        blocks = {name for net in model.networks.values() for name in _wrap_classes(net)}
        self._no_split_modules = sorted(blocks)

    def forward(
        self, latents: Tensor, timesteps: Tensor, conditions: Conditions, guidance_scale: float = 1.0
    ) -> Tensor:
        """See [`FlowModel.velocity`]."""
        return self._velocity(latents, timesteps, conditions, guidance_scale)

    def compile_blocks(self, backend: str, mode: str | None = None) -> int:
        """
        Compiles each block of the networks in place, and returns how many there are.

        Blocks are alike, so one compilation serves all of them, which takes a fraction of the time of the whole
        network; and their weights keep their names.
        """
        blocks = [module for module in self.networks.modules() if type(module).__name__ in self._no_split_modules]
        for block in blocks:
            block.compile(backend=backend, mode=mode)
        return len(blocks)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict | None = None, **_: Any) -> None:
        """
        Called by `transformers.Trainer`; diffusers networks have their own switch.

        They are told the function: their default one takes no keywords, with which `HunyuanImageTransformer2DModel`
        calls its blocks.
        """
        network: Any
        for network in self.networks.values():
            network.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False))

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None, **_: Any) -> None:
        """The name that transformers < 5.20 calls."""
        self.activation_checkpointing_enable()


def _wrap_classes(network: Any) -> list[str]:
    """Classes of a network's blocks, as diffusers names them; none for a torch module of one's own."""
    if not is_of_diffusers(network):
        return []
    inner = unwrapped(network)
    # The first is None where diffusers does not know how to place the network on devices.
    return list(inner._no_split_modules or inner._repeated_blocks)

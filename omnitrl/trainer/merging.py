# SPDX-License-Identifier: Apache-2.0
"""Adapters as part of the weights that they adapt, for as long as samples are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.models import FlowModel


def check_merging(model: FlowModel, sharded: bool, autocast: bool) -> None:
    """
    Raises unless adapters can be merged so that a replay's ratio stays 1 within rounding.

    Args:
        model ([`FlowModel`]):
            Its networks may be `PeftModel`s.
        sharded (`bool`):
            Whether each process has a part of the weights only.
        autocast (`bool`):
            Whether networks compute in less than float32.
    """
    reason = None
    if sharded:
        reason = "weights that are sharded (FSDP, DeepSpeed)"
    elif autocast or model.dtype not in (torch.float32, torch.float64):
        reason = "networks in half precision, where the merged weights would be rounded"
    else:
        for network in model.networks.values():
            if isinstance(network, PeftModel) and not _is_plain_lora(network):
                reason = "adapters that are no plain LoRA"
    if reason is not None:
        raise InputError(f"merge_adapters=True does not work with {reason}: use merge_adapters=False.")


def _is_plain_lora(network: PeftModel) -> bool:
    configs = network.peft_config.values()
    return all(isinstance(config, LoraConfig) and not config.use_dora for config in configs)


@contextmanager
def merged_adapters(model: FlowModel) -> Iterator[None]:
    """
    Puts `W + s B A` in place of each adapted weight `W` and leaves the adapters out, which saves their two products.

    The base weights are set aside and put back as they were: subtracting the adapter again would change them by
    rounding, a little more with each rollout. That takes the memory of the adapted weights once more.
    """
    kept: list[tuple[Any, Tensor]] = []
    networks: list[Any] = [network for network in model.networks.values() if isinstance(network, PeftModel)]
    try:
        with torch.no_grad():
            for network in networks:
                for module in network.modules():
                    if isinstance(module, LoraLayer):
                        kept.append(_merge(module))
        for network in networks:
            network.base_model.disable_adapter_layers()
        yield
    finally:
        for layer, weight in kept:
            layer.weight.data = weight
        for network in networks:
            network.base_model.enable_adapter_layers()


def _merge(module: Any) -> tuple[Any, Tensor]:
    """Merges the active adapters of a layer; returns it and the weight that it had."""
    layer = module.get_base_layer()
    base = layer.weight.data
    merged = base.clone()
    for name in module.active_adapters:
        if name in module.lora_A:
            merged += module.get_delta_weight(name).to(merged)
    layer.weight.data = merged
    return layer, base

# SPDX-License-Identifier: Apache-2.0
"""The trainer's weights as messages for servers: adapters alone where there are adapters, else whole networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.messages import pack
from omnitrl.models import FlowModel
from omnitrl.rollout.vllm_omni.transport import ADAPTER, WEIGHTS
from omnitrl.rollout.vllm_omni.wire import AdapterHead, BucketHead


BUCKET_BYTES = 256 * 2**20
"""Bytes of one message with a part of whole networks; a larger tensor has a message of its own."""

_PEFT_PREFIX = "base_model.model."
_LORA_PARTS = (".lora_A.weight", ".lora_B.weight")
# What of a LoRA config decides what its tensors mean; one message has one config.
_MEANING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
# How LoRA may begin with a part of the weights that it is added to, which the trainer then has without that part.
_TAKING_APART = ("pissa", "olora", "corda", "loftq", "lora_ga")

Weights = Mapping[str, Mapping[str, Tensor]]
"""Network → name → tensor: an adapter's by PEFT's names, or those of a whole network."""


def check_trained(model: FlowModel) -> None:
    """
    Raises unless servers can take what is trained.

    Raises:
        [`~omnitrl.errors.InputError`]: adapters are no plain LoRA, or those of several networks differ in kind.
    """
    configs = _configs(model)
    whole = [name for name in model.trained_networks if name not in configs]
    if configs and whole:
        raise InputError(
            f"rollout_engine='vllm_omni' takes adapters or whole networks, but {list(configs)} have adapters and "
            f"{whole} are trained as a whole: use one or the other, or rollout_engine='local'."
        )
    for name, config in configs.items():
        check_config(config, name)
    meanings = [{key: getattr(config, key) for key in _MEANING} for config in configs.values()]
    if any(meaning != meanings[0] for meaning in meanings):
        raise InputError(
            f"rollout_engine='vllm_omni' takes one LoRA config for all networks, but those of {list(configs)} differ "
            f"({meanings}): use adapters of one kind, or rollout_engine='local'."
        )


def check_config(config: Any, name: str) -> None:
    """
    Raises for a PEFT config that servers cannot follow.

    Args:
        config ([`~peft.PeftConfig`]):
            Of the adapter.
        name (`str`):
            Of what has it, for the error.

    Raises:
        [`~omnitrl.errors.InputError`]: it is one.
    """
    reason = _unfit(config)
    if reason:
        raise InputError(
            f"rollout_engine='vllm_omni' takes plain LoRA adapters, but that of the {name} {reason}: leave it out "
            "of the peft_config, or use rollout_engine='local'."
        )


def _configs(model: FlowModel) -> dict[str, Any]:
    """The active PEFT config of each trained network that has adapters."""
    from peft import PeftModel

    networks = model.trained_networks.items()
    return {name: net.peft_config[net.active_adapter] for name, net in networks if isinstance(net, PeftModel)}


def taking_apart(config: Any) -> str:
    """The `init_lora_weights` of a LoRA that begins with a part of the weights below it, as PiSSA does; else empty."""
    way = str(getattr(config, "init_lora_weights", ""))
    return way if way.lower().startswith(_TAKING_APART) else ""


def _unfit(config: Any) -> str:
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        return f"is a {type(config).__name__}"
    plain = {"use_dora": False, "bias": "none", "modules_to_save": None, "lora_bias": False}
    plain |= {"target_parameters": None}
    given = {key: getattr(config, key, value) or value for key, value in plain.items()}
    odd = [f"{key}={value!r}" for key, value in given.items() if value != plain[key]]
    if way := taking_apart(config):
        odd.append(f"init_lora_weights={way!r}")
    return f"has {', '.join(odd)}" if odd else ""


def weight_messages(
    model: FlowModel, weights: Weights, version: int, dtype: torch.dtype | None = None
) -> list[tuple[str, bytes]]:
    """
    The calls that bring weights to a server.

    Args:
        model ([`~omnitrl.models.FlowModel`]):
            What is trained.
        weights (`dict[str, dict[str, Tensor]]`):
            Network → name → tensor, as PEFT or the network names them.
        version (`int`):
            Weight version that they make.
        dtype (`torch.dtype`, *optional*):
            In which whole networks are sent; their own by default. Adapters are sent as they are.

    Returns:
        `list[tuple[str, bytes]]`: path and body of each call.
    """
    configs = _configs(model)
    if configs:
        return [(ADAPTER, adapter_message(next(iter(configs.values())), weights, version))]
    return whole_messages(weights, version, dtype)


def whole_messages(weights: Weights, version: int, dtype: torch.dtype | None = None) -> list[tuple[str, bytes]]:
    """The calls that bring whole networks; see [`weight_messages`]."""
    named = {f"{name}.{key}": tensor for name, tensors in weights.items() for key, tensor in tensors.items()}
    buckets = _buckets(named, dtype)
    messages = []
    for index, keys in enumerate(buckets):
        tensors = {key: _sent(named[key], dtype) for key in keys}  # one bucket at a time beside what is packed
        messages.append((WEIGHTS, pack(asdict(BucketHead(version, index, len(buckets))), tensors)))
    return messages


def adapter_message(config: Any, weights: Weights, version: int) -> bytes:
    """
    The body of a call that brings adapters.

    Args:
        config ([`~peft.LoraConfig`]):
            One for all networks.
        weights (`dict[str, dict[str, Tensor]]`):
            Network → name → tensor, as PEFT names them.
        version (`int`):
            Weight version that they make.

    Raises:
        [`~omnitrl.errors.InputError`]: a tensor is of a kind that servers do not take.
    """
    tensors: dict[str, Tensor] = {}
    expected: dict[str, None] = {}
    for name, adapter in weights.items():
        for key, tensor in adapter.items():
            key = f"{name}.{key.removeprefix(_PEFT_PREFIX)}"
            part = next((part for part in _LORA_PARTS if key.endswith(part)), None)
            if part is None:
                raise InputError(
                    f"The adapter tensor {key} is of a kind that rollout servers do not take: use LoRA of linear "
                    "layers, or rollout_engine='local'."
                )
            tensors[key] = tensor
            expected[key.removesuffix(part)] = None
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return pack(asdict(AdapterHead(version, _json(plain), list(expected))), tensors)


def _json(value: Any) -> Any:
    """The same as JSON has it: enumerations by their values, and words for what is none of its types."""
    if isinstance(value, Mapping):
        return {str(key): _json(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [_json(part) for part in value]
    value = getattr(value, "value", value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _buckets(named: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[list[str]]:
    """Names of tensors in parts of at most [`BUCKET_BYTES`]."""
    buckets: list[list[str]] = []
    size = 0
    for name, tensor in named.items():
        width = tensor.element_size() if dtype is None else dtype.itemsize
        num_bytes = tensor.numel() * width
        if not buckets or size + num_bytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += num_bytes
    return buckets


def _sent(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

# SPDX-License-Identifier: Apache-2.0
"""
What takes weights in the workers of a server that writes text. Its methods are called by name, in all workers.

vLLM-Omni has no adapters for such models (0.30), and vLLM's own come from folders. All completions are drawn from one
policy, so adapters are merged into the weights, by the loader of the model itself, which knows which layers are fused
and which part of a matrix a worker has. The weights before are kept, and each version is merged into these. Weights
themselves are loaded by vLLM's own way of loading again, which also puts them into the form that its kernels want.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from omnitrl.messages import unpack
from omnitrl.rollout.vllm_omni.server.adapters import (
    UNUSABLE,
    lora_a,
    lora_b,
    quantization_method,
    report_on,
)


AT_ONCE = 32
"""Weights that are merged at the same time, each of which takes its size in float32."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_experts", "vocab_size")


@dataclass
class _Arriving:
    """Weights of a version that come in several messages."""

    version: int
    following: int = 0
    sent: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class ThinkerExtension:
    """Methods that `collective_rpc` calls in each worker of a server that writes text."""

    model_runner: Any
    vllm_config: Any
    _rollout_version = -1
    _rollout_base: dict[str, Tensor] | None = None  # weights without the adapter, of what is adapted
    _rollout_arriving: _Arriving | None = None

    # What is there

    def rollout_facts(self) -> dict[str, Any]:
        """What the calls need to know of the model and of the settings of the server."""
        config, scheduler = self.vllm_config.model_config, self.vllm_config.scheduler_config
        thinker = self._rollout_thinker().config
        return {
            "model": str(config.model),
            "pipeline_class": type(self._rollout_thinker()).__name__,
            "dtype": str(config.dtype).removeprefix("torch."),
            "batching": "token",
            "max_num_seqs": int(scheduler.max_num_seqs),
            "max_model_len": int(config.max_model_len),
            "log_probs": str(config.logprobs_mode),
            "device": next(self._rollout_thinker().parameters()).device.type,
            "sizes": {name: getattr(thinker.text_config, name, None) for name in _SIZES},
            "quantization": quantization_method(self.vllm_config.quant_config),
            "placeholders": {kind: getattr(thinker, f"{kind}_token_id") for kind in ("image", "video", "audio")},
            "merge_size": int(thinker.vision_config.spatial_merge_size),
            **self.rollout_state(),
        }

    def rollout_state(self) -> dict[str, Any]:
        """Which weights it has."""
        return {"weight_version": self._rollout_version}

    def _rollout_thinker(self) -> Any:
        return self.model_runner.get_model().thinker

    # Adapters

    @torch.no_grad()
    def rollout_adapter(self, message: bytes) -> dict[str, Any]:
        """Merges an adapter in the place of the one before; a report, and nothing else if a module has no place."""
        head, tensors = unpack(message, "rollout")
        expected = list(head["expected"])
        places = {name: self._rollout_place(f"{name}.weight") for name in expected}
        whole = {name for name in expected if lora_a(name) in tensors and lora_b(name) in tensors}
        missing = [name for name in expected if places[name] is None or name not in whole]
        if not missing:
            self._rollout_version = UNUSABLE
            parts: dict[str, list[str]] = {}
            for name, place in places.items():
                parts.setdefault(str(place), []).append(name)
            self._rollout_merge(parts, tensors)
            self._rollout_version = head["version"]
        return report_on(head["version"], expected, missing) | self.rollout_state()

    def _rollout_place(self, weight: str) -> str | None:
        """Name of the parameter of the Thinker that has a weight of a checkpoint, alone or among others."""
        thinker = self._rollout_thinker()
        names = dict(thinker.named_parameters())
        (name,) = thinker.hf_to_vllm_mapper.apply_list([weight])
        if name in names:
            return name
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        for whole, fused in thinker.packed_modules_mapping.items():
            if leaf in fused and f"{parent}.{whole}.{kind}" in names:
                return f"{parent}.{whole}.{kind}"
        return None

    def _rollout_merge(self, parts: Mapping[str, list[str]], tensors: Mapping[str, Tensor]) -> None:
        """Sets the parameters that have these modules to their first values and the update of the adapter."""
        parameters: dict[str, nn.Parameter] = dict(self._rollout_thinker().named_parameters())
        base = self._rollout_base = self._rollout_base or {}
        for place in base.keys() - parts.keys():
            parameters[place].copy_(base[place])
        places = list(parts)
        for start in range(0, len(places), AT_ONCE):
            chosen = {place: parameters[place] for place in places[start : start + AT_ONCE]}
            weights = {place: parameter.data for place, parameter in chosen.items()}
            for place, weight in weights.items():
                if place not in base:
                    base[place] = weight.clone()
            updates = self._rollout_updates([name for place in chosen for name in parts[place]], tensors)
            try:  # the loader writes into what stands for the parameters meanwhile
                for parameter in chosen.values():
                    parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
                loaded = self._rollout_thinker().load_weights(updates)
                if not chosen.keys() <= loaded:
                    raise RuntimeError(f"The loader of the model left out {sorted(chosen.keys() - loaded)[:3]}.")
                for place, parameter in chosen.items():
                    weights[place].copy_(base[place].float() + parameter.data)
            finally:
                for place, parameter in chosen.items():
                    parameter.data = weights[place]

    def _rollout_updates(self, modules: list[str], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Names of weights in a checkpoint, and what the adapter adds to each."""
        device = next(self._rollout_thinker().parameters()).device
        for name in modules:
            a, b = (tensors[part(name)].to(device, torch.float32) for part in (lora_a, lora_b))
            yield f"{name}.weight", b @ a

    # Weights

    @torch.no_grad()
    def rollout_weights(self, message: bytes) -> dict[str, Any]:
        """
        Loads some of the weights of a version; a report after the last of them, `{}` before.

        From the first message on the weights are of no version, until all of them are there.
        """
        head, tensors = unpack(message, "rollout")
        version, index, count = (head[key] for key in ("version", "index", "count"))
        if index == 0:
            self._rollout_begin(version)
        arriving = self._rollout_arriving
        if arriving is None or (arriving.version, arriving.following) != (version, index):
            raise ValueError(f"Message {index} of the weights {version} does not follow on what came before it.")
        arriving.following += 1
        arriving.sent += tensors
        unknown = [name for name in tensors if not self._rollout_knows(name)]
        arriving.missing += unknown
        self._rollout_thinker().load_weights((n, tensor) for n, tensor in tensors.items() if n not in unknown)
        if arriving.following < count:
            return {}
        self._rollout_end()
        if not arriving.missing:
            self._rollout_version = version
        return report_on(version, arriving.sent, arriving.missing) | self.rollout_state()

    def _rollout_begin(self, version: int) -> None:
        """Undoes the adapter, which is none of the weights that come, and makes room for these."""
        if self._rollout_arriving is not None:  # its trainer went away in their midst
            self._rollout_end()
        self._rollout_version = UNUSABLE
        self._rollout_merge({}, {})
        self._rollout_base = None
        initialize_layerwise_reload(self.model_runner.get_model())
        self._rollout_arriving = _Arriving(version)

    def _rollout_end(self) -> None:
        self._rollout_arriving = None
        finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)

    def _rollout_knows(self, weight: str) -> bool:
        """Whether there is a place for a weight of a checkpoint; experts lie in one parameter for each layer."""
        (name,) = self._rollout_thinker().hf_to_vllm_mapper.apply_list([weight])
        experts, found, _ = name.partition(".experts.")
        if found:
            return any(n.startswith(f"{experts}.experts.") for n, _ in self._rollout_thinker().named_parameters())
        return self._rollout_place(weight) is not None

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
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from omnitrl.messages import unpack
from omnitrl.rollout.vllm_omni.server.adapters import (
    EXPERTS,
    UNUSABLE,
    Arriving,
    lora_a,
    lora_b,
    quantization_method,
    report_on,
    take_bucket,
)


AT_ONCE = 32
"""Weights that are merged at the same time, each of which takes its size in float32."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_experts", "vocab_size")


class ThinkerExtension:
    """Methods that `collective_rpc` calls in each worker of a server that writes text."""

    model_runner: Any
    vllm_config: Any
    _rollout_version = -1
    _rollout_base: dict[str, Tensor] | None = None  # weights without the adapter, of what is adapted
    _rollout_arriving: Arriving | None = None
    _rollout_missing: list[str] = []  # of what has arrived, what has no place

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
        found = self._rollout_places([f"{name}.weight" for name in expected])
        places = {name: found[f"{name}.weight"] for name in expected}
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

    def _rollout_places(self, weights: list[str]) -> dict[str, str | None]:
        """Weights of a checkpoint, and the parameter of the Thinker that has each, alone or among others."""
        thinker = self._rollout_thinker()
        names = {name for name, _ in thinker.named_parameters()}
        fused = {leaf: whole for whole, leaves in thinker.packed_modules_mapping.items() for leaf in leaves}

        def place(name: str) -> str | None:
            module, _, kind = name.rpartition(".")
            parent, _, leaf = module.rpartition(".")
            among = f"{parent}.{fused.get(leaf)}.{kind}"
            return name if name in names else among if among in names else None

        return {weight: place(thinker.hf_to_vllm_mapper.apply_list([weight])[0]) for weight in weights}

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
        if head["index"] == 0:
            self._rollout_begin(head["version"])
        arriving = take_bucket(self._rollout_arriving, head, tensors)
        unknown = self._rollout_unknown(list(tensors))
        self._rollout_missing += unknown
        self._rollout_thinker().load_weights((n, tensor) for n, tensor in tensors.items() if n not in unknown)
        if arriving.following < head["count"]:
            return {}
        self._rollout_end()
        if not self._rollout_missing:
            self._rollout_version = arriving.version
        return report_on(arriving.version, arriving.sent, self._rollout_missing) | self.rollout_state()

    def _rollout_begin(self, version: int) -> None:
        """Undoes the adapter, which is none of the weights that come, and makes room for these."""
        if self._rollout_arriving is not None:  # its trainer went away in their midst
            self._rollout_end()
        self._rollout_version = UNUSABLE
        self._rollout_merge({}, {})
        self._rollout_base = None
        initialize_layerwise_reload(self.model_runner.get_model())
        self._rollout_arriving, self._rollout_missing = Arriving(version), []

    def _rollout_end(self) -> None:
        self._rollout_arriving = None
        finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)

    def _rollout_unknown(self, weights: list[str]) -> list[str]:
        """Weights of a checkpoint that have no place; experts lie in one parameter for each layer."""
        names = [name for name, _ in self._rollout_thinker().named_parameters()]
        layers = {name.partition(EXPERTS)[0] for name in names if EXPERTS in name}
        mapper = self._rollout_thinker().hf_to_vllm_mapper
        experts = {name for name in weights if EXPERTS in name}
        unknown = [n for n in experts if mapper.apply_list([n])[0].partition(EXPERTS)[0] not in layers]
        places = self._rollout_places([name for name in weights if name not in experts])
        return sorted([*unknown, *(name for name, place in places.items() if place is None)])

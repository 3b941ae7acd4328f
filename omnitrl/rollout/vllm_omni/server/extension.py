# SPDX-License-Identifier: Apache-2.0
"""
What takes weights in the workers of a server. Its methods are called by name, in all workers.

Adapters come as tensors and are bound without a file. vLLM-Omni has no public way for that, so this uses what its
manager of adapters does after it has read a file (0.30). Whole networks go through the native `load_weights`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import replace_submodule
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from omnitrl.messages import unpack
from omnitrl.rollout.vllm_omni.collective import Group, Invitation
from omnitrl.rollout.vllm_omni.server.adapters import (
    UNUSABLE,
    Arriving,
    lora_a,
    lora_b,
    quantization_method,
    report_on,
    scaling,
    take_bucket,
)


# Ends of names in diffusers, and what native networks call them where they differ.
_OTHER_NAMES = ((".to_out.0", ".to_out"), (".ffn.net.0.", ".ffn.net_0."), (".ffn.net.2", ".ffn.net_2"))


class RolloutExtension(CustomPipelineWorkerExtension):
    """Methods that `collective_rpc` calls in each worker of a server that makes rollouts."""

    model_runner: Any
    lora_manager: Any
    od_config: Any
    _adapter = 0  # number of the adapter that is bound, 0 for none
    _adapters = 0  # how many there were
    _arriving: Arriving | None = None
    _loaded: set[str] = set()  # native names of the parameters that what has arrived went into
    _group: Group | None = None  # with the trainer whose weights are broadcast

    # What is there

    def rollout_facts(self) -> dict[str, Any]:
        """What the calls need to know of the pipeline and of the settings of the server."""
        pipeline, config = self.model_runner.pipeline, self.od_config
        frame_rate = pipeline.family.frame_rate
        factor = getattr(pipeline, "vae_scale_factor_spatial", None) or pipeline.vae_scale_factor
        vae = pipeline.vae.config
        return {
            "model": str(config.model),
            "pipeline_class": type(pipeline).__name__,
            "dtype": str(config.dtype).removeprefix("torch."),
            "batching": "step" if config.step_execution else "request" if config.max_num_seqs > 1 else "serial",
            "max_num_seqs": int(config.max_num_seqs),
            "cache_backend": config.cache_backend or "none",
            "quantization": quantization_method(config.quantization_config),
            "channels": int(getattr(vae, "latent_channels", None) or vae.z_dim),
            "factor": int(factor),
            "frames_factor": int(pipeline.vae_scale_factor_temporal) if frame_rate else None,
            "frame_rate": frame_rate(pipeline) if frame_rate else None,
            "workers": torch.distributed.get_world_size(),
            "device": self._device.type,
            "embeds_guidance": bool(getattr(pipeline.transformer, "guidance_embeds", False)),
            **self.rollout_state(),
        }

    def rollout_state(self) -> dict[str, Any]:
        """Which weights it has, and how many samples it has made in one network call at most."""
        pipeline = self.model_runner.pipeline
        return {
            "weight_version": pipeline.weight_version,
            "adapter": self._adapter,
            "largest_batch": pipeline.largest_batch,
        }

    def rollout_digest(self) -> str:
        """A digest of the weights of the networks, without adapters."""
        digest = hashlib.blake2b(digest_size=16)
        pipeline = self.model_runner.pipeline
        for network in self._networks():
            for name, parameter in sorted(getattr(pipeline, network).named_parameters()):
                digest.update(f"{network}.{name}".replace(".base_layer", "").encode())
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()

    @property
    def _device(self) -> torch.device:
        return next(self.model_runner.pipeline.transformer.parameters()).device

    def _networks(self) -> list[str]:
        pipeline = self.model_runner.pipeline
        names = ("transformer", "transformer_2")
        return [name for name in names if isinstance(getattr(pipeline, name, None), torch.nn.Module)]

    # Adapters

    @torch.no_grad()
    def rollout_adapter(self, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """
        Binds an adapter and removes the one before; a report, and nothing else if a module has no place.

        Each adapter has a number that no other had: vLLM-Omni takes one that it has seen for the same adapter.
        """
        manager, expected = self.lora_manager, list(head["expected"])
        places = self._places()
        native = {name: _place(name, places) for name in expected}
        whole = {name for name in expected if lora_a(name) in tensors and lora_b(name) in tensors}
        missing = [name for name in expected if native[name] is None or name not in whole]
        if not missing:
            loras = {}
            for name, place in native.items():
                a, b = tensors[lora_a(name)], tensors[lora_b(name)]
                scaled = b.float() * scaling(head["config"], name, a.shape[0])
                a, scaled = (part.to(manager.dtype).contiguous() for part in (a, scaled))
                loras[place] = LoRALayerWeights(place, a.shape[0], a.shape[0], a, scaled, scaling=1)
            self._bind(loras)
            self.model_runner.pipeline.weight_version = head["version"]
        return report_on(head["version"], expected, missing) | self.rollout_state()

    def _bind(self, loras: dict[Any, LoRALayerWeights]) -> None:
        """Makes these the adapter that is used; the old one stays if that fails."""
        manager, number = self.lora_manager, self._adapters + 1
        rank = max(lora.rank for lora in loras.values())
        pattern = f"^(?:{'|'.join(re.escape(name) for name in loras)})$"
        manager._replace_layers_with_lora(SimpleNamespace(r=rank, target_modules=pattern))
        manager._registered_adapters[number] = LoRAModel(number, rank, loras)
        manager._touch_adapter_info(number)
        try:
            manager._activate_adapter(number, 1.0)
        except Exception:
            manager.remove_adapter(number)
            raise
        manager.remove_adapter(self._adapter)
        manager.pin_adapter(number)  # those of other requests do not push it out
        self._adapter = self._adapters = number

    def _places(self) -> set[str]:
        """Names of the modules that may take an adapter, those that native networks have fused included."""
        pipeline, fused = self.model_runner.pipeline, self.lora_manager._packed_modules_mapping
        places = set()
        for network in self._networks():
            for name, _ in getattr(pipeline, network).named_modules():
                parent, _, leaf = f"{network}.{name}".rpartition(".")
                places |= {f"{network}.{name}", *(f"{parent}.{part}" for part in fused.get(leaf, ()))}
        return places

    def _unbind(self) -> None:
        """Takes the layers of adapters out, under whose names whole networks could not be loaded."""
        manager = self.lora_manager
        manager.remove_adapter(self._adapter)
        self._adapter = 0
        for name, layer in manager._lora_modules.items():
            network, _, module = name.partition(".")
            replace_submodule(getattr(self.model_runner.pipeline, network), module, layer.base_layer)
        manager._lora_modules.clear()
        manager._max_lora_rank = 0

    # Whole networks

    @torch.no_grad()
    def rollout_weights(self, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """
        Loads one bucket of whole networks; a report after the last one, `{}` before.

        From the first bucket on the weights are of no version, until all of them are there.
        """
        if "group" in head:
            head, tensors = self._received(head["group"], head["num_bytes"])
        pipeline = self.model_runner.pipeline
        if head["index"] == 0:
            pipeline.weight_version = UNUSABLE
            self._unbind()
            self._arriving, self._loaded = Arriving(head["version"]), set()
        arriving, self._arriving = self._arriving, None  # what fails here has to begin again
        arriving = take_bucket(arriving, head, tensors)
        self._loaded |= pipeline.load_weights(tensors.items())
        if arriving.following < head["count"]:
            self._arriving = arriving
            return {}
        expected, missing = self._unfilled(set(arriving.sent), self._loaded)
        if not missing:
            pipeline.weight_version = arriving.version
        return report_on(arriving.version, expected, missing) | self.rollout_state()

    def rollout_join(self, invitation: Mapping[str, Any]) -> dict[str, Any]:
        """Joins the group in which a trainer broadcasts, and leaves the one before."""
        self._group = None
        self._group = Group.join(Invitation(**invitation), 1 + torch.distributed.get_rank(), self._device)
        return {}

    def _received(self, group: str, num_bytes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Head and tensors of a message that is broadcast."""
        if self._group is None or self._group.name != group:
            raise ValueError("The trainer's process group is not the one that this server joined last.")
        try:
            return unpack(self._group.receive(num_bytes), "rollout")
        except Exception:
            self._group = None
            raise

    def _unfilled(self, sent: set[str], loaded: set[str]) -> tuple[list[str], list[str]]:
        """Native names of the parameters of the networks that were sent, and those that got no or not all values."""
        networks = {name.partition(".")[0] for name in sent}
        pipeline = self.model_runner.pipeline
        expected = [
            f"{network}.{name}"
            for network in self._networks()
            if network in networks
            for name, _ in getattr(pipeline, network).named_parameters()
        ]
        missing = []
        for name in expected:
            parts = self._parts(name)
            if name in sent or not parts:
                missing += [] if name in loaded else [name]
            else:
                missing += [part for part in parts if part not in sent]
        return expected, sorted(missing)

    def _parts(self, name: str) -> list[str]:
        """Names that the parameter of a fused layer has in parts."""
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        return [f"{parent}.{part}.{kind}" for part in self.lora_manager._packed_modules_mapping.get(leaf, ())]


def _place(name: str, places: Iterable[str]) -> str | None:
    """What a native network calls a module."""
    candidates = [name]
    for ours, theirs in _OTHER_NAMES:
        candidates += [name.replace(ours, theirs)]
    return next((candidate for candidate in candidates if candidate in places), None)

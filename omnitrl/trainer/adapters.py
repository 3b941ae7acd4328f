# SPDX-License-Identifier: Apache-2.0
"""What is trained: adapters or whole networks, and the reference policy that goes with either."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from omnitrl.errors import InputError
from omnitrl.models import FlowModel
from omnitrl.rollout.vllm_omni.weights import taking_apart


def attach_adapters(
    model: FlowModel, peft_config: PeftConfig | str | None, trainable_networks: Sequence[str] | None = None
) -> None:
    """
    Makes the networks of `model` trainable: new adapters, saved adapters, or all weights.

    Args:
        model ([`FlowModel`]):
            Modified in place.
        peft_config (`PeftConfig` or `str`, *optional*):
            Configuration of new adapters (`target_modules` default to the family's), or folder or Hub id of saved ones
            to go on with, with a sub-folder for each network where there are several. `None` trains all weights, in
            float32.
        trainable_networks (`Sequence[str]`, *optional*):
            Names of the networks that are trained; all by default.

    Raises:
        [`~omnitrl.errors.InputError`]: the model has no such network, or its adapters cannot be trained.
    """
    network: Any
    chosen = _chosen_networks(model, trainable_networks)
    for name, network in model.networks.items():
        if name not in chosen:
            network.requires_grad_(False)
            continue
        if isinstance(network, PeftModel):
            _refuse_second_adapter(name, peft_config)
            continue
        if getattr(network, "_hf_peft_config_loaded", False):
            raise InputError(
                f"The pipeline's {name} has LoRA weights loaded: merge them first with `pipeline.fuse_lora()` and "
                "`pipeline.unload_lora_weights()`, or pass their folder as `peft_config` to go on training them."
            )
        if peft_config is None:
            network.requires_grad_(True).float()
            for module_name, module in network.named_modules():
                if module_name.endswith(model.unused_modules):  # false for all where there are none
                    module.requires_grad_(False)
        elif isinstance(peft_config, PeftConfig):
            model.networks[name] = _new_adapter(network, _checked(peft_config), model)
            # get_peft_model looks for `name_or_path`, which diffusers networks do not have.
            adapted: Any = model.networks[name]
            for config in adapted.peft_config.values():
                config.base_model_name_or_path = model.name or None
        elif isinstance(peft_config, str | Path):
            several = len(model.networks) > 1
            model.networks[name] = _load_adapter(network, str(peft_config), {"subfolder": name} if several else {})
        else:
            raise InputError(
                f"peft_config is a {type(peft_config).__name__}: pass a `LoraConfig`, a folder or Hub id of saved "
                "adapters, or None to train all weights."
            )
    _check_bases(model, chosen)
    trainable = [p for p in model.networks.parameters() if p.requires_grad]
    if not trainable:
        raise InputError("No weight is trainable: check `target_modules` and `inference_mode` of the peft_config.")


def _check_bases(model: FlowModel, chosen: set[str]) -> None:
    """Raises for adapters that have taken weights out of the network below them, which then is no reference."""
    for network in (model.networks[name] for name in sorted(chosen)):
        configs = network.peft_config.values() if isinstance(network, PeftModel) else ()
        for way in filter(None, map(taking_apart, configs)):
            raise InputError(
                f"init_lora_weights={way!r} changes the weights below the adapter: without it they are not those that "
                "were given, to which the adapter does not fit in diffusers. Use init_lora_weights=True or 'gaussian'."
            )


def _chosen_networks(model: FlowModel, names: Sequence[str] | None) -> set[str]:
    known = list(model.network_names)
    if names is None:
        return set(known)
    if not names or not set(names) <= set(known):
        raise InputError(
            f"trainable_networks={list(names)} must name networks of the {type(model.pipeline).__name__}, which are "
            f"{known}: use trainable_networks={known[-1:]}, or None for all."
        )
    return set(names)


def _new_adapter(network: Any, config: PeftConfig, model: FlowModel) -> PeftModel:
    if isinstance(config, LoraConfig):
        if config.target_modules is None:
            config.target_modules = list(model.default_lora_targets)
        else:
            _check_targets(config.target_modules, network, model)
    return get_peft_model(network, config)


def _check_targets(targets: Any, network: Any, model: FlowModel) -> None:
    """Each target must be there; PEFT is content if one is."""
    names = [name for name, _ in network.named_modules()]
    if isinstance(targets, str):  # a regular expression, or a word of PEFT's own
        found = targets == "all-linear" or any(re.fullmatch(targets, name) for name in names)
        missing = [] if found else [targets]
    else:
        missing = sorted(t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names))
    if missing:
        raise InputError(
            f"peft_config.target_modules names {missing}, which {type(network).__name__} does not have: leave it out "
            f"for {list(model.default_lora_targets)}, or take names that `print(pipeline.transformer)` shows."
        )


def _refuse_second_adapter(name: str, peft_config: PeftConfig | str | None) -> None:
    if peft_config is not None:
        raise InputError(f"The model's {name} is a PeftModel already: leave peft_config out to train its adapter.")


def _checked(peft_config: PeftConfig) -> PeftConfig:
    """A copy of the user's config, after the checks that PEFT makes late or never."""
    config = copy.deepcopy(peft_config)
    if isinstance(config, LoraConfig) and config.lora_dropout:
        raise InputError(
            f"lora_dropout={config.lora_dropout} makes a replay differ from its rollout, so that the ratio is never "
            "1: use lora_dropout=0.0."
        )
    if config.task_type is not None:
        raise InputError(f"task_type={config.task_type} is for language models: leave it None.")
    return config


def _load_adapter(network: nn.Module, source: str, place: dict[str, Any]) -> PeftModel:
    try:
        return PeftModel.from_pretrained(network, source, is_trainable=True, **place)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputError(
            f"No adapter can be loaded from peft_config={source!r} ({first_line}): pass a folder or Hub id with "
            "adapter_config.json and adapter_model.safetensors, or a `LoraConfig` for a new adapter."
        ) from error


def has_adapters(model: FlowModel) -> bool:
    """Whether adapters are trained rather than whole networks."""
    return any(isinstance(network, PeftModel) for network in model.networks.values())


Velocity = Callable[..., Tensor]


class ReferencePolicy:
    """
    The policy as it was before training, for KL terms.

    With adapters it is the same network with the adapters off, which costs no memory. With full fine-tuning it is a
    frozen copy, made when this object is.

    Args:
        model ([`FlowModel`]):
            The model that is trained.
    """

    def __init__(self, model: FlowModel) -> None:
        self._model = model
        self._copy: FlowModel | None = None
        if not has_adapters(model):
            self._copy = copy.copy(model)
            self._copy.networks = copy.deepcopy(model.networks).requires_grad_(False).eval()

    @contextmanager
    def velocity(self, policy: nn.Module) -> Iterator[Velocity]:
        """Gives the reference's velocity function; `policy` is the (wrapped) policy that is trained."""
        with torch.no_grad(), ExitStack() as stack:
            if self._copy is not None:
                self._copy.networks.to(self._model.device)
                yield self._copy.velocity
            else:
                network: Any
                for network in self._model.trained_networks.values():
                    stack.enter_context(network.disable_adapter())
                yield policy

# SPDX-License-Identifier: Apache-2.0
"""
Trained weights on disk, in the formats that stock loaders read.

Adapters are written twice: as a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`), which PEFT and
vLLM-Omni read, and as `pytorch_lora_weights.safetensors` with the adapter's configuration in its header, which
`pipeline.load_lora_weights` reads; without that header diffusers takes alpha for the rank
(https://github.com/huggingface/diffusers/issues/6087). Pipelines without that method have the PEFT folder only. Whole
networks are written with `save_pretrained`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from omnitrl.errors import RunError
from omnitrl.models import FlowModel
from omnitrl.models.base import LORA_FILE


DIFFUSERS_LORA = LORA_FILE
# On the Hub `load_lora_weights` takes the first file that ends in the name above, so the EMA's copy must not.
DIFFUSERS_LORA_EMA = "pytorch_lora_weights_ema.safetensors"

PEFT_WEIGHTS = "adapter_model.safetensors"
PLAIN_WEIGHTS = "diffusion_pytorch_model*.safetensors"
_PEFT_PREFIX = "base_model.model."


def trained_weights(model: FlowModel, state_dict: dict[str, Tensor] | None = None) -> dict[str, dict[str, Tensor]]:
    """
    The trained weights by network: an adapter's tensors by PEFT's names, or all tensors of a network.

    Args:
        model ([`FlowModel`]):
            Its networks are `PeftModel`s or plain networks.
        state_dict (`dict[str, Tensor]`, *optional*):
            Weights of the policy (`networks.<name>.…`), where the modules do not hold them (DeepSpeed).

    Raises:
        [`~omnitrl.errors.RunError`]: an adapter has more tensors than were found; PEFT drops what it cannot match.
    """
    result: dict[str, dict[str, Tensor]] = {}
    for name, network in model.trained_networks.items():
        prefix = f"networks.{name}."
        given = state_dict and {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        if isinstance(network, PeftModel):
            tensors = _adapter_tensors(name, network, given)
        else:
            tensors = given or network.state_dict()
        result[name] = {key: tensor.detach() for key, tensor in tensors.items()}
    return result


def _adapter_tensors(name: str, network: PeftModel, given: dict[str, Tensor] | None) -> dict[str, Tensor]:
    def select(state_dict: dict[str, Tensor] | None) -> dict[str, Tensor]:
        # "auto" would ask the Hub for the base model's vocabulary.
        return get_peft_model_state_dict(
            network, state_dict=state_dict, adapter_name=network.active_adapter, save_embedding_layers=False
        )

    expected = select(None)
    tensors = expected if given is None else select(given)
    trained = sum(1 for p in network.parameters() if p.requires_grad)
    if tensors.keys() != expected.keys() or len(tensors) < trained:
        found = len(tensors.keys() & expected.keys())
        raise RunError(
            f"Only {found} of {trained} trained adapter tensors of the {name} were found, so nothing was written: use "
            "another kind of adapter, or report this."
        )
    return tensors


def whole_weights(weights: dict[str, dict[str, Tensor]], keep: bool) -> dict[str, dict[str, Tensor]]:
    """
    The same with shards put together on the CPU, one after the other; every rank calls it.

    Args:
        weights (`dict[str, dict[str, Tensor]]`):
            What [`trained_weights`] gave.
        keep (`bool`):
            Whether this rank wants the result; others get empty dicts.
    """
    result: dict[str, dict[str, Tensor]] = {}
    for name, tensors in weights.items():
        result[name] = {}
        for key, tensor in tensors.items():
            full = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
            if keep:
                result[name][key] = full
    return result


def save_networks(
    model: FlowModel,
    folder: str | Path,
    weights: dict[str, dict[str, Tensor]] | None = None,
    lora_name: str = DIFFUSERS_LORA,
) -> list[Path]:
    """
    Writes the trained weights of `model`.

    Args:
        model ([`FlowModel`]):
            Its networks are `PeftModel`s or plain networks.
        folder (`str` or `Path`):
            Created if needed. Where a model has several networks, each goes to a sub-folder of its name.
        weights (`dict[str, dict[str, Tensor]]`, *optional*):
            What to write by network, where that is not what the modules hold; see [`whole_weights`].
        lora_name (`str`):
            Name of the diffusers file, of the first network's if there are several.

    Returns:
        `list[Path]`: The weight files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights or trained_weights(model)
    several = len(model.networks) > 1
    written: list[Path] = []
    for name, network in model.trained_networks.items():
        tensors = {key: tensor.contiguous() for key, tensor in weights[name].items()}
        if isinstance(network, PeftModel):
            written.append(_save_peft(network, folder / name if several else folder, tensors))
            written += _save_for_diffusers(model, name, folder / model.lora_file(name, lora_name), tensors)
        else:
            written += _save_plain(network, folder / name, tensors)
    return written


def load_networks(model: FlowModel, folder: str | Path) -> None:
    """
    Reads what [`save_networks`] wrote into the networks of `model`, shards included; every rank calls it.

    Raises:
        [`~omnitrl.errors.RunError`]: the folder holds other weights than the model trains.
    """
    folder = Path(folder)
    several = len(model.networks) > 1
    for name, current in trained_weights(model).items():
        adapter = isinstance(model.networks[name], PeftModel)
        place = folder / name if several or not adapter else folder
        tensors = _read(place, PEFT_WEIGHTS if adapter else PLAIN_WEIGHTS)
        if tensors.keys() != current.keys():
            odd = sorted(tensors.keys() ^ current.keys())
            raise RunError(
                f"The weights in {place} do not fit what is trained: {len(odd)} tensors differ, such as {odd[0]!r}. "
                "Use the model and the peft_config of the run that wrote them."
            )
        for key, tensor in current.items():  # these share memory with the parameters
            tensor.copy_(_sharded_like(tensor, tensors[key]))


def _read(folder: Path, pattern: str) -> dict[str, Tensor]:
    files = sorted(folder.glob(pattern))
    if not files:
        other = "without" if pattern == PEFT_WEIGHTS else "with"
        raise RunError(f"The checkpoint has no {folder / pattern}: was it written by a run {other} adapters?")
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def _sharded_like(tensor: Tensor, full: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return distribute_tensor(full.to(tensor.device), tensor.device_mesh, tensor.placements)
    return full


def _save_plain(network: Any, folder: Path, tensors: dict[str, Tensor]) -> list[Path]:
    network.save_config(folder)
    save_torch_state_dict(tensors, folder, filename_pattern=PLAIN_WEIGHTS.replace("*", "{suffix}"))
    return sorted(folder.glob(PLAIN_WEIGHTS))


def _save_peft(network: PeftModel, folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / PEFT_WEIGHTS, metadata={"format": "pt"})
    config = network.peft_config[network.active_adapter]
    inference_mode, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = inference_mode
    return folder / PEFT_WEIGHTS


def _save_for_diffusers(model: FlowModel, name: str, path: Path, tensors: dict[str, Tensor]) -> list[Path]:
    """One network's adapter for `load_lora_weights`; none for adapters that are no LoRA, which it cannot load."""
    network: Any = model.networks[name]
    config = network.peft_config[network.active_adapter]
    if not isinstance(config, LoraConfig) or not model.loads_lora:
        return []
    metadata = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    layers = {key.removeprefix(_PEFT_PREFIX): tensor for key, tensor in tensors.items()}
    first = model.network_names[0]  # which a loader takes each file's network for, unless it is told another
    given: dict[str, Any] = {f"{first}_lora_layers": layers, f"{first}_lora_adapter_metadata": metadata}
    type(model.pipeline).save_lora_weights(path.parent, weight_name=path.name, **given)
    return [path]


def load_snippet(model: FlowModel, adapter: bool, repo: str) -> str:
    """Python that loads the result with stock diffusers, for the report and the model card."""
    pipeline, base = type(model.pipeline).__name__, model.name or "path/to/the/base/model"
    if adapter and not model.loads_lora:
        lines = [f"import torch\nfrom diffusers import {pipeline}\nfrom peft import PeftModel\n"]
        lines.append(f'pipe = {pipeline}.from_pretrained("{base}", dtype=torch.bfloat16)')
        for name in model.trained_networks:
            place = f'"{repo}", subfolder="{name}"' if len(model.networks) > 1 else f'"{repo}"'
            lines.append(f"pipe.{name} = PeftModel.from_pretrained(pipe.{name}, {place})")
        return "\n".join(lines) + "\n"
    if adapter:
        loads = "".join(
            f"pipe.load_lora_weights({', '.join([json.dumps(repo), *arguments])})\n"
            for arguments in _loading_arguments(model)
        )
        return (
            f"import torch\nfrom diffusers import {pipeline}\n\n"
            f'pipe = {pipeline}.from_pretrained("{base}", dtype=torch.bfloat16)\n{loads}'
        )
    loads = "".join(
        f'{name} = {type(network).__name__}.from_pretrained("{repo}", subfolder="{name}")\n'
        for name, network in model.trained_networks.items()
    )
    classes = ", ".join(sorted({pipeline, *(type(network).__name__ for network in model.trained_networks.values())}))
    given = ", ".join(f"{name}={name}" for name in model.trained_networks)
    return f'from diffusers import {classes}\n\n{loads}pipe = {pipeline}.from_pretrained("{base}", {given})\n'


def _loading_arguments(model: FlowModel) -> list[list[str]]:
    """For each trained network the arguments of `load_lora_weights` as they are written."""
    several = len(model.networks) > 1
    files = {name: {"weight_name": model.lora_file(name)} if several else {} for name in model.trained_networks}
    given = [{**files[name], **model.lora_arguments(name)} for name in files]
    return [[f"{key}={json.dumps(v) if isinstance(v, str) else repr(v)}" for key, v in one.items()] for one in given]

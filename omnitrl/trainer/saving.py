# SPDX-License-Identifier: Apache-2.0
"""
Trained weights on disk, in the formats that stock loaders read.

Adapters are written twice: as a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`), which PEFT and
vLLM-Omni read, and as `pytorch_lora_weights.safetensors` with the adapter's configuration in its header, which
`pipeline.load_lora_weights` reads; without that header diffusers takes alpha for the rank
(https://github.com/huggingface/diffusers/issues/6087). Whole networks are written with `save_pretrained`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from omnitrl.errors import RunError
from omnitrl.models import FlowModel


DIFFUSERS_LORA = "pytorch_lora_weights.safetensors"
# On the Hub `load_lora_weights` takes the first file that ends in the name above, so the EMA's copy must not.
DIFFUSERS_LORA_EMA = "pytorch_lora_weights_ema.safetensors"

PEFT_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def save_networks(
    model: FlowModel, folder: str | Path, state_dict: dict[str, Tensor] | None = None, lora_name: str = DIFFUSERS_LORA
) -> list[Path]:
    """
    Writes the trained weights of `model`.

    Args:
        model ([`FlowModel`]):
            Its networks are `PeftModel`s or plain networks.
        folder (`str` or `Path`):
            Created if needed. A second network goes to a sub-folder of its name.
        state_dict (`dict[str, Tensor]`, *optional*):
            Full weights of the policy (`networks.<name>.…`), needed where the modules hold only shards.
        lora_name (`str`):
            Name of the diffusers file.

    Returns:
        `list[Path]`: The weight files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    several = len(model.networks) > 1
    written: list[Path] = []
    lora_layers: dict[str, Any] = {}
    for name, network in model.networks.items():
        weights = _weights_of(name, state_dict)
        plain: Any = network
        if isinstance(network, PeftModel):
            target = folder / name if several else folder
            written.append(_save_peft(network, target, weights))
            lora_layers |= _diffusers_layers(name, network, weights)
        else:
            plain.save_pretrained(folder / name, **({} if weights is None else {"state_dict": weights}))
            written += sorted((folder / name).glob("*.safetensors"))
    if lora_layers:
        type(model.pipeline).save_lora_weights(folder, weight_name=lora_name, **lora_layers)
        written.append(folder / lora_name)
    return written


def load_networks(model: FlowModel, folder: str | Path) -> None:
    """
    Reads what [`save_networks`] wrote into the networks of `model`, checking that every trained tensor is there.

    Raises:
        [`~omnitrl.errors.RunError`]: the folder holds other weights than the model trains.
    """
    folder = Path(folder)
    several = len(model.networks) > 1
    for name, network in model.networks.items():
        if isinstance(network, PeftModel):
            _load_peft(network, (folder / name if several else folder) / PEFT_WEIGHTS)
        else:
            _load_plain(network, folder / name)


def _weights_of(name: str, state_dict: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    if state_dict is None:
        return None
    prefix = f"networks.{name}."
    return {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}


def _adapter_tensors(network: PeftModel, weights: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """The adapter's tensors by PEFT's names; PEFT drops silently what it cannot match, so they are counted."""
    tensors = _peft_state_dict(network, weights)
    trained = sum(1 for p in network.parameters() if p.requires_grad)
    if len(tensors) < trained:
        raise RunError(
            f"Only {len(tensors)} of {trained} trained adapter tensors were found for saving; nothing was written."
        )
    return {key: value.detach().contiguous() for key, value in tensors.items()}


def _peft_state_dict(network: PeftModel, weights: dict[str, Tensor] | None) -> dict[str, Tensor]:
    # "auto" would ask the Hub for the base model's vocabulary.
    return get_peft_model_state_dict(
        network, state_dict=weights, adapter_name=network.active_adapter, save_embedding_layers=False
    )


def _save_peft(network: PeftModel, folder: Path, weights: dict[str, Tensor] | None) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(_adapter_tensors(network, weights), folder / PEFT_WEIGHTS, metadata={"format": "pt"})
    config = network.peft_config[network.active_adapter]
    inference_mode, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = inference_mode
    return folder / PEFT_WEIGHTS


def _diffusers_layers(name: str, network: PeftModel, weights: dict[str, Tensor] | None) -> dict[str, Any]:
    layers = {key.removeprefix(_PEFT_PREFIX): v for key, v in _adapter_tensors(network, weights).items()}
    config = network.peft_config[network.active_adapter].to_dict()
    metadata = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {f"{name}_lora_layers": layers, f"{name}_lora_adapter_metadata": metadata}


def _load_peft(network: PeftModel, path: Path) -> None:
    if not path.is_file():
        raise RunError(f"The checkpoint has no {path}: was it written by a run without adapters?")
    tensors = load_file(path)
    expected = set(_peft_state_dict(network, None))
    if set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)
        raise RunError(
            f"{path} does not fit this adapter: {len(odd)} tensors differ, such as {odd[0]!r}. Use the peft_config "
            "of the run that wrote it."
        )
    set_peft_model_state_dict(network, tensors, adapter_name=network.active_adapter)


def _load_plain(network: nn.Module, folder: Path) -> None:
    if not folder.is_dir():
        raise RunError(f"The checkpoint has no {folder}: was it written by a run with adapters?")
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    network.load_state_dict(tensors, strict=True)


def load_snippet(model: FlowModel, adapter: bool, repo: str) -> str:
    """Python that loads the result with stock diffusers, for the report and the model card."""
    pipeline, base = type(model.pipeline).__name__, model.name or "path/to/the/base/model"
    if adapter:
        return (
            f"import torch\nfrom diffusers import {pipeline}\n\n"
            f'pipe = {pipeline}.from_pretrained("{base}", dtype=torch.bfloat16)\n'
            f'pipe.load_lora_weights("{repo}")\n'
        )
    loads = "".join(
        f'{name} = {type(network).__name__}.from_pretrained("{repo}", subfolder="{name}")\n'
        for name, network in model.networks.items()
    )
    classes = ", ".join(sorted({pipeline, *(type(network).__name__ for network in model.networks.values())}))
    given = ", ".join(f"{name}={name}" for name in model.networks)
    return f'from diffusers import {classes}\n\n{loads}pipe = {pipeline}.from_pretrained("{base}", {given})\n'

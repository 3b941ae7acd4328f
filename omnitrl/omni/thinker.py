# SPDX-License-Identifier: Apache-2.0
"""The part of an omni-modality model that is trained: the Thinker, its routers, and where LoRA goes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from omnitrl.errors import InputError


if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Model type of a whole checkpoint → class of its Thinker in Transformers.
THINKERS = {
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
}

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
"""`target_modules` of a `LoraConfig` for attention; `exclude_modules` is [`TOWERS`], which have the same names."""

TOWERS = r".*\b(audio_tower|visual)\b.*"
"""`exclude_modules` of a `LoraConfig`: what sees and hears."""

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""`target_parameters` of a `LoraConfig` for the experts of Qwen3-Omni, which are parameters and no modules."""

# What the names of the Thinker's weights begin with in a checkpoint.
_PREFIX = "thinker."

# Beginnings of names in Transformers 5.24, and what checkpoints have in their place.
_PUBLISHED = {
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    "model.audio_tower.": "audio_tower.",
}

# Tokens of a text that stand for media or for their ends, by their names in a model's config.
_MEDIA_TOKENS = (
    "image_token_id",
    "video_token_id",
    "audio_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
)


def has_thinker(model: str, **options: Any) -> bool:
    """Whether a folder or Hub id is a whole omni-modality checkpoint; `options` are those of `AutoConfig`."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, **options).model_type in THINKERS


def load_thinker(model: str, **options: Any) -> PreTrainedModel:
    """
    Loads the Thinker of a whole checkpoint; the weights of the Talker and of Code2Wav are never read.

    Args:
        model (`str`):
            Folder or Hub id of Qwen3-Omni or Qwen2.5-Omni.
        options:
            Arguments of `from_pretrained`; `dtype` is float32 by default.

    Returns:
        [`~transformers.PreTrainedModel`]: text, pictures, videos and sounds in, text out.

    Raises:
        [`~omnitrl.errors.InputError`]: the checkpoint has no Thinker, or some of its weights are missing.

    Example:

    ```python
    >>> thinker = load_thinker("Qwen/Qwen3-Omni-30B-A3B-Instruct", dtype="bfloat16")  # doctest: +SKIP
    ```
    """
    import transformers
    from trl.trainer.utils import create_model_from_path

    remote = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    config = transformers.AutoConfig.from_pretrained(model, **remote)
    if config.model_type not in THINKERS:
        raise InputError(
            f"{model} is a {config.model_type} and has no Thinker: use a checkpoint of {' or '.join(THINKERS)}, such "
            "as Qwen/Qwen3-Omni-30B-A3B-Instruct."
        )
    class_ = getattr(transformers, THINKERS[config.model_type])
    both: Any = create_model_from_path(
        model, architecture=class_, config=config.thinker_config, output_loading_info=True, **options
    )
    loaded, report = both
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(
            f"{model} lacks {len(missing)} weights of the Thinker, such as {missing[0]}: download the checkpoint "
            "again."
        )
    return loaded


def routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of what sends tokens to experts: the `gate` or `router` beside some `experts`."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        for router in ("gate", "router"):
            if "experts" in children and router in children:
                yield f"{name}.{router}", children[router]


def freeze_routers(model: nn.Module) -> list[str]:
    """
    Takes the routers of a mixture of experts out of training, their adapters included.

    Args:
        model (`nn.Module`):
            Any model; one without experts is left as it is.

    Returns:
        `list[str]`: the routers.

    Example:

    ```python
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> small = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=9)
    >>> model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=2, num_local_experts=2, **small))
    >>> freeze_routers(model)
    ['model.layers.0.mlp.gate', 'model.layers.1.mlp.gate']
    ```
    """
    frozen = []
    for name, router in routers(model):
        router.requires_grad_(False)
        frozen.append(name)
    return frozen


def check_adapted(model: nn.Module, pattern: Any) -> None:
    """
    Raises where an adapter went elsewhere than its pattern says.

    For mixtures of experts that Transformers 5 keeps fused, PEFT (0.21) makes of a pattern in `target_modules` the
    last part of each name that it matches, and so adapts every module that is called so.

    Args:
        model (`nn.Module`):
            A model with adapters.
        pattern (`str`, `list` or `None`):
            `target_modules` as the user gave them; only a pattern is looked at.
    """
    if not isinstance(pattern, str) or pattern == "all-linear":
        return
    for name, module in model.named_modules():
        plain = name.removeprefix("base_model.model.")
        if getattr(module, "lora_A", None) and not hasattr(module, "parameter_name"):
            if not re.fullmatch(pattern, plain):
                raise InputError(
                    f"PEFT adapted {plain}, which target_modules={pattern!r} does not match, as it makes plain names "
                    f"of a pattern for models with experts: use target_modules={ATTENTION} and "
                    f"exclude_modules={TOWERS!r}."
                )


def media_tokens(config: Any) -> list[int]:
    """
    Ids of the tokens that stand for media or for their ends.

    A completion must have none of them: a model would look for the features of a picture that is not there.

    Args:
        config (`transformers.PreTrainedConfig`):
            That of the model.
    """
    ids = (getattr(config, name, None) for name in _MEDIA_TOKENS)
    return sorted({token for token in ids if isinstance(token, int)})


def published_name(name: str) -> str:
    """
    What a whole checkpoint calls a weight or module of a Thinker, without what all of its names begin with.

    Args:
        name (`str`):
            As the model in memory calls it.

    Example:

    ```python
    >>> published_name("model.language_model.layers.0.self_attn.q_proj")
    'model.layers.0.self_attn.q_proj'
    >>> published_name("model.visual.blocks.0.attn.proj")
    'visual.blocks.0.attn.proj'
    ```
    """
    for ours, theirs in _PUBLISHED.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def restore(model: PreTrainedModel, folder: str | Path) -> None:
    """
    Gives a model the weights that were saved of it.

    Transformers saves mixtures of experts as they are published, and its trainer takes the names in the file for those
    of the model: what differs it would leave as it is, with a warning.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Changed in place.
        folder (`str` or `Path`):
            What `save_pretrained` wrote.

    Raises:
        [`~omnitrl.errors.InputError`]: it has not all weights of the model.
    """
    both: Any = type(model).from_pretrained(folder, config=model.config, dtype=model.dtype, output_loading_info=True)
    saved, report = both
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise InputError(
            f"{folder} lacks {len(missing)} weights of the model, such as {missing[0]}: was it written to?"
        )
    model.load_state_dict(saved.state_dict())


def save_with_thinker(thinker: str | Path, checkpoint: str | Path, output: str | Path) -> None:
    """
    Puts a trained Thinker into a whole checkpoint, as servers take it.

    Args:
        thinker (`str` or `Path`):
            Folder with a trained Thinker, as `trainer.save_model()` writes it; merge an adapter first.
        checkpoint (`str` or `Path`):
            Folder of the whole checkpoint that it came from. Its other weights are copied.
        output (`str` or `Path`):
            Folder to write.

    Raises:
        [`~omnitrl.errors.InputError`]: the weights of the two do not match, or `output` is one of the folders.

    Example:

    ```python
    >>> save_with_thinker("qwen3-omni-gspo", "Qwen3-Omni-30B-A3B-Instruct", "qwen3-omni-trained")  # doctest: +SKIP
    ```
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    thinker, checkpoint, output = Path(thinker), Path(checkpoint), Path(output)
    if output.resolve() in (thinker.resolve(), checkpoint.resolve()):
        raise InputError(f"output={output} is a folder that is read from: give another one, such as {output}-trained.")
    trained, others = (sorted(folder.glob("model*.safetensors")) for folder in (thinker, checkpoint))
    wanted = {name for name in _names(others) if name.startswith(_PREFIX)}
    names = list(_names(trained))
    if {_prefixed(name) for name in names} != wanted or not wanted:
        differing = sorted({_prefixed(name) for name in names} ^ wanted) or ["none"]
        raise InputError(
            f"{thinker} and {checkpoint} have no Thinker with the same weights ({len(names)} and {len(wanted)} of "
            f"them; {differing[0]} is in one only): give the folder of a trained Thinker, whose adapter was merged "
            "with model.merge_and_unload()."
        )
    output.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        if path.is_file() and not path.name.startswith("model"):
            shutil.copy2(path, output)
    places: dict[str, str] = {}
    size = 0
    for number, path in enumerate([*trained, *others]):
        with safe_open(path, "pt") as file:
            kept = [name for name in file.keys() if path in trained or not name.startswith(_PREFIX)]
            prefix = _prefixed if path in trained else str
            weights = {prefix(name): file.get_tensor(name) for name in kept}
        if weights:
            shard = f"model-{number:05}.safetensors"
            save_file(weights, output / shard, metadata={"format": "pt"})
            places |= dict.fromkeys(weights, shard)
            size += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), "utf-8")


def _names(paths: Iterable[Path]) -> Iterator[str]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, "pt") as file:
            yield from file.keys()


def _prefixed(name: str) -> str:
    """A weight's name in a whole checkpoint; Transformers saves a Thinker with or without the prefix."""
    return name if name.startswith(_PREFIX) else _PREFIX + name

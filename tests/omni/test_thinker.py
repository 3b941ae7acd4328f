# SPDX-License-Identifier: Apache-2.0
"""The Thinker of a whole checkpoint: what is read of it, what is frozen, where LoRA goes, and the way back."""

import json
import re

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeForConditionalGeneration

from omnitrl.errors import InputError
from omnitrl.omni.thinker import (
    ATTENTION,
    EXPERTS,
    TOWERS,
    check_adapted,
    freeze_routers,
    has_thinker,
    load_thinker,
    media_tokens,
    routers,
    save_with_thinker,
)
from tests.omni import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A whole checkpoint of several files, and the Thinker in it."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, tiny.save_full(folder, max_shard_size="200KB")


def names_in(folder):
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from file.keys()


class Spy:
    """`safe_open` that notes which tensors are read."""

    read = []

    def __init__(self, *arguments, **options):
        self.file = safe_open(*arguments, **options)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *exception):
        return self.file.__exit__(*exception)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def get_tensor(self, name):
        self.read.append(name)
        return self.file.get_tensor(name)

    def get_slice(self, name):
        return Slice(name, self.file.get_slice(name))


class Slice:
    def __init__(self, name, slice_):
        self.name, self.slice = name, slice_

    def __getitem__(self, index):
        Spy.read.append(self.name)
        return self.slice[index]

    def __getattr__(self, name):
        return getattr(self.slice, name)


def test_only_the_thinker_is_read(checkpoint, monkeypatch):
    folder, wanted = checkpoint
    monkeypatch.setattr(Spy, "read", [])
    monkeypatch.setattr(transformers.modeling_utils, "safe_open", Spy)
    loaded = load_thinker(str(folder))
    assert type(loaded) is type(wanted)
    assert loaded.dtype == torch.float32
    state = loaded.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in wanted.state_dict().items())
    there = set(names_in(folder))
    assert {name.split(".")[0] for name in there} == {"thinker", "talker", "code2wav"}
    assert set(Spy.read) == {name for name in there if name.startswith("thinker.")}


def test_a_saved_thinker_is_loaded_by_its_class(checkpoint, tmp_path):
    _, thinker = checkpoint
    thinker.save_pretrained(tmp_path)
    assert not has_thinker(str(tmp_path))
    again = type(thinker).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), thinker.parameters(), strict=True))


def test_a_trained_thinker_goes_back_into_a_whole_checkpoint(checkpoint, tmp_path):
    folder, thinker = checkpoint
    trained = tiny.thinker(seed=7)
    trained.save_pretrained(tmp_path / "trained")
    save_with_thinker(tmp_path / "trained", folder, tmp_path / "whole")
    whole = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tmp_path / "whole")
    before = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(whole.thinker.parameters(), trained.parameters(), strict=True))
    assert not torch.equal(whole.thinker.lm_head.weight, thinker.lm_head.weight)
    for part in ("talker", "code2wav"):
        pairs = zip(getattr(whole, part).parameters(), getattr(before, part).parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(names_in(folder))


def test_what_is_no_trained_thinker_does_not_go_back(checkpoint, tmp_path):
    folder, _ = checkpoint
    with pytest.raises(InputError, match=r"is a folder that is read from"):
        save_with_thinker(tmp_path, folder, folder)
    for weights in ({}, {"a": torch.zeros(1)}):
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(
            InputError, match=rf"have no Thinker with the same weights \({len(weights)} and .* was merged"
        ):
            save_with_thinker(tmp_path, folder, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_a_checkpoint_without_all_weights(checkpoint, tmp_path):
    folder, _ = checkpoint
    weights = {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}
    del weights["thinker.lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"lacks 1 weights of the Thinker, such as lm_head.weight: download"):
        load_thinker(str(tmp_path))


def test_a_model_that_has_no_thinker(tmp_path):
    tiny.language_model().save_pretrained(tmp_path)
    assert not has_thinker(str(tmp_path))
    with pytest.raises(
        InputError, match=r"is a qwen3 and has no Thinker: use a checkpoint of qwen3_omni_moe or qwen2_5"
    ):
        load_thinker(str(tmp_path))


def test_the_thinker_of_the_predecessor(tmp_path):
    thinker = tiny.save_full_25(tmp_path)
    assert has_thinker(str(tmp_path))
    loaded = load_thinker(str(tmp_path))
    assert type(loaded) is type(thinker)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), thinker.parameters(), strict=True))


def test_weights_may_have_another_type(checkpoint):
    assert load_thinker(str(checkpoint[0]), dtype="bfloat16").dtype == torch.bfloat16


# What is trained


def trained(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_routers_are_frozen():
    model = tiny.thinker()
    names = [f"model.language_model.layers.{i}.mlp.gate" for i in range(2)]
    assert [name for name, _ in routers(model)] == names
    before = trained(model)
    assert freeze_routers(model) == names
    assert before - trained(model) == {f"{name}.weight" for name in names}


def test_a_dense_model_has_none():
    model = tiny.language_model()
    before = trained(model)
    assert freeze_routers(model) == []
    assert trained(model) == before


def test_adapters_on_routers_are_frozen_too():
    lora = LoraConfig(r=2, target_modules=ATTENTION, target_parameters=["mlp.gate.weight"])
    model = get_peft_model(tiny.thinker(), lora)
    assert any("gate" in name for name in trained(model))
    freeze_routers(model)
    assert trained(model)
    assert not any("gate." in name for name in trained(model))


def test_lora_on_attention_and_experts_of_the_language_model_alone():
    lora = LoraConfig(r=2, target_modules=ATTENTION, exclude_modules=TOWERS, target_parameters=EXPERTS)
    names = trained(get_peft_model(tiny.thinker(), lora))
    assert all("language_model.layers" in name for name in names)
    found = {re.sub(r".*layers\.\d\.|\.lora_[AB].*", "", name) for name in names}
    projections = {f"self_attn.{name}_proj" for name in "qkvo"}
    assert found == projections | {"mlp.experts", "mlp.experts.base_layer"}
    assert len(names) == 2 * 2 * 6  # layers, A and B, four projections and two parameters of experts


def test_a_pattern_that_peft_takes_for_plain_names():
    pattern = r".*language_model\.layers\.\d\.self_attn\.q_proj"
    model = get_peft_model(tiny.thinker(), LoraConfig(r=2, target_modules=pattern))
    with pytest.raises(InputError, match=r"PEFT adapted model.audio_tower.layers.0.self_attn.q_proj, which"):
        check_adapted(model, pattern)
    check_adapted(get_peft_model(tiny.thinker(), LoraConfig(r=2, target_modules=r".*q_proj")), r".*q_proj")


def test_tokens_of_media_are_known():
    tokens = tiny.tokenizer().convert_ids_to_tokens(media_tokens(tiny.thinker_config()))
    assert set(tokens) == set(tiny.NAMED.values())
    assert media_tokens(tiny.language_model().config) == []

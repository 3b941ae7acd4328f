# SPDX-License-Identifier: Apache-2.0
"""What is saved loads in stock PEFT and stock diffusers, and computes there what was trained."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoHaConfig, LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from omnitrl.errors import RunError
from omnitrl.trainer.saving import load_networks, trained_weights
from tests.tiny_models import tiny_model, tiny_sd3
from tests.trainer.helpers import LORA, logged, same, trainable, trainer


RANKS = LoraConfig(
    r=4,
    lora_alpha=16,
    rank_pattern={"attn.to_q": 8},
    alpha_pattern={"attn.to_k": 2},
    init_lora_weights=False,
)
RSLORA = LoraConfig(r=4, lora_alpha=16, use_rslora=True, init_lora_weights=False)
DORA = LoraConfig(
    r=4, lora_alpha=16, use_dora=True, init_lora_weights=False, target_modules=["attn.to_q", "attn.to_v"]
)
EXPRESSION = LoraConfig(r=4, lora_alpha=16, target_modules=r".*\.attn\.to_[qv]", init_lora_weights=False)


def output(network):
    """What a network computes, whoever has loaded it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return network(
            hidden_states=torch.randn(2, 4, 16, 16, generator=generator),
            timestep=torch.tensor([900.0, 300.0]),
            encoder_hidden_states=torch.randn(2, 28, 64, generator=generator),
            pooled_projections=torch.randn(2, 64, generator=generator),
            return_dict=False,
        )[0]


def trained(place, **options):
    run = trainer(place, **{"max_steps": 2, "ema_decay": 0.5, **options})
    run.train()
    run.save_model()
    return run


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("full"), peft_config=None, learning_rate=1e-4)


def folder_of(run):
    return Path(run.args.output_dir)


def ema_output(run):
    with run.ema_weights():
        return output(run.flow_model.transformer)


# Adapters (A6)


@pytest.mark.compat
@pytest.mark.parametrize(
    "peft_config", [LORA, RANKS, RSLORA, DORA, EXPRESSION], ids=["lora", "ranks", "rs", "dora", "re"]
)
def test_both_formats_compute_what_was_trained(tmp_path, peft_config):
    run = trained(tmp_path, peft_config=peft_config, ema_decay=None)
    expected, folder = output(run.flow_model.transformer), folder_of(run)
    base = tiny_sd3().transformer
    assert (output(base) - expected).abs().max() > 0.01  # an adapter that is lost, or its alpha, would show

    peft = PeftModel.from_pretrained(tiny_sd3().transformer, folder).eval()
    assert torch.equal(output(peft), expected)

    pipeline = tiny_sd3()
    pipeline.load_lora_weights(folder)  # two files lie there; this takes its own
    assert torch.equal(output(pipeline.transformer), expected)


@pytest.mark.compat
def test_names_in_the_files_are_the_stock_ones(lora):
    folder = folder_of(lora)
    projection = r"transformer_blocks\.\d\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)\.lora_[AB]\.weight"
    for name, pattern in {
        "adapter_model.safetensors": rf"base_model\.model\.{projection}",
        "pytorch_lora_weights.safetensors": rf"transformer\.{projection}",
        "ema/adapter_model.safetensors": rf"base_model\.model\.{projection}",
        "ema/pytorch_lora_weights_ema.safetensors": rf"transformer\.{projection}",
    }.items():
        keys = list(load_file(folder / name))
        assert len(keys) == 30
        assert [key for key in keys if not re.fullmatch(pattern, key)] == []


def test_the_rank_and_alpha_are_in_the_header(lora):
    with safe_open(folder_of(lora) / "pytorch_lora_weights.safetensors", "pt") as file:
        config = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (config["transformer.r"], config["transformer.lora_alpha"]) == (4, 16)
    saved = json.loads((folder_of(lora) / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["inference_mode"]) == (4, 16, True)


def test_files_hold_the_tensors_and_nothing_else(lora):
    for path in folder_of(lora).rglob("*.safetensors"):
        tensors = load_file(path)
        (header,) = struct.unpack("<Q", path.open("rb").read(8))
        assert path.stat().st_size == 8 + header + sum(t.numel() * t.element_size() for t in tensors.values())
        assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in lora.trainable_parameters())


@pytest.mark.compat
def test_the_average_is_saved_beside_and_is_another(lora):
    folder = folder_of(lora)
    expected, last = ema_output(lora), output(lora.flow_model.transformer)
    assert (expected - last).abs().max() > 1e-5
    peft = PeftModel.from_pretrained(tiny_sd3().transformer, folder / "ema").eval()
    assert torch.equal(output(peft), expected)
    pipeline = tiny_sd3()
    pipeline.load_lora_weights(folder / "ema", weight_name="pytorch_lora_weights_ema.safetensors")
    assert torch.equal(output(pipeline.transformer), expected)


def test_the_average_is_that_of_the_weights_after_each_step(tmp_path):
    """From the first weights on, min(ema_decay, (1 + n) / (10 + n)) of the old and the rest of the new."""
    run = trainer(tmp_path, max_steps=4, ema_decay=0.2)
    seen = []
    after = run._after_optimizer_step
    run._after_optimizer_step = lambda: (after(), seen.append(trainable(run)))
    run.train()
    average = list(seen[0].values())
    for n, weights in enumerate(seen[1:], start=1):
        decay = min(0.2, (1 + n) / (10 + n))  # 0.18, then 0.2
        average = [decay * old + (1 - decay) * new for old, new in zip(average, weights.values(), strict=True)]
    for ours, expected in zip(run.ema.shadow_params, average, strict=True):
        assert torch.allclose(ours, expected, atol=1e-6)
    assert same(seen[-1], trainable(run))


def test_training_goes_on_from_a_saved_adapter(tmp_path, lora):
    before = trainable(lora)
    again = trainer(tmp_path, peft_config=str(folder_of(lora)), max_steps=1)
    assert same(before, trainable(again))
    assert torch.equal(output(again.flow_model.transformer), output(lora.flow_model.transformer))
    again.train()
    assert logged(again, "rollout/logp_abs_diff_max")[0] <= 1e-6
    assert not same(before, trainable(again))
    again.save_model()
    peft = PeftModel.from_pretrained(tiny_sd3().transformer, folder_of(again)).eval()
    assert torch.equal(output(peft), output(again.flow_model.transformer))


def test_the_reference_of_a_loaded_adapter_is_the_network_without_it(tmp_path, lora):
    run = trainer(tmp_path, peft_config=str(folder_of(lora)), beta=0.1)
    inputs = run.flow_model.example_inputs()
    with run.reference.velocity(run.model) as velocity:
        without = velocity(**inputs, guidance_scale=1.0)
    expected = tiny_model().velocity(**inputs, guidance_scale=1.0)
    assert torch.equal(without, expected)
    with torch.no_grad():
        assert (run.model(**inputs, guidance_scale=1.0) - expected).abs().max() > 0.01


def test_adapters_that_diffusers_cannot_load_are_saved_for_peft_alone(tmp_path):
    config = LoHaConfig(r=2, target_modules=["to_q"], init_weights=False)
    run = trained(tmp_path, peft_config=config, ema_decay=None)
    folder = folder_of(run)
    assert [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    peft = PeftModel.from_pretrained(tiny_sd3().transformer, folder).eval()
    assert torch.equal(output(peft), output(run.flow_model.transformer))


def test_an_adapter_whose_tensors_are_not_found_is_not_saved(tmp_path):
    """A7: PEFT answers names that it does not know with no tensors and no error."""
    run = trainer(tmp_path)
    state = {
        f"networks.transformer.module.{key}": tensor for key, tensor in run.flow_model.transformer.state_dict().items()
    }
    with pytest.raises(RunError, match="Only 0 of 30 trained adapter tensors of the transformer were found"):
        trained_weights(run.flow_model, state)


def test_weights_that_lack_a_tensor_are_not_loaded(tmp_path, lora):
    tensors = load_file(folder_of(lora) / "adapter_model.safetensors")
    tensors.pop("base_model.model.transformer_blocks.0.attn.to_q.lora_A.weight")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    run = trainer(tmp_path)
    before = trainable(run)
    with pytest.raises(RunError, match=r"1 tensors differ, such as '.*blocks\.0\.attn\.to_q\.lora_A\.weight'"):
        load_networks(run.flow_model, tmp_path)
    assert same(before, trainable(run))


# Whole networks


@pytest.mark.compat
def test_a_whole_network_loads_with_its_own_class(full):
    folder = folder_of(full)
    network = SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer")
    assert torch.equal(output(network), output(full.flow_model.transformer))
    assert (output(network) - output(tiny_sd3().transformer)).abs().max() > 1e-3
    average = SD3Transformer2DModel.from_pretrained(folder / "ema", subfolder="transformer")
    assert torch.equal(output(average), ema_output(full))
    assert not torch.equal(output(average), output(network))
    assert dict(network.config)["joint_attention_dim"] == 64


def test_a_whole_network_that_was_saved_in_parts_is_read_whole(tmp_path, full):
    folder = tmp_path / "transformer"
    full.flow_model.transformer.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    run = trainer(tmp_path, peft_config=None)
    load_networks(run.flow_model, tmp_path)
    assert same(trainable(run), trainable(full))


def test_saving_anew_leaves_no_part_of_an_older_save(tmp_path, full):
    folder = folder_of(full) / "transformer"
    before = load_file(folder / "diffusion_pytorch_model.safetensors")
    save_file(before, folder / "diffusion_pytorch_model-00001-of-00002.safetensors")
    full.save_model()
    assert [path.name for path in folder.glob("*.safetensors")] == ["diffusion_pytorch_model.safetensors"]


def test_full_fine_tuning_has_a_frozen_copy_as_reference(tmp_path):
    run = trainer(tmp_path, peft_config=None, beta=0.1, learning_rate=1e-3, max_steps=2)
    inputs = run.flow_model.example_inputs()
    expected = tiny_model().velocity(**inputs, guidance_scale=2.0)
    run.train()
    with run.reference.velocity(run.model) as velocity:
        assert torch.equal(velocity(**inputs, guidance_scale=2.0), expected)
    assert logged(run, "kl")[0] == 0
    assert logged(run, "kl")[1] > 0


# The card and the snippet


@pytest.mark.compat
def test_the_card_says_how_it_was_made(tmp_path):
    tiny_sd3().save_pretrained(tmp_path / "base")
    run = trainer(tmp_path, model=str(tmp_path / "base"), max_steps=1, max_sequence_length=12)
    run.train()
    run.save_model()
    run.create_model_card(tags=["mine"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path / "base") in card
    for expected in (
        "FlowGRPO",
        "2505.05470",
        "num_generations",
        "learning_rate",
        "- mine",
        "library_name: diffusers",
    ):
        assert expected in card
    snippet = re.search(r"```python\n(.*?)```", card, re.S).group(1)
    scope = {}
    exec(snippet.replace("torch.bfloat16", "torch.float32"), scope)
    assert isinstance(scope["pipe"], StableDiffusion3Pipeline)
    assert torch.equal(output(scope["pipe"].transformer), output(run.flow_model.transformer))


def test_the_snippet_of_a_whole_network_runs(tmp_path):
    tiny_sd3().save_pretrained(tmp_path / "base")
    run = trainer(tmp_path, model=str(tmp_path / "base"), peft_config=None, max_steps=1, max_sequence_length=12)
    run.train()
    run.save_model()
    scope = {}
    exec(run.report.summary.load_snippet, scope)
    assert torch.equal(output(scope["pipe"].transformer), output(run.flow_model.transformer))


# Keeping the best


def peaking(*numbers):
    """A reward of evaluations that has its peak in the midst; rollouts are scored by their place."""
    left = list(numbers)

    def reward(completions, trainer_state, **kwargs):
        if len(completions) == 1:
            return [left.pop(0)]
        return [0.1 * i for i in range(len(completions))]

    return reward


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_the_best_checkpoint_is_kept_and_loaded(tmp_path, strategy):
    """By `eval_reward`, with the averages that were evaluated; the last one is kept too, to go on from it."""
    run = trainer(
        tmp_path,
        rewards=peaking(0.2, 0.9, 0.4, 0.3),
        max_steps=4,
        ema_decay=0.5,
        eval_dataset=["a cat"],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy=strategy,
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=strategy == "steps",
    )
    weights, averages = {}, {}
    evaluate = run.evaluate

    def evaluate_and_keep(*args, **kwargs):
        step = run.state.global_step
        weights[step], averages[step] = trainable(run), [p.clone() for p in run.ema.shadow_params]
        return evaluate(*args, **kwargs)

    run.evaluate = evaluate_and_keep
    run.train()
    out = folder_of(run)
    left = sorted(path.name for path in out.iterdir() if "checkpoint" in path.name)
    assert left == {"steps": ["checkpoint-2", "checkpoint-4"], "best": ["checkpoint-1", "checkpoint-2"]}[strategy]
    assert run.state.best_model_checkpoint == str(out / "checkpoint-2")
    assert run.state.best_metric == pytest.approx(0.9)
    state = json.loads((out / left[-1] / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(out / "checkpoint-2")
    if strategy == "steps":
        assert same(weights[2], trainable(run))
        assert not same(weights[2], weights[4])
        assert all(map(torch.equal, averages[2], run.ema.shadow_params))


def test_no_more_checkpoints_than_the_limit(tmp_path):
    trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=1, save_total_limit=1).train()
    assert [path.name for path in (tmp_path / "out").glob("*checkpoint*")] == ["checkpoint-4"]

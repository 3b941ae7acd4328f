# SPDX-License-Identifier: Apache-2.0
"""Adapters that are merged into the weights for rollouts: the same samples, faster, and nothing is left behind."""

import pytest
import torch
from peft import LoraConfig

from omnitrl.errors import InputError
from omnitrl.trainer.merging import merged_adapters
from tests.marks import first_fast
from tests.tiny_models import tiny_model
from tests.trainer.helpers import LORA, WITH_REPLAY, all_rows, fresh_rollout, logged, same, trainable, trainer


def weights(run):
    """All weights of the networks, copied."""
    return {name: tensor.clone() for name, tensor in run.flow_model.networks.state_dict().items()}


def velocity(model):
    with torch.no_grad():
        return model.velocity(**model.example_inputs(), guidance_scale=3.0)


def test_merged_is_the_same_function_without_the_adapters_products(tmp_path):
    run = trainer(tmp_path)
    model, before = run.flow_model, weights(run)
    apart, calls = velocity(model), []
    for name, module in model.networks.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    with merged_adapters(model):
        merged = velocity(model)
        assert not calls
        changed = [name for name, tensor in weights(run).items() if not torch.equal(tensor, before[name])]
    assert (merged - apart).abs().max() <= 1e-5
    assert len(changed) == 15  # 8 targets in 2 blocks, of which the last has no way out for the text
    assert all("base_layer.weight" in name for name in changed)
    assert same(weights(run), before)
    assert torch.equal(velocity(model), apart)
    assert calls


def test_weights_come_back_after_an_error(tmp_path):
    run = trainer(tmp_path)
    before = weights(run)
    with pytest.raises(RuntimeError, match="broken off"), merged_adapters(run.flow_model):
        raise RuntimeError("broken off")
    assert same(weights(run), before)


@pytest.mark.parametrize("algorithm", first_fast(WITH_REPLAY, 2))
def test_the_ratio_of_a_merged_rollout_stays_one(tmp_path, algorithm):
    run = trainer(tmp_path, algorithm, merge_adapters=True, guidance_scale=3.0)
    buffer = fresh_rollout(run)
    rows = all_rows(buffer)
    with torch.no_grad():
        log_probs = run.replay(run.model, rows, buffer).log_probs
    assert ((log_probs - rows.old_log_probs).exp() - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft"])
def test_a_run_learns_the_same(tmp_path, algorithm):
    """Rewards and weights after four updates: as without merging but for rounding, which Adam makes larger."""
    runs = {}
    for merged in (False, True):
        runs[merged] = trainer(tmp_path / str(merged), algorithm, merge_adapters=merged, max_steps=4)
        runs[merged].train()
    assert logged(runs[True], "reward") == pytest.approx(logged(runs[False], "reward"), abs=1e-3)
    apart, merged = trainable(runs[False]), trainable(runs[True])
    for name, tensor in apart.items():
        assert (tensor - merged[name]).abs().mean() <= 1e-4  # of 4 updates of 1e-3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bf16": True}, "networks in half precision"),
        ({"peft_config": LoraConfig(r=2, use_dora=True)}, "adapters that are no plain LoRA"),
    ],
)
def test_where_rounding_would_show_it_is_refused(tmp_path, options, reason):
    with pytest.raises(InputError, match=f"merge_adapters=True does not work with {reason}.*use merge_adapters=False"):
        trainer(tmp_path, merge_adapters=True, **{"peft_config": LORA, **options})


def test_a_network_in_half_precision_is_refused(tmp_path):
    model = tiny_model()
    model.pipeline.to(torch.bfloat16)
    with pytest.raises(InputError, match="networks in half precision"):
        trainer(tmp_path, model=model, merge_adapters=True)


def test_whole_networks_have_nothing_to_merge(tmp_path):
    run = trainer(tmp_path, peft_config=None, merge_adapters=True, max_steps=2)
    run.train()
    assert run.state.global_step == 2

# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes whose weights FSDP2 shards, against one process."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.distributed import fsdp
from tests.distributed.launch import Launch
from tests.distributed.test_ddp import distance
from tests.tiny_models import tiny_sd3
from tests.trainer.helpers import same


pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LORA_TENSORS = 30  # A and B of 8 + 7 attention projections: the last block has no `to_add_out`


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    launch = Launch("tests.distributed.fsdp", tmp_path_factory.mktemp("two"), *fsdp.SCENARIOS)
    code = launch.wait(280)
    assert code == 0, launch.output()
    return launch


@pytest.mark.parametrize("name", ["lora", "full_fine_tuning", "bfloat16", "two_networks"])
def test_the_weights_are_sharded(two, name):
    for result in two.results(name):
        assert result["wrapped"]
        assert result["parameters"] == {"DTensor"}
        assert result["units"] == (5 if name == "two_networks" else 3)  # two blocks of a network, and the root
        assert 0.4 < result["share"] < 0.6


@pytest.mark.parametrize("name", ["lora", "full_fine_tuning", "bfloat16", "two_networks"])
def test_shards_train_what_whole_weights_train(two, name, tmp_path):
    first, second = two.results(name)
    assert same(first["weights"], second["weights"])
    alone = fsdp.SCENARIOS[name](tmp_path)
    assert alone["parameters"] == {"Tensor"}
    exact = name != "bfloat16"  # sums of another order round differently in its 8 bits
    tolerance = 1e-5 if exact else 1e-3
    gathered = [
        sample for rollout in range(2) for part in (first, second) for sample in part["samples"][rollout * 4 :][:4]
    ]
    assert [sample[:2] for sample in gathered] == [sample[:2] for sample in alone["samples"]]
    assert distance(alone["weights"], first["weights"]) <= tolerance
    assert distance(dict(enumerate(alone["ema"])), dict(enumerate(first["ema"]))) <= tolerance
    for key in ("reward", "eval_reward"):
        assert first[key] == pytest.approx(alone[key], abs=tolerance)
    for key in ("kl", "grad_norm"):
        assert first[key] == pytest.approx(alone[key], rel=1e-3 if exact else 0.1)
    assert max(first["mismatch"]) <= (1e-6 if exact else 1e-2)


def test_only_the_network_runs_in_bfloat16(two, tmp_path):
    """Law 4 under shards: Accelerate's own policy would round timesteps to 8 bits and return velocities in 16."""
    first, _ = two.results("bfloat16")
    assert first["dtypes"] == {("hidden_states", torch.bfloat16), ("timestep", torch.float32), ("v", torch.float32)}
    assert 857.6923 in {round(timestep, 4) for timestep in first["timesteps"]}


def test_saved_adapters_are_whole(two, tmp_path):
    """A7: as many tensors as one process writes, of the same shapes, and no shard among them."""
    folder = two.folder / "lora" / "out"
    fsdp.lora(tmp_path)
    for name in (
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
        "ema/adapter_model.safetensors",
        "ema/pytorch_lora_weights_ema.safetensors",
    ):
        sharded, alone = load_file(folder / name), load_file(tmp_path / "out" / name)
        assert len(sharded) == LORA_TENSORS
        assert {key: t.shape for key, t in sharded.items()} == {key: t.shape for key, t in alone.items()}
        for key, tensor in sharded.items():
            assert float(tensor.norm()) == pytest.approx(float(alone[key].norm()), rel=1e-5)
        assert distance(alone, sharded) <= 1e-5
    trained = load_file(folder / "adapter_model.safetensors")
    assert distance(trained, load_file(folder / "ema" / "adapter_model.safetensors")) > 1e-4
    model = PeftModel.from_pretrained(tiny_sd3().transformer, folder)
    (first, _) = two.results("lora")
    loaded = {f"transformer.{name}": p for name, p in model.named_parameters()}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in first["weights"].items())


def test_saved_networks_are_whole(two):
    folder = two.folder / "full_fine_tuning" / "out"
    network = type(tiny_sd3().transformer).from_pretrained(folder, subfolder="transformer")
    (first, _) = two.results("full_fine_tuning")
    assert {f"transformer.{name}" for name, _ in network.named_parameters()} == first["weights"].keys()
    for name, tensor in network.named_parameters():
        assert torch.equal(tensor, first["weights"][f"transformer.{name}"])
    average = type(network).from_pretrained(folder / "ema", subfolder="transformer")
    for tensor, expected in zip(average.parameters(), first["ema"], strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("stop", [1, 2])
@pytest.mark.parametrize("name", ["lora", "full"])
def test_resumed_equals_uninterrupted(two, name, stop):
    for results in two.results("resumed"):
        result = results[name, stop]
        assert result["steps"] == 4
        assert same(result["straight"][0], result["again"][0])
        assert all(map(torch.equal, result["straight"][1], result["again"][1]))
        assert result["straight"][2] == result["again"][2]


def test_checkpoints_hold_what_is_trained_and_nothing_else(two):
    """Twice the adapter and its moments, not the frozen network once more."""
    checkpoint = two.folder / "resumed" / "lora1b" / "out" / "checkpoint-1"
    names = {path.name for path in checkpoint.rglob("*")}
    assert {"adapter_model.safetensors", "optimizer.bin", "scheduler.pt"} <= names
    assert not [name for name in names if name.startswith("pytorch_model")]
    in_parts = two.folder / "resumed" / "full1b" / "out" / "checkpoint-1" / "optimizer_0"
    assert len(list(in_parts.glob("*.distcp"))) == 2


def test_the_best_checkpoint_is_loaded(two):
    for result in two.results("saving"):
        weights, average = result["kept"][2]
        assert same(result["final"][0], weights)
        assert all(map(torch.equal, result["final"][1], average))


def test_a_second_set_of_weights_may_be_sharded(two, tmp_path):
    """After a rollout of the old policy, what FSDP2 has gathered of the root's weights must not stay."""
    first, second = two.results("second_weights")
    alone = fsdp.second_weights(tmp_path)
    for algorithm, expected in alone.items():
        assert same(first[algorithm]["weights"], second[algorithm]["weights"])
        assert distance(expected["weights"], first[algorithm]["weights"]) <= 1e-5
        for key in ("reward", "kl"):
            assert first[algorithm][key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5)

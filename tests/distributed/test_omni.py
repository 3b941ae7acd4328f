# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes train a model that sees and hears, of which one has only text."""

import math

import pytest
import torch

from tests.distributed import omni
from tests.distributed.launch import Launch
from tests.omni import tiny
from tests.omni.test_gspo import independent_loss


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    launch = Launch("tests.distributed.omni", tmp_path_factory.mktemp("two"), *omni.SCENARIOS)
    code = launch.wait(280)
    assert code == 0, launch.output()
    return launch


@pytest.mark.parametrize("name", ["mixed", "checkpointed"])
def test_two_processes_with_different_media_have_the_gradient_of_all(two, name):
    ranks = two.results(name)
    assert {rank["wrapper"] for rank in ranks} == {"DistributedDataParallel"}
    media = [[kind for batch in rank["batches"] for row in batch["media"] for kind in row] for rank in ranks]
    assert media[0] == []
    assert {"pixel_values", "input_features"} <= set(media[1])
    model = tiny.thinker()
    for step in range(2):
        model.load_state_dict(ranks[0]["before"][step])
        model.zero_grad()
        for rank in ranks:
            batch = rank["batches"][step]
            old = [
                row[: mask.sum()]
                for row, mask in zip(batch["old_per_token_logps"], batch["completion_mask"], strict=True)
            ]
            loss, _ = independent_loss(model, batch, old, 0.1, 0.1, 1.0, omni.ROWS)
            (loss / 2).backward()
        wanted = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        scale = max(gradient.abs().max() for gradient in wanted.values())
        for rank in ranks:
            for weight, gradient in rank["gradients"][step].items():
                expected = wanted.get(weight, torch.zeros_like(gradient))
                torch.testing.assert_close(gradient, expected, atol=2e-5 * scale, rtol=1e-3, msg=weight)
    assert any("visual" in weight for weight in ranks[0]["gradients"][0])  # of the other process


@pytest.mark.parametrize("name", ["mixed", "checkpointed"])
def test_both_have_the_same_weights_in_the_end(two, name):
    first, second = two.results(name)
    assert all(torch.equal(first["after"][weight], second["after"][weight]) for weight in first["after"])
    assert any(not torch.equal(first["after"][weight], first["before"][0][weight]) for weight in first["after"])


def test_sharded_weights_have_the_gradient_of_all(two):
    ranks = two.results("sharded")
    assert {rank["wrapper"] for rank in ranks} == {"FSDPQwen3OmniMoeThinkerForConditionalGeneration"}
    model = tiny.thinker()
    for rank in ranks:
        batch = rank["batches"][0]
        loss, _ = independent_loss(model, batch, None, 3e-4, 4e-4, 1.0, omni.TEXTS)
        (loss / 2).backward()
    named = [(name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None]
    norm = torch.stack([gradient.norm() for name, gradient in named if "mlp.gate" not in name]).norm().item()
    for rank in ranks:
        assert rank["logs"][0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert rank["logs"][0]["ratio/mean"] == pytest.approx(1, abs=1e-6)
        assert abs(rank["logs"][1]["ratio/mean"] - 1) > 1e-5


def test_a_broken_reward_ends_both(two):
    first, second = two.results("broken_reward")
    assert first == ("RunError", "Another process stopped: no numbers here")
    assert second == ("RewardError", "no numbers here")


def test_failed_rewards_of_one_are_counted_in_both(two):
    first, second = two.results("failed_on_one")
    assert first == second
    assert first["rewards/reward/failed"] == [4.0]
    assert first["reward"] == [0.5]


def test_two_processes_with_different_media_make_the_update_of_all_pairs(two, tmp_path):
    first, second = two.results("preferences")
    whole = omni.preferences(tmp_path, per_device_train_batch_size=4)
    assert first["logs"][0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    for rank in (first, second):
        scale = max(move.abs().max() for move in whole["moves"].values())
        for name, move in whole["moves"].items():
            torch.testing.assert_close(rank["moves"][name], move, atol=2e-5 * scale, rtol=1e-3, msg=name)
    assert first["moves"]["model.audio_tower.proj1.weight"].abs().max() > 0  # of a sound of the other process

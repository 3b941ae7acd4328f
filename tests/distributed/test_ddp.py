# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes under DistributedDataParallel against one process."""

import os
import re
import signal

import pytest
import torch

from tests.distributed import ddp
from tests.distributed.launch import Launch
from tests.trainer.helpers import same


pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TOGETHER = (
    "whole_groups",
    "split_groups",
    "full_fine_tuning",
    "best_and_worst",
    "two_networks",
    "two_sizes",
    "streamed",
    "many_backwards",
    "second_weights",
    "evaluation",
    "resumed",
    "failing_rewards",
    "slow_reward",
    "saving",
    "watched",
    "compared",
    "split_compared",
)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All scenarios that end by themselves, one after the other in the same two processes."""
    launch = Launch("tests.distributed.ddp", tmp_path_factory.mktemp("two"), *TOGETHER)
    code = launch.wait(280)
    assert code == 0, launch.output()
    return launch


def distance(a, b):
    """Norm of the difference of two sets of tensors, relative to the first."""
    norm = torch.cat([t.flatten() for t in a.values()]).norm()
    return float(torch.cat([(a[name] - b[name]).flatten() for name in a]).norm() / norm)


@pytest.mark.parametrize(
    "name",
    ["whole_groups", "split_groups", "full_fine_tuning", "best_and_worst", "two_networks", "two_sizes", "streamed"],
)
def test_two_processes_train_what_one_trains(two, name, tmp_path):
    first, second = two.results(name)
    assert first["wrapper"] == second["wrapper"] == "DistributedDataParallel"
    assert first["world"] == second["world"] == 2
    assert same(first["weights"], second["weights"])
    alone = ddp.SCENARIOS[name](tmp_path)
    assert (alone["wrapper"], alone["world"]) == ("Policy", 1)

    # Law 6: the same samples, whoever makes them, and none twice.
    per_rollout = len(alone["samples"]) // 4
    half = per_rollout // 2
    gathered = []
    for rollout in range(4):
        for part in (first, second):
            gathered += part["samples"][rollout * half : (rollout + 1) * half]
    assert [sample[:2] for sample in gathered] == [sample[:2] for sample in alone["samples"]]
    assert len({seed for seed, _, _ in gathered}) == len(gathered)
    for (_, _, together), (_, _, apart) in zip(gathered, alone["samples"], strict=True):
        assert (together - apart).abs().max() <= 1e-4
    finals = torch.stack([latents.flatten() for _, _, latents in gathered[:per_rollout]])
    assert torch.cdist(finals, finals).fill_diagonal_(9.0).min() > 1.0

    assert distance(alone["weights"], first["weights"]) <= 1e-5
    # Batches of another size round otherwise, on some processors more than on others, and Adam makes more of it.
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone["ema"], first["ema"], strict=True))
    assert len(first["logs"]) == len(alone["logs"]) == 4
    for ours, theirs in zip(first["logs"], alone["logs"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {key for key in ours if key.startswith("time/") or key == "step_time"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=1e-5)


def test_gradients_of_several_backwards_are_those_of_one_process(two, tmp_path):
    first, second = two.results("many_backwards")
    assert same(first, second)
    alone = ddp.many_backwards(tmp_path)
    assert alone.keys() == first.keys()
    assert distance(alone, first) <= 1e-4  # of sums that nearly cancel


def test_two_processes_keep_the_second_set_of_weights_of_one(two, tmp_path):
    first, second = two.results("second_weights")
    alone = ddp.second_weights(tmp_path)
    assert alone.keys() == first.keys()
    for algorithm, expected in alone.items():
        assert same(first[algorithm]["weights"], second[algorithm]["weights"])
        assert all(map(torch.equal, first[algorithm]["average"], second[algorithm]["average"]))
        assert distance(expected["weights"], first[algorithm]["weights"]) <= 1e-5
        for ours, theirs in zip(first[algorithm]["average"], expected["average"], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def test_evaluation_counts_every_prompt_once(two):
    """A10: the mean of 0..9 is 4.5; five samples on each process, then four and three, then one and none."""
    first, second = two.results("evaluation")
    assert first.keys() == second.keys()
    assert all(first[key] == second[key] for key in first if not key.endswith("_runtime"))
    assert first["eval_ten_reward"] == 4.5
    assert first["eval_seven_reward"] == first["eval_sizes_reward"] == 3.0
    assert first["eval_one_reward"] == 3.0
    assert first["twice_eval_reward"] == 1.0


@pytest.mark.parametrize("stop", [1, 2])
def test_resumed_equals_uninterrupted(two, stop):
    for result in two.results("resumed"):
        straight, again = result[stop]["straight"], result[stop]["again"]
        assert result[stop]["steps"] == 4
        assert same(straight[0], again[0])
        assert all(map(torch.equal, straight[1], again[1]))
        assert straight[2] == again[2]


def test_a_reward_that_fails_on_one_process_ends_all_with_its_sentence(two):
    first, second = two.results("failing_rewards")
    for name, sentence in {
        "raises": "reward 'broken_on_one' failed for 4 of 4 rows",
        "count": "reward 'wrong_count_on_one' returned 1 values for 2 rows",
    }.items():
        for prefix in ("", "eval_"):
            (kind, there), (other_kind, here) = second[prefix + name], first[prefix + name]
            assert kind == "RewardError"
            assert there.startswith(sentence.replace("4 of 4", "5 of 5") if prefix else sentence)
            assert other_kind == "RunError"
            assert here == f"Another process stopped: {there}"


def test_a_failed_reward_is_missing_on_all_processes(two):
    first, second = two.results("failing_rewards")
    assert first["lenient"]["reward"] == pytest.approx(0.55, abs=1e-6)  # of 0.5 and 0.6 on the first process alone
    assert second["lenient"]["reward"] == first["lenient"]["reward"]
    assert first["lenient"]["rewards/broken_on_one/failed"] == 4  # none on one process, four on the other


def test_a_slow_reward_is_waited_for(two):
    assert two.results("slow_reward") == [1, 1]


def test_the_best_checkpoint_is_kept_and_loaded_by_all(two):
    first, second = two.results("saving")
    for result in (first, second):
        assert same(result["final"], result["kept"][2])
        assert result["best"] == first["best"]
    folders = sorted(path.name for path in (two.folder / "saving" / "out").glob("*checkpoint*"))
    assert folders == ["checkpoint-2"]


def test_two_processes_see_what_one_sees_and_keep_the_same_checkpoint(two, tmp_path):
    first, second = two.results("watched")
    assert {name: first[name] for name in ("history", "alarms", "best")} == {
        name: second[name] for name in ("history", "alarms", "best")
    }
    alone = ddp.watched(tmp_path)
    assert alone["alarms"] == first["alarms"] == [(4, "the reward is 1 at step 4, 67% below the one before, 3.")]
    assert alone["best"][0] == first["best"][0] == 2
    statistics = {f"watch/{name}" for name in ("entropy", "saturation", "jpeg_kilobytes", "diversity")}
    assert alone["history"].keys() == statistics | {"the reward"}
    for name, found in alone["history"].items():
        for ours, theirs in zip(first["history"][name], found, strict=True):  # (step, mean, standard error)
            assert ours[0] == theirs[0]
            assert ours[1] == pytest.approx(theirs[1], rel=2e-3), name  # a pixel may be rounded the other way
            assert ours[2] == pytest.approx(theirs[2], rel=2e-2, abs=1e-6), name
    for result in (first, second, alone):
        assert same(result["final"], result["kept"][2])
        assert not same(result["kept"][2], result["kept"][4])
    folders = sorted(path.name for path in (two.folder / "watched" / "out").glob("checkpoint-*"))
    assert folders == ["checkpoint-2", "checkpoint-4"]


def test_a_nan_on_one_process_ends_all(tmp_path):
    launch = Launch("tests.distributed.ddp", tmp_path, "nan_on_one")
    assert launch.wait(90) != 0
    assert "The loss is nan at optimizer step 0, sampler steps [0, 1, 2]" in launch.output()


def test_an_interrupt_ends_all_with_the_message(tmp_path):
    launch = Launch("tests.distributed.ddp", tmp_path, "endless")
    for rank in range(2):
        launch.wait_for(tmp_path / "endless" / f"begun.{rank}")
    os.killpg(launch.process.pid, signal.SIGINT)  # what a terminal does
    assert launch.wait(60) != 0
    output = launch.output()
    assert re.search(r"Interrupted at step \d+: go on from .*checkpoint-", output), output
    folders = list((tmp_path / "endless" / "out").glob("checkpoint-*"))
    assert folders
    assert all((folder / "trainer_state.json").is_file() for folder in folders)


def test_another_number_of_processes_is_refused(tmp_path):
    alone = ddp.make(tmp_path / "alone", save_strategy="steps", save_steps=2, max_steps=2)
    alone.train()
    checkpoint = str(tmp_path / "alone" / "out" / "checkpoint-2")
    launch = Launch(
        "tests.distributed.ddp", tmp_path, "other_number_of_processes", environment={"CHECKPOINT": checkpoint}
    )
    assert launch.wait(90) == 0, launch.output()
    for kind, message in launch.results("other_number_of_processes"):
        assert kind == "RunError"
        assert "another number of processes than 2" in message
    assert not list((tmp_path / "other_number_of_processes").rglob("checkpoint-*"))


def test_a_reward_that_compares_the_members_of_a_group(two, tmp_path):
    first, second = two.results("compared")
    alone = ddp.SCENARIOS["compared"](tmp_path)
    assert same(first["weights"], second["weights"])
    assert distance(alone["weights"], first["weights"]) < 1e-5
    assert first["rewards"] == second["rewards"] == pytest.approx(alone["rewards"], rel=1e-5)
    for result in (first, second, alone):
        for name in ("eval_reward", "eval_rewards/places/mean", "eval_rewards/brightness/mean"):
            assert result["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5)
        training, evaluation = result["calls"]
        assert all(len(set(prompts)) == 1 for prompts in training + evaluation)
        assert {len(prompts) for prompts in evaluation} == {2}
        assert {len(prompts) for prompts in training[len(evaluation) :]} == {4}
    # Three prompts on two processes: the second repeats one to stay in step.
    assert [len(result["calls"][1]) for result in (first, second, alone)] == [2, 2, 3]


def test_a_group_on_two_processes_is_refused_for_such_a_reward(two):
    first, second = two.results("split_compared")
    assert first == second
    assert "'brightness_again' compares the members of a group" in first
    assert "is 1 group(s) of 4 for 2 devices: use generation_batch_size=8." in first

# SPDX-License-Identifier: Apache-2.0
"""Groups are whole whatever the batch size, and prompts are used equally often (A10)."""

import itertools
from collections import Counter

import pytest
import torch

from tests.trainer.helpers import PROMPTS, fresh_rollout, logged, same, trainable, trainer


def numbered(completions, **kwargs):
    """A reward of equal steps within each call."""
    return [0.1 * i for i in range(len(completions))]


def test_a_batch_of_one_makes_whole_groups(tmp_path):
    """A10: one sample at a time, three members, one process: three micro-batches are a rollout."""
    run = trainer(tmp_path, num_generations=3, per_device_train_batch_size=1, generation_batch_size=None, max_steps=3)
    assert (run.args.steps_per_generation, run.args.generation_batch_size) == (3, 3)
    buffer = fresh_rollout(run)
    assert [t.request.member for t in buffer.trajectories] == [0, 1, 2]
    assert {t.request.row["prompt"] for t in buffer.trajectories} == {buffer.trajectories[0].request.row["prompt"]}
    assert buffer.advantages.sum() == pytest.approx(0, abs=1e-5)
    assert buffer.advantages.std(correction=0) == pytest.approx(1, abs=0.1)
    run.train()
    assert run.state.global_step == 3


@pytest.mark.parametrize(
    ("batch", "accumulation", "generations", "steps"),
    [(4, 1, 4, 1), (4, 1, 8, 2), (6, 1, 4, 2), (1, 2, 3, 6), (3, 4, 4, 4), (8, 3, 4, 3)],
)
def test_the_smallest_rollout_of_whole_groups_and_updates(tmp_path, batch, accumulation, generations, steps):
    run = trainer(
        tmp_path,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_generations=generations,
        generation_batch_size=None,
    )
    assert run.args.steps_per_generation == steps
    assert run.args.generation_batch_size == batch * steps


@pytest.mark.parametrize("rollout_batch_size", [1, 3, 8])
def test_the_batch_of_the_rollout_is_one_of_speed_alone(tmp_path, rollout_batch_size):
    usual = fresh_rollout(trainer(tmp_path))
    other = fresh_rollout(trainer(tmp_path, rollout_batch_size=rollout_batch_size))
    for a, b in zip(usual.trajectories, other.trajectories, strict=True):
        assert a.request == b.request
        assert torch.allclose(a.next_latents, b.next_latents, atol=2e-5)


def test_every_prompt_is_used_equally_often(tmp_path):
    """Seven prompts, two a rollout: none is dropped at the end of a pass."""
    run = trainer(tmp_path, data=[f"prompt {i}" for i in range(7)])
    run.get_train_dataloader()
    seen = Counter()
    for rollout in range(7):
        requests = run._plan.requests(rollout)
        assert [r.member for r in requests] == [0, 1, 2, 3] * 2
        assert [r.group_id for r in requests] == [0] * 4 + [1] * 4
        seen.update(r.row["prompt"] for r in requests[::4])
    assert set(seen.values()) == {2}


def test_the_last_short_part_of_an_epoch_is_counted(tmp_path):
    """Five prompts, two a rollout of two updates: an epoch is three rollouts, not two."""
    run = trainer(tmp_path, max_steps=-1, num_train_epochs=2, logging_steps=1)
    run.train()
    assert run.state.global_step == 2 * 3 * 2
    assert run.state.epoch == 2
    rollouts = [row["step"] for row in run.state.log_history if "reward" in row]
    assert rollouts == [1, 3, 5, 7, 9, 11]


def test_prompts_in_order_where_asked(tmp_path):
    run = trainer(tmp_path, shuffle_dataset=False)
    run.get_train_dataloader()
    order = [r.row["prompt"] for rollout in range(3) for r in run._plan.requests(rollout)[::4]]
    assert order == [*PROMPTS, PROMPTS[0]]


def test_a_group_of_equal_rewards_has_no_advantage(tmp_path):
    """Exactly 0, also where the mean of equal floats is not that float; the other group is as it would be alone."""
    values = [[0.1] * 4, [0.1, 0.2, 0.3, 0.4]]
    calls = itertools.count()

    def rewards(completions, **kwargs):
        return values[next(calls) % 2]

    run = trainer(tmp_path, rewards=rewards)
    buffer = fresh_rollout(run)
    assert buffer.advantages[:4].tolist() == [0, 0, 0, 0]
    std = 0.0125**0.5
    assert buffer.advantages[4:].tolist() == pytest.approx(
        [x / (std + 1e-4) for x in (-0.15, -0.05, 0.05, 0.15)], rel=1e-5
    )
    assert run.metrics.drain()["frac_reward_zero_std"] == 0.5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale_rewards": "none"}, [-0.15, -0.05, 0.05, 0.15]),
        ({"scale_rewards": "batch", "advantage_eps": 0.0}, [x / 0.0125**0.5 for x in (-0.15, -0.05, 0.05, 0.15)]),
        ({"advantage_ddof": 1, "advantage_eps": 0.0}, [x / (0.05 / 3) ** 0.5 for x in (-0.15, -0.05, 0.05, 0.15)]),
    ],
)
def test_what_advantages_are_divided_by(tmp_path, options, expected):
    buffer = fresh_rollout(trainer(tmp_path, rewards=numbered, **options))
    assert buffer.advantages[:4].tolist() == pytest.approx(expected, rel=1e-5)


def test_weights_of_rewards(tmp_path):
    def reverse(completions, **kwargs):
        return [0.3 - 0.1 * i for i in range(len(completions))]

    level = fresh_rollout(trainer(tmp_path, rewards=[numbered, reverse]))
    assert level.advantages.abs().max() <= 1e-3
    tilted = fresh_rollout(trainer(tmp_path, rewards=[numbered, reverse], reward_weights=[1.0, 0.5]))
    assert tilted.advantages[:4].tolist() == pytest.approx([-1.3416, -0.4472, 0.4472, 1.3416], rel=1e-2)


def test_the_control_gives_advantages_to_others(tmp_path):
    usual = fresh_rollout(trainer(tmp_path, rewards=numbered))
    shuffled = fresh_rollout(trainer(tmp_path, rewards=numbered, shuffle_advantages=True))
    assert sorted(shuffled.advantages.tolist()) == sorted(usual.advantages.tolist())
    assert shuffled.advantages.tolist() != usual.advantages.tolist()


def test_rewards_see_the_columns_of_their_rows(tmp_path):
    seen = []

    def reward(prompts, completions, answer, trainer_state, **kwargs):
        seen.extend(zip(prompts, answer, strict=True))
        assert [image.size for image in completions] == [(64, 64)] * 4
        assert trainer_state.global_step == 0
        return [0.0, 0.1, 0.2, 0.3]

    data = [{"prompt": f"prompt {i}", "answer": i} for i in range(5)]
    fresh_rollout(trainer(tmp_path, rewards=reward, data=data))
    assert len(seen) == 8
    assert all(prompt == f"prompt {answer}" for prompt, answer in seen)


def test_equal_seeds_make_equal_runs_and_others_do_not(tmp_path):
    runs = [trainer(tmp_path / str(i), seed=seed, max_steps=2) for i, seed in enumerate((1, 1, 2))]
    for run in runs:
        run.train()
    assert same(trainable(runs[0]), trainable(runs[1]))
    assert not same(trainable(runs[0]), trainable(runs[2]))
    assert logged(runs[0], "reward") == logged(runs[1], "reward") != logged(runs[2], "reward")

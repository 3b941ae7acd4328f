# SPDX-License-Identifier: Apache-2.0
"""Micro-batches, accumulation and iterations: how many updates there are, and of what (A14)."""

from itertools import chain

import pytest
import torch

from tests.marks import first_fast
from tests.trainer.helpers import fresh_rollout, logged, trainable, trainer


class Counting:
    """Replaces the loss of a run by one with a known gradient: `loss(rows) -> (R,)`, and counts what it is given."""

    def __init__(self, run, loss):
        self.rows, self.steps, self.calls = [], [], 0
        self._run, self._loss = run, loss
        run.compute_row_losses = self

    def __call__(self, model, batch, buffer):
        self.calls += 1
        self.rows.append(batch.latents[:, 0, 0, 0].tolist())
        self.steps.append(batch.steps.tolist())
        return self._loss(batch)


def scalar(run):
    """The one weight that the losses here depend on."""
    return run.trainable_parameters()[0].flatten()[0]


def first_gradient(run):
    kept = []
    run.create_optimizer()
    run.optimizer.register_step_pre_hook(
        lambda *_: kept.append(float(run.trainable_parameters()[0].grad.flatten()[0]))
    )
    return kept


def test_the_mean_is_over_rows_and_not_over_micro_batches(tmp_path):
    """
    A14: [1 .. 6] has the mean 3.5 whether it is cut into 2 + 2 + 2 or taken whole.

    The numbers are the advantages, so that it does not matter which sample is in which micro-batch.
    """
    for batch, accumulation in ((6, 1), (2, 3), (1, 6), (3, 2)):
        run = trainer(
            tmp_path,
            num_generations=6,
            generation_batch_size=6,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            max_grad_norm=0.0,
        )
        run._advantages = lambda rewards: torch.arange(1.0, 7.0)
        Counting(run, lambda rows, run=run: rows.advantages * scalar(run))
        gradients, before = first_gradient(run), float(scalar(run))
        run.train()
        assert gradients == pytest.approx([3.5], rel=1e-6)
        assert logged(run, "loss") == pytest.approx([3.5 * before], rel=1e-4)


def test_a_part_of_an_epoch_that_is_short_is_weighted_like_the_others(tmp_path):
    """
    A14: five rollouts of one prompt, accumulated by two: the sixth micro-batch begins the next pass.

    No update is of one micro-batch alone, whose gradient would count double or be divided by two.
    """
    run = trainer(
        tmp_path,
        num_generations=4,
        generation_batch_size=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=-1,
        num_train_epochs=1,
        max_grad_norm=0.0,
        learning_rate=0.0,
    )
    number = iter(range(1, 100))
    run._advantages = lambda rewards: torch.full((4,), float(next(number)))
    counting = Counting(run, lambda rows: rows.advantages * scalar(run))
    gradients = first_gradient(run)
    run.train()
    assert run.state.global_step == 3
    assert counting.calls == 6 * 3
    assert gradients == pytest.approx([1.5, 3.5, 5.5], rel=1e-6)


@pytest.mark.parametrize("timesteps_per_forward", first_fast([2, 1, 3]))
@pytest.mark.parametrize(("fraction", "trained"), first_fast([(0.67, 2), (1.0, 3), (0.1, 1)], 2))
def test_a_part_of_the_steps_is_trained_and_no_more(tmp_path, fraction, trained, timesteps_per_forward):
    """Of three stochastic steps; each sample is replayed once for each, and an update is of all of them."""
    run = trainer(tmp_path, timestep_fraction=fraction, timesteps_per_forward=timesteps_per_forward, max_steps=4)
    counting = Counting(run, lambda rows: rows.advantages * scalar(run))
    run.train()
    assert run.state.global_step == 4
    calls = -(-trained // timesteps_per_forward)
    assert counting.calls == 4 * calls
    for update in range(4):
        steps = chain(*counting.steps[update * calls : (update + 1) * calls])
        expected = run.args.trained_steps(update // 2)
        assert sorted(steps) == sorted(list(expected) * 4)
        assert len(expected) == trained


def test_every_sample_is_trained_once_an_iteration_in_another_order(tmp_path):
    run = trainer(tmp_path, num_iterations=3, max_steps=6, timesteps_per_forward=3, learning_rate=0.0)
    counting = Counting(run, lambda rows: rows.advantages * scalar(run))
    run.train()
    assert run._buffer.index == 0  # one rollout serves all six updates
    starts = sorted(t.latents[0].flatten()[0].item() for t in run._buffer.trajectories)
    iterations = []
    for iteration in range(3):
        seen = [rows[:4] for rows in counting.rows[2 * iteration : 2 * iteration + 2]]
        assert sorted(chain(*seen)) == pytest.approx(starts)
        iterations.append(tuple(chain(*seen)))
    assert len(set(iterations)) == 3


def test_old_log_probs_are_those_of_the_policy_that_sampled(tmp_path):
    """In later iterations the ratio is that to the rollout, not to the last update."""
    run = trainer(tmp_path, num_iterations=2, max_steps=4, epsilon=10.0)
    run.train()
    assert logged(run, "rollout/logp_abs_diff_max") == pytest.approx([0.0], abs=1e-6)
    means = logged(run, "ratio/mean")
    assert means[0] == pytest.approx(1.0, abs=1e-6)
    assert abs(means[3] - 1.0) > 1e-6
    assert len(logged(run, "reward")) == 1
    assert len(logged(run, "ratio/sum_log_std")) == 1  # of the rollout's last update


def test_several_rollouts_may_make_one_update(tmp_path):
    run = trainer(tmp_path, gradient_accumulation_steps=4, max_steps=2)
    assert run.args.updates_per_rollout == 0.5
    made = []
    make = run.make_rollout
    run.make_rollout = lambda rollout: made.append((rollout, run.state.global_step)) or make(rollout)
    run.train()
    assert made == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert logged(run, "rollout/logp_abs_diff_max") == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize(("guidance", "per_row"), [(1.0, 1), (4.0, 2)])
def test_forwards_are_counted_by_sample(tmp_path, guidance, per_row):
    """Four sampler steps and three trained ones, each of them twice with a reference, doubled by guidance."""
    run = trainer(tmp_path, guidance_scale=guidance, beta=0.1, max_steps=2)
    run.train()
    assert logged(run, "forwards_per_sample") == [per_row * (4 + 3 + 3)]


def test_clipping_is_of_the_ratio(tmp_path):
    """With a clip range of nothing, an update that moves the policy is followed by one that does not."""
    run = trainer(tmp_path, num_iterations=2, generation_batch_size=4, max_steps=2, epsilon=1e-9, weight_decay=0.0)
    weights = [trainable(run)]
    after = run._after_optimizer_step
    run._after_optimizer_step = lambda: (after(), weights.append(trainable(run)))
    run.train()
    clipped = logged(run, "clip_ratio/region_mean")
    assert clipped[0] == 0
    assert clipped[1] > 0.2
    assert logged(run, "grad_norm")[1] < logged(run, "grad_norm")[0]


def test_a_rollout_is_of_the_newest_weights(tmp_path):
    run = trainer(tmp_path, max_steps=4)
    versions = []
    make = run.make_rollout

    def make_and_look(rollout):
        buffer = make(rollout)
        versions.append({t.weight_version for t in buffer.trajectories})
        return buffer

    run.make_rollout = make_and_look
    run.train()
    assert versions == [{0}, {2}]


def test_states_of_a_rollout_are_those_that_were_scored(tmp_path):
    """What is replayed is the chain itself: each state before a step is the state after the last one."""
    buffer = fresh_rollout(trainer(tmp_path))
    for trajectory in buffer.trajectories:
        assert torch.equal(trajectory.latents[1:], trajectory.next_latents[:-1])
        assert trajectory.log_probs.shape == (3,)

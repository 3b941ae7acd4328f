# SPDX-License-Identifier: Apache-2.0
"""Flow-DPPO on real rollouts: what is dropped, what is kept, and the means that tell them apart."""

import pytest
import torch

from omnitrl.errors import InputError
from tests.trainer.helpers import all_rows, config, fresh_rollout, logged, same, trainable, trainer
from tests.trainer.test_grpo_guard import losses_of_velocity, move, noise_of, per_row, row_table
from tests.trainer.test_laws import StopAt


def dppo(tmp_path, **options):
    return trainer(tmp_path, "flow_dppo", **options)


def kl_of(run, buffer, batch):
    """KL (R,) per latent element from the policy of the rollout, in float64."""
    with torch.no_grad():
        shift = run.replay(run.model, batch, buffer).mean.double() - batch.old_means.double()
    _, std = row_table(buffer, batch)
    return per_row(shift.square() / (2 * std.square())) / buffer.latent_dim


@pytest.mark.parametrize("sde_type", ["flow_sde", "dance_sde", "cps"])
def test_t13_at_first_nothing_is_dropped_and_the_gradient_is_the_plain_one(tmp_path, sde_type):
    run = dppo(tmp_path, sde_type=sde_type, noise_level=0.5, kl_threshold=1e-9)
    buffer = fresh_rollout(run)
    batch, losses, gradient = losses_of_velocity(run, buffer)
    coefficient, std = row_table(buffer, batch)
    advantages = batch.advantages.double()
    expected = -advantages.view_as(std) * coefficient / std * noise_of(buffer, batch) / buffer.latent_dim
    assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert losses.tolist() == pytest.approx((-advantages).tolist(), abs=1e-5)
    assert run.metrics.drain()["dppo/dropped_mean"] == 0


def test_t13_rows_beyond_the_threshold_are_dropped_unless_they_lead_back(tmp_path):
    run = dppo(tmp_path)
    buffer = fresh_rollout(run)
    move(run)
    batch = all_rows(buffer)
    kl = kl_of(run, buffer, batch)
    run.args.kl_threshold = float(kl.median()) * 1.0001
    batch, losses, gradient = losses_of_velocity(run, buffer)
    with torch.no_grad():
        log_ratio = (run.replay(run.model, batch, buffer).log_probs - batch.old_log_probs).double()
    far, away = kl >= run.args.kl_threshold, log_ratio * batch.advantages > 0
    dropped = far & away
    assert dropped.any()
    assert (far & ~away).any()
    assert (away & ~far).any()
    assert (per_row(gradient.abs()) == 0).tolist() == dropped.tolist()
    expected = torch.where(dropped, 0.0, -batch.advantages.double() * log_ratio.exp())
    assert losses.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    metrics = run.metrics.drain()
    assert metrics["dppo/dropped_mean"] == pytest.approx(float(dropped.double().mean()))
    assert metrics["dppo/kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert metrics["dppo/kl_max"] == pytest.approx(float(kl.max()), rel=1e-4)


def test_with_a_threshold_that_nothing_reaches_it_is_flow_grpo_without_a_clip(tmp_path):
    common = {"max_steps": 4, "advantage_clip": 1.0}
    ours = dppo(tmp_path / "a", kl_threshold=1e9, **common)
    theirs = trainer(tmp_path / "b", "flow_grpo", epsilon=1e9, **common)
    dropping = dppo(tmp_path / "c", kl_threshold=1e-9, **common)
    for run in (ours, theirs, dropping):
        run.train()
    assert same(trainable(ours), trainable(theirs))
    assert not same(trainable(ours), trainable(dropping))
    assert logged(ours, "dppo/dropped_mean") == [0] * 4
    assert logged(dropping, "dppo/dropped_mean")[1] > 0.2


@pytest.mark.slow
def test_the_threshold_holds_the_policy_near_that_of_the_rollout(tmp_path):
    def last_divergence(folder, threshold):
        run = dppo(tmp_path / folder, kl_threshold=threshold, num_iterations=8, max_steps=16)
        run.train()
        return logged(run, "dppo/kl_mean")[-1]

    assert last_divergence("near", 1e-5) < 0.5 * last_divergence("far", 1e9)


def test_the_default_bounds_no_advantage_and_the_option_does(tmp_path):
    assert config(tmp_path, "flow_dppo").advantage_clip is None
    for clip, expected in ((None, 7.0), (2.0, 2.0)):
        run = dppo(tmp_path, advantage_clip=clip)
        buffer = fresh_rollout(run)
        buffer.advantages = torch.full_like(buffer.advantages, 7.0)
        _, losses, _ = losses_of_velocity(run, buffer)
        assert losses.tolist() == pytest.approx([-expected] * len(losses), abs=1e-4)


def test_old_means_are_those_of_the_guidance_that_is_trained(tmp_path):
    run = dppo(tmp_path, guidance_scale=4.0, guidance_scale_train=1.0, kl_threshold=1e-9, max_steps=1)
    buffer = fresh_rollout(run)
    assert kl_of(run, buffer, all_rows(buffer)).max() <= 1e-10
    run.train()
    assert logged(run, "dppo/dropped_mean") == [0]
    guided = dppo(tmp_path, guidance_scale=4.0)
    kept = all_rows(fresh_rollout(guided)).old_means
    assert (kept - all_rows(buffer).old_means).abs().max() > 1e-3


def test_log_probs_without_variance_are_dropped_by_the_same_divergence(tmp_path):
    """The sign of the log-ratio and the KL do not depend on the form, so neither does what is dropped."""
    dropped = []
    for form in ("gaussian", "squared_error"):
        run = dppo(tmp_path, log_prob_form=form)
        buffer = fresh_rollout(run)
        move(run)
        run.args.kl_threshold = float(kl_of(run, buffer, all_rows(buffer)).median())
        _, losses, _ = losses_of_velocity(run, buffer)
        dropped.append((losses == 0).tolist())
    assert dropped[0] == dropped[1]
    assert 0 < sum(dropped[0]) < len(dropped[0])


def test_resumed_in_the_midst_of_a_rollout_equals_uninterrupted(tmp_path):
    """The second update of a rollout needs the means that the first one had: from a checkpoint."""
    common = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "kl_threshold": 1e-7}
    straight = dppo(tmp_path / "a", **common)
    straight.train()
    dppo(tmp_path / "b", callbacks=[StopAt(1)], **common).train()
    resumed = dppo(tmp_path / "b", **common)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert same(trainable(straight), trainable(resumed))
    for name in ("loss", "dppo/kl_mean", "dppo/dropped_mean"):
        assert logged(straight, name) == logged(resumed, name)
    assert logged(straight, "dppo/kl_mean")[1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_threshold": 0.0}, "kl_threshold=0.0 must be above 0: use 1e-5"),
        ({"kl_threshold": -1.0}, "kl_threshold=-1.0 must be above 0"),
        ({"advantage_clip": 0.0}, "advantage_clip=0.0 must be above 0"),
    ],
)
def test_bad_input_is_refused_with_what_works(tmp_path, options, message):
    with pytest.raises(InputError, match=message) as error:
        config(tmp_path, "flow_dppo", **options)
    assert "\n" not in str(error.value)


def test_it_has_no_clip_range(tmp_path):
    with pytest.raises(TypeError, match="epsilon"):
        config(tmp_path, "flow_dppo", epsilon=1e-4)

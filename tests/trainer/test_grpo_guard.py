# SPDX-License-Identifier: Apache-2.0
"""GRPO-Guard on real rollouts: its ratio, its weights, and the means that it keeps."""

import pytest
import torch

from omnitrl.errors import InputError
from tests.marks import first_fast
from tests.trainer.helpers import all_rows, config, fresh_rollout, logged, same, trainable, trainer
from tests.trainer.test_laws import StopAt


SDE_TYPES = ["flow_sde", "dance_sde", "cps"]
NOISE = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.5}


def guard(tmp_path, **options):
    return trainer(tmp_path, "grpo_guard", **options)


def move(run, size=0.02):
    """Another policy than that of the rollout."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in run.trainable_parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def losses_of_velocity(run, buffer):
    """The batch of all rows, its losses, and the gradient of their sum for the velocity of each row."""
    batch = all_rows(buffer)
    with torch.no_grad():
        velocity = run.call_policy(run.model, batch)
    velocity.requires_grad_()
    run._buffer = buffer  # as in training, where the loss is of the current rollout
    losses = run.compute_row_losses(lambda *_: velocity, batch, buffer)
    losses.sum().backward()
    return batch, losses.detach().double(), velocity.grad.double()


def row_table(buffer, batch):
    """Velocity coefficient and std of each row, (R, 1, ...), in float64."""
    shape = [-1, *[1] * (batch.latents.ndim - 1)]
    return [column.double()[batch.steps].view(shape) for column in buffer.transitions[1:]]


def noise_of(buffer, batch):
    """The noise (R, ...) that was drawn in each step."""
    return (batch.next_latents.double() - batch.old_means.double()) / row_table(buffer, batch)[1]


def per_row(values):
    return values.flatten(1).sum(1)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
@pytest.mark.parametrize("reweight", first_fast([True, False]))
def test_the_first_gradient_is_advantage_times_noise(tmp_path, sde_type, reweight):
    run = guard(tmp_path, sde_type=sde_type, noise_level=NOISE[sde_type], reweight=reweight, epsilon=2e-6)
    buffer = fresh_rollout(run)
    batch, losses, gradient = losses_of_velocity(run, buffer)
    coefficient, _ = row_table(buffer, batch)
    sizes = buffer.transitions.velocity_coef.double().abs()[:3]  # the three stochastic steps of four
    weight = sizes.mean() / coefficient.abs() if reweight else torch.ones_like(coefficient)
    advantages = batch.advantages.double().view_as(coefficient)
    expected = -advantages * weight * coefficient * noise_of(buffer, batch) / buffer.latent_dim
    assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert losses.tolist() == pytest.approx((-advantages * weight).flatten().tolist(), abs=1e-5)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_t12_all_steps_pull_equally_and_on_average_as_without_weights(tmp_path, sde_type):
    pulls = {}
    for reweight in (True, False):
        run = guard(tmp_path, sde_type=sde_type, noise_level=NOISE[sde_type], reweight=reweight)
        buffer = fresh_rollout(run)
        batch, _, gradient = losses_of_velocity(run, buffer)
        scale = batch.advantages.double().abs() * per_row(noise_of(buffer, batch).square()).sqrt()
        pull = per_row(gradient.square()).sqrt() / scale
        pulls[reweight] = torch.stack([pull[batch.steps == step].mean() for step in buffer.steps])
    assert pulls[True].max() / pulls[True].min() <= 1 + 1e-5
    assert pulls[False].max() / pulls[False].min() > 1.3
    assert float(pulls[True].mean()) == pytest.approx(float(pulls[False].mean()), rel=1e-5)


def test_t12_a_window_that_moves_keeps_one_scale(tmp_path):
    """Weights that averaged 1 within each window would be 1 in windows of one step."""
    options = {"num_inference_steps": 6, "sde_window_strategy": "progressive", "sde_window_size": 1}
    run = guard(tmp_path, **options, sde_window_range=[1, 4])
    sizes = [float(run.tables(r)[1].velocity_coef.abs()[1 + r]) for r in range(3)]
    pulls = [size * float(run.step_weights(run.size)[1 + r]) for r, size in enumerate(sizes)]
    assert max(sizes) > 1.2 * min(sizes)
    assert pulls == pytest.approx([sum(sizes) / 3] * 3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0, 1, 2, 3, 4)),
        ({"sde_window_range": [2, 6]}, (2, 3, 4)),
        ({"sde_window_strategy": "random", "sde_window_size": 2, "sde_window_range": [1, 4]}, (1, 2, 3)),
        ({"sde_window_strategy": "first", "sde_window_size": 2}, (0, 1)),
    ],
)
def test_reachable_steps_are_those_of_all_windows(tmp_path, options, expected):
    args = config(tmp_path, "grpo_guard", num_inference_steps=6, **options)
    assert args.reachable_steps == expected
    assert sorted({step for rollout in range(50) for step in args.window(rollout)}) == list(expected)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_t8_the_ratio_is_the_plain_one_without_its_bias_and_times_the_std(tmp_path, sde_type):
    run = guard(tmp_path, sde_type=sde_type, noise_level=NOISE[sde_type], epsilon=1e6)
    buffer = fresh_rollout(run)
    move(run)
    batch = all_rows(buffer)
    batch.advantages = torch.ones_like(batch.advantages)
    run._buffer = buffer
    with torch.no_grad():
        losses = run.compute_row_losses(run.model, batch, buffer)
        replayed = run.replay(run.model, batch, buffer)
    log_ratio = (-losses / run.step_weights(run.size)[batch.steps]).double().log()
    _, std = row_table(buffer, batch)
    shift = replayed.mean.double() - batch.old_means.double()
    plain = (replayed.log_probs - batch.old_log_probs).double()
    bias = per_row(shift.square() / (2 * std.square())) / buffer.latent_dim
    assert log_ratio.tolist() == pytest.approx((std.flatten() * (plain + bias)).tolist(), abs=1e-6)
    in_noise = per_row(noise_of(buffer, batch) * shift) / buffer.latent_dim
    assert log_ratio.tolist() == pytest.approx(in_noise.tolist(), abs=2e-7)
    assert log_ratio.abs().mean() > 1e-4
    # What the normalisation is for: the plain ratio lies below 1, the other one around it.
    assert plain.mean() < 0
    assert log_ratio.mean().abs() < (std.flatten() * bias).mean()


def test_the_clip_is_of_the_normalised_ratio(tmp_path):
    run = guard(tmp_path)
    buffer = fresh_rollout(run)
    move(run)
    batch = all_rows(buffer)
    with torch.no_grad():
        shift = run.replay(run.model, batch, buffer).mean.double() - batch.old_means.double()
    log_ratio = per_row(noise_of(buffer, batch) * shift) / buffer.latent_dim
    run.args.epsilon = float(log_ratio.abs().median()) + 1e-6
    _, _, gradient = losses_of_velocity(run, buffer)
    beyond = (log_ratio.exp() - 1).abs() > run.args.epsilon
    clipped = beyond & (log_ratio * batch.advantages > 0)
    assert 0 < clipped.sum() < beyond.sum()
    assert (per_row(gradient.abs()) == 0).tolist() == clipped.tolist()
    share = run.metrics.drain()["clip_ratio/region_mean"]
    assert share == pytest.approx(float(clipped.double().mean()))


def test_the_first_update_has_ratio_one_and_the_next_a_ratio_around_it(tmp_path):
    run = guard(tmp_path, max_steps=2, epsilon=1e6)
    run.train()
    first, second = logged(run, "guard/log_ratio_abs_mean")
    assert first <= 1e-7
    assert second > 1e-5
    assert logged(run, "guard/ratio_mean")[0] == pytest.approx(1, abs=1e-7)
    assert logged(run, "clip_ratio/region_mean") == [0, 0]


def test_old_means_are_those_of_the_guidance_that_is_trained(tmp_path):
    options = {"guidance_scale": 4.0, "reweight": False}
    run = guard(tmp_path, guidance_scale_train=1.0, **options)
    buffer = fresh_rollout(run)
    batch, losses, _ = losses_of_velocity(run, buffer)
    assert losses.tolist() == pytest.approx((-batch.advantages).tolist(), abs=1e-5)
    guided = all_rows(fresh_rollout(guard(tmp_path, **options)))
    assert torch.equal(guided.next_latents, batch.next_latents)
    assert (guided.old_means - batch.old_means).abs().max() > 1e-3
    run.train()
    assert logged(run, "guard/log_ratio_abs_mean")[0] <= 1e-6


def test_resumed_in_the_midst_of_a_rollout_equals_uninterrupted(tmp_path):
    """The second update of a rollout needs the means that the first one had: from a checkpoint."""
    common = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "epsilon": 1e-4}
    straight = guard(tmp_path / "a", **common)
    straight.train()
    guard(tmp_path / "b", callbacks=[StopAt(1)], **common).train()
    resumed = guard(tmp_path / "b", **common)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert same(trainable(straight), trainable(resumed))
    for name in ("loss", "guard/log_ratio_abs_mean", "clip_ratio/region_mean"):
        assert logged(straight, name) == logged(resumed, name)


def test_means_cost_one_state_for_each_trained_step(tmp_path):
    means = fresh_rollout(guard(tmp_path)).trajectories[0].tensors()
    plain = fresh_rollout(trainer(tmp_path, "flow_grpo")).trajectories[0].tensors()
    assert means.keys() - plain.keys() == {"means"}
    assert means["means"].shape == (3, *means["latents"].shape[1:])
    assert means["latents"].untyped_storage().nbytes() == 4 * 4 * means["latents"][0].numel()  # 3 steps, 4 states


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_prob_form": "squared_error"}, "log_prob_form='squared_error' would change nothing.*use 'gaussian'"),
        ({"log_prob_reduction": "sum"}, "log_prob_reduction='sum' would change nothing.*use 'mean'"),
        ({"epsilon": 0.0}, "epsilon=0.0 must be above 0"),
        ({"epsilon_high": -1.0}, "epsilon_high=-1.0 must be above 0"),
    ],
)
def test_bad_input_is_refused_with_what_works(tmp_path, options, message):
    with pytest.raises(InputError, match=message) as error:
        config(tmp_path, "grpo_guard", **options)
    assert "\n" not in str(error.value)

# SPDX-License-Identifier: Apache-2.0
"""Advantage Weighted Matching: its loss on a rollout, old log-likelihoods, the average, and what it counts."""

import pytest
import torch

from omnitrl.algorithms import matching_error, velocity_target
from omnitrl.errors import InputError
from omnitrl.trainer.averages import PolicyAverage
from tests.marks import first_fast
from tests.trainer.helpers import config, fresh_rollout, logged, trainable, trainer
from tests.trainer.test_diffusion_nft import ADVANTAGES, forward, gradient_of, rollout_of
from tests.trainer.test_matching import flat, rows_of


def move(run, size=0.05):
    """Makes the trained weights others than those of the rollout."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in run.trainable_parameters():
            p.add_(size * torch.randn(p.shape, generator=generator))
    run._average_is_trained = False


def log_likelihood_in_float64(velocity, batch):
    """The negative generalised Huber loss of the velocity, from scratch."""
    target = (batch.noise - batch.clean_latents).double()
    error = (velocity.double() - target).square().mean(dim=(1, 2, 3))
    return -batch.sigmas.double() / 0.25 * ((error + 1e-10) ** 0.25 - 1e-10**0.25)


@pytest.mark.parametrize("peft", [True, False])
def test_the_loss_is_the_papers(tmp_path, peft):
    """In a later update of a rollout, with an average and a reference that are other weights, and a clip that acts."""
    options = {} if peft else {"peft_config": None}
    run = trainer(tmp_path, "awm", epsilon=0.02, beta=0.5, ema_beta=2.0, timesteps_per_sample=3, **options)
    buffer, batch = rollout_of(run, ADVANTAGES)
    run.average = PolicyAverage(run.trainable_parameters())
    with torch.no_grad():
        before = forward(run, batch)
        with run.reference.velocity(run.model) as velocity_of:
            reference = velocity_of(batch.latents, batch.timesteps, batch.conditions, 1.0).double()
    move(run)
    run.state.global_step = 1  # an update after the one that the rollout was made for

    velocity = forward(run, batch)
    log_likelihood = log_likelihood_in_float64(velocity, batch)
    old = log_likelihood.detach() + 0.05 * torch.randn(len(batch), generator=torch.Generator().manual_seed(2))
    buffer.extras["old_log_likelihoods"][batch.samples, batch.draws] = old.float()
    ratio = (log_likelihood - old).exp()
    assert ratio.min() < 0.98
    assert ratio.max() > 1.02
    a = torch.tensor(ADVANTAGES, dtype=torch.float64)[batch.samples].clamp(-5, 5) / 5
    expected = torch.maximum(-a * ratio, -a * ratio.clamp(0.98, 1.02))
    for weight, other in ((0.5, reference), (2.0, before.double())):
        expected = expected + weight * (velocity.double() - other).square().mean(dim=(1, 2, 3))
    losses = run.compute_row_losses(run.model, batch, buffer)
    assert torch.allclose(losses.double(), expected, rtol=1e-4, atol=1e-6)
    ours, theirs = gradient_of(run, losses.mean()), gradient_of(run, expected.mean())
    assert ours.keys() == theirs.keys()
    assert (flat(ours) - flat(theirs)).norm() <= 1e-4 * flat(theirs).norm()
    assert 0 < run.metrics.drain()["clip_ratio/region_mean"] < 1


@pytest.mark.parametrize(("bound", "scale"), [(5.0, 0.2), (2.0, 0.5), (None, 1.0)])
def test_the_first_gradient_is_that_of_pre_training_times_the_advantage(tmp_path, bound, scale):
    """T18: the ratio is 1, and the gradient advantage-weighted matching; bounded advantages are scaled to ±1."""
    run = trainer(tmp_path, "awm", awm_weighting="uniform", ema_beta=0.0, advantage_clip=bound, timesteps_per_sample=2)
    buffer, batch = rollout_of(run, ADVANTAGES)
    losses = run.compute_row_losses(run.model, batch, buffer)
    advantages = torch.tensor(ADVANTAGES)[batch.samples]
    advantages = scale * (advantages if bound is None else advantages.clamp(-bound, bound))
    assert torch.allclose(losses, -advantages, rtol=1e-6)
    error = matching_error(forward(run, batch), velocity_target(batch.clean_latents, batch.noise))
    ours, theirs = gradient_of(run, losses.mean()), gradient_of(run, (advantages * error).mean())
    assert (flat(ours) - flat(theirs)).norm() <= 1e-5 * flat(theirs).norm()
    assert run.metrics.drain()["ratio/mean"] == 1


@pytest.mark.parametrize(
    ("options", "updates"),
    first_fast(
        [
            ({"num_iterations": 2, "gradient_accumulation_steps": 2}, 2),
            ({}, 2),
            ({"num_iterations": 2}, 4),
            ({"num_iterations": 2, "gradient_accumulation_steps": 4}, 1),
        ]
    ),
)
def test_old_log_likelihoods_are_those_of_the_policy_that_sampled(tmp_path, options, updates):
    """At the same noise and level, whether they were computed before the first update or in it."""
    start = trainer(tmp_path / "start", "awm", timesteps_per_sample=2)
    buffer = fresh_rollout(start)
    batch = rows_of(start, buffer, list(range(8)))
    with torch.no_grad():
        expected = log_likelihood_in_float64(forward(start, batch), batch).float().view(2, 8).T

    run = trainer(tmp_path, "awm", timesteps_per_sample=2, learning_rate=1e-2, max_steps=updates, **options)
    run.train()
    assert run._buffer.index == 0
    assert torch.allclose(run._buffer.extras["old_log_likelihoods"], expected, rtol=1e-5)
    assert logged(run, "ratio/approx_kl")[0] == 0
    assert all(kl > 1e-7 for kl in logged(run, "ratio/approx_kl")[1:])


def test_clipping_cuts_what_has_moved(tmp_path):
    run = trainer(tmp_path, "awm", epsilon=1e-9, ema_beta=0.0, weight_decay=0.0, timesteps_per_sample=2)
    run.train()
    clipped = logged(run, "clip_ratio/region_mean")
    assert clipped[0] == clipped[2] == 0  # the first update of each rollout
    assert clipped[1] > 0.2


# The average


def test_the_average_follows_after_every_update(tmp_path):
    """By the decay min(0.3, 0.001 n) after n updates; the start is forgotten at once, as the decay is small."""
    run = trainer(tmp_path, "awm", timesteps_per_sample=1, learning_rate=1e-2)
    trained, averages, after = [], [], run._after_optimizer_step
    run._after_optimizer_step = lambda: (
        after(),
        trained.append(flat(trainable(run))),
        averages.append(torch.cat([w.flatten() for w in run.average._weights])),
    )
    expected = flat(trainable(run))
    run.train()
    for n in range(1, 5):
        expected = 0.001 * n * expected + (1 - 0.001 * n) * trained[n - 1]
        assert torch.allclose(averages[n - 1], expected, rtol=0, atol=1e-7)
    assert (trained[-1] - expected).abs().max() > 1e-5
    assert logged(run, "ema_kl")[0] == 0
    assert all(kl > 0 for kl in logged(run, "ema_kl")[1:])


def test_there_is_no_average_where_it_has_no_weight(tmp_path):
    run = trainer(tmp_path, "awm", ema_beta=0.0, max_steps=2)
    run.train()
    assert run.average is None
    assert logged(run, "ema_kl") == []


# Counting


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        # Four sampler steps and two trained levels. Half of the old log-likelihoods come by in the first update. The
        # average is another policy from the second update of the run on.
        ({}, [4 + 1 + 2 + 1, 4 + 1 + 2 + 2]),
        *first_fast(
            [
                ({"ema_beta": 0.0, "guidance_scale": 4.0}, [11, 11]),
                ({"ema_beta": 0.0}, [7, 7]),
                ({"ema_beta": 0.0, "per_device_train_batch_size": 8, "max_steps": 2}, [6, 6]),
                ({"ema_beta": 0.0, "num_iterations": 2, "gradient_accumulation_steps": 2}, [8, 8]),
                ({"ema_beta": 0.0, "beta": 0.1}, [9, 9]),
            ]
        ),
    ],
)
def test_forwards_are_counted(tmp_path, options, counts):
    run = trainer(tmp_path, "awm", timesteps_per_sample=2, timesteps_per_forward=2, **options)
    run.train()
    assert logged(run, "forwards_per_sample") == counts


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0 must be above 0: use 1.0 for none, or 1e-5"),
        ({"beta": -1.0}, "beta=-1.0 must be at least 0"),
        ({"ema_beta": -1.0}, "ema_beta=-1.0 must be at least 0"),
        ({"awm_weighting": "snr"}, "awm_weighting='snr' is unknown: use one of 'uniform', 't'"),
        ({"ghuber_power": 0.0}, "ghuber_power=0.0 must be above 0: use 0.25"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        config(tmp_path, "awm", **options)


def test_defaults_are_the_papers(tmp_path):
    from omnitrl import AWMConfig

    args = AWMConfig(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=8)
    assert (args.num_inference_steps, args.num_noise_levels, args.guidance_scale) == (14, 6, 1.0)
    assert (args.epsilon, args.beta, args.ema_beta, args.awm_weighting) == (1.0, 3e-3, 1.0, "ghuber")

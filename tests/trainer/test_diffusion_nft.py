# SPDX-License-Identifier: Apache-2.0
"""DiffusionNFT: its loss on a rollout, the old policy's way, and what it counts."""

import pytest
import torch

from omnitrl.algorithms import matching_error, velocity_target
from omnitrl.errors import InputError
from omnitrl.trainer.averages import PolicyAverage
from tests.marks import first_fast
from tests.trainer.helpers import config, fresh_rollout, logged, trainable, trainer
from tests.trainer.test_matching import flat, rows_of


NFT = "diffusion_nft"


def forward(run, batch):
    """The policy's velocity, with a graph, outside the trainer's own path."""
    return run.flow_model.velocity(batch.latents, batch.timesteps, batch.conditions, 1.0)


def gradient_of(run, loss):
    """Gradient of a loss by name of the weight."""
    named = {name: p for name, p in run.flow_model.networks.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def rollout_of(run, advantages):
    """A rollout with advantages of our choice, and all its rows."""
    buffer = run._buffer = fresh_rollout(run)
    buffer.advantages = torch.tensor(advantages)
    return buffer, rows_of(run, buffer, list(range(len(buffer.trajectories))))


ADVANTAGES = [1.0, -0.5, 0.0, 7.0, -9.0, 2.5, 0.1, -1.0]


def nft_in_float64(velocity, old, reference, batch, advantages, mix_beta, beta):
    """The loss (R,) as the paper has it, from scratch."""
    v, old, reference, latents, clean = (
        t.double() for t in (velocity, old, reference, batch.latents, batch.clean_latents)
    )
    t = batch.sigmas.double()[:, None, None, None]
    q = (0.5 + advantages.double() / 10).clamp(0, 1)
    loss = 0.0
    for share, mixed in ((q, (1 - mix_beta) * old + mix_beta * v), (1 - q, (1 + mix_beta) * old - mix_beta * v)):
        gap = latents - t * mixed - clean
        weight = gap.detach().abs().mean(dim=(1, 2, 3)).clamp(min=1e-5)
        loss = loss + share * gap.square().mean(dim=(1, 2, 3)) / weight
    return 5 * loss / mix_beta + beta * (v - reference).square().mean(dim=(1, 2, 3))


@pytest.mark.parametrize("peft", [True, False])
@pytest.mark.parametrize("mix_beta", [1.0, 0.3])
def test_the_loss_is_the_papers(tmp_path, mix_beta, peft):
    """With an old policy and a reference that are other weights than the trained ones, in value and gradient."""
    options = {} if peft else {"peft_config": None}
    run = trainer(tmp_path, NFT, mix_beta=mix_beta, beta=0.5, num_inference_steps=6, **options)
    buffer, batch = rollout_of(run, ADVANTAGES)
    assert len(batch) == 8 * 5

    run.average = PolicyAverage(run.trainable_parameters())
    with torch.no_grad():
        old = forward(run, batch)
        with run.reference.velocity(run.model) as velocity_of:
            reference = velocity_of(batch.latents, batch.timesteps, batch.conditions, 1.0)
        generator = torch.Generator().manual_seed(1)
        for p in run.trainable_parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    run._average_is_trained = False

    velocity = forward(run, batch)
    assert (velocity - old).abs().mean() > 1e-3
    assert ((reference - old).abs().mean() > 1e-3) == peft  # without adapters the reference is a copy of the start
    expected = nft_in_float64(
        velocity, old, reference, batch, torch.tensor(ADVANTAGES)[batch.samples].clamp(-5, 5), mix_beta, 0.5
    )
    losses = run.compute_row_losses(run.model, batch, buffer)
    assert torch.allclose(losses.double(), expected, rtol=1e-4)
    ours, theirs = gradient_of(run, losses.mean()), gradient_of(run, expected.mean())
    assert ours.keys() == theirs.keys()
    assert (flat(ours) - flat(theirs)).norm() <= 1e-4 * flat(theirs).norm()


def test_of_good_samples_alone_the_first_update_is_plain_fine_tuning(tmp_path):
    """T16: q = 1 and mix_beta = 1 without adaptive weights is the loss of pre-training times sigma² and the bound."""
    run = trainer(tmp_path, NFT, beta=0.0, adaptive_weights=False)
    buffer, batch = rollout_of(run, [5.0] * 8)
    losses = run.compute_row_losses(run.model, batch, buffer)
    error = matching_error(forward(run, batch), velocity_target(batch.clean_latents, batch.noise))
    expected = 5 * batch.sigmas.square() * error
    assert torch.allclose(losses, expected, rtol=1e-5)
    ours, theirs = gradient_of(run, losses.mean()), gradient_of(run, expected.mean())
    assert (flat(ours) - flat(theirs)).norm() <= 1e-5 * flat(theirs).norm()


def test_the_first_gradient_does_not_depend_on_mix_beta_and_is_0_for_average_samples(tmp_path):
    """T16."""
    found = []
    for mix_beta in (1.0, 0.1):
        run = trainer(tmp_path, NFT, beta=0.0, mix_beta=mix_beta)
        buffer, batch = rollout_of(run, ADVANTAGES)
        losses = run.compute_row_losses(run.model, batch, buffer)
        found.append(flat(gradient_of(run, losses.mean())))
    assert (found[0] - found[1]).norm() <= 1e-4 * found[0].norm()
    buffer, batch = rollout_of(run, [0.0] * 8)
    still = flat(gradient_of(run, run.compute_row_losses(run.model, batch, buffer).mean()))
    assert still.norm() <= 1e-5 * found[0].norm()


@pytest.mark.parametrize(
    ("mode", "optimality"),
    [
        ("all", [1.0, 0.4, 0.5]),
        ("positive_only", [1.0, 0.5, 0.5]),
        ("negative_only", [0.5, 0.4, 0.5]),
        ("binary", [0.6, 0.4, 0.5]),
    ],
)
def test_the_mode_says_what_is_taken_of_the_advantages(tmp_path, mode, optimality):
    run = trainer(tmp_path, NFT, nft_mode=mode, beta=0.0)
    buffer = fresh_rollout(run)
    buffer.advantages = torch.tensor([8.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    for sample, expected in enumerate(optimality):
        run.compute_row_losses(run.model, rows_of(run, buffer, [sample]), buffer)
        assert run.metrics.drain()["nft/optimality"] == pytest.approx(expected)


# The old policy


@pytest.mark.parametrize(
    ("schedule", "bound", "decays"),
    [("linear", None, [0.002, 0.004]), ("linear", 0.003, [0.002, 0.003]), ("delayed", None, [0.0, 0.0])],
)
def test_the_old_policy_moves_after_the_last_update_of_a_rollout(tmp_path, schedule, bound, decays):
    """T17: by the schedule's decay at the number of optimizer steps; in the midst of a rollout it stays."""
    options = {"old_policy_schedule": schedule, "old_policy_decay": bound, "learning_rate": 1e-2}
    run = trainer(tmp_path, NFT, timesteps_per_sample=1, **options)
    sampled, trained, old = [], [], []
    generate, after = run.engine.generate, run._after_optimizer_step
    run.engine.generate = lambda *a: sampled.append(trainable(run)) or generate(*a)
    run._after_optimizer_step = lambda: (
        after(),
        trained.append(trainable(run)),
        old.append([w.clone() for w in run.average._weights]),
    )
    start = trainable(run)
    run.train()
    assert logged(run, "old_policy/decay") == pytest.approx(decays)
    assert flat(sampled[0]).equal(flat(start))
    expected = flat(start)
    for step in range(4):
        if step % 2:  # the second update of a rollout is its last
            decay = decays[step // 2]
            expected = decay * expected + (1 - decay) * flat(trained[step])
        now = torch.cat([w.flatten() for w in old[step]])
        assert torch.allclose(now, expected, rtol=0, atol=1e-7)
    assert (flat(trained[2]) - expected).abs().max() > 1e-3
    # The second rollout is of the old policy, and the trained weights come back.
    assert torch.equal(flat(sampled[1]), torch.cat([w.flatten() for w in old[1]]))
    assert torch.equal(flat(sampled[1]), flat(trained[1])) == (schedule == "delayed")


def test_training_goes_on_from_the_trained_weights_after_a_rollout_of_the_old_policy(tmp_path):
    """Without a gradient nothing moves, though rollouts and losses exchange the weights all the time."""
    run = trainer(tmp_path, NFT, learning_rate=0.0)
    run.train()
    run.average.blend([2 * p for p in run.trainable_parameters()], 0.5)
    run._average_is_trained = False
    before = trainable(run)
    buffer, batch = rollout_of(run, ADVANTAGES)
    run.compute_row_losses(run.model, batch, buffer).mean().backward()
    assert all(torch.equal(before[name], weight) for name, weight in trainable(run).items())
    untouched = trainer(tmp_path / "b", NFT)
    other = fresh_rollout(untouched)
    gap = buffer.trajectories[0].clean_latents - other.trajectories[0].clean_latents
    assert gap.abs().max() > 1e-2  # the rollout was of other weights than the trained ones


# Counting


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        # Four sampler steps, three trained levels; the old policy's call is spared where it is the trained one's:
        ({}, [4 + 3 + 1.5, 4 + 3 + 3]),  # in the first update of a run
        ({"old_policy_schedule": "copy"}, [8.5, 8.5]),  # in the first of each rollout
        *first_fast(
            [
                ({"guidance_scale": 4.0}, [12.5, 14]),  # samples are made with guidance, and trained without
                ({"guidance_scale": 4.0, "guidance_scale_train": 4.0}, [17, 20]),
                ({"old_policy_schedule": "copy", "per_device_train_batch_size": 8, "max_steps": 2}, [7, 7]),
                ({"beta": 0.1}, [11.5, 13]),  # with a reference
            ]
        ),
    ],
)
def test_forwards_are_counted(tmp_path, options, counts):
    run = trainer(tmp_path, NFT, timesteps_per_forward=3, **options)
    run.train()
    assert logged(run, "forwards_per_sample") == counts


# Options


def test_defaults_are_the_papers(tmp_path):
    args = get_defaults(tmp_path)
    assert (args.num_inference_steps, args.num_noise_levels, args.guidance_scale) == (10, 9, 1.0)
    assert (args.mix_beta, args.beta, args.advantage_clip, args.scale_rewards) == (1.0, 1e-4, 5.0, "batch")


def get_defaults(tmp_path):
    from omnitrl import DiffusionNFTConfig

    return DiffusionNFTConfig(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix_beta": 0.0}, "mix_beta=0.0 must be above 0: use 1.0, or 0.1"),
        ({"beta": -1.0}, "beta=-1.0 must be at least 0"),
        ({"nft_mode": "positiv"}, "nft_mode='positiv' is unknown: use one of 'all', 'positive_only'"),
        ({"old_policy_schedule": "ema"}, "old_policy_schedule='ema' is unknown: use one of 'copy', 'linear'"),
        ({"old_policy_decay": 1.5}, "old_policy_decay=1.5 is a share of the old weights in 0..1: use 0.5"),
        ({"advantage_clip": None}, "advantage_clip=None leaves no scale .* use advantage_clip=5.0"),
        ({"ode_solver": "heun"}, "ode_solver='heun' is unknown: use one of 'euler', 'dpmpp_2m'"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        config(tmp_path, NFT, **options)

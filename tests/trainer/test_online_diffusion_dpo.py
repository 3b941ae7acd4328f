# SPDX-License-Identifier: Apache-2.0
"""Online Diffusion-DPO: which samples become a pair, what their loss is, and what the reference is."""

import math

import pytest
import torch
from peft import LoraConfig
from torch.nn.functional import softplus

from omnitrl.errors import InputError, RunError
from omnitrl.rollout import stable_seed
from tests.marks import first_fast
from tests.trainer.helpers import LORA, config, fresh_rollout, logged, same, trainable, trainer
from tests.trainer.test_diffusion_dpo import flat, gradients
from tests.trainer.test_laws import StopAt, _moments


FRESH = LoraConfig(r=4, lora_alpha=16, init_lora_weights="gaussian")  # the identity at first


def numbered(scores):
    """A reward that gives the samples of each rollout these scores, in order."""
    left = []

    def reward(completions, **kwargs):
        left.extend([] if left else scores)
        return [left.pop(0) for _ in completions]

    return reward


def dpo(tmp_path, scores=None, **options):
    rewards = {} if scores is None else {"rewards": numbered(scores)}
    return trainer(tmp_path, "online_diffusion_dpo", **{**rewards, **options})


# Pairs


@pytest.mark.parametrize(
    ("scores", "margin", "units", "weights"),
    [
        ([0, 1, 2, 3, 7, 6, 5, 4], 0.0, [(3, 0), (4, 7)], [1, 0, 0, 1, 1, 0, 0, 1]),
        ([5, 5, 5, 5, 0, 1, 1, 2], 0.0, [(0, 1), (7, 4)], [0, 0, 0, 0, 1, 0, 0, 1]),  # a tie has no weight
        ([0, 1, 2, 3, 0.1, 0.2, 0.3, 0.4], 0.5, [(3, 0), (7, 4)], [1, 0, 0, 1, 0, 0, 0, 0]),  # nor a narrow gap
        ([None, 1, None, 3, None, None, 5, None], 0.0, [(3, 1), None], [0, 1, 0, 1, 0, 0, 0, 0]),  # missing scores
    ],
)
def test_the_best_and_the_worst_of_a_group_are_a_pair(tmp_path, scores, margin, units, weights):
    run = dpo(tmp_path, scores, preference_margin=margin)
    buffer = fresh_rollout(run)
    assert len(buffer.units) == 2
    assert [unit for unit, known in zip(buffer.units, units, strict=True) if known] == [u for u in units if u]
    assert buffer.advantages.tolist() == weights
    assert run.metrics.drain()["frac_invalid_pairs"] == 1 - sum(weights) / 4
    assert all(sample // 4 == group for group, unit in enumerate(buffer.units) for sample in unit)


def test_several_rewards_are_weighted_and_added(tmp_path):
    one, two = numbered([0, 1, 0, 0] * 2), numbered([0, 0, 1, 0] * 2)
    run = dpo(tmp_path, rewards=[one, two], reward_weights=[1.0, 2.0])
    assert fresh_rollout(run).units == [(2, 0), (6, 4)]
    assert run.metrics.drain()["reward_gap"] == 2.0


def test_the_control_pairs_samples_by_the_scores_of_others(tmp_path):
    scores = [0, 1, 2, 3, 7, 6, 5, 4]
    run = dpo(tmp_path, scores, shuffle_advantages=True)
    for rollout in range(3):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(stable_seed(42, "control", rollout)))
        shuffled = torch.tensor(scores)[order]
        expected = [
            (4 * g + int(shuffled[4 * g : 4 * g + 4].argmax()), 4 * g + int(shuffled[4 * g : 4 * g + 4].argmin()))
            for g in range(2)
        ]
        assert fresh_rollout(run, rollout).units == expected
        assert expected != [(3, 0), (4, 7)]


def test_the_two_of_a_pair_have_one_noise_and_stay_together(tmp_path):
    run = dpo(tmp_path, [0, 1, 2, 3, 7, 6, 5, 4], per_device_train_batch_size=2, timesteps_per_forward=4)
    buffer = fresh_rollout(run)
    batch = run.cut(buffer, buffer.samples_of(0, 2))[0]
    assert len(batch) == 2 * 2 * 4
    pairs = batch.samples.reshape(-1, 2).tolist()
    assert sorted(map(tuple, pairs)) == [(3, 0)] * 4 + [(4, 7)] * 4
    assert torch.equal(batch.noise[::2], batch.noise[1::2])
    assert torch.equal(batch.sigmas[::2], batch.sigmas[1::2])
    assert len(set(batch.sigmas[::2].tolist())) == 8
    clean = torch.stack([buffer.trajectories[i].clean_latents for i in batch.samples])
    assert torch.equal(batch.clean_latents, clean)


# The loss


def test_the_first_gradient_is_that_of_the_formula_in_float64(tmp_path):
    scores, options = [0, 1, 2, 3, 7, 6, 5, 4], {"beta": 20.0, "per_device_train_batch_size": 2, "max_steps": 1}
    run = dpo(tmp_path / "a", scores, max_grad_norm=0.0, **options)
    ours = gradients(run)

    again = dpo(tmp_path / "b", scores, **options)
    buffer, model = fresh_rollout(again), again.flow_model
    model.networks.double()
    margins = []
    for group, pair in enumerate([(3, 0), (4, 7)]):
        clean = torch.stack([buffer.trajectories[i].clean_latents for i in pair]).double()
        generator = torch.Generator().manual_seed(stable_seed(42, "levels", 0, group))
        sigmas = 0.001 + 0.998 * torch.randn(4, generator=generator).sigmoid()
        noise = torch.randn(4, *clean.shape[1:], generator=generator).double()
        conditions = buffer.conditions_of(list(pair))
        for sigma, eps in zip(sigmas, noise, strict=True):
            latents = (1 - sigma.double()) * clean + sigma.double() * eps

            def error(latents=latents, sigma=sigma, eps=eps, clean=clean, conditions=conditions):
                velocity = model.velocity(latents, 1000 * sigma.expand(2), conditions)
                return (velocity - (eps - clean)).square().mean(dim=(1, 2, 3))

            with torch.no_grad(), model.transformer.disable_adapter():
                reference = error()
            gap = error() - reference
            margins.append(-20.0 / 2 * (gap[0] - gap[1]))
    margins = torch.stack(margins)
    softplus(-margins).mean().backward()
    exact = {name: p.grad for name, p in model.networks.named_parameters() if p.requires_grad and p.grad is not None}
    assert logged(run, "rewards/margins")[0] == pytest.approx(margins.mean().item(), rel=1e-3)
    assert ours.keys() == exact.keys()
    assert (flat(ours) - flat(exact)).norm() <= 1e-4 * flat(exact).norm()


@pytest.mark.parametrize(
    ("form", "value"), first_fast([("sigmoid", math.log(2)), ("ipo", 1 / (4 * 50.0**2)), ("hinge", 1.0)])
)
def test_t15_at_the_reference(tmp_path, form, value):
    run = dpo(tmp_path, beta=50.0, loss_type=form, peft_config=FRESH, max_steps=1)
    run.train()
    assert logged(run, "loss") == pytest.approx([value], abs=1e-7)
    assert logged(run, "rewards/margins") == logged(run, "rewards/chosen") == [0.0]


def test_a_pair_without_a_preference_counts_in_the_mean_with_a_loss_of_zero(tmp_path):
    """So that the step is smaller where less was found out, as for groups of equal rewards in policy gradients."""
    options = {"peft_config": FRESH, "max_steps": 1, "per_device_train_batch_size": 2, "max_grad_norm": 0.0}
    both = dpo(tmp_path / "a", [0, 1, 2, 3, 7, 6, 5, 4], **options)
    one = dpo(tmp_path / "b", [0, 1, 2, 3, 5, 5, 5, 5], **options)
    other = dpo(tmp_path / "c", [5, 5, 5, 5, 7, 6, 5, 4], **options)
    whole, first, second = (flat(gradients(run)) for run in (both, one, other))
    assert first.norm() > 0
    assert (whole - first - second).norm() <= 1e-5 * whole.norm()
    assert logged(one, "loss") == pytest.approx([math.log(2) / 2])
    assert logged(one, "frac_invalid_pairs") == [0.5]
    assert logged(one, "error/chosen")[0] != logged(both, "error/chosen")[0]  # of the pair that counts


def test_law_08_equal_rewards_move_nothing(tmp_path):
    run = dpo(tmp_path, [1.0] * 8, max_steps=2, weight_decay=0.0)
    before = trainable(run)
    run.train()
    assert same(before, trainable(run))
    assert logged(run, "loss") == [0.0, 0.0]
    assert logged(run, "frac_invalid_pairs") == [1.0]
    assert not logged(run, "rewards/margins")  # of no pair


@pytest.mark.parametrize(("batch", "accumulation", "levels"), first_fast([(1, 2, 2), (2, 1, 1), (1, 2, 4)]))
def test_law_09_any_split_gives_the_gradient_of_the_one_big_batch(tmp_path, batch, accumulation, levels):
    options = {"max_steps": 1, "max_grad_norm": 0.0}
    scores = [0, 1, 2, 3, 7, 6, 5, 4]
    whole = dpo(tmp_path / "a", scores, per_device_train_batch_size=2, timesteps_per_forward=4, **options)
    split = dpo(
        tmp_path / "b",
        scores,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        timesteps_per_forward=levels,
        **options,
    )
    one, other = flat(gradients(whole)), flat(gradients(split))
    assert one.norm() > 0
    assert (one - other).norm() <= 1e-5 * one.norm()


# The reference


def test_the_policy_becomes_the_reference_after_so_many_steps(tmp_path):
    """Margins are 0 in the first update after each."""
    run = dpo(tmp_path, ref_update_steps=2, max_steps=5)
    run.train()
    zero = [value == 0.0 for value in logged(run, "rewards/margins")]
    assert zero == [True, False, True, False, True]
    never = dpo(tmp_path / "never", max_steps=3)
    never.train()
    assert all(value != 0.0 for value in logged(never, "rewards/margins"))  # adapters off: not the start of this run


def test_with_a_fresh_adapter_the_first_reference_is_the_base(tmp_path):
    runs = [dpo(tmp_path / str(every), ref_update_steps=every, peft_config=FRESH, max_steps=3) for every in (None, 9)]
    for run in runs:
        run.train()
    assert logged(runs[0], "loss") == pytest.approx(logged(runs[1], "loss"), abs=1e-6)


@pytest.mark.parametrize("peft_config", first_fast([LORA, None]))
@pytest.mark.parametrize("stop", first_fast([1, 3]))
def test_law_10_resumed_equals_uninterrupted(tmp_path, stop, peft_config):
    common = {"save_strategy": "steps", "save_steps": stop, "ref_update_steps": 2, "peft_config": peft_config}
    straight = dpo(tmp_path / "a", max_steps=5, **common)
    straight.train()
    dpo(tmp_path / "b", max_steps=5, callbacks=[StopAt(stop)], **common).train()
    resumed = dpo(tmp_path / "b", max_steps=5, **common)
    resumed.train(resume_from_checkpoint=True)
    assert same(trainable(straight), trainable(resumed))
    assert all(map(torch.equal, _moments(straight), _moments(resumed)))
    assert logged(straight, "rewards/margins") == logged(resumed, "rewards/margins")
    assert straight.num_forwards == resumed.num_forwards


def test_a_checkpoint_of_another_reference_is_refused(tmp_path):
    dpo(tmp_path / "a", max_steps=1, save_strategy="steps", save_steps=1, ref_update_steps=2).train()
    checkpoint = str(tmp_path / "a" / "out" / "checkpoint-1")
    with pytest.raises(RunError, match="with ref_update_steps=2, which decides what the reference is"):
        dpo(tmp_path / "b", ref_update_steps=4).train(resume_from_checkpoint=checkpoint)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta=0.0 must be above 0: use 100.0"),
        ({"loss_type": "dpo"}, "loss_type='dpo' is unknown: use one of 'sigmoid', 'ipo', 'hinge'"),
        ({"preference_margin": -0.1}, "preference_margin=-0.1 must be at least 0"),
        ({"ref_update_steps": 0}, "ref_update_steps=0 must be at least 1"),
        ({"num_generations": 1}, "num_generations=1 must be at least 2"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch' has no effect on pairs"),
        ({"advantage_clip": 1.0}, "advantage_clip=1.0 has no effect on pairs"),
        ({"sigma_sampling": "gird"}, "Did you mean 'grid'"),
    ],
)
def test_options_are_checked(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        config(tmp_path, "online_diffusion_dpo", **options)


def test_batches_count_pairs(tmp_path):
    args = config(tmp_path, "online_diffusion_dpo", generation_batch_size=32, per_device_train_batch_size=4)
    assert (args.prompts_per_rollout, args.steps_per_generation) == (8, 2)
    args = config(tmp_path, "online_diffusion_dpo", generation_batch_size=None, per_device_train_batch_size=4)
    assert (args.generation_batch_size, args.steps_per_generation) == (16, 1)


def test_forwards_are_counted(tmp_path):
    """8 samples of 4 steps, and 4 samples at 4 levels by policy and reference."""
    run = dpo(tmp_path, max_steps=2)
    run.train()
    assert run.num_forwards == 8 * 4 + 4 * 4 * 2
    assert logged(run, "forwards_per_sample") == [(8 * 4 + 4 * 4 * 2) / 4]

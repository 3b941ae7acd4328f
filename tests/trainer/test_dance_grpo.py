# SPDX-License-Identifier: Apache-2.0
"""DanceGRPO: its loss, which samples are trained, and a loss for each reward."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omnitrl.algorithms import shifted_sigmas
from omnitrl.errors import InputError, RunError
from omnitrl.trainer import DanceGRPOConfig
from omnitrl.trainer.replay_trainer import Replayed
from tests.golden_cases import load_case
from tests.marks import first_fast
from tests.trainer.helpers import brightness, config, fresh_rollout, logged, same, trainable
from tests.trainer.helpers import trainer as any_trainer
from tests.trainer.test_laws import StopAt


def trainer(tmp_path, **options):
    return any_trainer(tmp_path, "dance_grpo", **options)


def redness(completions, **kwargs):
    return [float(np.asarray(image)[..., 0].mean() / 255) for image in completions]


def kept(buffer):
    """Numbers of the samples that are trained."""
    return [i for (i,) in buffer.units]


# Defaults


def test_defaults_are_the_papers():
    args = DanceGRPOConfig(output_dir="out", use_cpu=True)
    assert (args.sde_type, args.noise_level, args.same_init_noise) == ("dance_sde", 0.3, True)
    assert (args.num_inference_steps, args.num_generations, args.beta, args.epsilon) == (16, 12, 0.0, 1e-4)
    assert (args.scale_rewards, args.advantage_ddof, args.advantage_eps) == ("group", 1, 1e-8)
    trained = [args.trained_steps(rollout) for rollout in range(20)]
    assert {len(steps) for steps in trained} == {9}  # int(0.6 · 15): the last of 16 is an ODE step
    assert set().union(*trained) == set(range(15))


# Which samples are trained


def test_the_best_and_the_worst_of_each_group_are_trained_on_advantages_of_the_whole(tmp_path):
    whole = fresh_rollout(trainer(tmp_path))
    run = trainer(tmp_path, best_of_n=2)
    buffer = fresh_rollout(run)
    assert torch.equal(buffer.advantages, whole.advantages)
    expected = []
    for group in buffer.advantages.view(2, 4):
        expected += [{int(group.argmax()), int(group.argmin())}]
    assert [set(kept(buffer)[:2]), {i - 4 for i in kept(buffer)[2:]}] == expected
    assert buffer.num_trained == 4
    assert len(whole.units) == 8
    micro_batches = [buffer.samples_of(position, 2) for position in range(2)]
    assert sorted(itertools.chain(*micro_batches)) == sorted(kept(buffer))


def test_a_rank_with_whole_groups_chooses_as_one_process_does(tmp_path):
    run = trainer(tmp_path, best_of_n=2, generation_batch_size=16)
    advantages = torch.randn(16, generator=torch.Generator().manual_seed(0))
    whole, _ = run.select(advantages)
    first, second = run.select(advantages[:8])[0], run.select(advantages[8:])[0]
    assert whole == first + [(i + 8,) for (i,) in second]
    assert len(whole) == 8


def test_forwards_are_counted_by_trained_sample(tmp_path):
    """Eight samples of four steps; three steps of the four that are kept: (32 + 12) / 4."""
    run = trainer(tmp_path, best_of_n=2, per_device_train_batch_size=2, max_steps=2)
    run.train()
    assert logged(run, "forwards_per_sample") == [11]
    run = trainer(tmp_path, max_steps=2)
    run.train()
    assert logged(run, "forwards_per_sample") == [4 + 3]


def test_old_log_probs_of_another_guidance_are_computed_for_what_is_trained(tmp_path):
    """Guided rollouts of 8 · 4 · 2 calls, then 4 · 3 for the old log-probs of four samples and as many in training."""
    run = trainer(tmp_path, best_of_n=2, guidance_scale=4.0, guidance_scale_train=1.0, per_device_train_batch_size=2)
    buffer = fresh_rollout(run)
    assert run._forwards == 8 * 4 * 2 + 4 * 3
    (batch,) = buffer.replay(kept(buffer), timesteps_per_forward=3)
    with torch.no_grad():
        log_probs = run.replay(run.model, batch, buffer).log_probs
    assert (log_probs - batch.old_log_probs).abs().max() <= 1e-5


def test_the_terminal_says_how_many_are_trained(tmp_path):
    some = trainer(tmp_path, best_of_n=4, num_generations=8).describe_run()
    assert some.endswith("= 1 prompts × 8, 1 optimizer step(s) each on the 2 best and the 2 worst of each prompt")
    assert trainer(tmp_path).describe_run().endswith("= 2 prompts × 4, 2 optimizer step(s) each")


def test_the_control_chooses_by_shuffled_advantages(tmp_path):
    real, control = (fresh_rollout(trainer(tmp_path, best_of_n=2, shuffle_advantages=s)) for s in (False, True))
    assert not torch.equal(real.advantages, control.advantages)
    assert torch.equal(real.advantages.sort().values, control.advantages.sort().values)
    for buffer in (real, control):
        for group, scores in enumerate(buffer.advantages.view(2, 4)):
            extremes = {int(scores.argmax()) + 4 * group, int(scores.argmin()) + 4 * group}
            assert set(kept(buffer)[2 * group : 2 * group + 2]) == extremes
    assert kept(real) != kept(control)


# Sizes


def sizes(tmp_path, monkeypatch, world, size, number, batch, **options):
    monkeypatch.setattr(DanceGRPOConfig, "world_size", world)
    options = {"generation_batch_size": None, **options}
    return config(
        tmp_path,
        "dance_grpo",
        num_generations=size,
        best_of_n=number,
        per_device_train_batch_size=batch,
        **options,
    )


def is_cut_evenly(args, world):
    """Whole groups on each device, and micro-batches that take all that is trained there."""
    groups, rest = divmod(args.generation_batch_size, args.num_generations * world)
    trained = groups * args.units_per_group
    return rest == 0 and trained == args.per_device_train_batch_size * args.steps_per_generation


SIZES = list(itertools.product((1, 2), ((4, 2), (6, 2), (6, 4), (8, 2), (24, 8)), (1, 2, 3, 4, 8)))


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_the_smallest_rollout_has_whole_groups_on_each_device(tmp_path, monkeypatch, accumulation):
    for world, (size, number), batch in SIZES:
        args = sizes(tmp_path, monkeypatch, world, size, number, batch, gradient_accumulation_steps=accumulation)
        assert is_cut_evenly(args, world)
        assert args.steps_per_generation % accumulation == 0
        smaller = [
            groups
            for groups in range(world, args.prompts_per_rollout, world)
            if groups * number % (batch * world * accumulation) == 0
        ]
        assert smaller == [], (world, size, number, batch)


def test_a_size_is_taken_if_it_fits_and_otherwise_told_one_that_does(tmp_path, monkeypatch):
    refused = 0
    for (world, (size, number), batch), groups in itertools.product(SIZES, range(1, 7)):
        fits = groups % world == 0 and groups * number % (batch * world) == 0
        try:
            args = sizes(tmp_path, monkeypatch, world, size, number, batch, generation_batch_size=groups * size)
        except InputError as error:
            assert not fits
            works = int(re.search(r": use (\d+)\.$", str(error))[1])
            args = sizes(tmp_path, monkeypatch, world, size, number, batch, generation_batch_size=works)
            assert works > groups * size
            refused += 1
        else:
            assert fits
        assert is_cut_evenly(args, world)
    assert 50 < refused < 250


def test_steps_that_leave_a_group_on_two_devices_are_told_a_number_that_works(tmp_path, monkeypatch):
    message = (
        r"^steps_per_generation=3 with per_device_train_batch_size=2 makes no whole groups on each of 2 device\(s\), "
        r"each of which gives 4 to train on: use 4\.$"
    )
    with pytest.raises(InputError, match=message):
        sizes(tmp_path, monkeypatch, 2, 6, 4, 2, steps_per_generation=3)
    args = sizes(tmp_path, monkeypatch, 2, 6, 4, 2, steps_per_generation=4)
    assert args.generation_batch_size == 4 * 6
    assert is_cut_evenly(args, 2)


def test_all_members_may_lie_on_several_devices(tmp_path, monkeypatch):
    """Nothing is chosen within a group then: one group of four on two devices."""
    for number in (None, 4):
        args = sizes(tmp_path, monkeypatch, 2, 4, number, 2)
        assert (args.generation_batch_size, args.steps_per_generation) == (4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of_n": 3}, "best_of_n=3 must be an even number from 2 to num_generations=4, .*: use 2, or None"),
        ({"best_of_n": 6}, "best_of_n=6 must be an even number .*: use 4, or None to train all"),
        ({"best_of_n": 0}, "best_of_n=0 must be an even number .*: use 2, or None to train all"),
        ({"best_of_n": 4, "num_generations": 3, "generation_batch_size": 12}, "from 2 to num_generations=3.*: use 2"),
        (
            {"per_reward_loss": True, "multi_objective_aggregation": "normalize_then_sum"},
            "per_reward_loss=True .* multi_objective_aggregation='normalize_then_sum' would do nothing: leave one",
        ),
        (
            {"best_of_n": 2, "generation_batch_size": 4},
            r"generation_batch_size=4 makes 1 group\(s\), of which each gives 2 to train on, .* of .*=4: use 8",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        config(tmp_path, "dance_grpo", **options)


# Losses


def by_hand(run, buffer, rewards, weights, per_reward):
    """Gradients of the loss of a fresh rollout, written out in float64 from the velocity on."""
    rewards = torch.tensor(rewards, dtype=torch.float64)  # (N, F)
    columns = rewards if per_reward else rewards @ torch.tensor(weights, dtype=torch.float64)[:, None]
    scales = weights if per_reward else [1.0]
    groups = columns.unflatten(0, (-1, 4))
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-8)).flatten(0, 1)
    total = torch.zeros((), dtype=torch.float64)
    for i in kept(buffer):
        (batch,) = buffer.replay([i], timesteps_per_forward=3)
        x, drawn = batch.latents.double(), batch.next_latents.double()
        v = run.model(batch.latents, batch.timesteps, batch.conditions, 1.0).double()
        t = buffer.table.sigmas.double()[batch.steps].view(-1, 1, 1, 1)
        h = t - buffer.table.sigmas.double()[batch.steps + 1].view(-1, 1, 1, 1)
        clean = x - t * v
        mean = x - h * v - 0.09 * h / (2 * t**2) * (x - (1 - t) * clean)
        log_prob = (-((drawn - mean) ** 2) / (2 * 0.09 * h)).mean((1, 2, 3))
        ratio = (log_prob - log_prob.detach()).exp()
        for f, scale in enumerate(scales):
            total = total + scale * (-advantages[i, f] * ratio).sum()
    run.model.zero_grad()
    (total / (len(kept(buffer)) * 3)).backward()
    return {name: p.grad.double() for name, p in run.flow_model.networks.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("per_reward", first_fast([True, False]))
@pytest.mark.parametrize("number", [None, 2])
def test_the_first_gradient_is_that_of_the_formula(tmp_path, per_reward, number):
    scored = {"brightness": [], "redness": []}

    def watched(reward):
        def score(completions, **kwargs):
            values = reward(completions=completions, **kwargs)
            scored[reward.__name__] += values
            return values

        return score

    run = trainer(
        tmp_path,
        rewards=[watched(brightness), watched(redness)],
        reward_weights=[0.5, 2.0],
        per_reward_loss=per_reward,
        best_of_n=number,
        per_device_train_batch_size=8 if number is None else 4,
        rollout_batch_size=8,
        max_steps=1,
        max_grad_norm=0.0,
    )
    ours = {}

    def keep(*_):
        named = run.flow_model.networks.named_parameters()
        ours.update({name: p.grad.double() for name, p in named if p.grad is not None})

    run.create_optimizer()
    run.optimizer.register_step_pre_hook(keep)
    other = trainer(
        tmp_path,
        best_of_n=number,
        reward_weights=[0.5, 2.0],
        rewards=[brightness, redness],
        per_reward_loss=per_reward,
    )
    buffer = fresh_rollout(other)
    run.train()
    rewards = list(zip(*scored.values(), strict=True))[:8]
    expected = by_hand(other, buffer, rewards, [0.5, 2.0], per_reward)
    assert expected.keys() == ours.keys()
    size = torch.cat([g.flatten() for g in expected.values()]).norm()
    gap = torch.cat([(ours[name] - expected[name]).flatten() for name in expected]).norm()
    assert size > 1e-3
    assert gap <= 1e-4 * size, f"{gap / size:.1e}"


def replayed_loss(run, log_probs, old_log_probs, advantages):
    nothing = torch.zeros(())
    batch = SimpleNamespace(old_log_probs=old_log_probs, advantages=advantages)
    return run.policy_loss(Replayed(nothing, nothing, nothing, log_probs), batch, None)


def test_case_05h_the_public_codes_loss_and_gradient(tmp_path):
    case, stored = load_case("05h")
    divisor = case["parameters"]["gradient_accumulation_steps"] * case["parameters"]["n_train_timesteps"]
    for per_reward in (False, True):
        run = trainer(tmp_path, epsilon=0.2, per_reward_loss=per_reward)
        log_probs = stored["log_prob"].clone().requires_grad_(True)
        advantages = stored["advantages"][:, None] if per_reward else stored["advantages"]
        loss = replayed_loss(run, log_probs, stored["old_log_prob"], advantages).mean() / divisor
        loss.backward()
        torch.testing.assert_close(loss.reshape(1), stored["dance_loss"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(log_probs.grad, stored["dance_grad_log_prob"], rtol=1e-5, atol=1e-6)


def test_a_loss_for_each_reward_is_not_that_of_summed_advantages(tmp_path):
    """One reward wants the step likelier and is clipped, the other wants it less likely and is not."""
    run = trainer(
        tmp_path, epsilon=0.2, per_reward_loss=True, rewards=[brightness, redness], reward_weights=[2.0, 3.0]
    )
    log_probs = torch.tensor([0.5, -0.5, 0.1, 0.0], requires_grad=True)
    advantages = torch.tensor([[1.0, -0.5], [-7.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    loss = replayed_loss(run, log_probs, torch.zeros(4), advantages)
    up, down, near = (torch.tensor(x).exp().item() for x in (0.5, -0.5, 0.1))
    expected = [2 * -1.2 + 3 * 0.5 * up, 2 * 5 * 0.8 + 3 * -down, -5 * near, 0.0]
    assert loss.tolist() == pytest.approx(expected, rel=1e-5)
    loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([3 * 0.5 * up, -3 * down, -5 * near, 0.0], rel=1e-6)


def test_each_reward_has_its_own_advantages_and_a_missing_one_no_say(tmp_path):
    run = trainer(
        tmp_path, rewards=[brightness, redness], reward_weights=[1.0, -2.0], per_reward_loss=True, best_of_n=2
    )
    run.get_train_dataloader()
    rewards = torch.tensor(
        [[0.0, 1.0], [1.0, float("nan")], [2.0, 3.0], [3.0, 2.0], [5.0, 1.0], [5.0, 2.0], [5.0, 3.0], [5.0, 4.0]]
    )
    advantages = run.compute_advantages(rewards)
    one = torch.tensor([-1.5, -0.5, 0.5, 1.5])
    expected = torch.zeros(8, 2)
    expected[:4, 0] = one / one.std()
    expected[:4, 1] = -torch.tensor([-1.0, 0.0, 1.0, 0.0])  # std 1 of three; turned, for the weight is negative
    expected[4:, 1] = -one / one.std()
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)
    assert run.loss_weights.tolist() == [1.0, 2.0]
    # Scores A_0 + 2 A_1 of the first group: 0.84, -0.39, -1.61, 1.16.
    units, same_advantages = run.select(advantages)
    assert units == [(2,), (3,), (4,), (7,)]
    assert torch.equal(same_advantages, advantages)


def test_a_reward_that_is_only_watched_has_no_loss(tmp_path):
    both = trainer(tmp_path, rewards=[brightness, redness], reward_weights=[1.0, 0.0], per_reward_loss=True)
    assert fresh_rollout(both).advantages.shape == (8, 1)
    assert torch.equal(fresh_rollout(both).advantages[:, 0], fresh_rollout(trainer(tmp_path)).advantages)


# Sampling


def test_the_last_step_is_the_predicted_data(tmp_path):
    """What DanceGRPO decodes, the clean latents as predicted by the last network call, is our last ODE step."""
    run = trainer(tmp_path, rollout_batch_size=4)
    decoded, calls = [], []
    decode, policy = run.flow_model.decode, run.engine._policy

    def watched(latents, *args):
        velocity = policy()(latents, *args)
        calls.append((latents, velocity))
        return velocity

    run.flow_model.decode = lambda latents, size: decoded.append(latents) or decode(latents, size)
    run.engine._policy = lambda: watched
    buffer = fresh_rollout(run)
    last = [calls[3], calls[7]]
    sigma = buffer.table.sigmas[3]
    for latents, (state, v) in zip(decoded, last, strict=True):
        torch.testing.assert_close(latents, state - sigma * v, rtol=0, atol=1e-6)
        assert (latents - state).abs().max() > 1e-3


def test_the_authors_grid_is_not_the_stock_one():
    """The figures of the trainer's page: 16 steps of shift 3."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(16)
    theirs, stock = shifted_sigmas(16, 3.0), scheduler.sigmas
    assert [round(float(s), 4) for s in theirs[[1, 8, 14, 15, 16]]] == [0.9783, 0.75, 0.3, 0.1667, 0.0]
    assert [round(float(s), 4) for s in stock[[1, 8, 14, 15, 16]]] == [0.9768, 0.7254, 0.183, 0.0089, 0.0]


# Going on


@pytest.mark.parametrize("options", first_fast([{"best_of_n": 2, "per_reward_loss": True}, {"best_of_n": 2}]))
def test_resumed_in_the_midst_of_a_rollout_equals_uninterrupted(tmp_path, options):
    common = {
        "rewards": [brightness, redness],
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "max_steps": 5,
        **options,
    }
    straight = trainer(tmp_path / "a", **common)
    straight.train()
    trainer(tmp_path / "b", callbacks=[StopAt(3)], **common).train()
    resumed = trainer(tmp_path / "b", **common)
    resumed.train(resume_from_checkpoint=True)
    assert same(trainable(straight), trainable(resumed))
    assert logged(straight, "loss") == logged(resumed, "loss")
    assert logged(straight, "forwards_per_sample") == logged(resumed, "forwards_per_sample")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of_n": None}, "written with best_of_n=2, which decides which samples a rollout has"),
        ({"per_reward_loss": False}, "written with per_reward_loss=True"),
        ({"reward_weights": [1.0, 2.0]}, r"written with reward_weights=\[1.0, 1.0\]"),
    ],
)
def test_a_rollout_of_other_losses_is_not_gone_on_with(tmp_path, options, message):
    common = {"rewards": [brightness, redness], "per_device_train_batch_size": 2, "best_of_n": 2}
    common |= {"per_reward_loss": True, "save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, max_steps=1, **common).train()
    with pytest.raises(RunError, match=message):
        trainer(tmp_path, max_steps=2, **{**common, **options}).train(resume_from_checkpoint=True)

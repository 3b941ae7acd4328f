# SPDX-License-Identifier: Apache-2.0
"""MixGRPO through its public classes: window schedule, advantages, loss and Flash."""

import dataclasses

import pytest
import torch

from omnitrl import FlowGRPOConfig, MixGRPOConfig
from omnitrl.algorithms import sde_window
from tests.golden_cases import load_case
from tests.marks import first_fast
from tests.tiny_models import tiny_model
from tests.trainer.helpers import all_rows, brightness, fresh_rollout, logged, trainer


FLASH = {"ode_solver": "dpmpp_2m", "tail_ratio": 0.4}
FLASH_STAR = {"ode_solver": "dpmpp_2m", "tail_ratio": 0.2, "sde_window_strategy": "first"}


def config(tmp_path, **options):
    return MixGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def mix(tmp_path, **options):
    return trainer(tmp_path, "mix_grpo", **options)


def gradients_of_first_update(run):
    """Gradients of the optimizer step, before it is taken."""
    kept = {}

    def keep(*_):
        named = run.flow_model.networks.named_parameters()
        kept.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    run.create_optimizer()
    run.optimizer.register_step_pre_hook(keep)
    run.train()
    return kept


# Windows


@pytest.mark.parametrize(
    ("case", "whole", "options"),
    [
        ("default_mixgrpo_sh", 20 * 25, {}),
        ("flash_sh", 20 * 20, {"sde_window_interval": 20, **FLASH}),
        ("flash_star_sh", 60, {"sde_window_interval": 20, **FLASH_STAR}),
        ("exp_decay", 16 * 5 + 3 * 4 + 3, {"sde_window_strategy": "exp_decay", "sde_window_interval": 5}),
    ],
)
def test_case_03c_the_config_trains_the_steps_of_the_public_recipes(tmp_path, case, whole, options):
    setting, reference = load_case("03c")[0]["parameters"][case], load_case("03c")[1][case]
    args = config(tmp_path, sde_window_range=[0, setting["max_timesteps"]], **options)
    assert (args.num_inference_steps, args.sde_window_size) == (25, setting["group_size"])
    ours = [list(args.trained_steps(rollout)) for rollout in range(whole)]
    assert ours == reference[:whole].tolist()


@pytest.mark.parametrize("options", [{}, FLASH, {"sde_window_strategy": "random", "sde_window_interval": 1}])
def test_t20_windows_are_whole_and_cover_every_step(tmp_path, options):
    args = config(tmp_path, **options)
    cycle = 21 * args.sde_window_interval  # starts 0 to 20 of 24 steps that may be stochastic
    windows = [args.window(rollout) for rollout in range(cycle)]
    assert all(window == tuple(range(window[0], window[0] + 4)) and window[-1] <= 23 for window in windows)
    assert windows == [args.window(rollout) for rollout in range(cycle)]  # no state: the same on all ranks
    if args.sde_window_strategy == "progressive":
        counts = [sum(step in window for window in windows) for step in range(24)]
        assert counts[3:21] == [4 * 25] * 18  # every interior step equally often
        assert counts[:3] == counts[:20:-1] == [25, 50, 75]
        assert [args.window(rollout)[0] for rollout in (24, 25, cycle - 1, cycle)] == [0, 1, 20, 0]


def test_the_window_moves_as_training_goes_on(tmp_path):
    options = {"num_inference_steps": 6, "sde_window_size": 2, "sde_window_interval": 2, "max_steps": 8}
    run = mix(tmp_path, num_iterations=1, steps_per_generation=1, generation_batch_size=None, **options)
    seen = []
    made = run.make_rollout
    run.make_rollout = lambda rollout: seen.append(made(rollout)) or seen[-1]
    run.train()
    assert [buffer.steps for buffer in seen] == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4)]
    for buffer in seen:
        stochastic = tuple(buffer.transitions.stochastic.nonzero().flatten().tolist())
        assert stochastic == buffer.steps


# Advantages


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "mix_advantage_aggr_w0p25_0p75"),
        ({"reward_weights": [1.0, 0.0]}, "mix_reward_aggr"),
        ({"reward_weights": [1.0, 0.0], "advantage_trim": 0.25}, "mix_reward_aggr_trim_0p25"),
        ({"reward_weights": [1.0, 0.0], "advantage_trim": 0.5}, "mix_reward_aggr_trim_0p5"),
    ],
)
def test_case_04b_advantages_are_those_of_the_public_code(tmp_path, options, expected):
    _, stored = load_case("04b")
    weights = options.pop("reward_weights", [0.25, 0.75])
    run = mix(
        tmp_path,
        rewards=[brightness, lambda completions, **_: [0.0] * len(completions)],
        reward_weights=weights,
        generation_batch_size=16,
        **options,
    )
    run.get_train_dataloader()
    rewards = torch.stack([stored["rewards"], stored["rewards_b"]], 1)[:, [i for i, w in enumerate(weights) if w]]
    torch.testing.assert_close(run.compute_advantages(rewards), stored[expected], rtol=1e-5, atol=1e-6)


def test_equal_rewards_move_nothing_in_spite_of_the_small_eps(tmp_path):
    """In float32, 1e-8 under a rounding error makes -0.58 for all members of such a group."""
    run = mix(tmp_path, rewards=lambda completions, **_: [0.1] * len(completions))
    assert run.args.advantage_eps == 1e-8
    assert fresh_rollout(run).advantages.tolist() == [0.0] * 8


def test_each_reward_has_an_equal_voice(tmp_path):
    """With sums, the reward of the wider range decides alone."""

    def narrow(prompts, completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    def wide(prompts, completions, **_):
        return [1000.0 * (i < 2) for i in range(len(completions))]

    each = fresh_rollout(mix(tmp_path, rewards=[narrow, wide])).advantages
    summed = fresh_rollout(
        mix(tmp_path, rewards=[narrow, wide], multi_objective_aggregation="sum_then_normalize")
    ).advantages
    root = (4 / 3) ** 0.5  # sample std of two zeros and two ones: 1/sqrt(3)
    one = root**-1 * 1.0
    assert each[:4].tolist() == pytest.approx([0.0, 2 * one, -2 * one, 0.0], abs=1e-5)
    assert summed[:4].tolist() == pytest.approx([one, one, -one, -one], abs=2e-3)


# The loss


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_the_first_gradient_is_that_of_the_policy_gradient_in_float64(tmp_path, guidance):
    """Where the ratio is 1 the loss is -A r, whose gradient is -A ∇ log p, whatever the clip."""
    options = {"num_inference_steps": 6, "sde_window_size": 2, "guidance_scale": guidance, "max_grad_norm": 0.0}
    run = mix(tmp_path, per_device_train_batch_size=8, max_steps=1, **FLASH, **options)
    ours = gradients_of_first_update(run)

    exact = mix(tmp_path, model=tiny_model(), per_device_train_batch_size=8, max_steps=1, **FLASH, **options)
    buffer = fresh_rollout(exact)
    batch = all_rows(buffer)
    exact.flow_model.networks.double()
    sigmas = buffer.table.sigmas.double()
    t, then = sigmas[batch.steps].view(-1, 1, 1, 1), sigmas[batch.steps + 1].view(-1, 1, 1, 1)
    singular = torch.where(t == 1, sigmas[1], t)
    diffusion, h = 0.7 * (t / (1 - singular)).sqrt(), t - then
    x, velocity = batch.latents.double(), exact.flow_model.velocity
    v = velocity(x, batch.timesteps.double(), batch.conditions, guidance)
    mean = x - h * (v + diffusion**2 / (2 * t) * (x + (1 - t) * v))
    density = torch.distributions.Normal(mean, (diffusion * h.sqrt()).expand_as(mean))
    log_probs = density.log_prob(batch.next_latents.double()).flatten(1).mean(1)
    (-(batch.advantages.double() * log_probs).mean()).backward()

    theirs = {n: p.grad for n, p in exact.flow_model.networks.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    gap = torch.cat([(ours[name] - theirs[name]).flatten() for name in ours]).norm()
    size = torch.cat([theirs[name].flatten() for name in ours]).norm()
    assert size > 1e-6
    assert gap <= 1e-4 * size, f"{gap / size:.1e}"


def test_there_is_no_kl_by_default(tmp_path):
    run = mix(tmp_path, max_steps=1)
    assert run.reference is None
    run.train()
    assert logged(run, "kl") == []


# Flash


@pytest.mark.parametrize(
    ("options", "tail"), [({}, {0: 21, 20: 1}), (FLASH, {0: 8, 20: 1}), (FLASH_STAR, {0: 4, 20: 4})]
)
def test_t20_the_tail_of_each_variant_ends_at_zero(tmp_path, options, tail):
    run = mix(tmp_path, **{"num_inference_steps": 25, "sde_window_size": 4, **options})
    full = run.flow_model.sigmas(25)
    for start, calls in tail.items():
        rollout = 25 * start
        table, transitions = run.tables(rollout)
        end = run.args.window(rollout)[-1] + 1
        assert table.num_steps == end + calls
        assert table.sigmas[-1] == 0
        assert torch.equal(table.sigmas[: end + 1], full.sigmas[: end + 1])
        assert (table.sigmas.diff() < 0).all()
        assert tuple(transitions.stochastic.nonzero().flatten().tolist()) == run.args.window(rollout)


@pytest.mark.parametrize(
    ("options", "sampling"),
    first_fast(
        [
            ({**FLASH, "shared_prefix": True}, (2 * 2 + 8 * (2 + 3)) / 8),
            ({}, 12.0),
            (FLASH, 2 + 2 + int(0.4 * 8)),
            (FLASH_STAR, 0 + 2 + int(0.2 * 10)),
        ]
    ),
)
def test_the_forwards_of_each_variant(tmp_path, options, sampling):
    """The third window of 12 steps, [2, 3], has two steps before it and eight after it."""
    sizes = {"num_inference_steps": 12, "sde_window_size": 2, "sde_window_interval": 1}
    run = mix(tmp_path, max_steps=6, **sizes, **options)
    run.train()
    assert logged(run, "forwards_per_sample")[2] == pytest.approx(sampling + 2)


def test_members_of_a_group_start_from_one_noise(tmp_path):
    buffer = fresh_rollout(mix(tmp_path))
    first, second, other = (buffer.trajectories[i].latents[0] for i in (0, 1, 4))
    assert torch.equal(first, second)
    assert (first - other).abs().max() > 0.1


# Options


def test_defaults_are_those_of_the_paper_and_all_else_is_shared(tmp_path):
    args, shared = config(tmp_path), FlowGRPOConfig(output_dir=str(tmp_path), use_cpu=True, beta=0.0)
    names = {field.name for field in dataclasses.fields(args)}
    names -= {"generation_batch_size", "steps_per_generation"}  # follow from the size of a group
    different = {name: vars(args)[name] for name in names if vars(args)[name] != vars(shared)[name]}
    assert different == {
        "num_inference_steps": 25,
        "same_init_noise": True,
        "num_generations": 12,
        "sde_window_strategy": "progressive",
        "sde_window_size": 4,
        "sde_window_interval": 25,
        "multi_objective_aggregation": "normalize_each",
        "advantage_ddof": 1,
        "advantage_eps": 1e-8,
    }
    assert (args.noise_level, args.epsilon, args.advantage_clip, args.sde_type) == (None, 1e-4, 5.0, "flow_sde")
    assert args.generation_batch_size % 12 == 0
    assert args.window(0) == sde_window("progressive", 25, 4, interval=25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_inference_steps": 4}, r"sde_window_size=4 does not fit steps 0\.\.2.*use 1 to 3"),
        ({"sde_window_stride": 5}, r"sde_window_stride=5 would leave steps between two windows of 4.*use 1 to 4"),
        ({"sde_window_interval": 0}, r"sde_window_interval=0 must be at least 1"),
        ({"sde_window_strategy": "progresive"}, r"'progresive' is unknown: use one of 'all'.*'progressive'"),
        ({"sde_window_strategy": "all"}, r"sde_window_size=4 has no meaning for sde_window_strategy='all'"),
        ({"sde_window_range": [22, 24]}, r"sde_window_size=4 does not fit steps 22\.\.23"),
        ({"tail_ratio": 0.0}, r"tail_ratio=0\.0 must be in \(0, 1\]"),
        ({"multi_objective_aggregation": "gdpo"}, r"use one of .*'normalize_each'"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)

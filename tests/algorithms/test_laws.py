# SPDX-License-Identifier: Apache-2.0
"""The laws of the numbers, as far as they are laws of pure functions."""

import random

import pytest
import torch

from omnitrl.algorithms import (
    AGGREGATIONS,
    SCALES,
    SDE_TYPES,
    WINDOW_STRATEGIES,
    gaussian_log_prob,
    reward_advantages,
    sde_window,
    shifted_sigmas,
    trained_steps,
    transition_mean,
    transition_std,
    transition_table,
)


@pytest.mark.parametrize("sde_type", list(SDE_TYPES))
@pytest.mark.parametrize("form", ["gaussian", "squared_error"])
def test_law_05_log_prob_of_a_deterministic_step_raises(sde_type, form):
    table = transition_table(shifted_sigmas(4, 3.0), sde_type, 0.5, [1])
    latents = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for step in range(4):
        mean, std = transition_mean(latents, latents, table, step), transition_std(latents, table, step)
        if step == 1 and sde_type != "ode":
            assert gaussian_log_prob(mean, mean, std, form=form).isfinite().all()
            continue
        with pytest.raises(ValueError, match="deterministic step has no density"):
            gaussian_log_prob(mean, mean, std, form=form)
    steps = torch.tensor([1, 3])  # one such row in a batch is enough
    with pytest.raises(ValueError, match="deterministic step has no density"):
        gaussian_log_prob(latents, latents, transition_std(latents, table, steps), form=form)


@pytest.mark.parametrize("sde_type", list(SDE_TYPES))
def test_law_05_the_last_step_is_refused_as_an_sde_step(sde_type):
    with pytest.raises(ValueError, match="the last step is an ODE step"):
        transition_table(shifted_sigmas(4, 3.0), sde_type, 0.5, [3])


@pytest.mark.parametrize("strategy", [name for name in WINDOW_STRATEGIES if name != "all"])
def test_law_07_window_is_a_function_of_seed_and_step(strategy):
    def run(order):
        return {step: sde_window(strategy, 10, 2, (0, 6), seed=11, step=step) for step in order}

    steps = list(range(50))
    shuffled = random.Random(3).sample(steps, len(steps))
    first = run(steps)
    random.seed(0)
    torch.manual_seed(0)
    state = random.getstate()
    assert run(shuffled) == first  # whatever was asked before, and in a run that starts in the middle
    assert random.getstate() == state  # and it leaves the global generator alone
    drawn = [trained_steps((0, 1, 2, 3), 0.5, 11, step) for step in steps]
    assert [trained_steps((0, 1, 2, 3), 0.5, 11, step) for step in reversed(steps)] == drawn[::-1]


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("scale", list(SCALES))
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-4])
def test_law_08_equal_rewards_give_exactly_zero_advantage(aggregation, scale, ddof, eps):
    # 0.1 twelve times over: in float32 with a small eps, rounding alone makes an advantage of -0.58 of it.
    equal = torch.full((12, 2), 0.1)
    weights, ids = torch.tensor([0.3, 0.7]), torch.zeros(12, dtype=torch.long)
    assert (reward_advantages(equal, weights, ids, aggregation, scale, ddof, eps) == 0).all()
    # Beside a group that does differ, in which the same holds the other way round.
    differing = torch.rand(12, 2, generator=torch.Generator().manual_seed(0))
    both = reward_advantages(
        torch.cat([equal, differing]), weights, torch.cat([ids, ids + 1]), aggregation, scale, ddof, eps
    )
    assert (both[:12] == 0).all()
    assert (both[12:] != 0).all()
    assert both.isfinite().all()

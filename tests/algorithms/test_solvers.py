# SPDX-License-Identifier: Apache-2.0
import math
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from omnitrl.algorithms.sigmas import make_sigma_table, shifted_sigmas
from omnitrl.algorithms.solvers import ODE_SOLVERS, predicted_data, solver_step, solver_table, thin_tail
from omnitrl.algorithms.transitions import transition_mean, transition_std, transition_table
from tests.golden_cases import load_case


SOLVERS = list(ODE_SOLVERS)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sample(velocity_of, latents, sigmas, solver, steps=None):
    """Run a sampler and return the latents after each step. The history is handed over at every step."""
    steps = range(len(sigmas) - 1) if steps is None else steps
    table = solver_table(sigmas, solver, steps)
    history, states = None, []
    for step in steps:
        velocity, sigma = velocity_of(latents, sigmas[step].item()), sigmas[step].item()
        latents, history = (
            solver_step(latents, velocity, history, table, step),
            predicted_data(latents, velocity, sigma),
        )
        states.append(latents)
    return states


@pytest.mark.parametrize("solver", SOLVERS)
def test_order_one_rows_are_the_ode_transition_bit_for_bit(solver):
    sigmas = load_case("07")[1]["sd35_shift3_n10_sigmas"]
    reference = transition_table(sigmas)
    first_order = range(10) if solver == "euler" else [0, 1, 9]
    table = solver_table(sigmas, solver, range(10))
    latents, velocity = normal(2, 4, 8, 8), normal(2, 4, 8, 8, seed=1)
    for step in first_order:
        assert table.latents_coef[step] == reference.latents_coef[step]
        assert table.velocity_coef[step] == reference.velocity_coef[step]
        assert not table.needs_history[step]
        moved = solver_step(latents, velocity, None, table, step)
        assert torch.equal(moved, transition_mean(latents, velocity, reference, step))
        # A history that is there and not needed changes no bit.
        assert torch.equal(moved, solver_step(latents, velocity, latents, table, step))


def test_every_stretch_begins_with_order_one_and_the_sampler_ends_with_it():
    sigmas = shifted_sigmas(12, 3.0)
    table, euler = (
        solver_table(sigmas, "dpmpp_2m", [0, 1, 2, 5, 6, 9, 10, 11]),
        solver_table(sigmas, "euler", range(12)),
    )
    assert table.needs_history.nonzero().flatten().tolist() == [1, 2, 6, 10][1:]  # step 1 comes from t = 1: order 1
    for step in (0, 1, 5, 9, 11):
        assert [column[step] for column in table] == [column[step] for column in euler]
    for step in (3, 4, 7, 8):
        assert [column[step].item() for column in table] == [0, 0, 0]
    for column in table:
        assert column.isfinite().all()
        assert column.dtype == torch.float32


def test_2m_coefficients_are_the_extrapolation_written_out():
    # t = 0.5 -> 0.25 after 0.75: lambda = log((1 - t) / t) is -log 3, 0, log 3, so the two steps are equally long.
    table = solver_table([0.75, 0.5, 0.25, 0.0], "dpmpp_2m", [0, 1, 2])
    latents, velocity, history = (normal(2, 3, seed=seed, dtype=torch.float64) for seed in range(3))
    data = latents - 0.5 * velocity
    expected = 0.5 * latents + 0.5 * (data + 0.5 * (data - history))
    assert_close(solver_step(latents, velocity, history, table, 1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [1.0, 1 + 1e-7, 0.999999, 0.96])
def test_2m_is_exact_for_constant_data_and_finite_from_any_start(start):
    # With v = (x - x0) / t for one x0, every solver ends in x0, and the extrapolation adds nothing.
    sigmas = shifted_sigmas(8, 3.0)
    sigmas[0] = start
    clean, noise = normal(3, 5), normal(3, 5, seed=1)
    states = sample(lambda x, t: (x - clean) / t, (1 - start) * clean + start * noise, sigmas, "dpmpp_2m")
    for sigma, state in zip(sigmas[1:], states, strict=True):
        assert_close(state, (1 - sigma) * clean + sigma * noise, rtol=0, atol=3e-6)


def gaussian_velocity(x, t, data_mean=0.7, data_std=0.3):
    """`E[e - x0 | x]` where the data is normal: the flow then has a closed form, see [`gaussian_flow`]."""
    variance = (1 - t) ** 2 * data_std**2 + t**2
    residual = x - (1 - t) * data_mean
    return -data_mean + (t - (1 - t) * data_std**2) / variance * residual


def gaussian_flow(noise, t, data_mean=0.7, data_std=0.3):
    """Where the probability flow takes `noise` to at level `t`: mean and scale of the marginal."""
    return (1 - t) * data_mean + math.sqrt((1 - t) ** 2 * data_std**2 + t**2) * noise


def flow_errors(solver, num_steps):
    """Errors at t = 0.2 and at t = 0 of a uniform grid from 1."""
    noise, sigmas = normal(64, dtype=torch.float64), torch.linspace(1, 0, num_steps + 1)
    states = sample(gaussian_velocity, noise, sigmas, solver)
    at = num_steps * 4 // 5
    return [(states[step - 1] - gaussian_flow(noise, sigmas[step].item())).norm().item() for step in (at, num_steps)]


@pytest.mark.parametrize(("solver", "factor"), [("euler", 2), ("dpmpp_2m", 4)])
def test_order_of_convergence(solver, factor):
    coarse, fine, finest = (flow_errors(solver, num_steps)[0] for num_steps in (80, 160, 320))
    assert coarse / fine == pytest.approx(factor, rel=0.05)
    assert fine / finest == pytest.approx(factor, rel=0.05)


def test_2m_beats_euler_at_the_end_of_the_sampler():
    # Towards t = 0 a lambda step grows without bound, so the order shows late there. The gain is there early.
    for num_steps in (10, 20, 40):
        assert flow_errors("dpmpp_2m", num_steps)[1] < flow_errors("euler", num_steps)[1] / 3


def test_2m_is_the_stock_scheduler():
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    )
    scheduler.set_timesteps(12)
    sigmas = scheduler.sigmas.float()
    stock = normal(4, 6)
    ours = sample(gaussian_velocity, stock, sigmas, "dpmpp_2m")
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = gaussian_velocity(stock, sigmas[step].item())
        stock = scheduler.step(velocity, timestep, stock, return_dict=False)[0]
        assert_close(ours[step], stock, rtol=1e-4, atol=1e-5)


def test_case_03b_mix_grpo_2m_stretch():
    _, stored = load_case("03b")
    sigmas, velocity = stored["sigmas"], stored["model_output"]
    table = solver_table(sigmas, "dpmpp_2m", range(10, 14))
    assert table.needs_history.nonzero().flatten().tolist() == [11, 12, 13]
    latents, history = stored["sample"], None
    for step in range(10, 14):
        assert_close(latents, stored[f"dpmpp2m_ode_i{step}_in"], rtol=1e-4, atol=1e-5)
        data = predicted_data(latents, velocity, sigmas[step])
        latents, history = solver_step(latents, velocity, history, table, step), data
        assert_close(latents, stored[f"dpmpp2m_ode_i{step}_out"], rtol=1e-4, atol=1e-5)


def test_predicted_data_and_noise_make_the_latents():
    latents, velocity = normal(3, 4, 5, dtype=torch.float64), normal(3, 4, 5, seed=1, dtype=torch.float64)
    for sigma in (0.3, torch.tensor(0.3), torch.tensor([0.9, 0.3, 0.01])):
        level = torch.as_tensor(sigma, dtype=torch.float64).reshape(-1, 1, 1)
        data = predicted_data(latents, velocity, sigma)
        assert_close((1 - level) * data + level * (latents + (1 - level) * velocity), latents, rtol=0, atol=1e-12)
    half = predicted_data(latents.bfloat16(), velocity.bfloat16(), 0.3)
    assert half.dtype == torch.float32
    assert torch.equal(half, predicted_data(latents.bfloat16().float(), velocity.bfloat16().float(), 0.3))


def test_inputs_are_left_alone_and_half_precision_is_float32():
    table = solver_table(shifted_sigmas(6, 3.0), "dpmpp_2m", range(6))
    latents, velocity, history = normal(2, 4), normal(2, 4, seed=1), normal(2, 4, seed=2)
    moved = solver_step(latents, velocity, history, table, 3)
    assert torch.equal(latents, normal(2, 4))
    assert torch.equal(velocity, normal(2, 4, seed=1))
    assert torch.equal(history, normal(2, 4, seed=2))
    assert moved.dtype == torch.float32
    low = solver_step(latents, velocity.bfloat16(), history.bfloat16(), table, 3)
    assert torch.equal(low, solver_step(latents, velocity.bfloat16().float(), history.bfloat16().float(), table, 3))


@pytest.mark.parametrize("ratio", [0.01, 0.2, 0.29, 0.4, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("num_steps", [2, 3, 10, 25])
def test_t20_flash_tail(ratio, num_steps):
    full = make_sigma_table(shifted_sigmas(num_steps, 3.0), torch.arange(num_steps) + 0.5)
    for last_step in range(num_steps - 1):
        remaining = num_steps - 1 - last_step
        thin = thin_tail(full, last_step, ratio)
        calls = max(int(remaining * ratio + 1e-9), 1)
        assert thin.num_steps == last_step + 1 + calls == len(thin.timesteps)
        assert thin.sigmas[-1] == 0
        assert torch.equal(thin.sigmas[: last_step + 2], full.sigmas[: last_step + 2])
        assert torch.equal(thin.timesteps[: last_step + 2], full.timesteps[: last_step + 2])
        assert (thin.sigmas[1:] < thin.sigmas[:-1]).all()
        kept = [full.sigmas.tolist().index(sigma) for sigma in thin.sigmas.tolist()]  # none is made up
        assert torch.equal(full.timesteps[kept[:-1]], thin.timesteps)
        tail = kept[last_step + 1 :]
        gaps = [after - before for before, after in pairwise(tail)]
        assert max(gaps) - min(gaps) <= 1  # evenly by index
        if ratio == 1.0:
            assert torch.equal(thin.sigmas, full.sigmas)
            assert torch.equal(thin.timesteps, full.timesteps)


def test_flash_tail_of_the_recipes():
    full = make_sigma_table(shifted_sigmas(25, 3.0))
    assert thin_tail(full, 3, 0.4).num_steps == 4 + 8  # 21 steps follow the first window of 4
    assert thin_tail(full, 3, 0.2).num_steps == 4 + 4
    assert thin_tail(full, 3, 1 / 3).num_steps == 4 + 7  # 1/3 of 21 is 7, whatever the float product
    last = thin_tail(full, 22, 0.4)  # where MixGRPO's tail of one point never reaches 0
    assert torch.equal(last.sigmas[-2:], full.sigmas[[23, 25]])


@pytest.mark.parametrize("sde_type", ["flow_sde", "cps"])
def test_stochastic_window_with_a_thin_second_order_tail(sde_type):
    # All together, for a velocity whose end is known: a window of noise, then few steps to exactly the data.
    table = thin_tail(make_sigma_table(shifted_sigmas(10, 3.0)), 2, 0.5)
    sde, clean = transition_table(table.sigmas, sde_type, 0.7, range(3)), normal(2, 6)
    tail = range(3, table.num_steps)
    latents, velocity_of = normal(2, 6, seed=1), lambda x, t: (x - clean) / t
    for step in range(3):
        mean = transition_mean(latents, velocity_of(latents, table.sigmas[step]), sde, step)
        latents = mean + transition_std(latents, sde, step) * normal(2, 6, seed=2 + step)
    end = sample(velocity_of, latents, table.sigmas, "dpmpp_2m", tail)[-1]
    assert_close(end, clean, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solver_table([1.0, 0.0], "heun"), "ode_solver='heun' is not known: use one of 'euler', 'dpmpp_2m'"),
        (
            lambda: solver_table([1.0, 0.0], "euler", [1]),
            r"ode_steps has 1, but a sampler of 1 steps has steps 0\.\.0",
        ),
        (lambda: solver_table([1.0, 0.0], "euler", [-1]), "ode_steps has -1"),
        (lambda: solver_table([1.0, 0.5], "euler", [0]), "exactly 0"),
        (lambda: thin_tail(make_sigma_table([1.0, 0.5, 0.0]), 0, 0.0), "tail_ratio=0.0 must be above 0 .*use 1.0"),
        (lambda: thin_tail(make_sigma_table([1.0, 0.5, 0.0]), 0, 1.1), "tail_ratio=1.1 must be"),
        (lambda: thin_tail(make_sigma_table([1.0, 0.5, 0.0]), 1, 0.5), "last_step=1 leaves no tail .*: use 0 to 0"),
        (lambda: thin_tail(make_sigma_table([1.0, 0.5, 0.0]), -1, 0.5), "last_step=-1 leaves no tail"),
        (lambda: predicted_data(normal(2, 3), normal(2, 3), torch.ones(3)), "`sigma` has one value for all rows"),
        (lambda: predicted_data(normal(2, 3), normal(2, 1), 0.5), r"`latents` \(2, 3\), `velocity` \(2, 1\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_steps():
    table, latents = solver_table(shifted_sigmas(6, 3.0), "dpmpp_2m", [2, 3, 4]), normal(2, 4)
    with pytest.raises(ValueError, match=r"step=6 is not one of the 6 steps 0\.\.5"):
        solver_step(latents, latents, None, table, 6)
    with pytest.raises(ValueError, match=r"step=0 is not one of the deterministic steps .*add it to `ode_steps`"):
        solver_step(latents, latents, None, table, 0)
    with pytest.raises(ValueError, match="needs the data predicted at step 2, got history=None: pass predicted_data"):
        solver_step(latents, latents, None, table, 3)
    with pytest.raises(ValueError, match=r"`latents` \(2, 4\), `history` \(1, 4\)"):
        solver_step(latents, latents, latents[:1], table, 3)
    with pytest.raises(ValueError, match=r"`latents` \(2, 4\), `velocity` \(2, 1\)"):
        solver_step(latents, latents[:, :1], latents, table, 3)

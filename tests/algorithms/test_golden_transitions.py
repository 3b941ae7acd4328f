# SPDX-License-Identifier: Apache-2.0
"""Means, stds and log-probs against what Flow-GRPO, verl-omni, Flow-Factory, DanceGRPO and MixGRPO produce."""

import math

import pytest
import torch
from torch.testing import assert_close

from omnitrl.algorithms import (
    SDE_TYPES,
    TransitionTable,
    gaussian_log_prob,
    shifted_sigmas,
    transition_mean,
    transition_std,
    transition_table,
)
from tests.golden_cases import load_case


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CLOSE_GRAD = {"rtol": 1e-4, "atol": 1e-6}


def one_sde_step(sigmas, sde_type, noise_level, step):
    """A table whose row `step` is the SDE. The references draw noise on the last step too, which our tables refuse."""
    if step < len(sigmas) - 2:
        return transition_table(sigmas, sde_type, noise_level, [step])
    exact = sigmas.double()
    row = torch.stack(SDE_TYPES[sde_type](exact[step], exact[step + 1], exact[1], noise_level)).float()
    columns = torch.stack(transition_table(sigmas))
    columns[:, step] = row
    return TransitionTable(*columns)


def check_step(stored, key, table, step, form="gaussian", grad=True):
    """Mean, sample and log-prob of one stored step, then the replay of that sample under another velocity."""
    latents = stored["sample"]
    mean = transition_mean(latents, stored["model_output"], table, step)
    std = transition_std(latents, table, step)
    assert_close(mean, stored[f"{key}_mean"], **CLOSE)
    drawn = stored[f"{key}_prev_sample"]
    assert_close(mean + std * stored["noise"], drawn, **CLOSE)
    if (std == 0).any():
        with pytest.raises(ValueError, match="deterministic step"):
            gaussian_log_prob(drawn, mean, std, form=form)
        return
    assert_close(gaussian_log_prob(drawn, mean, std, form=form), stored[f"{key}_log_prob"], **CLOSE)
    velocity = stored["model_output_new"].clone().requires_grad_()
    replayed = gaussian_log_prob(drawn, transition_mean(latents, velocity, table, step), std, form=form)
    assert_close(replayed, stored[f"{key}_replay_log_prob"], **CLOSE)
    if grad:
        replayed.sum().backward()
        assert_close(velocity.grad, stored[f"{key}_replay_grad_model_output"], **CLOSE_GRAD)


@pytest.mark.parametrize("num_steps", [10, 28])
def test_case_01_flow_grpo(num_steps):
    case, stored = load_case("01")
    sigmas = stored[f"sigmas_n{num_steps}"]
    for step in case["parameters"]["step_indices"][str(num_steps)]:
        table = one_sde_step(sigmas, "flow_sde", 0.7, step)
        key = f"n{num_steps}_i{step}"
        # The reference returns the diffusion coefficient, ours is the std of the whole step.
        diffusion = stored[f"{key}_std"]
        root = (sigmas[step] - sigmas[step + 1]).sqrt()
        assert_close(transition_std(stored["sample"], table, step).expand_as(diffusion), diffusion * root, **CLOSE)
        assert_close(
            transition_mean(stored["sample"], stored["model_output_new"], table, step),
            stored[f"{key}_replay_mean"],
            **CLOSE,
        )
        check_step(stored, key, table, step)


def test_case_01_rows_at_different_steps():
    _, stored = load_case("01")
    table = transition_table(stored["sigmas_n10"], "flow_sde", 0.7, range(9))
    steps = torch.tensor([0, 6])
    mean = transition_mean(stored["sample"], stored["model_output"], table, steps)
    std = transition_std(stored["sample"], table, steps)
    assert_close(mean, stored["mixed_i0_6_mean"], **CLOSE)
    drawn = stored["mixed_i0_6_prev_sample"]
    assert_close(mean + std * stored["noise"], drawn, **CLOSE)
    assert_close(gaussian_log_prob(drawn, mean, std), stored["mixed_i0_6_log_prob"], **CLOSE)


@pytest.mark.parametrize(("name", "sde_type"), [("sde", "flow_sde"), ("cps", "cps"), ("dance_sde", "dance_sde")])
def test_case_02_verl_omni(name, sde_type):
    case, stored = load_case("02")
    noise_level = case["parameters"]["noise_level"][name]
    form = "squared_error" if name == "cps" else "gaussian"
    for step in case["parameters"]["step_indices"]:
        key = f"{name}_i{step}"
        table = one_sde_step(stored["sigmas"], sde_type, noise_level, step)
        std = transition_std(stored["sample"], table, step)
        reference = stored[f"{key}_std_dev_t"]
        if name == "sde":  # only there verl-omni leaves sqrt(-dt) out
            reference = reference * stored[f"{key}_sqrt_dt"].reshape(-1, 1, 1, 1)
        assert_close(std.expand_as(reference), reference, **CLOSE)
        check_step(stored, key, table, step, form)
        if std > 0 and name != "cps":
            density = gaussian_log_prob(stored[f"{key}_prev_sample"], stored[f"{key}_mean"], std)
            normaliser = std.log().item() + 0.5 * math.log(2 * math.pi)
            assert_close(density + normaliser, stored[f"{key}_log_prob_no_normalizer"], **CLOSE)


def test_case_02_packed_latents():
    _, stored = load_case("02")
    latents, velocity, noise = (stored[name].reshape(2, 16, 16) for name in ("sample", "model_output", "noise"))
    for step in (0, 1):
        table = transition_table(stored["sigmas"], "flow_sde", 0.7, [step])
        mean, std = transition_mean(latents, velocity, table, step), transition_std(latents, table, step)
        drawn = stored[f"packed_step_i{step}_prev_sample"]
        assert_close(mean + std * noise, drawn, **CLOSE)
        assert_close(gaussian_log_prob(drawn, mean, std), stored[f"packed_step_i{step}_log_prob"], **CLOSE)


@pytest.mark.parametrize(("name", "sde_type"), [("Flow-SDE", "flow_sde"), ("Dance-SDE", "dance_sde"), ("CPS", "cps")])
def test_case_02b_flow_factory(name, sde_type):
    case, stored = load_case("02b")
    form = "squared_error" if name == "CPS" else "gaussian"
    for step in case["parameters"]["step_indices"]:
        table = one_sde_step(stored["sigmas"], sde_type, case["parameters"]["noise_level"][name], step)
        check_step(stored, f"{name}_i{step}", table, step, form, grad=False)


def test_case_02b_ode_steps_are_bit_equal():
    case, stored = load_case("02b")
    table = transition_table(stored["sigmas"])
    for step in case["parameters"]["step_indices"]:
        mean = transition_mean(stored["sample"], stored["model_output"], table, step)
        assert torch.equal(mean, stored[f"ODE_i{step}_mean"])
        assert transition_std(stored["sample"], table, step).item() == 0


@pytest.mark.parametrize(("num_steps", "shift"), [(16, 3.0), (10, 5.0)])
def test_case_03_dance_grpo(num_steps, shift):
    case, stored = load_case("03")
    sigmas = shifted_sigmas(num_steps, shift)
    assert_close(sigmas, stored[f"sigmas_n{num_steps}_shift{shift:.0f}"], rtol=1e-6, atol=1e-7)
    for step in case["parameters"]["step_indices"][f"n{num_steps}"]:
        key = f"n{num_steps}_i{step}"
        table = one_sde_step(sigmas, "dance_sde", 0.3, step)
        assert_close(table.std[step].reshape(1).double(), stored[f"{key}_std"], **CLOSE)
        plain = transition_mean(stored["sample"], stored["model_output"], transition_table(sigmas), step)
        assert_close(plain, stored[f"{key}_mean_ode"], **CLOSE)
        check_step(stored, key, table, step)


def test_case_03b_mix_grpo_flow_steps():
    case, stored = load_case("03b")
    for step in case["parameters"]["step_indices"]:
        key = f"flow_i{step}"
        table = one_sde_step(stored["sigmas"], "flow_sde", 0.7, step)
        assert_close(table.std[step], stored[f"{key}_std_sqrt_dt"], **CLOSE)
        check_step(stored, key, table, step, grad=False)
        # MixGRPO's ODE step is the Euler step, and the number it logs there is the density of the SDE at that point.
        ode_table = transition_table(stored["sigmas"])
        ode_latents = transition_mean(stored["sample"], stored["model_output"], ode_table, step)
        assert_close(ode_latents, stored[f"{key}_ode_prev_sample"], **CLOSE)
        under_sde = gaussian_log_prob(ode_latents, stored[f"{key}_mean"], table.std[step])
        assert_close(under_sde, stored[f"{key}_ode_log_prob"], **CLOSE)


def test_case_03b_mix_grpo_dance_steps():
    case, stored = load_case("03b")
    latents = stored["sample"]
    for step in case["parameters"]["step_indices"]:
        key = f"dance_i{step}"
        table = one_sde_step(stored["sigmas"], "dance_sde", 0.7, step)
        mean, std = transition_mean(latents, stored["model_output"], table, step), table.std[step]
        drawn = stored[f"{key}_prev_sample"]
        assert_close(mean + std * stored["noise"], drawn, **CLOSE)
        # Its code drops the normaliser by accident. The case stores what is missing.
        missing = stored[f"{key}_missing_normaliser"].float()
        assert_close(gaussian_log_prob(drawn, mean, std) - missing, stored[f"{key}_log_prob_as_coded"], **CLOSE)
        replayed = gaussian_log_prob(drawn, transition_mean(latents, stored["model_output_new"], table, step), std)
        assert_close(replayed - missing, stored[f"{key}_replay_log_prob_as_coded"], **CLOSE)


@pytest.mark.parametrize("step", [1, 12])
def test_case_03b_mix_grpo_first_order_dpm_sde_step_is_a_cps_step(step):
    # The SDE form of DPM-Solver++(1) keeps a share exp(-h) of the next noise level, h being the step in lambda. So it
    # is CPS with a noise level that depends on the step: cos(level * pi / 2) = exp(-h).
    _, stored = load_case("03b")
    now, then = stored["sigmas"][step].item(), stored["sigmas"][step + 1].item()
    kept = (1 - now) / now * then / (1 - then)
    table = transition_table(stored["sigmas"], "cps", math.acos(kept) * 2 / math.pi, [step])
    mean, std = transition_mean(stored["sample"], stored["model_output"], table, step), table.std[step]
    drawn = stored[f"dpmpp1_sde_i{step}_out"]
    assert_close(mean + std * stored["noise"], drawn, rtol=1e-4, atol=1e-5)
    assert_close(gaussian_log_prob(drawn, mean, std), stored[f"dpmpp1_sde_i{step}_log_prob"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shift", "num_steps"), [(3.0, 16), (3.0, 10), (5.0, 10)])
def test_case_07_dance_grid(shift, num_steps):
    _, stored = load_case("07")
    reference = stored[f"dance_shift{shift:.0f}_n{num_steps}_sigmas"]
    assert_close(shifted_sigmas(num_steps, shift), reference, rtol=1e-6, atol=1e-7)


def test_case_07_verl_omni_wan_grid_is_the_dance_grid():
    _, stored = load_case("07")
    assert_close(shifted_sigmas(10, 5.0), stored["verl_wan22_shift5_n10_sigmas"], rtol=1e-6, atol=1e-7)


def test_case_02c_a_start_that_is_one_but_for_rounding_is_the_endpoint():
    """Flow-Factory takes 0.999999 for a level below 1; its std without the step size is then 695, and 22 at 0.999."""
    case, stored = load_case("02c")
    level, sigmas = case["parameters"]["noise_level"], stored["sigmas"].clone()
    assert 1 - 2e-6 < sigmas[0] < 1
    table = transition_table(sigmas, "flow_sde", level, [0, 1, 5])
    root = (sigmas[:-1] - sigmas[1:]).sqrt()
    for step in (1, 5):  # away from the endpoint both are the same formula
        std = float(stored[f"i{step}_own_sigma_std_dev_t"].flatten()[0] * root[step])
        assert float(table.std[step]) == pytest.approx(std, rel=1e-5)
        mean = transition_mean(stored["sample"], stored["model_output"], table, step)
        assert_close(mean, stored[f"i{step}_own_sigma_mean"], rtol=1e-5, atol=2e-5)
    assert stored["i0_own_sigma_std_dev_t"].min() > 690
    assert float(table.std[0]) == pytest.approx(level, rel=1e-4)  # the total std of the first step is `a`
    exact = transition_table([1.0, *sigmas[1:].tolist()], "flow_sde", level, [0])
    for ours, one in zip(table, exact, strict=True):
        assert float(ours[0]) == pytest.approx(float(one[0]), rel=1e-4)

# SPDX-License-Identifier: Apache-2.0
"""Tables read from stock schedulers are those that the stock pipelines use (golden case 07)."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from omnitrl.models import stock_sigma_table
from tests.golden_cases import load_case


CASE, STORED = load_case("07")
PARAMETERS = CASE["parameters"]


def check(table, name):
    tolerance = CASE["tolerance"]
    assert torch.allclose(table.sigmas, STORED[f"{name}_sigmas"], rtol=tolerance["rtol"], atol=tolerance["atol"])
    if f"{name}_timesteps" in STORED:
        assert torch.allclose(table.timesteps, STORED[f"{name}_timesteps"].float(), rtol=0, atol=1e-3)


def grid(num_steps):
    """What the Qwen-Image and FLUX pipelines pass as `sigmas`."""
    return np.linspace(1.0, 1 / num_steps, num_steps)


@pytest.mark.compat
@pytest.mark.parametrize("steps", [10, 28, 40])
def test_sd35(steps):
    check(stock_sigma_table(FlowMatchEulerDiscreteScheduler(shift=3.0), steps), f"sd35_shift3_n{steps}")


@pytest.mark.compat
@pytest.mark.parametrize("steps", [10, 50])
@pytest.mark.parametrize("size", [512, 1024, 1328])
def test_qwen_image(size, steps):
    config = PARAMETERS["qwen_scheduler_config"]
    mu = PARAMETERS["computed"][f"qwen_mu_{size}"]["mu"]
    table = stock_sigma_table(FlowMatchEulerDiscreteScheduler(**config), steps, sigmas=grid(steps), mu=mu)
    check(table, f"qwen_{size}_n{steps}")
    assert table.sigmas[-2] == pytest.approx(config["shift_terminal"], abs=1e-6)
    if steps == 10:
        without = FlowMatchEulerDiscreteScheduler(**{**config, "shift_terminal": None})
        check(stock_sigma_table(without, steps, sigmas=grid(steps), mu=mu), f"qwen_{size}_n10_no_terminal")


@pytest.mark.compat
@pytest.mark.parametrize("steps", [10, 28])
@pytest.mark.parametrize("size", [512, 1024])
def test_flux(size, steps):
    scheduler = FlowMatchEulerDiscreteScheduler(**PARAMETERS["flux_scheduler_config"])
    mu = PARAMETERS["computed"][f"flux_mu_{size}"]["mu"]
    check(stock_sigma_table(scheduler, steps, sigmas=grid(steps), mu=mu), f"flux_{size}_n{steps}")


@pytest.mark.parametrize("steps", [10, 40])
@pytest.mark.parametrize("shift", [3, 5, 12])
def test_wan(shift, steps):
    unipc = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=float(shift), num_train_timesteps=1000
    )
    check(stock_sigma_table(unipc, steps), f"wan_unipc_shift{shift}_n{steps}")
    euler = FlowMatchEulerDiscreteScheduler(shift=float(shift))
    check(stock_sigma_table(euler, steps), f"wan_euler_shift{shift}_n{steps}")


def test_the_scheduler_is_left_as_it_was():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(7)
    before = scheduler.sigmas.clone()
    table = stock_sigma_table(scheduler, 4)
    assert len(table.sigmas) == 5
    assert torch.equal(scheduler.sigmas, before)


def test_a_table_that_a_stock_scheduler_gets_wrong_is_refused():
    """diffusers answers one step and `shift_terminal` with [nan, 0] (A4)."""
    scheduler = FlowMatchEulerDiscreteScheduler(**PARAMETERS["qwen_scheduler_config"])
    with pytest.raises(ValueError, match="must be finite"):
        stock_sigma_table(scheduler, 1, sigmas=grid(1), mu=0.6)
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, got 0"):
        stock_sigma_table(FlowMatchEulerDiscreteScheduler(), 0)

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from omnitrl.algorithms import make_sigma_table, shifted_sigmas, time_shift
from tests.golden_cases import load_case


def test_table_keeps_the_values_of_the_scheduler():
    _, stored = load_case("07")
    sigmas, timesteps = stored["sd35_shift3_n10_sigmas"], stored["sd35_shift3_n10_timesteps"]
    table = make_sigma_table(sigmas, timesteps, num_steps=10)
    assert torch.equal(table.sigmas, sigmas)
    assert torch.equal(table.timesteps, timesteps)
    assert table.num_steps == 10
    expected = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
    assert [round(sigma, 4) for sigma in table.sigmas.tolist()] == expected


def test_timesteps_default_to_thousand_sigmas():
    table = make_sigma_table([1.0, 0.75, 0.5, 0.0])
    assert table.timesteps.tolist() == [1000.0, 750.0, 500.0]
    assert table.timesteps.dtype == table.sigmas.dtype == torch.float32


def test_integer_timesteps_become_float():
    _, stored = load_case("07")
    sigmas, timesteps = stored["wan_unipc_shift5_n10_sigmas"], stored["wan_unipc_shift5_n10_timesteps"]
    assert timesteps.dtype == torch.int64
    assert make_sigma_table(sigmas, timesteps).timesteps.tolist() == [float(step) for step in timesteps]


@pytest.mark.parametrize("num_steps", [1, 2, 4, 10])
def test_length_is_what_was_asked_for(num_steps):
    sigmas = shifted_sigmas(num_steps, 3.0)
    assert make_sigma_table(sigmas, num_steps=num_steps).num_steps == num_steps
    with pytest.raises(
        ValueError, match=rf"num_steps={num_steps + 1} needs {num_steps + 2} sigmas.*got {num_steps + 1}"
    ):
        make_sigma_table(sigmas, num_steps=num_steps + 1)


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([0.0], "at least 2 noise levels"),
        ([[1.0, 0.0]], "at least 2 noise levels"),
        ([float("nan"), 0.0], "must be finite"),  # diffusers with shift_terminal and one step
        ([1000.0, 500.0, 0.0], "at most 1, got 1000 first"),
        ([1.0, 0.5, 0.01], "exactly 0.*got 0.01"),
        ([0.0, 0.5, 1.0, 0.0], "got 0 then 0.5 at step 0"),
        ([1.0, 0.5, 0.5, 0.0], "got 0.5 then 0.5 at step 1"),
    ],
)
def test_bad_noise_levels(sigmas, message):
    with pytest.raises(ValueError, match=message):
        make_sigma_table(sigmas)


def test_bad_timesteps():
    with pytest.raises(ValueError, match=r"3 sigmas make 2 steps, got timesteps of shape \(3,\)"):
        make_sigma_table([1.0, 0.5, 0.0], [1000.0, 500.0, 0.0])
    with pytest.raises(ValueError, match="`timesteps` must be finite"):
        make_sigma_table([1.0, 0.5, 0.0], [1000.0, float("inf")])


def test_first_sigma_may_be_one_rounding_above_one():
    above = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert make_sigma_table(torch.stack([above, torch.tensor(0.0)])).sigmas[0] == above


def test_time_shift_values():
    assert time_shift(0.5, 3.0) == 0.75
    assert time_shift(torch.tensor([0.0, 0.25, 1.0]), 1.0).tolist() == [0.0, 0.25, 1.0]
    with pytest.raises(ValueError, match="shift=0 must be above 0"):
        time_shift(0.5, 0)


@pytest.mark.parametrize("shift", [1.0, 1.15, 3.3, 7.0])
def test_shifted_grid_ends_exactly(shift):
    sigmas = shifted_sigmas(20, shift)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert (sigmas[1:] < sigmas[:-1]).all()
    assert sigmas[10].item() == pytest.approx(shift / (1 + shift), abs=1e-7)
    with pytest.raises(ValueError, match="num_steps=0"):
        shifted_sigmas(0, shift)

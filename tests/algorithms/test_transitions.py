# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch.testing import assert_close

from omnitrl.algorithms.sigmas import shifted_sigmas
from omnitrl.algorithms.transitions import (
    SDE_TYPES,
    gaussian_log_prob,
    multimodal_log_prob,
    token_weights,
    transition_mean,
    transition_std,
    transition_table,
)
from tests.golden_cases import load_case


STOCHASTIC = [("flow_sde", 0.7), ("dance_sde", 0.3), ("cps", 0.8)]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def sigmas():
    """The table of SD3 with 10 steps."""
    return load_case("07")[1]["sd35_shift3_n10_sigmas"]


def test_ode_table_is_the_stock_scheduler_bit_for_bit():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    table = transition_table(scheduler.sigmas)
    assert not table.stochastic.any()
    ours = stock = normal(2, 4, 8, 8)
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = normal(2, 4, 8, 8, seed=step + 1)
        stock = scheduler.step(velocity, timestep, stock, return_dict=False)[0]
        ours = transition_mean(ours, velocity, table, step)
        assert torch.equal(ours, stock)


def test_one_euler_step_from_noise_returns_the_data():
    clean, noise = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    table = transition_table([1.0, 0.0])
    assert_close(transition_mean(noise, noise - clean, table, 0), clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sde_type", list(SDE_TYPES))
def test_t1_without_noise_every_type_is_the_euler_step(sigmas, sde_type):
    steps = range(9)
    quiet, plain = transition_table(sigmas, sde_type, 0.0, steps), transition_table(sigmas)
    for ours, euler in zip(quiet, plain, strict=True):
        assert torch.equal(ours, euler)
    exact = sigmas.double()
    coefficients = SDE_TYPES[sde_type](exact[:-1], exact[1:], exact[1], 0.0)
    for ours, euler in zip(coefficients, SDE_TYPES["ode"](exact[:-1], exact[1:], exact[1], 0.0), strict=True):
        assert_close(ours, euler, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("sde_type", "noise_level"), STOCHASTIC)
def test_t2_the_data_keeps_its_coefficient(sigmas, sde_type, noise_level):
    # With the exact velocity v = e - x0 the next mean is (1 - sigma_next) x0 + (...) e for every type.
    now, then = sigmas[:-1].double(), sigmas[1:].double()
    latents_coef, velocity_coef, _ = SDE_TYPES[sde_type](now, then, then[0], noise_level)
    assert_close(latents_coef * (1 - now) - velocity_coef, 1 - then, rtol=0, atol=1e-12)


def test_t2_predicted_data_and_noise_make_the_latents(sigmas):
    latents, velocity = normal(10, 3, 4, dtype=torch.float64), normal(10, 3, 4, seed=1, dtype=torch.float64)
    now, then = sigmas[:-1].double().reshape(-1, 1, 1), sigmas[1:].double().reshape(-1, 1, 1)
    data, noise = latents - now * velocity, latents + (1 - now) * velocity
    assert_close((1 - now) * data + now * noise, latents, rtol=0, atol=1e-12)
    # And so every mean is that of the paper, written in data and noise: CPS, and the ODE as CPS without noise.
    for sde_type, kept in [("cps", math.cos(0.4 * math.pi)), ("ode", 1.0)]:
        latents_coef, velocity_coef, _ = SDE_TYPES[sde_type](now, then, then[0], 0.8)
        mean = latents_coef * latents + velocity_coef * velocity
        assert_close(mean, (1 - then) * data + then * kept * noise, rtol=0, atol=1e-12)


def test_t2_cps_splits_the_next_noise_level(sigmas):
    now, then = sigmas[:-1].double(), sigmas[1:].double()
    latents_coef, velocity_coef, std = SDE_TYPES["cps"](now, then, then[0], 0.8)
    predicted = latents_coef * now + velocity_coef  # factor of e when v = e - x0
    assert_close(predicted, then * math.cos(0.4 * math.pi), rtol=0, atol=1e-12)
    assert_close(predicted.square() + std.square(), then.square(), rtol=0, atol=1e-12)


def test_t3_first_flow_step_and_its_finite_std(sigmas):
    table = transition_table(sigmas, "flow_sde", 0.7, [0])
    h = (sigmas[0] - sigmas[1]).item()
    assert table.std[0].item() == pytest.approx(0.7, abs=1e-6)
    assert round(table.std[0].item() / math.sqrt(h), 4) == 3.5057
    assert table.latents_coef[0].item() == pytest.approx(1 - 0.7**2 / 2, abs=1e-6)
    assert table.velocity_coef[0].item() == pytest.approx(-h, abs=1e-6)


@pytest.mark.parametrize("first", [1 - 1e-7, 0.999999, 1 + 1e-7])
def test_a_first_sigma_that_rounding_moved_is_the_endpoint_too(sigmas, first):
    moved = sigmas.clone()
    moved[0] = first
    for ours, exact in zip(
        transition_table(moved, "flow_sde", 0.7, [0]), transition_table(sigmas, "flow_sde", 0.7, [0]), strict=True
    ):
        assert_close(ours[0], exact[0], rtol=1e-4, atol=0)


def test_t3_and_t4_hold_in_float64(sigmas):
    a, exact = 0.7, sigmas.double()
    t, h = exact[:-1], exact[:-1] - exact[1:]
    latents_coef, velocity_coef, std = SDE_TYPES["flow_sde"](t, exact[1:], exact[1], a)
    for ours, closed in [(latents_coef[0], 1 - a**2 / 2), (velocity_coef[0], -h[0]), (std[0], a)]:
        assert ours.item() == pytest.approx(float(closed), abs=1e-12)
    assert_close(latents_coef[1:], 1 - a**2 * h[1:] / (2 * (1 - t[1:])), rtol=0, atol=1e-12)
    assert_close(velocity_coef[1:], -(1 + a**2 / 2) * h[1:], rtol=0, atol=1e-12)
    assert_close(std[1:], a * (t[1:] / (1 - t[1:]) * h[1:]).sqrt(), rtol=0, atol=1e-12)


def test_t4_flow_closed_form(sigmas):
    a, table = 0.7, transition_table(sigmas, "flow_sde", 0.7, range(9))
    t, h = sigmas[1:-2].double(), (sigmas[1:-2] - sigmas[2:-1]).double()
    assert_close(table.latents_coef[1:9].double(), 1 - a**2 * h / (2 * (1 - t)), rtol=0, atol=1e-6)
    assert_close(table.velocity_coef[1:9].double(), -(1 + a**2 / 2) * h, rtol=0, atol=1e-6)
    assert_close(table.std[1:9].double(), a * (t / (1 - t) * h).sqrt(), rtol=0, atol=1e-6)


def residual_std(sde_type, noise_level, t, t_next):
    """Std of `x_next - (1 - t_next) x0` after one sampled step with the exact velocity, by Monte Carlo."""
    table = transition_table(torch.tensor([1.0, t, t_next, 0.0]), sde_type, noise_level, [1])
    clean, noise = normal(1, 200_000, dtype=torch.float64), normal(1, 200_000, seed=1, dtype=torch.float64)
    mean = transition_mean((1 - t) * clean + t * noise, noise - clean, table, 1)
    drawn = mean + transition_std(mean, table, 1) * normal(1, 200_000, seed=2, dtype=torch.float64)
    return (drawn - (1 - t_next) * clean).std().item()


@pytest.mark.parametrize("t_next", [0.3, 0.45])
def test_t5_marginals(t_next):
    t, a = 0.6, 0.7
    h = t - t_next
    diffusion = a**2 * t / (1 - t)
    excess = diffusion * h**2 / t * (1 + diffusion / (4 * t))  # of order h²: halving h quarters it
    assert residual_std("flow_sde", a, t, t_next) == pytest.approx(math.sqrt(t_next**2 + excess), rel=0.01)
    assert residual_std("cps", 0.8, t, t_next) == pytest.approx(t_next, rel=0.01)


@pytest.mark.parametrize(
    ("sde_type", "noise_level", "diffusion"), [("flow_sde", 0.7, 0.49 * 0.6 / 0.4), ("dance_sde", 0.9, 0.81)]
)
def test_t5_the_excess_is_quadratic_in_the_step(sde_type, noise_level, diffusion):
    # The residual is linear in two independent unit normals (the noise and the fresh one), so its variance is exact:
    # (latents_coef * t + velocity_coef)² + std².
    t = torch.full((3,), 0.6, dtype=torch.float64)
    h = torch.tensor([0.4, 0.2, 0.1], dtype=torch.float64)
    latents_coef, velocity_coef, std = SDE_TYPES[sde_type](t, t - h, t, noise_level)
    excess = (latents_coef * t + velocity_coef).square() + std.square() - (t - h).square()
    assert_close(excess, diffusion * h.square() / t * (1 + diffusion / (4 * t)), rtol=1e-12, atol=0)
    assert_close(excess[:-1] / excess[1:], torch.full((2,), 4.0, dtype=torch.float64), rtol=1e-12, atol=0)
    # And that is what the sampled step has.
    expected = (0.2**2 + excess[0].item()) ** 0.5
    assert residual_std(sde_type, noise_level, 0.6, 0.2) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("sde_type", "noise_level"), STOCHASTIC)
def test_t6_log_prob_of_a_fresh_sample(sigmas, sde_type, noise_level):
    table = transition_table(sigmas, sde_type, noise_level, range(9))
    latents, velocity, noise = normal(3, 4, 8, 8), normal(3, 4, 8, 8, seed=1), normal(3, 4, 8, 8, seed=2)
    for step in range(9):
        mean, std = transition_mean(latents, velocity, table, step), transition_std(latents, table, step)
        drawn = mean + std * noise
        log_prob = gaussian_log_prob(drawn.double(), mean.double(), std)
        expected = -noise.double().square().flatten(1).mean(1) / 2 - math.log(std.item()) - math.log(2 * math.pi) / 2
        assert_close(log_prob, expected, rtol=1e-5, atol=1e-4)  # the sample was rounded to float32
        density = torch.distributions.Normal(mean.double(), std.double()).log_prob(drawn.double()).flatten(1)
        assert_close(log_prob, density.mean(1), rtol=1e-6, atol=1e-6)
        assert_close(gaussian_log_prob(drawn.double(), mean.double(), std, "sum"), density.sum(1), rtol=1e-6, atol=0)


def test_t8_log_ratio_identity():
    noise, shift, std = normal(2, 500, dtype=torch.float64), 0.01 * normal(2, 500, seed=1, dtype=torch.float64), 0.4
    mean = normal(2, 500, seed=2, dtype=torch.float64)
    drawn = mean + std * noise
    log_ratio = gaussian_log_prob(drawn, mean + shift, std) - gaussian_log_prob(drawn, mean, std)
    cross, quadratic = (noise * shift).mean(1), shift.square().mean(1)
    assert_close(log_ratio, cross / std - quadratic / (2 * std**2), rtol=0, atol=1e-12)
    assert_close(std * (log_ratio + quadratic / (2 * std**2)), cross, rtol=0, atol=1e-12)  # GRPO-Guard's RatioNorm


def test_mean_reduced_ratios_average_below_one():
    # With D = 16 and a standardised shift of 0.1, KL = D * 0.1² / 2: E[ratio] = exp(-KL/D + KL/D²) = 0.99532.
    drawn, mean = normal(200_000, 16), torch.zeros(200_000, 16)
    for reduction, expected, tolerance in [("mean", 0.99532, 3e-4), ("sum", 1.0, 5e-3)]:
        new = gaussian_log_prob(drawn, mean + 0.1, 1.0, reduction)
        old = gaussian_log_prob(drawn, mean, 1.0, reduction)
        assert (new - old).exp().mean().item() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("sde_type", "noise_level"), STOCHASTIC)
def test_replay_with_mixed_steps_gives_the_same_bits(sigmas, sde_type, noise_level):
    table = transition_table(sigmas, sde_type, noise_level, range(1, 9))
    latents, velocity, noise = normal(4, 4, 8, 8), normal(4, 4, 8, 8, seed=1), normal(4, 4, 8, 8, seed=2)
    steps = torch.tensor([8, 1, 5, 2])
    mean, std = transition_mean(latents, velocity, table, steps), transition_std(latents, table, steps)
    drawn = mean + std * noise
    log_prob = gaussian_log_prob(drawn, mean, std)
    for row, step in enumerate(steps.tolist()):
        alone = transition_mean(latents[row : row + 1], velocity[row : row + 1], table, step)
        assert torch.equal(alone[0], mean[row])
        alone_std = transition_std(latents, table, step)
        assert torch.equal(alone_std.flatten()[0], std.flatten()[row])
        assert gaussian_log_prob(drawn[row : row + 1], alone, alone_std)[0] == log_prob[row]


def test_half_precision_is_computed_in_float32(sigmas):
    table = transition_table(sigmas, "flow_sde", 0.7, [3])
    latents, velocity = normal(2, 4, 8, 8), normal(2, 4, 8, 8, seed=1).bfloat16()
    mean = transition_mean(latents, velocity, table, 3)
    assert mean.dtype == torch.float32
    assert torch.equal(mean, transition_mean(latents, velocity.float(), table, 3))
    log_prob = gaussian_log_prob(latents.bfloat16(), mean, 0.05)
    assert log_prob.dtype == torch.float32
    assert torch.equal(log_prob, gaussian_log_prob(latents.bfloat16().float(), mean, 0.05))


def test_inputs_are_left_alone(sigmas):
    table = transition_table(sigmas, "flow_sde", 0.7, [3])
    latents, velocity = normal(2, 4), normal(2, 4, seed=1)
    transition_mean(latents, velocity, table, 3)
    assert torch.equal(latents, normal(2, 4))
    assert torch.equal(velocity, normal(2, 4, seed=1))


def test_the_sample_carries_no_gradient():
    sample, mean = normal(1, 4).requires_grad_(), normal(1, 4, seed=1).requires_grad_()
    gaussian_log_prob(sample, mean, 0.5).sum().backward()
    assert sample.grad is None
    assert_close(mean.grad, (sample - mean).detach() / (4 * 0.5**2), rtol=1e-6, atol=1e-7)


def test_rows_outside_the_window_are_ode_rows(sigmas):
    table, plain = transition_table(sigmas, "cps", 0.8, [2, 4]), transition_table(sigmas)
    assert table.stochastic.nonzero().flatten().tolist() == [2, 4]
    outside = [0, 1, 3, 5, 6, 7, 8, 9]
    for ours, euler in zip(table, plain, strict=True):
        assert torch.equal(ours[outside], euler[outside])
        assert (ours[[2, 4]] != euler[[2, 4]]).all()


def test_two_steps_are_finite_and_one_step_is_deterministic():
    for sde_type, noise_level in STOCHASTIC:
        for column in transition_table(shifted_sigmas(2, 3.0), sde_type, noise_level, [0]):
            assert column.isfinite().all()
        one = transition_table([1.0, 0.0], sde_type, noise_level)
        assert [column.item() for column in one] == [1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sde_type": "sde"}, "sde_type='sde' is not known: use one of 'flow_sde', 'dance_sde', 'cps', 'ode'"),
        ({"noise_level": -0.1}, "noise_level=-0.1 must be a finite number of at least 0"),
        ({"noise_level": float("nan")}, "noise_level=nan"),
        ({"sde_type": "cps", "noise_level": 1.1}, "noise_level=1.1 must be at most 1 for sde_type='cps'"),
        ({"sde_steps": [0, 10]}, r"sde_steps has 10, but a sampler of 10 steps has steps 0\.\.9"),
        ({"sde_steps": [-1]}, "sde_steps has -1"),
        ({"sde_steps": [9]}, r"the last step is an ODE step, use steps 0\.\.8"),
        ({"sigmas": [1.0, 0.0], "sde_steps": [0]}, "the last step is an ODE step, use 2 sampler steps or more"),
        ({"sigmas": [0.0, 1.0]}, "exactly 0"),
    ],
)
def test_bad_tables(sigmas, kwargs, message):
    with pytest.raises(ValueError, match=message):
        transition_table(**{"sigmas": sigmas, **kwargs})


def test_bad_steps_and_shapes(sigmas):
    table = transition_table(sigmas)
    latents = normal(2, 4)
    with pytest.raises(ValueError, match=r"step=10 is not one of the 10 steps 0\.\.9"):
        transition_mean(latents, latents, table, 10)
    with pytest.raises(ValueError, match="step=-1 is not one"):
        transition_std(latents, table, -1)
    with pytest.raises(ValueError, match=r"got shape \(3,\) for 2 rows"):
        transition_mean(latents, latents, table, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"`latents` \(2, 4\), `velocity` \(2, 1\)"):
        transition_mean(latents, latents[:, :1], table, 0)
    with pytest.raises(ValueError, match=r"`sample` \(2, 4\), `mean` \(1, 4\)"):
        gaussian_log_prob(latents, latents[:1], 1.0)
    with pytest.raises(ValueError, match=r"`std` has one value for all rows or one per row.*2 rows"):
        gaussian_log_prob(latents, latents, torch.ones(3))
    with pytest.raises(ValueError, match="reduction='max' is not known"):
        gaussian_log_prob(latents, latents, 1.0, reduction="max")
    with pytest.raises(ValueError, match="form='cps' is not known: use one of 'gaussian', 'squared_error'"):
        gaussian_log_prob(latents, latents, 1.0, form="cps")


def test_multimodal_log_ratio_is_the_weighted_sum():
    weights = {"video": 0.8, "audio": 0.5}
    new = {name: normal(5, seed=seed) for seed, name in enumerate(weights)}
    old = {name: normal(5, seed=seed + 2) for seed, name in enumerate(weights)}
    ratio = multimodal_log_prob(new, weights) - multimodal_log_prob(old, weights)
    expected = 0.8 * (new["video"] - old["video"]) + 0.5 * (new["audio"] - old["audio"])
    assert_close(ratio, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(multimodal_log_prob({"image": new["video"]}, {"image": 1.0}), new["video"])
    with_gradient = new["audio"].clone().requires_grad_()
    multimodal_log_prob({**new, "audio": with_gradient}, weights).sum().backward()
    assert_close(with_gradient.grad, torch.full((5,), 0.5))
    assert multimodal_log_prob({name: value.bfloat16() for name, value in new.items()}, weights).dtype == torch.float32


def test_token_weights_give_one_mean_over_all_elements():
    # verl-omni's choice for LTX-2: the tokens of both modalities are one sample with one mean.
    shapes = {"video": (6, 8), "audio": (5, 4)}
    drawn = {name: normal(3, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    mean = {name: normal(3, *shape, seed=1, dtype=torch.float64) for name, shape in shapes.items()}
    weights = token_weights({name: math.prod(shape) for name, shape in shapes.items()})
    assert weights == {"video": 48 / 68, "audio": 20 / 68}
    apart = {name: gaussian_log_prob(drawn[name], mean[name], 0.4) for name in shapes}
    joined = [torch.cat([part[name].flatten(1) for name in shapes], 1) for part in (drawn, mean)]
    assert_close(multimodal_log_prob(apart, weights), gaussian_log_prob(*joined, 0.4), rtol=0, atol=1e-12)


def test_a_modality_without_a_density_has_weight_zero():
    # Flow-Factory's choice: audio takes ODE steps, so it has no log-prob, or one that must not be read.
    video, weights = normal(4), {"video": 1.0, "audio": 0.0}
    assert torch.equal(multimodal_log_prob({"video": video}, weights), video)
    assert torch.equal(multimodal_log_prob({"video": video, "audio": torch.full((4,), math.inf)}, weights), video)


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["video", "audio"], {"video": 1.0}, r"'audio' has no weight, got weights for \['video'\]: add 'audio': 1.0"),
        (["video"], {"video": 1.0, "audio": 0.2}, "'audio' has weight 0.2 and no log-prob.*: use weight 0.0"),
        (["video"], {"video": -1.0}, "weight of 'video' must be a finite number of at least 0, got -1.0: use 1.0"),
        (["video"], {"video": math.nan}, "got nan"),
        (["video"], {"video": 0.0}, "No modality has a weight above 0"),
        ([], {}, "No modality has a weight above 0"),
    ],
)
def test_bad_modalities(names, weights, message):
    with pytest.raises(ValueError, match=message):
        multimodal_log_prob({name: normal(3) for name in names}, weights)


def test_bad_modality_shapes_and_sizes():
    with pytest.raises(ValueError, match=r"`video` \(3,\), `audio` \(3, 1\)"):
        multimodal_log_prob({"video": normal(3), "audio": normal(3, 1)}, {"video": 1.0, "audio": 1.0})
    for sizes in ({}, {"video": 10, "audio": 0}):
        with pytest.raises(ValueError, match="Each modality has at least one latent element"):
            token_weights(sizes)

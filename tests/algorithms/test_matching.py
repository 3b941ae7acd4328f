# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.testing import assert_close

from omnitrl.algorithms.losses import clipped_policy_loss
from omnitrl.algorithms.matching import (
    AWM_WEIGHTINGS,
    NFT_MODES,
    OLD_POLICY_SCHEDULES,
    SIGMA_SAMPLINGS,
    awm_log_likelihood,
    matching_error,
    nft_loss,
    noised,
    old_policy_decay,
    optimality_probability,
    sample_sigmas,
    velocity_target,
)
from omnitrl.algorithms.sigmas import shifted_sigmas
from tests.golden_cases import load_case


EXACT = {"rtol": 1e-9, "atol": 1e-12}
GOLDEN_NFT = {"rtol": 2e-6, "atol": 1e-7}
MAX_ADVANTAGE = 5.0


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def nft_case(rows=3, elements=8):
    """A random case in float64: clean latents, exact velocity, noised latents, levels."""
    clean, noise = normal(rows, elements), normal(rows, elements, seed=1)
    sigma = torch.linspace(0.2, 0.9, rows, dtype=torch.float64)
    return clean, velocity_target(clean, noise), noised(clean, noise, sigma), sigma


def test_path_and_target():
    clean, noise = torch.tensor([[2.0, 0.0], [1.0, -1.0]]), torch.tensor([[0.0, 4.0], [3.0, 1.0]])
    expected = torch.tensor([[1.5, 1.0], [2.0, 0.0]])
    assert torch.equal(noised(clean, noise, torch.tensor([0.25, 0.5])), expected)
    assert torch.equal(noised(clean, noise, torch.tensor([0.25, 0.5]).reshape(2, 1)), expected)
    assert torch.equal(noised(clean, noise, 0.0), clean)
    assert torch.equal(noised(clean, noise, 1.0), noise)
    assert velocity_target(clean, noise).tolist() == [[-2.0, 4.0], [2.0, 2.0]]
    # A `float` keeps its digits beside float64.
    assert_close(noised(torch.zeros(1, 1).double(), torch.ones(1, 1).double(), 0.1).item(), 0.1, rtol=0, atol=1e-16)
    # The target is the slope of the path.
    assert_close(noised(clean, noise, 0.75) - noised(clean, noise, 0.25), 0.5 * velocity_target(clean, noise))


def test_half_precision_is_raised_before_the_arithmetic():
    clean, noise = normal(2, 64, dtype=torch.bfloat16), normal(2, 64, seed=1, dtype=torch.bfloat16)
    assert torch.equal(noised(clean, noise, 0.3), 0.7 * clean.float() + 0.3 * noise.float())
    assert torch.equal(velocity_target(clean, noise), noise.float() - clean.float())
    assert torch.equal(matching_error(clean, noise), (clean.float() - noise.float()).square().mean(1))


def test_bad_paths():
    latents = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"noise level from 0 .* got 500: divide timesteps by 1000"):
        noised(latents, latents, torch.tensor([0.5, 500.0]))
    with pytest.raises(ValueError, match=r"`sigma` is a noise level .* got nan"):
        noised(latents, latents, float("nan"))
    with pytest.raises(ValueError, match=r"`sigma` has one value .* got shape \(3,\)"):
        noised(latents, latents, torch.full((3,), 0.5))
    for function in (velocity_target, matching_error, lambda a, b: noised(a, b, 0.5)):
        with pytest.raises(ValueError, match=r"\(2, 4\), .* \(1, 4\)"):
            function(latents, latents[:1])


def test_grid_levels_are_the_samplers_own_without_replacement():
    grid = shifted_sigmas(10, 3.0)
    sigmas, steps = sample_sigmas("grid", 9, generator(), grid, high=0.99)
    assert sorted(steps.tolist()) == list(range(9)), "int(0.99 * 10) steps, the last one left out"
    assert steps.tolist() != list(range(9)), "in random order"
    assert torch.equal(sigmas, grid[steps])
    assert sigmas.dtype == torch.float32
    assert steps.dtype == torch.int64
    assert sorted(sample_sigmas("grid", 10, generator(), grid)[1].tolist()) == list(range(10)), "never the final 0"
    assert len(set(sample_sigmas("grid", 4, generator(3), grid)[1].tolist())) == 4
    # More than there are: every level again before one comes a third time.
    counts = torch.bincount(sample_sigmas("grid", 25, generator(), grid)[1], minlength=10)
    assert sorted(set(counts.tolist())) == [2, 3]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 0.9, range(9)), (0.0, 0.5, range(5)), (0.1, 0.9, range(1, 9)), (0.5, 1.0, range(5, 10)), (0.29, 0.3, [2])],
)
def test_part_of_a_grid_in_sampling_order(low, high, expected):
    grid = shifted_sigmas(10, 1.0)
    drawn = set(sample_sigmas("grid", 40, generator(), grid, low, high)[1].tolist())
    assert drawn == set(expected)


def test_a_rounding_does_not_lose_a_step_of_the_grid():
    assert int(0.29 * 100) == 28
    assert sample_sigmas("grid", 200, generator(), shifted_sigmas(100, 1.0), high=0.29)[1].max() == 28


def test_continuous_levels():
    uniform, steps = sample_sigmas("uniform", 4000, generator())
    assert steps is None
    assert uniform.dtype == torch.float32
    assert 0.001 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() <= 0.999
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.02)
    assert uniform.std().item() == pytest.approx(12**-0.5, abs=0.01)
    logit_normal, steps = sample_sigmas("logit_normal", 4000, generator())
    assert steps is None
    assert logit_normal.dtype == torch.float32
    logits = ((logit_normal - 0.001) / 0.998).logit()
    assert logits.mean().item() == pytest.approx(0.0, abs=0.05)
    assert logits.std().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
def test_part_of_the_continuous_levels_is_counted_from_the_noise(sampling):
    noisiest, _ = sample_sigmas(sampling, 2000, generator(), high=0.5)
    assert 0.5 <= noisiest.min() < 0.55
    assert 0.95 < noisiest.max() <= 0.999
    first, _ = sample_sigmas(sampling, 2000, generator(), high=0.9)
    assert 0.1 <= first.min() < 0.2
    late, _ = sample_sigmas(sampling, 2000, generator(), low=0.2, high=1.0)
    assert 0.001 <= late.min() < 0.1
    assert 0.7 < late.max() <= 0.8
    assert_close(late.median(), torch.tensor(0.4), rtol=0, atol=0.03)


@pytest.mark.parametrize("sampling", list(SIGMA_SAMPLINGS))
def test_the_levels_are_a_function_of_the_generator(sampling):
    grid = shifted_sigmas(10, 3.0)
    first, again, other = (sample_sigmas(sampling, 6, generator(seed), grid)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_bad_sampling():
    grid = shifted_sigmas(10, 3.0)
    with pytest.raises(ValueError, match="sigma_sampling='cosine' is not known: use one of 'uniform', 'logit_normal'"):
        sample_sigmas("cosine", 1, generator())
    with pytest.raises(ValueError, match="count=0 draws no noise level"):
        sample_sigmas("uniform", 0, generator())
    for low, high in [(0.5, 0.5), (-0.1, 1.0), (0.0, 1.1), (0.9, 0.1)]:
        with pytest.raises(ValueError, match="no part of the way"):
            sample_sigmas("uniform", 1, generator(), low=low, high=high)
    with pytest.raises(ValueError, match=r"got grid=None: pass `table.sigmas`"):
        sample_sigmas("grid", 1, generator())
    with pytest.raises(ValueError, match=r"got grid=shape \(1,\)"):
        sample_sigmas("grid", 1, generator(), grid[:1])
    with pytest.raises(ValueError, match=r"low=0.01, high=0.09 of a grid of 10 steps holds none"):
        sample_sigmas("grid", 1, generator(), grid, 0.01, 0.09)


@pytest.mark.parametrize("mode", list(NFT_MODES))
def test_case_04c_and_05d_optimality(mode):
    _, stored = load_case("04c")
    name = "continuous" if mode == "all" else mode
    assert_close(optimality_probability(stored["adv_in"], 5.0, mode), stored[f"reward_prob_{name}"], rtol=0, atol=1e-7)
    _, stored = load_case("05d")
    assert_close(
        optimality_probability(stored["advantages"], 5.0, mode), stored[f"nft_{mode}_beta1_r"], rtol=0, atol=1e-7
    )


def test_optimality_at_another_bound():
    advantages = torch.tensor([-3.0, -1.0, 0.5, 4.0])
    assert optimality_probability(advantages, 2.0).tolist() == [0.0, 0.25, 0.625, 1.0]
    assert optimality_probability(advantages, 2.0, "binary").tolist() == [0.25, 0.25, 0.75, 0.75]
    assert not optimality_probability(advantages.requires_grad_()).requires_grad
    with pytest.raises(ValueError, match="nft_mode='soft' is not known: use one of 'all', 'positive_only'"):
        optimality_probability(advantages, mode="soft")
    with pytest.raises(ValueError, match="advantage_clip=0 scales"):
        optimality_probability(advantages, 0.0)


def golden_nft(stored, optimality, beta, suffix="", dtype=torch.float32):
    velocity = stored[f"forward_prediction{suffix}"].to(dtype).requires_grad_()
    old = stored[f"old_prediction{suffix}"].to(dtype)
    out = nft_loss(velocity, old, stored["xt"].to(dtype), stored["x0"].to(dtype), stored["t"], optimality, beta)
    return velocity, out


def test_case_05d_latents():
    _, stored = load_case("05d")
    assert_close(noised(stored["x0"], stored["noise"], stored["t"]), stored["xt"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("mode", "beta"),
    [
        ("all", 1),
        ("all", 0.1),
        ("positive_only", 1),
        ("negative_only", 1),
        ("one_only", 1),
        ("binary", 1),
    ],
)
def test_case_05d_official(mode, beta, dtype):
    case, stored = load_case("05d")
    key = f"nft_{mode}_beta{beta}"
    optimality = optimality_probability(stored["advantages"], MAX_ADVANTAGE, mode)
    velocity, out = golden_nft(stored, optimality, beta, dtype=dtype)
    assert out.loss.dtype == dtype
    # The reference computes its weights in float64 from float32 predictions.
    assert_close(out.positive_error.double(), stored[f"{key}_positive_loss"], **GOLDEN_NFT)
    assert_close(out.negative_error.double(), stored[f"{key}_negative_loss"], **GOLDEN_NFT)
    drift = matching_error(velocity, stored["ref_forward_prediction"]).mean()
    # The reference adds the drift in place, so that what it reports as the policy loss has it too.
    loss = MAX_ADVANTAGE * out.loss.mean() + case["parameters"]["kl_coef"] * drift
    assert_close(loss.double().reshape(1), stored[f"{key}_policy_loss"], **GOLDEN_NFT)
    assert_close(loss.double().reshape(1), stored[f"{key}_loss"], **GOLDEN_NFT)
    loss.backward()
    assert_close(velocity.grad.float(), stored[f"{key}_grad"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("beta", [1, 0.5, 0.1])
def test_case_05d_verl_omni(beta):
    case, stored = load_case("05d")
    velocity, out = golden_nft(stored, stored["nft_all_beta1_r"], beta)
    drift = matching_error(velocity, stored["ref_forward_prediction"]).mean()
    loss = MAX_ADVANTAGE * out.loss.mean() + case["parameters"]["kl_coef"] * drift
    loss.backward()
    assert_close(loss.reshape(1), stored[f"verl_beta{beta}_loss"], **GOLDEN_NFT)
    assert_close(velocity.grad, stored[f"verl_beta{beta}_grad"], rtol=1e-4, atol=1e-7)


def test_case_05d_flow_factory():
    _, stored = load_case("05d")
    velocity, out = golden_nft(stored, stored["nft_all_beta1_r"], 1)
    loss = MAX_ADVANTAGE * out.loss.mean()
    loss.backward()
    assert_close(loss.double().reshape(1), stored["flow_factory_beta1_policy_loss"], **GOLDEN_NFT)
    assert_close(velocity.grad, stored["flow_factory_beta1_grad"], rtol=1e-4, atol=1e-7)


def test_case_05d_floor_of_the_weight():
    case, stored = load_case("05d")
    velocity, out = golden_nft(stored, stored["nft_all_beta1_r"], 1, "_exact_row0")
    drift = matching_error(velocity, stored["ref_forward_prediction"]).mean()
    loss = MAX_ADVANTAGE * out.loss.mean() + case["parameters"]["kl_coef"] * drift
    assert_close(loss.double().reshape(1), stored["nft_floor_loss"], **GOLDEN_NFT)
    assert stored["nft_floor_weight_pos"][0] == 1e-5
    # Off by 1e-6 at level 1, in both directions: 1e-12 over the floor of 1e-5.
    near = nft_loss(*[torch.full((1, 4), gap, dtype=torch.float64) for gap in (1e-6, 0, 0, 0)], 1.0, torch.ones(1))
    assert_close(near.loss, torch.tensor([1e-7], dtype=torch.float64), rtol=1e-9, atol=0)
    # An exact prediction: no error, and no division by it.
    clean, target, latents, sigma = nft_case()
    exact = nft_loss(target.requires_grad_(), target, latents, clean, sigma, torch.ones(3))
    exact.loss.sum().backward()
    assert (exact.loss < 1e-20).all()
    assert target.grad.isfinite().all()


def test_t16_all_good_and_unweighted_is_fine_tuning():
    clean, target, latents, sigma = nft_case()
    velocity = normal(3, 8, seed=2).requires_grad_()
    out = nft_loss(velocity, normal(3, 8, seed=3), latents, clean, sigma, torch.ones(3), 1.0, adaptive=False)
    plain = sigma.square() * matching_error(velocity, target)
    assert_close(out.loss, plain, **EXACT)
    (grad,) = torch.autograd.grad(out.loss.sum(), velocity, retain_graph=True)
    (plain_grad,) = torch.autograd.grad(plain.sum(), velocity)
    assert_close(grad, plain_grad, **EXACT)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_t16_gradient_at_the_old_policy(beta, adaptive):
    clean, target, latents, sigma = nft_case()
    old, quality = normal(3, 8, seed=2), torch.tensor([0.5, 0.9, 0.2], dtype=torch.float64)
    velocity = old.clone().requires_grad_()
    out = nft_loss(velocity, old, latents, clean, sigma, quality, beta, adaptive)
    out.loss.sum().backward()
    level = sigma.reshape(3, 1)
    weight = (level * (old - target)).abs().mean(1, keepdim=True) if adaptive else 1.0
    expected = (2 * quality.reshape(3, 1) - 1) * 2 * level.square() * (old - target) / (8 * weight)
    assert_close(velocity.grad, expected, **EXACT)
    assert (velocity.grad[0].abs() < 1e-12).all(), "a sample that is neither good nor bad"
    assert torch.equal(out.positive_error, out.negative_error)


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_t16_stationary_point(beta):
    clean, target, latents, sigma = nft_case()
    old, quality = normal(3, 8, seed=2), torch.tensor([0.5, 0.9, 0.2], dtype=torch.float64)
    best = old + (2 * quality.reshape(3, 1) - 1) / beta * (target - old)
    velocity = best.clone().requires_grad_()
    out = nft_loss(velocity, old, latents, clean, sigma, quality, beta, adaptive=False)
    out.loss.sum().backward()
    assert velocity.grad.abs().max() < 1e-12
    moved = nft_loss(best + 0.1 * normal(3, 8, seed=4), old, latents, clean, sigma, quality, beta, adaptive=False)
    assert (moved.loss > out.loss).all()


def test_nft_gradient_reaches_the_policy_alone():
    clean, _, latents, sigma = nft_case()
    inputs = [normal(3, 8, seed=2), normal(3, 8, seed=3), latents, clean, torch.rand(3, generator=generator())]
    velocity, old, latents, clean, quality = (tensor.detach().requires_grad_() for tensor in inputs)
    out = nft_loss(velocity, old, latents, clean, sigma, quality)
    out.loss.sum().backward()
    assert velocity.grad.abs().min() > 0
    assert [old.grad, latents.grad, clean.grad, quality.grad] == [None] * 4
    assert not out.positive_error.requires_grad
    assert not out.negative_error.requires_grad


def test_bad_nft():
    clean, target, latents, sigma = nft_case()
    with pytest.raises(ValueError, match="mix_beta=0 divides the loss"):
        nft_loss(target, target, latents, clean, sigma, torch.ones(3), mix_beta=0.0)
    with pytest.raises(ValueError, match=r"`optimality` is a probability in 0..1, got .*-0\.5"):
        nft_loss(target, target, latents, clean, sigma, torch.tensor([0.1, -0.5, 1.0]))
    with pytest.raises(ValueError, match="`optimality` is a probability"):
        nft_loss(target, target, latents, clean, sigma, torch.tensor([0.1, 1.5, 1.0]))
    with pytest.raises(ValueError, match="`optimality` has one value"):
        nft_loss(target, target, latents, clean, sigma, torch.ones(2))
    with pytest.raises(ValueError, match=r"`velocity_old` \(1, 8\)"):
        nft_loss(target, target[:1], latents, clean, sigma, torch.ones(3))


@pytest.mark.parametrize(
    ("schedule", "step", "decay"),
    [
        ("copy", 10_000, 0.0),
        ("linear", 0, 0.0),
        ("linear", 100, 0.1),
        ("linear", 500, 0.5),
        ("linear", 9000, 0.5),
        ("delayed", 74, 0.0),
        ("delayed", 75, 0.0),
        ("delayed", 100, 0.1875),
        ("delayed", 208, 0.0075 * 133),
        ("delayed", 209, 0.999),
        ("delayed", 9000, 0.999),
        ("awm", 100, 0.1),
        ("awm", 300, 0.3),
        ("awm", 9000, 0.3),
    ],
)
def test_t17_old_policy_schedules(schedule, step, decay):
    assert old_policy_decay(schedule, step) == decay
    assert OLD_POLICY_SCHEDULES[schedule](step) == decay


def test_bound_of_the_old_policy_decay():
    assert old_policy_decay("delayed", 9000, max_decay=0.9) == 0.9
    assert old_policy_decay("delayed", 100, max_decay=0.9) == 0.1875
    with pytest.raises(ValueError, match="old_policy_schedule='cosine' is not known: use one of 'copy', 'linear'"):
        old_policy_decay("cosine", 1)
    with pytest.raises(ValueError, match="step=-1 counts optimizer steps"):
        old_policy_decay("linear", -1)
    with pytest.raises(ValueError, match=r"max_decay=1.5 is a share"):
        old_policy_decay("linear", 1, 1.5)


AWM_KEYS = {"uniform": "Uniform", "t": "t", "t2": "tsq2", "huber": "huber", "ghuber": "ghuber"}


@pytest.mark.parametrize("weighting", list(AWM_WEIGHTINGS))
@pytest.mark.parametrize("epsilon", [1e-4, 0.2])
def test_case_05f_flow_factory(weighting, epsilon):
    case, stored = load_case("05f")
    key, close = AWM_KEYS[weighting], {"rtol": 1e-5, "atol": 1e-6}
    sigma, power = stored["timesteps"] / 1000, case["parameters"]["ghuber_power"]
    velocity = stored["model_output"].clone().requires_grad_()
    new = awm_log_likelihood(velocity, stored["target"], sigma, weighting, power)
    old = awm_log_likelihood(stored["old_model_output"], stored["target"], sigma, weighting, power)
    assert_close(new, stored[f"{key}_log_prob"], **close)
    assert_close(old, stored[f"{key}_old_log_prob"], **close)
    loss = clipped_policy_loss(new, old, stored["advantages"], epsilon).loss.mean()
    loss.backward()
    name = f"{key}_clip{'1e-4' if epsilon == 1e-4 else epsilon}"
    assert_close(loss.reshape(1), stored[f"{name}_loss"], **close)
    assert_close(velocity.grad, stored[f"{name}_grad"], rtol=1e-4, atol=1e-7)


def test_case_05f_kl():
    _, stored = load_case("05f")
    drift = matching_error(stored["model_output"], stored["ref_model_output"]).mean()
    assert_close(drift.reshape(1), stored["kl_value"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighting", list(AWM_WEIGHTINGS))
def test_t18_on_policy_gradient_is_the_advantage_times_that_of_the_weighted_loss(weighting):
    _, target, _, sigma = nft_case()
    velocity, advantages = normal(3, 8, seed=2).requires_grad_(), torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64)
    new = awm_log_likelihood(velocity, target, sigma, weighting)
    out = clipped_policy_loss(new, new.detach(), advantages)
    assert (out.ratio == 1).all()
    (grad,) = torch.autograd.grad(out.loss.sum(), velocity, retain_graph=True)
    (matching,) = torch.autograd.grad(-new.sum(), velocity)
    assert_close(grad, advantages.reshape(3, 1) * matching, **EXACT)
    if weighting == "uniform":
        assert_close(grad, advantages.reshape(3, 1) * 2 / 8 * (velocity - target).detach(), **EXACT)


def test_t18_a_ratio_per_level_and_one_per_sample_have_one_gradient_on_policy():
    samples, levels = 3, 4
    target, sigma = normal(samples * levels, 8), torch.linspace(0.1, 0.9, samples * levels, dtype=torch.float64)
    advantages = torch.tensor([1.5, -0.5, 0.25], dtype=torch.float64)
    grads = []
    for sum_first in (False, True):
        velocity = normal(samples * levels, 8, seed=2).requires_grad_()
        new, rows = awm_log_likelihood(velocity, target, sigma).reshape(samples, levels), advantages
        if sum_first:
            new = new.mean(1)
        else:
            new, rows = new.flatten(), advantages.repeat_interleave(levels)
        clipped_policy_loss(new, new.detach(), rows).loss.mean().backward()
        grads.append(velocity.grad)
    assert_close(grads[0], grads[1], **EXACT)
    assert grads[0].abs().min() > 0


def test_huber_weightings_in_closed_form():
    error = torch.tensor([0.0, 0.04, 4.0], dtype=torch.float64)
    velocity = error.sqrt().reshape(3, 1).expand(3, 5)
    huber = awm_log_likelihood(velocity, torch.zeros_like(velocity), 0.5, "huber")
    assert_close(huber, -0.5 * ((error + 1e-10).sqrt() - 1e-5), **EXACT)
    assert huber[0].item() == pytest.approx(0.0, abs=1e-15)
    # With a power of 1/2, "ghuber" is twice "huber"; with 1 it is "t".
    assert_close(awm_log_likelihood(velocity, torch.zeros_like(velocity), 0.5, "ghuber", 0.5), 2 * huber, **EXACT)
    linear = awm_log_likelihood(velocity, torch.zeros_like(velocity), 0.5, "ghuber", 1.0)
    assert_close(linear, -0.5 * error, **EXACT)


def test_bad_awm():
    velocity = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="awm_weighting='snr' is not known: use one of 'uniform', 't', 't2'"):
        awm_log_likelihood(velocity, velocity, 0.5, "snr")
    with pytest.raises(ValueError, match=r"power=0 must be above 0: use 0.25"):
        awm_log_likelihood(velocity, velocity, 0.5, power=0.0)
    with pytest.raises(ValueError, match="got 500: divide timesteps"):
        awm_log_likelihood(velocity, velocity, torch.tensor([500.0, 20.0]))

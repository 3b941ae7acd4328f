# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch.testing import assert_close

from omnitrl.algorithms.losses import clipped_policy_loss
from omnitrl.algorithms.policy_losses import (
    dppo_policy_loss,
    guard_log_ratio,
    guard_policy_loss,
    sequence_level_log_ratio,
    sequence_log_ratio,
    sequence_policy_loss,
)
from omnitrl.algorithms.sigmas import shifted_sigmas
from omnitrl.algorithms.transitions import (
    gaussian_log_prob,
    transition_mean,
    transition_std,
    transition_table,
)
from tests.golden_cases import load_case


CLOSE = {"rtol": 1e-5, "atol": 1e-6}
NOISE_LEVELS = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_steps(sde_type, rows=5, shift=1e-3):
    """One float64 row per trained step of a sampler: table, steps, old and new velocity, and what was drawn."""
    table = transition_table(shifted_sigmas(rows + 1, 3.0), sde_type, NOISE_LEVELS[sde_type], range(rows))
    steps, latents, noise = torch.arange(rows), normal(rows, 3, 8), normal(rows, 3, 8, seed=1)
    velocity_old = normal(rows, 3, 8, seed=2)
    velocity = (velocity_old + shift * normal(rows, 3, 8, seed=3)).requires_grad_()
    mean_old = transition_mean(latents, velocity_old, table, steps)
    std = transition_std(latents, table, steps).double()
    mean = transition_mean(latents, velocity, table, steps)
    return table, velocity, noise, mean, mean_old, std, mean_old + std * noise


# GRPO-Guard


def guard_inputs(stored, wide="", mixed=""):
    """
    The references take log-prob and mean as if they had nothing to do with each other. A sample that lies off the old
    mean along the shift of the mean, as far as the log-ratio asks for, makes them the log-prob and mean of one step.
    """
    scale = (stored[f"std_dev_t{mixed}"].flatten() * stored[f"sqrt_dt{mixed}"]).double()  # (B,)
    mean_old = stored["old_prev_sample_mean"].double()
    mean = stored[f"prev_sample_mean{wide}"].double()
    shift = mean - mean_old
    square = shift.square().flatten(1).mean(1)
    log_ratio = (stored[f"log_prob{wide}"] - stored["old_log_prob"]).double()
    along = (scale * log_ratio + square / (2 * scale)) / square
    std = scale.reshape(-1, 1, 1, 1)
    sample = mean_old + std * shift * along.reshape(-1, 1, 1, 1)
    plain = gaussian_log_prob(sample, mean, std) - gaussian_log_prob(sample, mean_old, std)
    assert_close(plain, log_ratio, rtol=1e-9, atol=1e-12)
    return sample, mean.requires_grad_(), mean_old, std


@pytest.mark.parametrize("project", ["verl", "flow_factory"])
@pytest.mark.parametrize(("epsilon", "wide"), [(1e-4, ""), (0.2, ""), (0.2, "_wide")])
def test_case_05b_guard_of_one_timestep(project, epsilon, wide):
    _, stored = load_case("05b")
    sample, mean, mean_old, std = guard_inputs(stored, wide)
    # verl-omni divides by the step size, Flow-Factory by nothing.
    weight = 1 / stored["sqrt_dt"].square() if project == "verl" else None
    out = guard_policy_loss(sample, mean, mean_old, std, stored["advantages"], epsilon, weight=weight)
    out.loss.mean().backward()
    key = f"{project}{wide}_clip{'0.0001' if epsilon == 1e-4 else epsilon}"
    assert_close(out.loss.detach().mean().reshape(1).float(), stored[f"{key}_loss"], rtol=2e-5, atol=1e-6)
    # Theirs has one gradient through the log-prob and one through the mean.
    through_log_prob = (sample - mean_old - (mean - mean_old)) / std.square() / mean[0].numel()
    theirs = (
        stored[f"{key}_grad_log_prob"].double().reshape(-1, 1, 1, 1) * through_log_prob + stored[f"{key}_grad_mean"]
    )
    assert_close(mean.grad, theirs.detach(), rtol=1e-4, atol=1e-5)
    assert mean.grad.abs().max() > 1e-4


def test_case_05b_guard_of_mixed_timesteps_has_one_scale_per_sample():
    _, stored = load_case("05b")
    for mixed in ("", "_mixed"):
        out = guard_policy_loss(*guard_inputs(stored, "_wide", mixed), stored["advantages"], 0.2)
        expected = stored[f"diagonal_per_sample_wide{mixed}_clip0.2_loss"]
        assert_close(out.loss.detach().mean().reshape(1).float(), expected, rtol=2e-5, atol=1e-6)
    # What the references make of the same mixed rows.
    ours = out.loss.detach().mean().item()
    assert abs(ours - stored["flow_factory_wide_mixed_clip0.2_loss"].item()) > 0.1


@pytest.mark.parametrize("sde_type", list(NOISE_LEVELS))
def test_t8_guard_is_the_log_ratio_without_its_bias_and_times_the_std(sde_type):
    _, _, noise, mean, mean_old, std, sample = drawn_steps(sde_type)
    log_ratio = gaussian_log_prob(sample, mean, std) - gaussian_log_prob(sample, mean_old, std)
    shift, scale = mean - mean_old, std.flatten()
    bias = shift.square().flatten(1).mean(1) / (2 * scale.square())
    along_noise = (noise * shift).flatten(1).mean(1)
    assert_close(log_ratio, along_noise / scale - bias, rtol=1e-6, atol=1e-12)
    normalised = guard_log_ratio(sample, mean, mean_old, std)
    assert_close(normalised, scale * (log_ratio + bias), rtol=1e-6, atol=1e-12)
    assert_close(normalised, along_noise, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("sde_type", list(NOISE_LEVELS))
def test_t8_plain_ratios_are_biased_and_normalised_ones_are_not(sde_type):
    table = transition_table(shifted_sigmas(4, 3.0), sde_type, NOISE_LEVELS[sde_type], [1])
    latents, noise = normal(4000, 16), normal(4000, 16, seed=1)
    mean_old = transition_mean(latents, latents, table, 1)
    mean, std = transition_mean(latents, latents + 0.5, table, 1), transition_std(latents, table, 1).double()
    sample = mean_old + std * noise
    plain = gaussian_log_prob(sample, mean, std) - gaussian_log_prob(sample, mean_old, std)
    assert plain.mean() < -4 * plain.std() / math.sqrt(4000)
    normalised = guard_log_ratio(sample, mean, mean_old, std)
    assert normalised.mean().abs() < 3 * normalised.std() / math.sqrt(4000)
    shift = (mean - mean_old).square().mean().sqrt()
    assert normalised.std().item() == pytest.approx(shift.item() / math.sqrt(16), rel=0.05)


@pytest.mark.parametrize("sde_type", list(NOISE_LEVELS))
def test_t12_weighted_guard_has_equal_velocity_gradients_on_all_steps(sde_type):
    def norms(weight):
        table, velocity, _, mean, mean_old, std, _ = drawn_steps(sde_type)
        noise = normal(1, 3, 8, seed=4).expand(5, 3, 8)  # the same on all steps
        out = guard_policy_loss(
            mean_old + std * noise, mean, mean_old, std, torch.full((5,), 2.0), epsilon=0.5, weight=weight(table)
        )
        (grad,) = torch.autograd.grad((out.loss / out.ratio).sum(), velocity)
        expected = 2.0 * noise[0].norm().item() / noise[0].numel()
        return grad.flatten(1).norm(dim=1) / expected

    exact = norms(lambda table: 1 / table.velocity_coef[:5].abs())
    assert_close(exact, torch.ones(5, dtype=torch.float64), rtol=1e-5, atol=0)
    plain = norms(lambda table: None)
    assert plain.max() > 1.5 * plain.min()


def test_t12_one_over_dt_is_enough_for_flow_sde_after_the_first_step():
    sigmas = shifted_sigmas(6, 3.0)
    table = transition_table(sigmas, "flow_sde", 0.7, range(5))
    product = table.velocity_coef[:5].abs() / (sigmas[:5] - sigmas[1:6])
    assert_close(product[1:], torch.full((4,), 1 + 0.49 / 2), rtol=1e-5, atol=0)
    assert product[0].item() == pytest.approx(1.0, rel=1e-5)  # at sigma 1


def test_t7_guard_on_policy_is_the_policy_gradient_times_the_std():
    _, velocity, _, mean, _, std, _ = drawn_steps("flow_sde")
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.25, 0.25], dtype=torch.float64)
    sample = (mean + std * normal(5, 3, 8, seed=5)).detach()
    out = guard_policy_loss(sample, mean, mean.detach(), std, advantages)
    assert (out.ratio == 1).all()
    assert torch.equal(out.loss.detach(), -advantages)
    (grad,) = torch.autograd.grad(out.loss.sum(), velocity, retain_graph=True)
    weighted = -advantages * std.flatten() * gaussian_log_prob(sample, mean, std)
    (plain,) = torch.autograd.grad(weighted.sum(), velocity)
    assert_close(grad, plain, rtol=1e-6, atol=1e-12)


def test_guard_bounds_weights_and_flags():
    mean_old = torch.zeros(4, 2)
    mean = torch.tensor([0.3, 0.3, -0.3, -0.3]).reshape(4, 1).expand(4, 2).clone().requires_grad_()
    sample, advantages = torch.ones(4, 2, requires_grad=True), torch.tensor([9.0, -1.0, 1.0, -9.0])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    out = guard_policy_loss(sample, mean, mean_old, 2.0, advantages, 0.1, 0.05, weight=weight)  # log-ratio +-0.15
    up, down = math.exp(0.15), math.exp(-0.15)
    assert_close(out.loss.detach(), torch.tensor([-5 * 1.05, 2 * up, 3 * -down, 4 * 5 * 0.9]), rtol=1e-6, atol=0)
    assert out.clipped_high.tolist() == [True, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True]
    assert_close(out.approx_kl, torch.full((4,), 0.5 * 0.15**2), rtol=1e-5, atol=0)
    out.loss.sum().backward()
    assert (mean.grad.abs().sum(1) > 0).tolist() == [False, True, True, False]
    assert sample.grad is None
    assert weight.grad is None
    unbounded = guard_policy_loss(sample, mean, mean_old, 2.0, advantages, 0.1, 0.05, advantage_clip=None)
    assert_close(unbounded.loss.detach(), torch.tensor([-9 * 1.05, up, -down, 9 * 0.9]), rtol=1e-6, atol=0)
    # The recipe's range: 1.5e-6 is inside, 3e-6 is not.
    near = guard_policy_loss(sample.detach()[:2], mean_old[:2] + 3e-6, mean_old[:2], 2.0, torch.ones(2))
    far = guard_policy_loss(sample.detach()[:2], mean_old[:2] + 6e-6, mean_old[:2], 2.0, torch.ones(2))
    assert near.clipped_high.tolist() == [False, False]
    assert far.clipped_high.tolist() == [True, True]


def test_guard_refuses_what_has_no_density():
    mean = torch.zeros(2, 4)
    with pytest.raises(
        ValueError, match=r"no noise to normalise a ratio with, got std=0: train stochastic steps only"
    ):
        guard_policy_loss(mean, mean, mean, torch.tensor([0.5, 0.0]), torch.ones(2))
    with pytest.raises(ValueError, match=r"`sample` \(2, 4\), `mean` \(2, 4\), `mean_old` \(1, 4\)"):
        guard_log_ratio(mean, mean, mean[:1], 1.0)
    with pytest.raises(ValueError, match=r"`log_ratio` \(2,\), `advantages` \(2, 1\)"):
        guard_policy_loss(mean, mean, mean, 1.0, torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"`weight` has one value for all rows or one per row"):
        guard_policy_loss(mean, mean, mean, 1.0, torch.ones(2), weight=torch.ones(3))


# Flow-DPPO


@pytest.mark.parametrize(
    ("key", "threshold", "own_std"), [("default", 1e-5, True), ("nocoef", 1e-5, False), ("loose", 0.01, True)]
)
def test_case_05c(key, threshold, own_std):
    case, stored = load_case("05c")
    std = stored["std_dev_t"].flatten() * stored["sqrt_dt"] if own_std else 1.0
    log_probs = stored["log_prob"].clone().requires_grad_()
    mean = stored["prev_sample_mean"].clone().requires_grad_()
    old_log_probs, mean_old = stored["old_log_prob"], stored["old_prev_sample_mean"]
    out = dppo_policy_loss(log_probs, old_log_probs, mean, mean_old, std, stored["advantages"], threshold)
    out.loss.mean().backward()
    assert_close(out.loss.detach().mean().reshape(1), stored[f"verl_{key}_loss"], **CLOSE)
    assert_close(log_probs.grad, stored[f"verl_{key}_grad_log_prob"], **CLOSE)
    assert mean.grad is None
    assert not any(value.requires_grad for value in (out.kl, out.ratio, out.approx_kl))
    assert (stored[f"verl_{key}_grad_mean"] == 0).all()
    metrics = case["metrics"][key]
    assert out.dropped.float().mean().item() == pytest.approx(metrics["actor/masked_fraction"])
    assert out.kl.mean().item() == pytest.approx(metrics["actor/kl_new_old_mean"], rel=1e-4)
    assert out.kl.max().item() == pytest.approx(metrics["actor/kl_new_old_max"], rel=1e-4)
    assert out.approx_kl.mean().item() == pytest.approx(metrics["actor/approx_kl"], rel=1e-4)
    assert out.ratio.mean().item() == pytest.approx(metrics["actor/ratio_mean"], rel=1e-6)


def test_t13_dppo_at_the_old_policy_is_the_plain_gradient():
    _, velocity, _, mean, _, std, _ = drawn_steps("flow_sde")
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.25, 9.0], dtype=torch.float64)
    sample = (mean + std * normal(5, 3, 8, seed=5)).detach()
    log_probs = gaussian_log_prob(sample, mean, std)
    out = dppo_policy_loss(log_probs, log_probs.detach(), mean, mean.detach(), std, advantages, kl_threshold=0.0)
    assert not out.dropped.any()
    assert (out.kl == 0).all()
    (grad,) = torch.autograd.grad(out.loss.sum(), velocity, retain_graph=True)
    (plain,) = torch.autograd.grad((-advantages * log_probs).sum(), velocity)
    assert torch.equal(grad, plain)


def test_t13_dppo_drops_what_leads_away_and_keeps_what_leads_back():
    log_ratio = torch.tensor([0.1, -0.1, 0.1, -0.1, 0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0], dtype=torch.float64)
    mean_old = torch.zeros(5, 4, dtype=torch.float64)
    far = dppo_policy_loss(log_ratio, torch.zeros(5), mean_old + 0.1, mean_old, 0.5, advantages, kl_threshold=0.0199)
    assert_close(far.kl, torch.full((5,), 0.02, dtype=torch.float64), rtol=1e-6, atol=0)
    assert far.dropped.tolist() == [True, True, False, False, False]
    (grad,) = torch.autograd.grad(far.loss.sum(), log_ratio)
    up, down = math.exp(0.1), math.exp(-0.1)
    assert_close(far.loss.tolist(), [0.0, 0.0, up, -down, 0.0], rtol=1e-7, atol=0)
    assert_close(grad.tolist(), [0.0, 0.0, up, -down, 0.0], rtol=1e-7, atol=0)
    near = dppo_policy_loss(log_ratio, torch.zeros(5), mean_old + 0.1, mean_old, 0.5, advantages, kl_threshold=0.0201)
    assert not near.dropped.any()
    assert_close(near.loss.tolist(), [-up, down, up, -down, 0.0], rtol=1e-7, atol=0)


def test_dppo_drops_from_the_threshold_on():
    mean_old = torch.zeros(1, 4)
    inputs = torch.ones(1), torch.zeros(1), mean_old + 0.5, mean_old, 1.0, torch.ones(1)  # a KL of 1/8, exactly
    assert dppo_policy_loss(*inputs, kl_threshold=0.125).dropped.item()
    assert not dppo_policy_loss(*inputs, kl_threshold=0.1250001).dropped.item()


def test_dppo_drops_an_infinite_ratio_without_a_nan():
    log_probs, mean_old = torch.tensor([200.0, 0.0], requires_grad=True), torch.zeros(2, 4)
    out = dppo_policy_loss(log_probs, torch.zeros(2), mean_old + 1, mean_old, 1.0, torch.tensor([1.0, 7.0]))
    out.loss.mean().backward()
    assert out.ratio[0] == math.inf
    assert out.loss.tolist() == [0.0, -7.0]  # and the advantage is as it is
    assert log_probs.grad.tolist() == [0.0, -3.5]  # the mean is over both rows
    bounded = dppo_policy_loss(
        log_probs, torch.zeros(2), mean_old + 1, mean_old, 1.0, torch.tensor([1.0, 7.0]), advantage_clip=5.0
    )
    assert bounded.loss.tolist() == [0.0, -5.0]
    with pytest.raises(ValueError, match="deterministic step has no finite KL, got std=0"):
        dppo_policy_loss(log_probs, torch.zeros(2), mean_old, mean_old, 0.0, torch.ones(2))
    with pytest.raises(ValueError, match=r"`log_probs` \(2,\), `mean_of_each_row` \(1,\)"):
        dppo_policy_loss(log_probs, torch.zeros(2), mean_old[:1], mean_old[:1], 1.0, torch.ones(2))


# GSPO


EPSILONS = {"gspo": (3e-4, 4e-4), "wide": (0.2, 0.2)}


def sequences(stored):
    log_probs = stored["per_token_logps"].clone().requires_grad_()
    return log_probs, stored["old_per_token_logps"], stored["advantages"], stored["mask"]


@pytest.mark.parametrize("key", list(EPSILONS))
@pytest.mark.parametrize("project", ["sequence_grpo_beta0", "verl_seq-mean-token-mean"])
def test_case_06_mean_over_sequences(project, key):
    _, stored = load_case("06")
    log_probs, old, advantages, mask = sequences(stored)
    assert_close(sequence_log_ratio(log_probs, old, mask).detach(), stored["seq_mean_log_ratio"], **CLOSE)
    out = sequence_policy_loss(log_probs, old, advantages, mask, *EPSILONS[key], advantage_clip=None)
    out.loss.mean().backward()
    assert_close(out.loss.detach().mean().reshape(1), stored[f"{project}_{key}_loss"], **CLOSE)
    assert_close(log_probs.grad, stored[f"{project}_{key}_grad"], **CLOSE)


@pytest.mark.parametrize("key", list(EPSILONS))
@pytest.mark.parametrize(
    ("project", "divisor"),
    [
        ("sequence_bnpo_beta0", 17),  # the tokens of the batch
        ("sequence_dapo_beta0", 17),
        ("verl_token-mean", 17),
        ("sequence_dr_grpo_beta0", 4 * 6),  # sequences times their greatest length
    ],
)
def test_case_06_sum_over_tokens(project, divisor, key):
    _, stored = load_case("06")
    log_probs, old, advantages, mask = sequences(stored)
    token = sequence_level_log_ratio(log_probs, old, mask)
    per_token = advantages.unsqueeze(1).expand_as(token)
    out = clipped_policy_loss(token, torch.zeros_like(token), per_token, *EPSILONS[key])
    loss = (out.loss * mask).sum() / divisor
    loss.backward()
    assert_close(loss.detach().reshape(1), stored[f"{project}_{key}_loss"], **CLOSE)
    assert_close(log_probs.grad, stored[f"{project}_{key}_grad"], **CLOSE)


def test_case_06_on_policy_and_bounded_above():
    _, stored = load_case("06")
    log_probs, old, advantages, mask = sequences(stored)
    out = sequence_policy_loss(log_probs, log_probs, advantages, mask)
    out.loss.mean().backward()
    assert (out.ratio == 1).all()
    assert_close(out.loss.detach().mean().reshape(1), stored["sequence_grpo_onpolicy_loss"], **CLOSE)
    assert_close(log_probs.grad, stored["sequence_grpo_onpolicy_grad"], **CLOSE)
    log_probs, old, advantages, mask = sequences(stored)
    out = sequence_policy_loss(log_probs, old, advantages, mask, *EPSILONS["wide"], delta=1.03)
    out.loss.mean().backward()
    assert_close(out.loss.detach().mean().reshape(1), stored["sequence_grpo_delta1.03_loss"], **CLOSE)
    assert_close(log_probs.grad, stored["sequence_grpo_delta1.03_grad"], **CLOSE)


def test_delta_bounds_the_ratio_of_negative_advantages():
    log_probs = torch.full((2, 1), 2.0, requires_grad=True)
    out = sequence_policy_loss(log_probs, torch.zeros(2, 1), torch.tensor([-1.0, 1.0]), epsilon=0.2, delta=3.0)
    assert_close(out.loss.detach(), torch.tensor([3.0, -1.2]), rtol=1e-6, atol=0)
    out.loss.sum().backward()
    assert (log_probs.grad == 0).all()
    free = sequence_policy_loss(log_probs, torch.zeros(2, 1), torch.tensor([-1.0, 1.0]), epsilon=0.2)
    assert free.loss[0].item() == pytest.approx(math.exp(2))


def test_t14_one_step_is_the_clipped_loss_of_that_step():
    log_probs, old, advantages = normal(6) * 0.2, normal(6, seed=1) * 0.2, 4 * normal(6, seed=2)
    one, other = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    sequence = sequence_policy_loss(one.unsqueeze(1), old.unsqueeze(1), advantages, epsilon=0.1, epsilon_high=0.15)
    step = clipped_policy_loss(other, old, advantages, epsilon=0.1, epsilon_high=0.15)
    for ours, theirs in zip(sequence, step, strict=True):
        assert torch.equal(ours, theirs)
    sequence.loss.mean().backward()
    step.loss.mean().backward()
    assert torch.equal(one.grad, other.grad)
    assert (step.clipped_low | step.clipped_high).any()


def gradient(loss_of, log_probs):
    leaf = log_probs.clone().requires_grad_()
    loss = loss_of(leaf)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("masked", [False, True])
def test_t14_token_form_and_parts_have_the_gradient_of_the_sequence(masked):
    old, advantages = normal(5, 4), 2 * normal(5, seed=2)
    log_probs = old + 0.3 * normal(5, 4, seed=1)
    mask = torch.arange(4) < torch.tensor([4, 3, 1, 2, 4]).unsqueeze(1) if masked else None
    weights = torch.full((5, 4), 0.25) if mask is None else mask / mask.sum(1, keepdim=True)

    def whole(leaf):
        return sequence_policy_loss(leaf, old, advantages, mask, epsilon=0.1).loss.mean()

    def tokens(leaf):
        token = sequence_level_log_ratio(leaf, old, mask)
        out = clipped_policy_loss(token, torch.zeros_like(token), advantages.unsqueeze(1).expand(5, 4), epsilon=0.1)
        return (out.loss * weights).sum(1).mean()

    def step_by_step(leaf):
        ratio, total = sequence_log_ratio(leaf.detach(), old, mask), 0.0
        for step in range(4):
            at = slice(step, step + 1)
            out = sequence_policy_loss(
                leaf[:, at], old[:, at], advantages, None if mask is None else mask[:, at], 0.1, log_ratio=ratio
            )
            total = total + (out.loss * weights[:, step]).mean()
        return total

    loss, grad = gradient(whole, log_probs)
    out = sequence_policy_loss(log_probs, old, advantages, mask, epsilon=0.1)
    clipped = out.clipped_low | out.clipped_high
    assert 0 < clipped.sum() < 5
    for other in (tokens, step_by_step):
        other_loss, other_grad = gradient(other, log_probs)
        assert_close(other_loss, loss, rtol=1e-6, atol=0)
        assert_close(other_grad, grad, rtol=1e-6, atol=1e-12)


def test_padding_takes_no_part_whatever_it_holds():
    log_probs = torch.tensor([[0.1, 0.3, math.inf], [0.2, math.nan, 5.0], [7.0, 8.0, 9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    old = torch.zeros(3, 3)
    assert_close(sequence_log_ratio(log_probs, old, mask).detach(), torch.tensor([0.2, 0.2, 0.0]), **CLOSE)
    token = sequence_level_log_ratio(log_probs, old, mask)
    assert_close(token.detach(), torch.tensor([[0.2, 0.2, 0], [0.2, 0, 0], [0, 0, 0]]), **CLOSE)
    sequence_policy_loss(log_probs, old, torch.ones(3), mask, epsilon=0.5).loss.sum().backward()
    ratio = math.exp(0.2)
    expected = torch.tensor([[-ratio / 2, -ratio / 2, 0], [-ratio, 0, 0], [0, 0, 0]])
    assert_close(log_probs.grad, expected, **CLOSE)


def test_bad_sequences():
    log_probs = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"one column per step, got shape \(2,\): pass \(B, T\), or \(B, 1\)"):
        sequence_log_ratio(log_probs[:, 0], log_probs[:, 0])
    with pytest.raises(ValueError, match=r"`old_log_probs` \(2, 3\), `mask` \(1, 3\)"):
        sequence_policy_loss(log_probs, log_probs, torch.ones(2), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"`log_ratio` \(2,\), `advantages` \(2, 1\)"):
        sequence_policy_loss(log_probs, log_probs, torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"`log_ratio` \(1,\), `advantages` \(2,\)"):
        sequence_policy_loss(log_probs, log_probs, torch.ones(2), log_ratio=torch.zeros(1))

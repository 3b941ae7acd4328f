# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from omnitrl.algorithms import (
    KL_FORMS,
    clipped_policy_loss,
    gaussian_log_prob,
    reference_kl,
    shifted_sigmas,
    transition_mean,
    transition_std,
    transition_table,
)
from tests.golden_cases import load_case


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def policy_loss(stored, epsilon, log_prob="log_prob"):
    log_probs = stored[log_prob].clone().requires_grad_()
    return log_probs, clipped_policy_loss(log_probs, stored["old_log_prob"], stored["advantages"], epsilon)


@pytest.mark.parametrize("epsilon", [1e-4, 0.2])
def test_case_05a_policy_loss(epsilon):
    _, stored = load_case("05a")
    key = f"clip{'0.0001' if epsilon == 1e-4 else epsilon}"
    log_probs, out = policy_loss(stored, epsilon)
    out.loss.mean().backward()
    for name in (f"flow_grpo_{key}_beta0", f"verl_{key}"):
        assert_close(out.loss.mean().reshape(1), stored[f"{name}_loss"], **CLOSE)
        assert_close(log_probs.grad, stored[f"{name}_grad_log_prob"], **CLOSE)
    # Weights of the rows multiply the clipped loss before the mean over all of them.
    log_probs, out = policy_loss(stored, epsilon)
    weighted = (out.loss * stored["rollout_is_weights"]).mean()
    weighted.backward()
    assert_close(weighted.reshape(1), stored[f"verl_{key}_isw_loss"], **CLOSE)
    assert_close(log_probs.grad, stored[f"verl_{key}_isw_grad_log_prob"], **CLOSE)


@pytest.mark.parametrize("epsilon", [1e-4, 0.2])
def test_case_05a_policy_loss_with_kl(epsilon):
    _, stored = load_case("05a")
    key = f"flow_grpo_clip{'0.0001' if epsilon == 1e-4 else epsilon}_beta0.04"
    log_probs, out = policy_loss(stored, epsilon)
    mean = stored["prev_sample_mean"].clone().requires_grad_()
    # The reference keeps std without sqrt(|dt|). Any dt must give its number.
    kl = reference_kl(
        "flow_grpo", mean=mean, mean_ref=stored["prev_sample_mean_ref"], std=stored["std_dev_t"] * 0.5, dt=-0.25
    )
    loss = (out.loss + 0.04 * kl).mean()
    loss.backward()
    assert_close(out.loss.mean().reshape(1), stored[f"{key}_policy_loss"], **CLOSE)
    assert_close(kl.mean().reshape(1), stored[f"{key}_kl_loss"], **CLOSE)
    assert_close(loss.reshape(1), stored[f"{key}_loss"], **CLOSE)
    assert_close(log_probs.grad, stored[f"{key}_grad_log_prob"], **CLOSE)
    assert_close(mean.grad, stored[f"{key}_grad_mean"], rtol=1e-5, atol=1e-9)


def test_case_05a_wide_ratios():
    _, stored = load_case("05a")
    log_probs, out = policy_loss(stored, 0.2, "log_prob_wide")
    out.loss.mean().backward()
    assert_close(out.loss.mean().reshape(1), stored["verl_wide_clip0.2_loss"], **CLOSE)
    for name in ("verl_wide_clip0.2", "flow_grpo_wide_clip0.2"):
        assert_close(log_probs.grad, stored[f"{name}_grad_log_prob"], **CLOSE)


def test_case_05a_verl_kl():
    _, stored = load_case("05a")
    mean, mean_ref = stored["prev_sample_mean"].clone().requires_grad_(), stored["prev_sample_mean_ref"]
    dt = torch.linspace(-0.3, -0.05, 6).reshape(6, 1, 1, 1)
    root = dt.neg().sqrt()
    kl = reference_kl("flow_grpo", mean=mean, mean_ref=mean_ref, std=stored["std_dev_t"] * root, dt=dt).mean()
    kl.backward()
    assert_close(kl.reshape(1), stored["verl_kl_loss"], rtol=1e-5, atol=1e-9)
    assert_close(mean.grad, stored["verl_kl_grad_mean"], rtol=1e-5, atol=1e-9)
    packed = reference_kl(
        "flow_grpo",
        mean=mean.reshape(6, 16, 4),
        mean_ref=mean_ref.reshape(6, 16, 4),
        std=(stored["std_dev_t"] * root).reshape(6, 1, 1),
        dt=dt.flatten(),
    )
    assert_close(packed.mean().reshape(1), stored["verl_kl_loss_packed"], rtol=1e-5, atol=1e-9)
    mixed = reference_kl("flow_grpo", mean=mean, mean_ref=mean_ref, std=stored["std_dev_t_mixed"] * root, dt=dt)
    assert_close(mixed.mean().reshape(1), stored["verl_kl_loss_mixed_std"], rtol=1e-5, atol=1e-9)


def test_case_05h_other_projects():
    case, stored = load_case("05h")
    divisor = case["parameters"]["gradient_accumulation_steps"] * case["parameters"]["n_train_timesteps"]
    log_probs, out = policy_loss(stored, 0.2)
    dance = out.loss.mean() / divisor
    dance.backward()
    assert_close(dance.reshape(1), stored["dance_loss"], **CLOSE)
    assert_close(log_probs.grad, stored["dance_grad_log_prob"], **CLOSE)
    # MixGRPO's "KL" is to the old policy: our `approx_kl`.
    assert_close(out.approx_kl.mean().reshape(1) / divisor, stored["mix_kl_loss"], **CLOSE)
    assert_close((out.loss + 0.01 * out.approx_kl).mean().reshape(1) / divisor, stored["mix_loss"], **CLOSE)
    velocity = stored["noise_pred"].clone().requires_grad_()
    kl = reference_kl("velocity", velocity=velocity, velocity_ref=stored["noise_pred_ref"])
    loss = out.loss.detach().mean() + 0.04 * kl.mean()
    loss.backward()
    assert_close(kl.mean().reshape(1), stored["flow_factory_v_kl_div"], **CLOSE)
    assert_close(loss.reshape(1), stored["flow_factory_v_loss"], **CLOSE)
    assert_close(velocity.grad, stored["flow_factory_v_grad_noise_pred"], rtol=1e-5, atol=1e-9)


def test_t7_on_policy_the_gradient_is_that_of_the_plain_policy_gradient():
    table = transition_table(shifted_sigmas(6, 3.0), "flow_sde", 0.7, range(5))
    latents, noise, advantages = normal(4, 3, 8), normal(4, 3, 8, seed=1), torch.tensor([1.5, -0.5, 0.25, -1.25])
    steps = torch.tensor([0, 2, 3, 4])
    velocity = normal(4, 3, 8, seed=2).requires_grad_()
    mean, std = transition_mean(latents, velocity, table, steps), transition_std(latents, table, steps)
    drawn = (mean + std * noise).detach()
    old = gaussian_log_prob(drawn, mean, std).detach()
    replayed = gaussian_log_prob(drawn, transition_mean(latents, velocity, table, steps), std)
    out = clipped_policy_loss(replayed, old, advantages)
    assert (out.ratio == 1).all()
    assert torch.equal(out.loss.detach(), -advantages)
    assert (out.approx_kl == 0).all()
    assert not (out.clipped_low | out.clipped_high).any()
    (grad,) = torch.autograd.grad(out.loss.sum(), velocity, retain_graph=True)
    (plain,) = torch.autograd.grad((-advantages * replayed).sum(), velocity)
    assert_close(grad, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [
        (1.3, 1.0, True),
        (0.7, -1.0, True),
        (1.3, -1.0, False),
        (0.7, 1.0, False),
        (1.1, 1.0, False),
        (0.9, -1.0, False),
    ],
)
def test_t9_the_clip_cuts_the_gradient_in_two_quadrants(ratio, advantage, cut):
    log_probs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    out = clipped_policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), epsilon=0.2)
    out.loss.sum().backward()
    assert log_probs.grad.item() == pytest.approx(0.0 if cut else -advantage * ratio, abs=1e-12)
    assert (out.clipped_low | out.clipped_high).item() == cut


def test_clip_fractions_count_the_side_where_the_clip_acts():
    old, new = torch.zeros(3), torch.tensor([0.7, 1.0, 1.3]).log()
    positive = clipped_policy_loss(new, old, torch.ones(3), epsilon=0.2)
    assert positive.clipped_low.tolist() == [False, False, False]
    assert positive.clipped_high.tolist() == [False, False, True]
    negative = clipped_policy_loss(new, old, -torch.ones(3), epsilon=0.2)
    assert negative.clipped_low.tolist() == [True, False, False]
    assert negative.clipped_high.tolist() == [False, False, False]
    nothing = clipped_policy_loss(new, old, torch.zeros(3), epsilon=0.2)
    assert not (nothing.clipped_low | nothing.clipped_high).any()


def test_upper_range_and_advantage_clip():
    new = torch.tensor([1.3, 1.3]).log()
    out = clipped_policy_loss(new, torch.zeros(2), torch.tensor([1.0, 7.0]), epsilon=0.2, epsilon_high=0.28)
    assert_close(out.loss, torch.tensor([-1.28, -5 * 1.28]), **CLOSE)
    assert out.clipped_high.all()
    free = clipped_policy_loss(new, torch.zeros(2), torch.tensor([1.0, 7.0]), epsilon=0.2, epsilon_high=0.4)
    assert not free.clipped_high.any()
    assert_close(free.loss, torch.tensor([-1.3, -6.5]), **CLOSE)
    unbounded = clipped_policy_loss(new, torch.zeros(2), torch.tensor([1.0, 7.0]), 0.4, advantage_clip=None)
    assert_close(unbounded.loss, torch.tensor([-1.3, -9.1]), **CLOSE)


def test_only_the_new_log_probs_get_a_gradient():
    new, old, advantages = (normal(3, seed=seed).requires_grad_() for seed in range(3))
    out = clipped_policy_loss(new, old, advantages, epsilon=10.0)
    out.loss.sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert advantages.grad is None
    assert not out.ratio.requires_grad
    assert not out.approx_kl.requires_grad
    with pytest.raises(ValueError, match=r"`old_log_probs` \(3, 1\)"):
        clipped_policy_loss(new, old.unsqueeze(1), advantages)


def test_t11_exact_kl_is_the_kl_of_two_normals():
    mean, mean_ref, std = normal(3, 4, 5), normal(3, 4, 5, seed=1), torch.tensor([0.3, 0.7, 1.5]).reshape(3, 1, 1)
    analytic = kl_divergence(Normal(mean, std), Normal(mean_ref, std)).flatten(1).mean(1)
    assert_close(reference_kl("exact", mean=mean, mean_ref=mean_ref, std=std), analytic, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", list(KL_FORMS))
def test_t11_kl_of_the_reference_itself_is_zero_with_zero_gradient(form):
    mean, velocity = normal(2, 8).requires_grad_(), normal(2, 8, seed=1).requires_grad_()
    kl = reference_kl(
        form, mean=mean, mean_ref=mean.detach(), velocity=velocity, velocity_ref=velocity.detach(), std=0.4, dt=-0.1
    )
    assert (kl == 0).all()
    kl.sum().backward()
    assert ((velocity if form == "velocity" else mean).grad == 0).all()


def test_kl_forms_of_one_step():
    # A gap of 0.1 in the velocity of a flow_sde step, in closed form.
    table = transition_table([1.0, 0.8, 0.5, 0.0], "flow_sde", 0.7, [1])
    latents, velocity_ref = normal(2, 16), normal(2, 16, seed=1)
    velocity = velocity_ref + 0.1
    inputs = {
        "mean": transition_mean(latents, velocity, table, 1),
        "mean_ref": transition_mean(latents, velocity_ref, table, 1),
        "velocity": velocity,
        "velocity_ref": velocity_ref,
        "std": transition_std(latents, table, 1),
        "dt": -0.3,
    }
    diffusion, scale = 0.49 * 0.8 / 0.2, (1 + 0.49 / 2) ** 2 * 0.01
    exact = scale * 0.3 / (2 * diffusion)
    assert_close(reference_kl("exact", **inputs), torch.full((2,), exact), rtol=1e-4, atol=0)
    assert_close(reference_kl("flow_grpo", **inputs), torch.full((2,), 0.3 * exact), rtol=1e-4, atol=0)
    assert_close(reference_kl("velocity", **inputs), torch.full((2,), 0.01), rtol=1e-4, atol=0)


def test_only_the_velocity_form_is_defined_on_the_last_step_of_cps():
    table = transition_table(shifted_sigmas(4, 3.0), "cps", 0.8, range(3))
    velocity, steps = normal(2, 8), torch.tensor([1, 3])
    mean, std = transition_mean(velocity, velocity, table, steps), transition_std(velocity, table, steps)
    inputs = {"mean": mean, "mean_ref": mean, "velocity": velocity, "velocity_ref": velocity - 0.1, "std": std}
    assert_close(reference_kl("velocity", **inputs), torch.full((2,), 0.01), **CLOSE)
    for form in ("exact", "flow_grpo"):
        with pytest.raises(ValueError, match="got std=0: use stochastic steps, or kl_form='velocity'"):
            reference_kl(form, **inputs, dt=-0.1)


def test_bad_kl():
    mean = normal(2, 4)
    with pytest.raises(ValueError, match="kl_form='k3' is not known: use one of 'exact', 'flow_grpo', 'velocity'"):
        reference_kl("k3", mean=mean, mean_ref=mean, std=1.0)
    with pytest.raises(ValueError, match="'flow_grpo' needs mean, mean_ref, std, dt, but got no mean_ref, dt"):
        reference_kl("flow_grpo", mean=mean, std=1.0)
    for form in ("exact", "flow_grpo"):
        with pytest.raises(ValueError, match="deterministic step has no finite KL"):
            reference_kl(form, mean=mean, mean_ref=mean, std=torch.tensor([0.5, 0.0]), dt=-0.1)
    with pytest.raises(ValueError, match=r"`dt` has one value"):
        reference_kl("flow_grpo", mean=mean, mean_ref=mean, std=1.0, dt=torch.ones(3))
    with pytest.raises(ValueError, match=r"`velocity` \(2, 4\), `velocity_ref` \(1, 4\)"):
        reference_kl("velocity", velocity=mean, velocity_ref=mean[:1])
    with pytest.raises(ValueError, match=r"`mean` \(2, 4\), `mean_ref` \(1, 4\)"):
        reference_kl("exact", mean=mean, mean_ref=mean[:1], std=1.0)

# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch.testing import assert_close

from omnitrl.algorithms.matching import matching_error, velocity_target
from omnitrl.algorithms.preference import DPO_FORMS, diffusion_dpo_loss
from tests.golden_cases import load_case


EXACT = {"rtol": 1e-9, "atol": 1e-12}


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("beta", [100, 2000])
def test_case_05e(beta):
    _, stored = load_case("05e")
    chosen = stored["pred_chosen"].clone().requires_grad_()
    rejected = stored["pred_rejected"].clone().requires_grad_()
    target_chosen = velocity_target(stored["latent_chosen"], stored["noise"])
    target_rejected = velocity_target(stored["latent_rejected"], stored["noise"])
    out = diffusion_dpo_loss(
        matching_error(chosen, target_chosen),
        matching_error(rejected, target_rejected),
        matching_error(stored["ref_pred_chosen"], target_chosen),
        matching_error(stored["ref_pred_rejected"], target_rejected),
        beta,
    )
    loss = out.loss.mean()
    loss.backward()
    for project in ("flow_grpo", "verl", "flow_factory"):
        assert_close(loss.reshape(1), stored[f"beta{beta}_{project}_loss"], rtol=1e-4, atol=1e-5)
    assert_close(out.margins, stored[f"beta{beta}_inside_term"], rtol=1e-4, atol=1e-5)
    assert_close(chosen.grad, stored[f"beta{beta}_grad_chosen"], rtol=1e-4, atol=1e-5)
    assert_close(rejected.grad, stored[f"beta{beta}_grad_rejected"], rtol=1e-4, atol=1e-5)


def test_t15_at_the_reference():
    error_chosen, error_rejected = rows(0.3, 0.7).requires_grad_(), rows(0.5, 0.1).requires_grad_()
    out = diffusion_dpo_loss(error_chosen, error_rejected, error_chosen, error_rejected, beta=2000.0)
    assert_close(out.loss, rows(math.log(2), math.log(2)), **EXACT)
    assert out.chosen_rewards.tolist() == out.rejected_rewards.tolist() == [0.0, 0.0]
    out.loss.sum().backward()
    assert error_chosen.grad.tolist() == [500.0, 500.0]
    assert error_rejected.grad.tolist() == [-500.0, -500.0]


def test_t15_gradient_of_a_prediction_at_the_reference():
    velocity, target = normal(2, 8).requires_grad_(), normal(2, 8, seed=1)
    error, other = matching_error(velocity, target), rows(0.5, 0.1)
    diffusion_dpo_loss(error, other, error, other, beta=100.0).loss.sum().backward()
    assert_close(velocity.grad, 100 / 4 * 2 / 8 * (velocity.detach() - target), **EXACT)


def test_t15_swapping_the_pair_negates_the_margin():
    errors = [rows(0.3, 0.7), rows(0.5, 0.1), rows(0.32, 0.6), rows(0.4, 0.3)]
    out = diffusion_dpo_loss(*errors, beta=10.0)
    swapped = diffusion_dpo_loss(errors[1], errors[0], errors[3], errors[2], beta=10.0)
    assert_close(out.margins, rows(0.6, -1.5), **EXACT)
    assert_close(out.chosen_rewards, rows(0.1, -0.5), **EXACT)
    assert_close(out.rejected_rewards, rows(-0.5, 1.0), **EXACT)
    assert_close(swapped.margins, -out.margins, **EXACT)
    assert torch.equal(swapped.chosen_rewards, out.rejected_rewards)
    # -log sigmoid(m) + log sigmoid(-m) = -m
    assert_close(out.loss - swapped.loss, -out.margins, **EXACT)


def test_t15_one_sample_on_both_sides_has_no_margin():
    error, reference = matching_error(normal(2, 8), normal(2, 8, seed=1)), rows(0.4, 0.9)
    out = diffusion_dpo_loss(error, error, reference, reference, beta=5000.0)
    assert out.margins.tolist() == [0.0, 0.0]
    assert_close(out.loss, rows(math.log(2), math.log(2)), **EXACT)


def test_the_mean_is_outside_the_log_sigmoid():
    errors = [rows(0.3, 0.7), rows(0.5, 0.1), rows(0.32, 0.6), rows(0.4, 0.3)]
    out = diffusion_dpo_loss(*errors, beta=10.0)
    assert_close(out.loss, -torch.nn.functional.logsigmoid(rows(0.6, -1.5)), **EXACT)
    of_the_mean = -torch.nn.functional.logsigmoid(out.margins.mean())
    assert (out.loss.mean() - of_the_mean).item() > 0.1


@pytest.mark.parametrize(
    ("form", "loss", "slope"),
    [("sigmoid", math.log(2), -0.5), ("ipo", 1 / (4 * 20.0**2), -1 / 20.0**2), ("hinge", 1.0, -1.0)],
)
def test_forms_at_the_reference(form, loss, slope):
    error = rows(0.3).requires_grad_()
    out = diffusion_dpo_loss(error, rows(0.5), rows(0.3), rows(0.5), beta=20.0, form=form)
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    out.loss.backward()
    # The margin falls by beta / 2 per unit of the error.
    assert error.grad.item() == pytest.approx(-20.0 / 2 * slope, rel=1e-12)


def test_forms_away_from_the_reference():
    # Margins of -0.5, 0.5 and 1.5.
    errors = rows(0.05, -0.05, -0.15), rows(0.0, 0.0, 0.0), rows(0.0, 0.0, 0.0), rows(0.0, 0.0, 0.0)
    hinge = diffusion_dpo_loss(*errors, beta=20.0, form="hinge")
    assert_close(hinge.margins, rows(-0.5, 0.5, 1.5), **EXACT)
    assert_close(hinge.loss, rows(1.5, 0.5, 0.0), **EXACT)
    ipo = diffusion_dpo_loss(*errors, beta=20.0, form="ipo")
    assert_close(ipo.loss, rows(1.0, 0.0, 1.0) / 400, **EXACT)


@pytest.mark.parametrize("form", list(DPO_FORMS))
def test_every_form_wants_the_chosen_sample_fitted_better(form):
    chosen, rejected = rows(0.3).requires_grad_(), rows(0.5).requires_grad_()
    reference = [rows(0.3).requires_grad_(), rows(0.5).requires_grad_()]
    out = diffusion_dpo_loss(chosen, rejected, *reference, beta=20.0, form=form)
    out.loss.sum().backward()
    assert chosen.grad.item() > 0 > rejected.grad.item()
    assert [tensor.grad for tensor in reference] == [None, None]
    assert [tensor.requires_grad for tensor in out] == [True, False, False, False]


def test_large_margins_stay_finite():
    out = diffusion_dpo_loss(torch.tensor([0.0, 9.0]), torch.tensor([9.0, 0.0]), torch.zeros(2), torch.zeros(2), 5000)
    assert out.loss.tolist() == [0.0, 22500.0]


def test_bad_dpo():
    error = torch.zeros(2)
    with pytest.raises(ValueError, match="dpo_form='kto' is not known: use one of 'sigmoid', 'ipo', 'hinge'"):
        diffusion_dpo_loss(error, error, error, error, 100.0, "kto")
    with pytest.raises(ValueError, match="beta=0 scales the implicit rewards and must be above 0"):
        diffusion_dpo_loss(error, error, error, error, 0.0)
    with pytest.raises(ValueError, match=r"`ref_error_chosen` \(2, 1\)"):
        diffusion_dpo_loss(error, error, error.unsqueeze(1), error, 100.0)

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.testing import assert_close

from omnitrl.algorithms.direct_align import (
    ALIGN_BRANCHES,
    direct_align_levels,
    direct_align_recover,
    preference_strength,
    relative_preference,
    srpo_loss,
)
from omnitrl.algorithms.matching import noised, velocity_target
from omnitrl.algorithms.sigmas import shifted_sigmas
from tests.golden_cases import load_case


EXACT = {"rtol": 1e-9, "atol": 1e-12}
ROWS = [(index, branch) for index in (100, 400, 700, 950) for branch in ("denoise", "inversion")]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def golden_row(index, branch):
    case, stored = load_case("05g")
    (row,) = [r for r in case["parameters"]["rows"] if (r["mid_timestep"], r["branch"]) == (index, branch)]
    return row, stored


@pytest.mark.parametrize(("index", "branch"), ROWS)
def test_case_05g_levels(index, branch):
    row, stored = golden_row(index, branch)
    assert_close(shifted_sigmas(50, 3.0), stored["sigma_schedule"], rtol=0, atol=1e-6)
    levels = direct_align_levels(stored["sigma_schedule"], index, branch)
    noisier, cleaner = (row["sigma_start"], row["sigma_base"])
    expected = (noisier, cleaner) if branch == "denoise" else (cleaner, noisier)
    assert (levels.sigma_from, levels.sigma_to) == pytest.approx(expected, abs=1e-7)
    assert levels.sigma_to == pytest.approx(row["sigma_target"], abs=1e-7)
    assert levels.position == index / 999
    # The indices of the case, on its stored grid.
    assert stored["sigmas_l"][row["t_start"]].item() == pytest.approx(noisier, abs=1e-7)
    assert row["t_base"] - row["t_start"] == row["k"]


@pytest.mark.parametrize(("index", "branch"), ROWS)
def test_case_05g_recovery(index, branch):
    _, stored = golden_row(index, branch)
    levels = direct_align_levels(stored["sigma_schedule"], index, branch)
    latents = noised(stored["latent_start"], stored["noise"], levels.sigma_from)
    key = f"mid{index}_{branch}"
    assert_close(latents, stored[f"{key}_noisy"], rtol=1e-4, atol=1e-5)
    velocity = stored["pred"].clone().requires_grad_()
    recovered = direct_align_recover(latents, velocity, stored["noise"], levels.sigma_from, levels.sigma_to)
    assert_close(recovered, stored[f"{key}_recovered"], rtol=1e-4, atol=1e-5)
    (stored["weight"] * recovered).sum().backward()
    assert_close(velocity.grad, stored[f"{key}_grad_pred"], rtol=1e-4, atol=1e-5)


def test_every_index_gives_a_step_of_the_right_sign_within_the_range():
    sigmas = shifted_sigmas(50, 3.0)
    noisiest, cleanest = sigmas[5].item(), sigmas[25].item()
    spacing = (noisiest - cleanest) / 999
    for index in range(1, 1000):
        down, up = (direct_align_levels(sigmas, index, branch) for branch in ("denoise", "inversion"))
        gap = min(100, index, 1000 - index)
        for levels, sign in ((down, -1), (up, 1)):
            assert levels.sigma_to - levels.sigma_from == pytest.approx(sign * gap * spacing, abs=1e-6)
            assert cleanest - 1e-6 <= min(levels[:2]) < max(levels[:2]) <= noisiest + 1e-6
        # Both recover at the level of the index; the inversion is one point off where it starts at the clean end.
        assert abs(down.sigma_to - up.sigma_to) == pytest.approx(spacing if index <= 100 else 0, abs=1e-6)


def test_other_ranges_and_gaps():
    sigmas = torch.linspace(1, 0, 11)
    levels = direct_align_levels(sigmas, 5, "denoise", step_range=(1, 10), gap=2, num_points=10)
    assert levels.sigma_from == pytest.approx(0.9 - 0.1 * 3)
    assert levels.sigma_to == pytest.approx(0.9 - 0.1 * 5)
    assert levels.position == 5 / 9


@pytest.mark.parametrize("branch", list(ALIGN_BRANCHES))
def test_t19_the_exact_velocity_recovers_the_sample(branch):
    clean, noise = normal(2, 3, 8), normal(2, 3, 8, seed=1)
    for index in (1, 500, 999):
        start, end, _ = direct_align_levels(shifted_sigmas(50, 3.0), index, branch)
        latents = noised(clean, noise, start)
        recovered = direct_align_recover(latents, velocity_target(clean, noise), noise, start, end)
        assert_close(recovered, clean, rtol=0, atol=1e-12)


def test_t19_the_branches_answer_an_error_with_opposite_signs():
    clean, noise, error = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(2, 3, 8, seed=2)
    velocity = velocity_target(clean, noise) + error
    noisier, cleaner = 0.8, 0.7
    down = direct_align_recover(noised(clean, noise, noisier), velocity, noise, noisier, cleaner) - clean
    up = direct_align_recover(noised(clean, noise, cleaner), velocity, noise, cleaner, noisier) - clean
    assert_close(down, (cleaner - noisier) / (1 - cleaner) * error, rtol=0, atol=1e-12)
    assert_close(up, (noisier - cleaner) / (1 - noisier) * error, rtol=0, atol=1e-12)
    assert (down * up <= 0).all()


def test_levels_per_row():
    clean, noise, velocity = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(2, 3, 8, seed=2)
    start, end = torch.tensor([0.8, 0.6], dtype=torch.float64), torch.tensor([0.7, 0.65], dtype=torch.float64)
    latents = noised(clean, noise, start)
    both = direct_align_recover(latents, velocity, noise, start, end.reshape(2, 1, 1))
    for row in range(2):
        alone = (tensor[row : row + 1] for tensor in (latents, velocity, noise))
        assert_close(both[row : row + 1], direct_align_recover(*alone, float(start[row]), float(end[row])), **EXACT)


def test_half_precision_is_raised_before_the_recovery():
    clean, noise = normal(1, 64).bfloat16(), normal(1, 64, seed=1).bfloat16()
    velocity = velocity_target(clean, noise)
    recovered = direct_align_recover(noised(clean, noise, 0.9), velocity, noise, 0.9, 0.8)
    assert_close(recovered, clean.float(), rtol=0, atol=2e-6)


def test_t19_equal_prompts_leave_the_strength_times_the_reward():
    reward = normal(4)
    for strength in (0.0, 0.1, 0.25):
        assert_close(relative_preference(reward, reward, strength), strength * reward, **EXACT)
    strengths = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert_close(relative_preference(reward, torch.zeros_like(reward), strengths), (1 + strengths) * reward, **EXACT)


def test_both_rewards_get_a_gradient():
    first, second = normal(3).requires_grad_(), normal(3, seed=1).requires_grad_()
    relative_preference(first, second, 0.25).sum().backward()
    assert first.grad.tolist() == [1.25] * 3
    assert second.grad.tolist() == [-1.0] * 3


def test_loss_stops_at_the_margin():
    relative = torch.tensor([-0.3, 0.5, 0.7, 0.9], requires_grad=True)
    loss = srpo_loss(relative)
    loss.sum().backward()
    assert_close(loss, torch.tensor([1.0, 0.2, 0.0, 0.0]), rtol=0, atol=1e-6)
    assert relative.grad.tolist() == [-1.0, -1.0, 0.0, 0.0]
    assert srpo_loss(torch.tensor([0.5]), margin=1.5).tolist() == [1.0]


def test_strength_is_linear_between_the_papers_ends():
    assert [preference_strength("denoise", at) for at in (0.0, 1.0)] == [0.1, 0.25]
    assert [preference_strength("inversion", at) for at in (0.0, 1.0)] == pytest.approx([0.3, 0.01])
    linear = torch.linspace(0.3, 0.01, 1000)
    for index in (1, 400, 950):
        levels = direct_align_levels(shifted_sigmas(50, 3.0), index, "inversion")
        assert preference_strength("inversion", levels.position) == pytest.approx(linear[index].item(), abs=1e-6)


def test_bad_levels():
    sigmas = shifted_sigmas(50, 3.0)
    with pytest.raises(ValueError, match="branch='up' is not known: use one of 'denoise', 'inversion'"):
        direct_align_levels(sigmas, 100, "up")
    with pytest.raises(ValueError, match="branch='up' is not known"):
        preference_strength("up", 0.5)
    with pytest.raises(ValueError, match=r"position=1.5 is a place"):
        preference_strength("denoise", 1.5)
    for step_range in [(25, 5), (5, 5), (5, 51), (-1, 5)]:
        with pytest.raises(ValueError, match=r"must be two rising steps of the 50 of the sampler"):
            direct_align_levels(sigmas, 100, step_range=step_range)
    for index in (0, 1000):
        with pytest.raises(ValueError, match=rf"index={index} is not a point 1..999 of the grid: use 500"):
            direct_align_levels(sigmas, index)
    with pytest.raises(ValueError, match="gap=0 points is no step: use 100"):
        direct_align_levels(sigmas, 100, gap=0)


def test_bad_recovery():
    latents = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"sigma_to=0.995 .* multiplied by 200: use 0.99 or less"):
        direct_align_recover(latents, latents, latents, 0.9, torch.tensor([0.5, 0.995]))
    with pytest.raises(ValueError, match="sigma_to=1 leaves so little"):
        direct_align_recover(latents, latents, latents, 0.9, 1.0)
    assert direct_align_recover(latents, latents, latents, 1.0, torch.tensor(0.99)).tolist() == latents.tolist()
    with pytest.raises(ValueError, match="`sigma_from` is a noise level"):
        direct_align_recover(latents, latents, latents, 900.0, 0.8)
    with pytest.raises(ValueError, match=r"`noise` \(1, 4\)"):
        direct_align_recover(latents, latents, latents[:1], 0.9, 0.8)
    with pytest.raises(ValueError, match=r"`reward_second` \(2, 1\)"):
        relative_preference(torch.zeros(2), torch.zeros(2, 1), 0.1)
    with pytest.raises(ValueError, match=r"`strength` \(3,\)"):
        relative_preference(torch.zeros(2), torch.zeros(2), torch.zeros(3))

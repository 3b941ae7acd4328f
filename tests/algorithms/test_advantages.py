# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch.testing import assert_close

from omnitrl.algorithms import (
    SCALES,
    combine_rewards,
    group_advantages,
    group_std_mean,
    normalize_then_sum_advantages,
    reward_advantages,
    zero_std_fraction,
)
from omnitrl.algorithms.advantages import BASELINES, TRIM_TAILS
from tests.golden_cases import load_case


NAN = float("nan")
ONE_FLOAT32_ROUNDING = {"rtol": 1.2e-7, "atol": 1e-9}  # the references are float64, ours are rounded once at the end


def rewards_and_ids(num_groups=5, members=4, seed=0):
    rewards = torch.rand(num_groups * members, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rewards, torch.arange(num_groups).repeat_interleave(members)


def test_case_04_flow_grpo():
    _, stored = load_case("04")
    rewards, ids, order = stored["rewards"], stored["group_ids"], stored["permutation"]
    for scale, name in [("group", "False"), ("batch", "True")]:
        ours = group_advantages(rewards, ids, scale, ddof=0, eps=1e-4)
        assert_close(ours.double(), stored[f"flow_grpo_global_std_{name}"], **ONE_FLOAT32_ROUNDING)
        permuted = group_advantages(rewards[order], ids[order], scale, ddof=0, eps=1e-4)
        assert_close(permuted.double(), stored[f"flow_grpo_global_std_{name}_permuted"], **ONE_FLOAT32_ROUNDING)
        assert (ours[4:9] == 0).all()  # four equal rewards, and a group of one
    no_groups = group_advantages(rewards, torch.zeros_like(ids), ddof=0, eps=1e-4)
    assert_close(no_groups, stored["flow_grpo_no_tracking"], rtol=1e-5, atol=1e-5)


def test_case_04b_dance_grpo():
    _, stored = load_case("04b")
    rewards, ids = stored["rewards"], torch.arange(4).repeat_interleave(4)
    close = {"rtol": 1e-5, "atol": 1e-6}
    ours = group_advantages(rewards, ids, ddof=1, eps=1e-8)
    assert_close(ours, stored["dance_num_generations_4"], **close)
    assert_close(ours, stored["mix_reward_aggr"], **close)
    no_groups = group_advantages(rewards, torch.zeros_like(ids), ddof=1, eps=1e-8)
    assert_close(no_groups, stored["dance_no_group"], **close)
    both = torch.stack([rewards, stored["rewards_b"]], 1)
    mixed = normalize_then_sum_advantages(
        both, torch.tensor([0.25, 0.75]), ids, ddof=1, eps=1e-8, batch_normalize=False
    )
    assert_close(mixed, stored["mix_advantage_aggr_w0p25_0p75"], **close)


@pytest.mark.parametrize("trim", [0.25, 0.5])
def test_case_04b_mix_grpo_leaves_the_lowest_rewards_out_of_mean_and_std(trim):
    _, stored = load_case("04b")
    rewards, ids = stored["rewards"], torch.arange(4).repeat_interleave(4)
    ours = group_advantages(rewards, ids, ddof=1, eps=1e-8, trim=trim)
    assert_close(ours, stored[f"mix_reward_aggr_trim_0p{trim * 100:.0f}".rstrip("0")], rtol=1e-5, atol=1e-6)
    assert (ours[4:8] == 0).all()
    assert ours[9] < -1.6  # the worst of its group is left out, and still gets an advantage
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert_close(group_advantages(rewards[order], ids[order], ddof=1, eps=1e-8, trim=trim), ours[order])


def test_case_04b_where_the_reference_is_wrong_ours_is_zero():
    _, stored = load_case("04b")
    constant = stored["rewards_const_0p1_x12"]
    assert stored["dance_const_0p1_num_generations_12"].max() < -0.58  # what rounding makes of equal rewards
    assert (group_advantages(constant, torch.zeros(12, dtype=torch.long), ddof=1, eps=1e-8) == 0).all()
    assert stored["dance_num_generations_1"].isnan().all()
    assert (group_advantages(stored["rewards_single"], torch.arange(3), ddof=1, eps=1e-8) == 0).all()


def test_case_04c_verl_omni():
    _, stored = load_case("04c")
    rewards, ids = stored["rewards"], stored["group_ids"]
    for scale, key in [("batch", "norm_True_global_True"), ("group", "norm_True_global_False")]:
        assert_close(group_advantages(rewards, ids, scale, ddof=1), stored[key], rtol=1e-5, atol=1e-6)
    unscaled = group_advantages(rewards, ids, "none")
    assert_close(unscaled, stored["norm_False_global_True"], rtol=1e-5, atol=1e-6)
    assert stored["single_sample_batch_global_True"].isnan().all()
    assert group_advantages(rewards[:1], ids[:1], "batch", ddof=1).tolist() == [0.0]


def test_case_04d_flow_factory():
    case, stored = load_case("04d")
    rewards = torch.stack([stored["reward_a"], stored["reward_b"]], 1)
    weights = torch.tensor(list(case["parameters"]["weights"].values()))
    ids = stored["group_ids"]
    for layout, rtol in [("distributed_k_repeat", 1e-6), ("group_contiguous", 1e-4)]:
        # eps=0: its floor of 1e-6 does not act on these rewards.
        for scale, key in [("batch", "True"), ("group", "False")]:
            ours = reward_advantages(rewards, weights, ids, "sum_then_normalize", scale, eps=0.0)
            assert_close(ours.double(), stored[f"sum_{layout}_global_{key}"], rtol=rtol, atol=1e-6)
        ours = reward_advantages(rewards, weights, ids, "normalize_then_sum", eps=0.0)
        assert_close(ours.double(), stored[f"gdpo_{layout}"], rtol=rtol, atol=1e-6)
        single = group_advantages(stored["reward_a"], ids, eps=0.0)
        assert_close(single.double(), stored[f"sum_single_reward_{layout}_global_False"], rtol=rtol, atol=1e-6)
    assert (group_advantages(stored["reward_singletons"], torch.arange(3), eps=0.0) == 0).all()


def test_case_04d_groups_of_unequal_size():
    _, stored = load_case("04d")
    rewards, ids = stored["unequal_rewards"].unsqueeze(1), stored["unequal_group_ids"]
    ours = normalize_then_sum_advantages(rewards, torch.ones(1), ids, eps=0.0)
    assert_close(ours.double(), stored["gdpo_unequal_groups"], rtol=1e-6, atol=1e-6)
    assert (ours[4:9] == 0).all()  # the reference has -1.3e-8 there


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("group", "group", [-1, 1, -1, 1]),
        ("group", "batch", [-0.5, 0.5, -1.5, 1.5]),
        ("group", "none", [-1, 1, -3, 3]),
        ("batch", "group", [-5, -3, 1 / 3, 7 / 3]),
        ("batch", "batch", [-2.5, -1.5, 0.5, 3.5]),
        ("batch", "none", [-5, -3, 1, 7]),
        ("none", "group", [1, 3, 7 / 3, 13 / 3]),
        ("none", "batch", [0.5, 1.5, 3.5, 6.5]),
        ("none", "none", [1, 3, 7, 13]),
    ],
)
def test_every_pair_of_baseline_and_scale(baseline, scale, expected):
    rewards, ids = torch.tensor([1.0, 3, 7, 13]), torch.tensor([0, 0, 1, 1])  # mean 6, std sqrt(21); 2 and 1, 10 and 3
    ours = group_advantages(rewards, ids, scale, eps=0.0, baseline=baseline)
    factor = 2 / math.sqrt(21) if scale == "batch" else 1.0
    assert_close(ours, factor * torch.tensor(expected), rtol=1e-6, atol=0)
    both = torch.stack([rewards, rewards], 1)
    several = reward_advantages(both, torch.tensor([0.25, 0.75]), ids, scale=scale, eps=0.0, baseline=baseline)
    assert_close(several, ours, rtol=1e-6, atol=1e-7)
    decoupled = normalize_then_sum_advantages(
        both, torch.tensor([0.5, 1.5]), ids, scale, eps=0.0, batch_normalize=False, baseline=baseline
    )
    assert_close(decoupled, 2 * ours, rtol=1e-6, atol=1e-7)


def test_case_04_and_04b_whole_batch_without_giving_up_the_groups():
    _, stored = load_case("04b")
    ours = group_advantages(
        stored["rewards"], torch.arange(4).repeat_interleave(4), "batch", ddof=1, eps=1e-8, baseline="batch"
    )
    assert_close(ours, stored["dance_no_group"], rtol=1e-5, atol=1e-6)
    _, stored = load_case("04")
    ours = group_advantages(stored["rewards"], stored["group_ids"], "batch", baseline="batch")
    assert_close(ours, stored["flow_grpo_no_tracking"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("baseline", list(BASELINES))
@pytest.mark.parametrize("scale", list(SCALES))
@pytest.mark.parametrize("tails", list(TRIM_TAILS))
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_law_08_equal_rewards_with_every_option(baseline, scale, tails, eps):
    options = {"scale": scale, "eps": eps, "baseline": baseline, "trim": 0.25, "trim_tails": tails}
    ids = torch.arange(3).repeat_interleave(4)
    assert (group_advantages(torch.full((12,), 0.1), ids, **options) == 0).all()
    assert group_advantages(torch.tensor([0.3]), ids[:1], **options).tolist() == [0.0]
    assert (group_advantages(torch.full((12,), NAN), ids, **options) == 0).all()
    # One group of equal rewards among others: nothing to learn in the group, but it may be better than the batch.
    rewards = torch.cat([torch.full((4,), 0.1), torch.tensor([0.9, 0.2, 0.6, 0.4, 0.5, 0.7, 0.3, 0.8])])
    ours = group_advantages(rewards, ids, **options)
    assert ours.isfinite().all()
    assert (ours[:4] == 0).all() == (baseline == "group" or scale == "group")
    assert (ours[4:] != 0).sum() >= 7


@pytest.mark.parametrize(
    ("tails", "trim", "mean", "std"),
    [
        ("low", 0.2, 4.75, 3.112475),  # of 2, 3, 4, 10
        ("low", 0.39, 4.75, 3.112475),  # rounded down to one member
        ("low", 0.6, 7.0, 3.0),  # of 4, 10
        ("low", 0.95, 10.0, 0.0),  # one stays
        ("both", 0.2, 3.0, 0.816497),  # of 2, 3, 4
        ("both", 0.4, 3.0, 0.0),
        ("both", 0.19, 4.0, 3.162278),  # nobody
    ],
)
def test_trimmed_statistics(tails, trim, mean, std):
    rewards = torch.tensor([3.0, 10.0, 1.0, NAN, 2.0, 4.0])
    unscaled = group_advantages(rewards, torch.zeros(6).long(), "none", trim=trim, trim_tails=tails)
    expected = torch.where(rewards.isnan(), 0.0, rewards - mean)
    assert_close(unscaled, expected, rtol=1e-6, atol=1e-6)
    scaled = group_advantages(rewards, torch.zeros(6).long(), eps=0.0, trim=trim, trim_tails=tails)
    # With one different reward left there is no std to divide by.
    assert_close(scaled, expected / std if std else torch.zeros(6), rtol=1e-5, atol=1e-6)
    # With one group, the batch is the group.
    batch = group_advantages(
        rewards, torch.zeros(6).long(), "batch", eps=0.0, baseline="batch", trim=trim, trim_tails=tails
    )
    assert_close(batch, scaled, rtol=1e-6, atol=0)


def test_trim_is_a_share_of_each_group():
    rewards, ids = torch.arange(14.0), torch.tensor([0] * 10 + [1] * 4)
    ours = group_advantages(rewards, ids, "none", trim=0.3)  # 3 of 10 (10 * 0.3 is not below 3 here), 1 of 4
    assert_close(ours, torch.cat([torch.arange(10.0) - 6, torch.arange(4.0) - 2]), rtol=0, atol=1e-6)
    # 0.29 * 100 is below 29 in floating point.
    hundred = group_advantages(torch.arange(100.0), torch.zeros(100).long(), "none", trim=0.29)
    assert_close(hundred, torch.arange(100.0) - 64, rtol=0, atol=1e-6)
    one_column = rewards.unsqueeze(1)
    for aggregation in ("sum_then_normalize", "normalize_then_sum"):
        several = reward_advantages(one_column, torch.ones(1), ids, aggregation, eps=0.0, trim=0.3, trim_tails="low")
        plain = group_advantages(rewards, ids, eps=0.0, trim=0.3)
        assert_close(several / several[0], plain / plain[0], rtol=1e-6, atol=1e-7)


def test_one_success_in_four():
    rewards, ids = torch.tensor([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.long)
    assert [round(x, 4) for x in group_advantages(rewards, ids, ddof=0).tolist()] == [1.7317] + [-0.5772] * 3
    assert [round(x, 4) for x in group_advantages(rewards, ids, ddof=1).tolist()] == [1.4997] + [-0.4999] * 3


def test_the_reward_with_the_widest_range_decides_unless_each_is_normalised():
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 10.0], [1.0, 10.0]])
    ids, weights = torch.zeros(4, dtype=torch.long), torch.ones(2)
    summed = reward_advantages(rewards, weights, ids, "sum_then_normalize")
    assert_close(summed, torch.tensor([-1.095, -0.896, 0.896, 1.095]), rtol=0, atol=1e-3)
    decoupled = normalize_then_sum_advantages(rewards, weights, ids, batch_normalize=False)
    assert_close(decoupled, torch.tensor([-2.0, 0.0, 0.0, 2.0]), rtol=0, atol=1e-3)
    normalised = reward_advantages(rewards, weights, ids, "normalize_then_sum")
    assert_close(normalised, torch.tensor([-1.0, 0.0, 0.0, 1.0]) * math.sqrt(2), rtol=0, atol=1e-3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_t10_sums_to_zero_and_does_not_mind_order_shift_or_scale(scale):
    rewards, ids = rewards_and_ids()
    ours = group_advantages(rewards, ids, scale, eps=0.0)
    assert_close(ours.reshape(5, 4).sum(1), torch.zeros(5), rtol=0, atol=1e-6)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    assert_close(group_advantages(rewards[order], ids[order], scale, eps=0.0), ours[order], rtol=0, atol=1e-6)
    renamed = torch.tensor([7, -3, 2**60 + 1, 2**60 + 2, 0])[ids]
    assert_close(group_advantages(rewards, renamed, scale, eps=0.0), ours, rtol=0, atol=1e-6)
    factor = 3.0 if scale == "none" else 1.0
    assert_close(group_advantages(3 * rewards + 5, ids, scale, eps=0.0), factor * ours, rtol=0, atol=1e-6)


def test_t10_spread_is_one_in_its_scope():
    rewards, ids = rewards_and_ids()
    per_group = group_advantages(rewards, ids, "group", eps=0.0).reshape(5, 4)
    assert_close(per_group.std(1, correction=0), torch.ones(5), rtol=0, atol=1e-6)
    same_mean = rewards - rewards.reshape(5, 4).mean(1).repeat_interleave(4)
    assert group_advantages(same_mean, ids, "batch", eps=0.0).std(correction=0).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_missing_rewards_take_no_part(scale, ddof):
    rewards = torch.tensor([0.5, NAN, NAN, 0.8, 0.6, 0.7, NAN, 0.3])
    ids = torch.tensor([0, 0, 1, 0, 0, 0, 1, 2])
    ours = group_advantages(rewards, ids, scale, ddof)
    valid = ~rewards.isnan()
    assert_close(ours[valid], group_advantages(rewards[valid], ids[valid], scale, ddof), rtol=0, atol=0)
    assert (ours[~valid] == 0).all()
    assert ours[7] == 0  # a group of one
    if scale == "none":
        assert_close(ours[0].item(), 0.5 - 0.65, rtol=0, atol=1e-7)  # the mean is of four, not of five with a 0


def test_clip():
    rewards, ids = torch.tensor([1.0] + [0.0] * 99), torch.zeros(100, dtype=torch.long)
    assert group_advantages(rewards, ids).max().item() == pytest.approx(9.94, abs=0.02)
    assert group_advantages(rewards, ids, clip=5.0).max() == 5


def test_combine_rewards():
    rewards = torch.tensor([[1.0, 2.0], [3.0, NAN], [NAN, NAN]])
    combined = combine_rewards(rewards, torch.tensor([0.5, 2.0]))
    assert combined[:2].tolist() == [4.5, 1.5]
    assert combined[2].isnan()
    infinite = combine_rewards(torch.tensor([[1.0, math.inf]]), torch.ones(2))
    with pytest.raises(ValueError, match="Rewards must be finite, got inf for sample 0"):
        group_advantages(infinite, torch.zeros(1, dtype=torch.long))


def test_decoupled_rewards_with_missing_values():
    rewards = torch.tensor([[0.0, 1.0], [1.0, NAN], [NAN, 3.0], [NAN, NAN]])
    ids, weights = torch.zeros(4, dtype=torch.long), torch.tensor([1.0, 2.0])
    ours = normalize_then_sum_advantages(rewards, weights, ids, eps=0.0, batch_normalize=False)
    assert ours.tolist() == [-3.0, 1.0, 2.0, 0.0]
    batch = normalize_then_sum_advantages(rewards, weights, ids, eps=0.0)
    # The sample without any reward is not counted in the std of the batch, which is sqrt((9 + 1 + 4) / 3).
    assert_close(batch, ours / math.sqrt(14 / 3), rtol=1e-6, atol=0)


def test_a_constant_reward_leaves_the_other_one_alone():
    rewards, ids = rewards_and_ids()
    both = torch.stack([rewards, torch.full_like(rewards, 0.1)], 1)
    ours = normalize_then_sum_advantages(both, torch.tensor([1.0, 5.0]), ids, batch_normalize=False)
    assert torch.equal(ours, group_advantages(rewards, ids))


def test_statistics_of_groups():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, NAN, 0.5, NAN, NAN])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 3])
    assert zero_std_fraction(rewards, ids) == 0.75  # equal, single, and missing altogether
    assert zero_std_fraction(rewards[:3], ids[:3]) == 1.0
    assert zero_std_fraction(rewards[3:5], ids[3:5]) == 0.0
    assert group_std_mean(rewards, ids) == pytest.approx((0 + 0.5 + 0) / 3, abs=1e-9)
    assert group_std_mean(rewards, ids, ddof=1) == pytest.approx(math.sqrt(0.5) / 3, abs=1e-9)
    assert math.isnan(group_std_mean(rewards[7:], ids[7:]))


def test_bad_input():
    rewards, ids = rewards_and_ids()
    with pytest.raises(ValueError, match="scale_rewards='global' is not known: use one of 'group', 'batch', 'none'"):
        group_advantages(rewards, ids, "global")
    with pytest.raises(ValueError, match="ddof=2 must be 0"):
        group_advantages(rewards, ids, ddof=2)
    with pytest.raises(ValueError, match="eps=-1 must be at least 0"):
        group_advantages(rewards, ids, eps=-1)
    with pytest.raises(ValueError, match=r"got shapes \(20,\) and \(19,\)"):
        group_advantages(rewards, ids[1:])
    with pytest.raises(ValueError, match=r"`group_ids` must be integers, got torch\.float32"):
        group_advantages(rewards, ids.float())
    with pytest.raises(ValueError, match=r"got shapes \(20, 1\) and \(2,\): two functions need \(N, 2\)"):
        combine_rewards(rewards.unsqueeze(1), torch.ones(2))
    with pytest.raises(ValueError, match=r"got shapes \(20,\) and \(1,\)"):
        normalize_then_sum_advantages(rewards, torch.ones(1), ids)
    with pytest.raises(ValueError, match="multi_objective_aggregation='gdpo' is not known"):
        reward_advantages(rewards.unsqueeze(1), torch.ones(1), ids, "gdpo")
    with pytest.raises(ValueError, match="baseline='prompt' is not known: use one of 'group', 'batch', 'none'"):
        group_advantages(rewards, ids, baseline="prompt")
    with pytest.raises(ValueError, match="trim_tails='high' is not known: use one of 'low', 'both'"):
        group_advantages(rewards, ids, trim_tails="high")
    for trim, tails, limit in [(-0.1, "low", "1"), (1.0, "low", "1"), (0.5, "both", "0.5"), (NAN, "low", "1")]:
        with pytest.raises(ValueError, match=f"trim={trim} must be at least 0 and below {limit} for trim_tails="):
            normalize_then_sum_advantages(rewards.unsqueeze(1), torch.ones(1), ids, trim=trim, trim_tails=tails)

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from omnitrl.algorithms.selection import best_and_worst, preference_pairs
from tests.golden_cases import load_case


NAN = float("nan")


def zeros(length):
    return torch.zeros(length, dtype=torch.long)


def scores_and_ids():
    scores = torch.tensor([0.2, 0.9, 0.4, 0.5, 0.7, 0.1, 0.3, 0.6])
    ids = torch.tensor([7, -3, 7, -3, 7, -3, 7, -3])  # 7: .2 .4 .7 .3; -3: .9 .5 .1 .6
    return scores, ids


@pytest.mark.parametrize(
    ("count", "expected"), [(2, [0, 1, 4, 5]), (3, [0, 1, 3, 4, 5, 6]), (4, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_best_and_worst_of_each_group(count, expected):
    scores, ids = scores_and_ids()
    assert best_and_worst(scores, ids, count).tolist() == expected
    # An odd one is one of the worst, and groups may differ in size.
    extended = torch.cat([scores, torch.tensor([0.95, 0.0])]), torch.cat([ids, torch.tensor([7, 7])])
    chosen = best_and_worst(*extended, 3)
    assert chosen.tolist() == [0, 1, 3, 5, 8, 9]


def test_best_and_worst_as_dance_grpo_keeps_8_of_24():
    scores = torch.rand(24, generator=torch.Generator().manual_seed(0))
    order = scores.argsort()
    expected = torch.cat([order[:4], order[-4:]]).sort().values
    assert torch.equal(best_and_worst(scores, zeros(24), 8), expected)


def test_best_and_worst_takes_missing_scores_last():
    scores = torch.tensor([NAN, 0.3, NAN, 0.1, 0.2])
    assert best_and_worst(scores, zeros(5), 2).tolist() == [1, 3]
    assert best_and_worst(scores, zeros(5), 3).tolist() == [1, 3, 4]
    assert best_and_worst(scores, zeros(5), 4).tolist() == [0, 1, 3, 4]
    # One group without any score still gives as many.
    both = torch.cat([scores, torch.full((3,), NAN)]), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    assert best_and_worst(*both, 2).tolist() == [1, 3, 5, 6]


def test_ties_are_broken_by_index():
    assert best_and_worst(torch.full((5,), 0.1), zeros(5), 4).tolist() == [0, 1, 2, 3]
    assert best_and_worst(torch.tensor([0.5, 0.1, 0.5, 0.1, 0.5]), zeros(5), 2).tolist() == [0, 1]
    pairs = preference_pairs(torch.tensor([0.2, 0.5, 0.1, 0.5, 0.1]), zeros(5))
    assert (pairs.chosen.tolist(), pairs.rejected.tolist()) == ([1], [2])


def test_case_04c_pairs():
    _, stored = load_case("04c")
    scores, ids = stored["rewards"], stored["group_ids"]
    pair = ids != 2  # theirs leaves out the group of one
    index = pair.nonzero().flatten()
    pairs = preference_pairs(scores[pair], ids[pair])
    ours = torch.stack([index[pairs.chosen], index[pairs.rejected]], 1)
    theirs = stored["dpo_pair_indices"].reshape(-1, 2)
    assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
    # The group between has equal scores: theirs trains on its first against its last sample, ours does not.
    assert theirs[1].tolist() == [4, 7]
    assert ours[1].tolist() == [4, 5]
    assert pairs.valid.tolist() == [True, False, True]


def test_pairs_are_in_the_order_of_the_ids_and_of_one_group_each():
    scores, ids = scores_and_ids()
    pairs = preference_pairs(scores, ids)
    assert pairs.chosen.tolist() == [1, 4]  # of group -3, of group 7
    assert pairs.rejected.tolist() == [5, 0]
    assert pairs.valid.tolist() == [True, True]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    shuffled = preference_pairs(scores[order], ids[order])
    assert torch.equal(order[shuffled.chosen], pairs.chosen)
    assert torch.equal(order[shuffled.rejected], pairs.rejected)


def test_pairs_need_a_gap_of_the_margin():
    scores, ids = torch.tensor([0.5, 0.25, 1.0, 0.5, 3.0, 3.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert preference_pairs(scores, ids).valid.tolist() == [True, True, False]
    assert preference_pairs(scores, ids, margin=0.25).valid.tolist() == [True, True, False]
    assert preference_pairs(scores, ids, margin=0.3).valid.tolist() == [False, True, False]
    assert preference_pairs(scores, ids, margin=0.6).valid.tolist() == [False, False, False]


def test_pairs_with_missing_scores():
    scores = torch.tensor([NAN, 0.3, 0.1, NAN, NAN, 0.5, NAN, NAN])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    pairs = preference_pairs(scores, ids)
    assert pairs.valid.tolist() == [True, False, False]
    assert pairs.chosen.tolist() == [1, 5, 6]
    assert pairs.rejected.tolist() == [2, 3, 7]  # different members even where they mean nothing


def test_no_samples_give_no_pairs():
    pairs = preference_pairs(torch.zeros(0), zeros(0))
    assert pairs.chosen.shape == pairs.rejected.shape == pairs.valid.shape == (0,)


def test_bad_input():
    scores, ids = scores_and_ids()
    with pytest.raises(
        ValueError, match="count=5 members of each group cannot be kept, the smallest group has 4: use"
    ):
        best_and_worst(scores, ids, 5)
    with pytest.raises(ValueError, match=r"count=1 members .* use a number from 2 to 4"):
        best_and_worst(scores, ids, 1)
    with pytest.raises(ValueError, match="the smallest group has 1: use 2 generations per prompt or more"):
        best_and_worst(scores[:2], ids[:2], 2)
    with pytest.raises(ValueError, match="got a group of one: use num_generations=2 or more"):
        preference_pairs(scores[:3], ids[:3])
    with pytest.raises(ValueError, match=r"margin=-0\.1 must be at least 0"):
        preference_pairs(scores, ids, -0.1)
    with pytest.raises(ValueError, match=r"`scores` and `group_ids` have one value per sample, got shapes \(8,\)"):
        preference_pairs(scores, ids[1:])
    with pytest.raises(ValueError, match="`group_ids` must be integers"):
        best_and_worst(scores, ids.float(), 2)
    with pytest.raises(ValueError, match="Scores must be finite, got inf for sample 0"):
        best_and_worst(torch.tensor([float("inf"), 0.0]), zeros(2), 2)

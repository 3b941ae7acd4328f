# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from omnitrl.algorithms import IMPORTANCE_MODES, importance_weights


MINE = torch.tensor([[0.0, math.log(4.0)], [math.log(0.2), 0.0]])
THEIRS = torch.zeros(2, 2)  # ratios 1, 4 and 0.2, 1


@pytest.mark.parametrize(
    ("mode", "expected", "bounded"),
    [
        ("step_truncate", [[1, 3], [0.5, 1]], [[0, 1], [1, 0]]),
        ("step_mask", [[1, 0], [0, 1]], [[0, 1], [1, 0]]),
        ("sequence_truncate", [[3, 3], [0.5, 0.5]], [[1, 1], [1, 1]]),
        ("sequence_mask", [[0, 0], [0, 0]], [[1, 1], [1, 1]]),
    ],
)
def test_ratios_beyond_the_bounds_are_clamped_or_dropped(mode, expected, bounded):
    weights = importance_weights(MINE, THEIRS, mode, clip_max=3.0, clip_min=0.5)
    assert torch.allclose(weights.weights, torch.tensor(expected, dtype=torch.float32))
    assert weights.bounded.tolist() == torch.tensor(bounded).bool().tolist()


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_without_bounds_weights_are_the_ratios(mode):
    weights = importance_weights(MINE, THEIRS, mode, clip_max=None).weights
    steps = [[1, 4], [0.2, 1]] if mode.startswith("step") else [[4, 4], [0.2, 0.2]]
    assert torch.allclose(weights, torch.tensor(steps, dtype=torch.float32))


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_equal_policies_have_weights_of_exactly_one(mode):
    weights = importance_weights(MINE, MINE, mode)
    assert torch.equal(weights.weights, torch.ones(2, 2))
    assert not weights.bounded.any()


def test_a_step_without_a_log_prob_counts_nothing():
    weights = importance_weights(torch.tensor([[float("nan"), 0.0]]), torch.zeros(1, 2), "step_truncate")
    assert weights.weights.tolist() == [[0.0, 1.0]]
    assert weights.bounded.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "token_mask"}, "mode='token_mask' is unknown: use one of 'step_truncate'"),
        ({"clip_max": 1.0}, "clip_max=1.0 must be above 1, the ratio of equal policies: use 3.0"),
        ({"clip_min": 1.5}, r"clip_min=1.5 must be in \[0, 1\): use 0.3"),
    ],
)
def test_bounds_that_exclude_equal_policies_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        importance_weights(MINE, THEIRS, **arguments)


def test_log_probs_of_other_samples_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(1, 2\): both must be \(samples, steps\)"):
        importance_weights(MINE, THEIRS[:1])

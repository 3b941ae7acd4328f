# SPDX-License-Identifier: Apache-2.0
"""Pairs that the shipped model draws: what OCR reads better is preferred."""

import pytest

from omnitrl.data import load_preferences
from omnitrl.quickstart import preference_pairs
from omnitrl.rewards import ocr_reward


@pytest.mark.slow
def test_the_preferred_picture_is_read_better():
    pairs = preference_pairs("heldout", num_generations=4, num_words=3)
    assert [row["prompt"] for row in pairs] == ["CAT", "DOG", "SUN"]
    for row in pairs:
        assert row["chosen"].size == row["rejected"].size == (64, 32)
        scores = ocr_reward([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
        assert scores == pytest.approx([row["score_chosen"], row["score_rejected"]])
        assert scores[0] > scores[1]
    assert len(load_preferences(pairs)) == 3
    again = preference_pairs("heldout", num_generations=4, num_words=1)
    assert again[0]["chosen"].tobytes() == pairs[0]["chosen"].tobytes()
    others = preference_pairs("heldout", num_generations=4, num_words=3, seed=1)
    assert 0 < len(others) <= 3  # words whose pictures are all read alike are left out
    assert {row["chosen"].tobytes() for row in others}.isdisjoint(row["chosen"].tobytes() for row in pairs)

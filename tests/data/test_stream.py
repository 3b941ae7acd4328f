# SPDX-License-Identifier: Apache-2.0
import logging
from collections import Counter

import pytest

from omnitrl.data import PromptStream, shard
from omnitrl.errors import InputError


# Written down once: a change here means that no earlier run can be repeated.
GOLDEN = [[5, 4, 1], [0, 6, 3], [2, 3, 6], [2, 4, 5], [0, 1, 6]]


def test_golden_indices():
    stream = PromptStream(num_prompts=7, prompts_per_rollout=3, seed=42)
    assert [stream.indices(rollout) for rollout in range(5)] == GOLDEN


def test_every_prompt_is_seen_equally_often_and_once_a_pass():
    stream = PromptStream(num_prompts=7, prompts_per_rollout=3, seed=1)
    rows = [row for rollout in range(7 * 4) for row in stream.indices(rollout)]
    assert Counter(rows) == dict.fromkeys(range(7), 12)
    passes = [tuple(rows[start : start + 7]) for start in range(0, len(rows), 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len(set(passes)) == len(passes)  # each pass has its own order


def test_a_rollout_depends_on_its_number_alone():
    uninterrupted = PromptStream(num_prompts=7, prompts_per_rollout=3, seed=5)
    expected = [uninterrupted.indices(rollout) for rollout in range(20)]
    resumed = PromptStream(num_prompts=7, prompts_per_rollout=3, seed=5)
    assert [resumed.indices(rollout) for rollout in range(11, 20)] == expected[11:]
    assert [resumed.indices(rollout) for rollout in reversed(range(20))] == expected[::-1]


def test_seed_and_shuffle():
    first, second = (PromptStream(50, 50, seed=seed).indices(0) for seed in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert [PromptStream(4, 3, seed=0, shuffle=False).indices(r) for r in range(2)] == [[0, 1, 2], [3, 0, 1]]


def test_more_prompts_a_rollout_than_there_are(caplog):
    with caplog.at_level(logging.WARNING):
        stream = PromptStream(num_prompts=3, prompts_per_rollout=8, seed=0)
        rows = stream.indices(0) + stream.indices(1) + stream.indices(2)
    assert Counter(rows) == {0: 8, 1: 8, 2: 8}
    assert set(Counter(stream.indices(0)).values()) <= {2, 3}
    assert len(caplog.records) == 1
    assert "A rollout takes 8 prompts but the dataset has 3" in caplog.text


@pytest.mark.parametrize(("num_prompts", "per_rollout", "rollouts"), [(7, 3, 3), (6, 3, 2), (2, 3, 1)])
def test_rollouts_per_epoch(num_prompts, per_rollout, rollouts):
    assert PromptStream(num_prompts, per_rollout, seed=0).rollouts_per_epoch == rollouts


@pytest.mark.parametrize("arguments", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_numbers_out_of_range(arguments):
    with pytest.raises(InputError, match="at least"):
        PromptStream(*arguments)
    with pytest.raises(InputError, match="numbered from 0, got -1"):
        PromptStream(1, 1, 0).indices(-1)


@pytest.mark.parametrize(("num_items", "world_size"), [(5, 2), (7, 3), (2, 4), (0, 3), (8, 4), (5, 1)])
def test_shards_are_the_whole_in_order_and_even(num_items, world_size):
    shards = [shard(num_items, rank, world_size) for rank in range(world_size)]
    assert [item for part in shards for item in part] == list(range(num_items))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_rank_that_does_not_exist():
    with pytest.raises(InputError, match="less than world_size=2, got 2"):
        shard(5, 2, 2)

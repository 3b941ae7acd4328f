# SPDX-License-Identifier: Apache-2.0
import logging
from collections import Counter

import pytest

from omnitrl.data import BucketStream, PromptStream, shard
from omnitrl.errors import InputError


# Written down once: a change here means that no earlier run can be repeated.
GOLDEN_SIZES = [
    ("s", [8, 6]),
    ("w", [1, 2]),
    ("t", [11, 5]),
    ("w", [0, 3]),
    ("t", [7, 9]),
    ("w", [4, 4]),  # it spans two passes
    ("t", [10, 5]),
]
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


# Rows of several sizes

SIZES = ["wide"] * 5 + ["tall", "square"] * 2 + ["tall"] * 3  # 5, 5 and 2 rows


def test_rows_of_one_size_are_drawn_as_without_sizes():
    plain = PromptStream(7, 3, seed=42)
    stream = BucketStream(["any"] * 7, 3, seed=42)
    assert [stream.indices(rollout) for rollout in range(30)] == [plain.indices(rollout) for rollout in range(30)]
    assert [stream.indices(rollout) for rollout in range(5)] == GOLDEN
    assert stream.rollouts_per_epoch == plain.rollouts_per_epoch
    assert stream.size(3) == "any"


def test_golden_rollouts_of_several_sizes():
    stream = BucketStream(SIZES, 2, seed=42)
    assert [(stream.size(r)[0], stream.indices(r)) for r in range(7)] == GOLDEN_SIZES


def test_a_rollout_has_rows_of_one_size_and_every_row_is_drawn_equally_often():
    stream = BucketStream(SIZES, 3, seed=1)
    drawn = Counter()
    for rollout in range(12 * 5):  # five cycles of twelve turns
        rows = stream.indices(rollout)
        assert {SIZES[row] for row in rows} == {stream.size(rollout)}
        drawn.update(rows)
    assert drawn == dict.fromkeys(range(12), 3 * 5)


def test_turns_are_spread_as_the_rows_are():
    sizes = ["a"] * 50 + ["b"] * 30 + ["c"] * 7
    stream = BucketStream(sizes, 4, seed=3)
    seen = Counter()
    for rollout in range(3 * 87):
        seen[stream.size(rollout)] += 1
        for size, rows in Counter(sizes).items():
            assert abs(seen[size] - (rollout + 1) * rows / 87) <= 1
    cycles = [[stream.size(cycle * 87 + i) for i in range(87)] for cycle in range(3)]
    assert cycles[0] != cycles[1] != cycles[2]
    others = [[BucketStream(sizes, 4, seed=seed).size(i) for i in range(87)] for seed in (3, 4)]
    assert others[0] != others[1]


def test_a_rollout_of_several_sizes_depends_on_its_number_alone():
    expected = [(s.size(r), s.indices(r)) for s in [BucketStream(SIZES, 2, seed=5)] for r in range(40)]
    again = BucketStream(SIZES, 2, seed=5)
    assert [(again.size(r), again.indices(r)) for r in reversed(range(40))] == expected[::-1]


def test_sizes_in_the_order_of_the_dataset():
    stream = BucketStream(SIZES, 2, seed=5, shuffle=False)
    wide = [row for r in range(24) if stream.size(r) == "wide" for row in stream.indices(r)]
    assert wide == [0, 1, 2, 3, 4] * 4
    assert [stream.size(r) for r in range(12)] == [stream.size(r + 12) for r in range(12)]


def test_a_size_of_fewer_rows_than_a_rollout_takes_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        BucketStream(SIZES, 4, seed=0)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "A rollout takes 4 prompts but the size square has 2"
    ]


def test_numbers_of_several_sizes_out_of_range():
    for sizes, per_rollout, seed in (([], 1, 0), (SIZES, 0, 0), (SIZES, 1, -1)):
        with pytest.raises(InputError, match="at least"):
            BucketStream(sizes, per_rollout, seed)
    with pytest.raises(InputError, match="numbered from 0, got -1"):
        BucketStream(SIZES, 1, 0).indices(-1)


@pytest.mark.parametrize(("num_items", "world_size"), [(5, 2), (7, 3), (2, 4), (0, 3), (8, 4), (5, 1)])
def test_shards_are_the_whole_in_order_and_even(num_items, world_size):
    shards = [shard(num_items, rank, world_size) for rank in range(world_size)]
    assert [item for part in shards for item in part] == list(range(num_items))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_rank_that_does_not_exist():
    with pytest.raises(InputError, match="less than world_size=2, got 2"):
        shard(5, 2, 2)

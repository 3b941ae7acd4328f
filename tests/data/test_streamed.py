# SPDX-License-Identifier: Apache-2.0
"""Prompts from a stream: each once a pass, rollouts of one size, and the same ones wherever one begins."""

from itertools import islice

import datasets
import pytest

from omnitrl import load_prompts
from omnitrl.data import StreamedPrompts, StreamFeed
from omnitrl.data import feed as feed_module
from omnitrl.errors import InputError


pytestmark = pytest.mark.compat

ROWS = [{"prompt": f"p{i}", "width": 64 if i % 3 else 32} for i in range(8)]  # of size 32 are p0, p3 and p6


def stream_of(rows=ROWS, shards=1):
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=shards)


def prompts_of(rows):
    return [int(row["prompt"][1:]) for _, row in rows]


def feed_of(prompts=None, per_rollout=2, key="width"):
    return StreamFeed(prompts or load_prompts(stream_of()), per_rollout, lambda row: row[key] if key else None)


def drawn(feed, rollout):
    return [int(feed.row(rollout, group)["prompt"][1:]) for group in range(feed.prompts_per_rollout)]


def test_a_stream_is_begun_anew_when_it_ends():
    prompts = load_prompts(stream_of())
    assert isinstance(prompts, StreamedPrompts)
    assert load_prompts(prompts) is prompts
    assert prompts.column_names == ["prompt", "width"]
    assert prompts_of(islice(prompts.rows(), 20)) == [*range(8), *range(8), 0, 1, 2, 3]
    assert [where for where, _ in islice(prompts.rows(), 7, 10)] == [
        "row 7 of the stream",
        "row 0 of the stream in pass 1",
        "row 1 of the stream in pass 1",
    ]


def test_a_split_of_streams():
    both = datasets.IterableDatasetDict(train=stream_of(), test=stream_of(ROWS[:2]))
    assert len(load_prompts(both).head(99)) == 8
    assert [row["prompt"] for row in load_prompts(both, "test").head(99)] == ["p0", "p1"]
    with pytest.raises(InputError, match=r"has no split 'tests'; .* Did you mean 'test'"):
        load_prompts(both, "tests")


def test_passes_of_a_shuffled_stream_have_orders_of_their_own_and_can_be_repeated():
    passes = [prompts_of(islice(load_prompts(stream_of()).shuffled(7, 8).rows(), 24)) for _ in range(2)]
    assert passes[0] == passes[1]
    orders = [tuple(passes[0][start : start + 8]) for start in (0, 8, 16)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({*orders, tuple(range(8))}) == 4
    assert prompts_of(islice(load_prompts(stream_of()).shuffled(8, 8).rows(), 24)) != passes[0]


def test_the_head_can_be_looked_at_while_the_stream_is_read():
    prompts = load_prompts(stream_of()).shuffled(7, 8)
    expected = prompts_of(islice(prompts.rows(), 20))
    rows = prompts.rows()
    found = prompts_of(islice(rows, 11))
    head = prompts.head(3)
    assert [int(row["prompt"][1:]) for row in head] == expected[:3]
    assert found + prompts_of(islice(rows, 9)) == expected


def test_rollouts_are_the_next_rows_of_the_stream():
    feed = feed_of(per_rollout=3, key=None)
    assert [drawn(feed, rollout) for rollout in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]
    assert feed.where(3, 0) == "row 1 of the stream in pass 1"


def test_a_rollout_waits_until_it_is_full():
    feed = feed_of()
    assert [(feed.size(r), drawn(feed, r)) for r in range(7)] == [
        (64, [1, 2]),
        (32, [0, 3]),
        (64, [4, 5]),
        (32, [6, 0]),
        (64, [7, 1]),
        (64, [2, 4]),
        (32, [3, 6]),
    ]
    counted = [row for r in range(7, 4 * 8) for row in drawn(feed, r)]
    assert {counted.count(row) for row in range(8)} <= {5, 6, 7}


def test_a_resumed_run_finds_its_place_and_goes_back():
    expected = [(feed.size(r), drawn(feed, r)) for feed in [feed_of()] for r in range(12)]
    resumed = feed_of()
    assert [(resumed.size(r), drawn(resumed, r)) for r in range(5, 12)] == expected[5:]
    assert (resumed.size(2), drawn(resumed, 2)) == expected[2]
    assert (resumed.size(6), drawn(resumed, 6)) == expected[6]


def test_no_more_is_read_than_a_rollout_needs():
    read = []

    def rows():
        for row in ROWS:
            read.append(row["prompt"])
            yield row

    feed = feed_of(load_prompts(datasets.IterableDataset.from_generator(rows)))
    read.clear()
    assert drawn(feed, 0) == [1, 2]
    assert len(read) <= 4
    assert drawn(feed, 0) == [1, 2]
    assert feed.size(0) == 64
    assert len(read) <= 4


def test_another_row_of_the_rollout():
    feed = feed_of(per_rollout=3)
    others = {feed.other(0, 1, draw)["prompt"] for draw in range(10)}
    assert others == {"p1", "p4"}
    assert drawn(feed, 0) == [1, 2, 4]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": " "}, "Row 3 of the stream has a blank prompt"),
        ({"prompt": None}, "Row 3 of the stream has a NoneType as its prompt"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_when_it_is_read(row, message):
    prompts = load_prompts(stream_of([*ROWS[:3], {**ROWS[3], **row}]))
    feed = feed_of(prompts, per_rollout=3, key=None)
    assert drawn(feed, 0) == [0, 1, 2]
    with pytest.raises(InputError, match=message):
        feed.row(1, 0)


def test_too_many_sizes_are_refused(monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_WAITING_SIZES", 4)
    feed = feed_of(key="prompt")
    with pytest.raises(InputError, match="Row 4 of the stream is of one more of 5 sizes that wait for 2 rows"):
        feed.row(0, 0)

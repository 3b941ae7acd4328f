# SPDX-License-Identifier: Apache-2.0
import math
import os
import subprocess
import sys
from collections import Counter
from itertools import groupby, pairwise

import pytest

from omnitrl.algorithms.windows import WINDOW_STRATEGIES, sde_window, trained_steps


FROZEN = [
    ((19, 20, 21, 22), (0, 1, 2, 3, 7)),
    ((23, 24, 25, 26), (0, 2, 4, 6, 7)),
    ((2, 3, 4, 5), (1, 2, 5, 6, 7)),
]


SLIDING = ["progressive", "decay", "exp_decay"]


def windows(strategy, num_steps, size, window_range, count=400, **kwargs):
    return [sde_window(strategy, num_steps, size, window_range, step=step, **kwargs) for step in range(count)]


@pytest.mark.parametrize("strategy", list(WINDOW_STRATEGIES))
@pytest.mark.parametrize("num_steps", [2, 3, 5, 10])
@pytest.mark.parametrize("window_range", [None, (0, 2), (1, 4), (0, 100)])
def test_never_empty_never_last_never_cut(strategy, num_steps, window_range):
    low, high = window_range or (0, num_steps - 1)
    high = min(high, num_steps - 1)
    if low >= high:
        with pytest.raises(ValueError, match="holds none of the steps"):
            sde_window(strategy, num_steps, 1, window_range)
        return
    for size in range(1, high - low + 1):
        if strategy == "all" and size < high - low:
            continue
        for window in windows(strategy, num_steps, size, window_range, count=30):
            assert window == tuple(sorted(set(window)))
            assert len(window) == size
            assert strategy == "scattered" or window[-1] - window[0] == size - 1
            assert low <= window[0]
            assert window[-1] < high <= num_steps - 1


def test_all_and_first():
    assert sde_window("all", 10) == tuple(range(9))
    assert sde_window("all", 10, window_range=(2, 5)) == (2, 3, 4)
    assert sde_window("all", 4, window_range=(0, 4)) == (0, 1, 2)  # 4 is the end of the sampler, and is clipped
    assert set(windows("first", 6, 2, None, seed=3)) == {(0, 1)}
    assert sde_window("first", 10, 2, (3, 8)) == (3, 4)
    assert sde_window("first", 4) == (0, 1, 2)


def test_random_starts_are_uniform():
    starts = Counter(window[0] for window in windows("random", 10, 2, (0, 5), count=4000))
    assert sorted(starts) == [0, 1, 2, 3]
    for count in starts.values():
        assert count == pytest.approx(1000, abs=110)  # 4 standard deviations


def test_random_differs_between_seeds_and_stays_for_an_interval():
    runs = [windows("random", 20, 3, None, count=40, seed=seed) for seed in (0, 1, 2)]
    assert len({tuple(run) for run in runs}) == 3
    held = windows("random", 20, 3, None, count=40, interval=5)
    assert all(held[step] == held[step - step % 5] for step in range(40))
    assert len(set(held)) > 3


def test_progressive_covers_every_start_equally_and_rolls_back():
    cycle = windows("progressive", 10, 3, None, count=7)
    assert [window[0] for window in cycle] == [0, 1, 2, 3, 4, 5, 6]
    visits = Counter(step for window in cycle for step in window)
    assert [visits[step] for step in range(9)] == [1, 2, 3, 3, 3, 3, 3, 2, 1]
    assert sde_window("progressive", 10, 3, step=7) == (0, 1, 2)
    slow = [sde_window("progressive", 10, 3, step=step, interval=25)[0] for step in (0, 24, 25, 174, 175)]
    assert slow == [0, 0, 1, 6, 0]


@pytest.mark.parametrize("strategy", SLIDING)
@pytest.mark.parametrize("window_range", [(0, 9), (2, 9), (3, 4)])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_t20_a_cycle_covers_the_range_with_full_windows(strategy, window_range, stride):
    low, high = window_range
    for size in range(stride, high - low + 1):
        run = windows(strategy, 10, size, window_range, count=200, stride=stride, interval=3)
        starts = [start for start, _ in groupby(window[0] for window in run)]
        cycle = starts[: starts.index(low, 1)] if len(starts) > 1 else starts
        assert {step for start in cycle for step in range(start, start + size)} == set(range(low, high))
        assert (cycle[0], cycle[-1]) == (low, high - size)
        moves = [after - before for before, after in pairwise(cycle)]
        assert all(move == stride for move in moves[:-1])
        assert all(0 < move <= stride for move in moves)
        assert all(start == cycle[place % len(cycle)] for place, start in enumerate(starts))  # and again


def test_t20_every_interior_step_is_covered_equally():
    visits = Counter(
        step for window in windows("progressive", 25, 4, (0, 23), count=20 * 5, interval=5) for step in window
    )
    assert {visits[step] for step in range(3, 20)} == {4 * 5}
    assert [visits[step] for step in (0, 1, 2, 20, 21, 22)] == [5, 10, 15, 15, 10, 5]


def stays(strategy, count, **kwargs):
    """How long each start stays in the first cycle, by its distance from the start of the range."""
    counts = Counter(window[0] - 2 for window in windows(strategy, 30, 4, (2, 28), count=count, **kwargs))
    return [counts[distance] for distance in sorted(counts)]


def test_decay_falls_linearly_to_the_last_start():
    # 23 starts, distances 0..22: floor(25 - 20 * distance / 22).
    expected = [(25 * (22 - gone) + 5 * gone) // 22 for gone in range(23)]
    assert (expected[0], expected[11], expected[22]) == (25, 15, 5)
    total = sum(expected)
    assert stays("decay", total, interval=25, min_interval=5) == expected
    assert sde_window("decay", 30, 4, (2, 28), step=total - 1, interval=25, min_interval=5) == (24, 25, 26, 27)
    assert sde_window("decay", 30, 4, (2, 28), step=total, interval=25, min_interval=5) == (2, 3, 4, 5)
    # With a stride the last window is placed at the end, and stays for the least.
    strided = [expected[gone] for gone in (0, 4, 8, 12, 16, 20, 22)]
    assert stays("decay", sum(strided), interval=25, min_interval=5, stride=4) == strided
    assert stays("decay", 23, interval=1) == [1] * 23


def test_exp_decay_falls_after_its_start():
    expected = [max(1, math.ceil(25 * math.exp(-0.1 * max(0, gone - 13)))) for gone in range(23)]
    assert expected[12:17] == [25, 25, 23, 21, 19]
    total = sum(expected)
    assert stays("exp_decay", total, interval=25, decay_start=13) == expected
    assert sde_window("exp_decay", 30, 4, (2, 28), step=total, interval=25, decay_start=13) == (2, 3, 4, 5)
    assert stays("exp_decay", 25 + 22, interval=25, decay_rate=50.0) == [25] + [1] * 22
    assert stays("exp_decay", 23 * 3, interval=3, decay_rate=0.0) == [3] * 23


def test_scattered_steps_are_drawn_evenly_and_stay_for_an_interval():
    run = windows("scattered", 10, 3, (1, 8), count=3500)
    visits = Counter(step for window in run for step in window)
    assert sorted(visits) == [1, 2, 3, 4, 5, 6, 7]
    for count in visits.values():
        assert count == pytest.approx(1500, abs=120)  # 4 standard deviations
    assert len(set(run)) == math.comb(7, 3)  # every set of steps comes up
    assert run[:20] != windows("scattered", 10, 3, (1, 8), count=20, seed=1)
    held = windows("scattered", 10, 3, (1, 8), count=40, interval=5)
    assert all(held[step] == held[step - step % 5] for step in range(40))
    assert len(set(held)) > 3


def test_same_in_every_process_and_version():
    # Written down, because a run that is resumed with a newer release must go on as it was.
    call = "[(sde_window('random', 28, 4, seed=42, step=s), trained_steps(range(9), 0.6, 42, s)) for s in range(3)]"
    ours = [(sde_window("random", 28, 4, seed=42, step=s), trained_steps(range(9), 0.6, 42, s)) for s in range(3)]
    assert ours == FROZEN
    other = subprocess.run(
        [sys.executable, "-c", f"from omnitrl.algorithms import *; print({call})"],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == str(FROZEN)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"strategy": "sliding"}, "sde_window_strategy='sliding' is not known: use one of 'all', 'first', 'random'"),
        ({"size": 10}, r"sde_window_size=10 does not fit steps 0\.\.8 .*use 1 to 9"),
        ({"size": 0}, "sde_window_size=0"),
        ({"size": 3, "window_range": (2, 4)}, r"sde_window_size=3 does not fit steps 2\.\.3 .*use 1 to 2"),
        ({"size": None}, "'random' needs the size of the window: set sde_window_size=2"),
        ({"strategy": "all", "size": 2}, "sde_window_size=2 has no meaning for sde_window_strategy='all'"),
        ({"window_range": (9, 10)}, r"sde_window_range=\(9, 10\) holds none of the steps 0\.\.8 .*use \(0, 9\)"),
        ({"window_range": (3, 3)}, r"sde_window_range=\(3, 3\)"),
        ({"window_range": (-1, 3)}, r"sde_window_range=\(-1, 3\)"),
        ({"num_steps": 1}, "num_inference_steps=1 leaves no stochastic step"),
        ({"strategy": "scattered", "size": None}, "'scattered' needs the size of the window: set sde_window_size=2"),
        ({"strategy": "decay", "size": None}, "'decay' needs the size of the window"),
        ({"interval": 0}, "sde_window_interval=0 must be at least 1: use 1"),
        ({"step": -1}, "step=-1 must be at least 0: use step=0"),
        ({"stride": 3}, "sde_window_stride=3 would leave steps between two windows of 2 .*: use 1 to 2"),
        ({"stride": 0}, "sde_window_stride=0 would .* not move: use 1 to 2, or sde_window_strategy='first' to stay"),
        ({"min_interval": 2}, "sde_window_min_interval=2 must be .* at most sde_window_interval=1, .*: use 1"),
        ({"min_interval": 0}, "sde_window_min_interval=0 must be at least 1"),
        ({"decay_rate": -0.1}, "sde_window_decay_rate=-0.1 must be a finite number of at least 0: use 0.1"),
        ({"decay_rate": float("nan")}, "sde_window_decay_rate=nan"),
        ({"decay_start": -1}, "sde_window_decay_start=-1 must be at least 0: use 0"),
    ],
)
def test_bad_windows(kwargs, message):
    with pytest.raises(ValueError, match=message):
        sde_window(**{"strategy": "random", "num_steps": 10, "size": 2, **kwargs})


def test_trained_steps_are_a_share():
    assert trained_steps((3, 4, 5), 1.0, 0, 0) == (3, 4, 5)
    assert len(trained_steps(range(15), 0.6, 0, 0)) == 9  # DanceGRPO with 16 steps
    assert len(trained_steps(range(9), 0.99, 0, 0)) == 8  # as int() does
    assert len(trained_steps(range(100), 0.29, 0, 0)) == 29  # 0.29 * 100 is 28.999999999999996
    assert len(trained_steps((0, 1), 0.1, 0, 0)) == 1  # never none


def test_trained_steps_cover_all_steps_evenly():
    draws = [trained_steps((2, 4, 6, 8), 0.5, 1, step) for step in range(2000)]
    assert all(draw == tuple(sorted(set(draw))) and len(draw) == 2 for draw in draws)
    visits = Counter(step for draw in draws for step in draw)
    assert sorted(visits) == [2, 4, 6, 8]
    for count in visits.values():
        assert count == pytest.approx(1000, abs=90)  # 4 standard deviations
    assert draws[0] == trained_steps((2, 4, 6, 8), 0.5, 1, 0)
    assert draws[:20] != [trained_steps((2, 4, 6, 8), 0.5, 2, step) for step in range(20)]


def test_bad_trained_steps():
    for fraction in (0, -0.5, 1.5):
        with pytest.raises(ValueError, match=f"timestep_fraction={fraction} must be above 0 and at most 1"):
            trained_steps((0, 1), fraction, 0, 0)
    with pytest.raises(ValueError, match="no stochastic step to train"):
        trained_steps((), 1.0, 0, 0)

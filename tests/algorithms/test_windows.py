# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from collections import Counter

import pytest

from omnitrl.algorithms import WINDOW_STRATEGIES, sde_window, trained_steps


FROZEN = [
    ((19, 20, 21, 22), (0, 1, 2, 3, 7)),
    ((23, 24, 25, 26), (0, 2, 4, 6, 7)),
    ((2, 3, 4, 5), (1, 2, 5, 6, 7)),
]


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
            assert window == tuple(range(window[0], window[0] + size))
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
        ({"interval": 0}, "interval=0 must be at least 1"),
        ({"step": -1}, "step=-1 at least 0"),
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

# SPDX-License-Identifier: Apache-2.0
"""
Windows against what MixGRPO (03c) and verl-omni (03d) train at each iteration.

Both leave faults in their numbers, which ours do not have, so the tests say what is equal and what is not:

- MixGRPO lets the window's start run to the end `L` of the range and cuts the window there, down to an empty one that
  lasts a whole interval. Ours over a range that is one window longer, cut at `L`, is its schedule to the last row;
  ours over the range itself has the same windows while they are whole, and then rolls back.
- verl-omni's window stays at the end of the range for good. Ours goes back to the start.
- Draws come from other generators, so of the random schedules only the set of windows can be equal.
"""

import pytest

from omnitrl.algorithms.windows import sde_window
from tests.golden_cases import load_case


def rows(name, setting):
    """The trained steps of each iteration, without the padding of -1."""
    case, stored = load_case(name)
    return case["parameters"][setting], [tuple(step for step in row if step >= 0) for row in stored[setting].tolist()]


def strategy_options(setting):
    """MixGRPO's names of a schedule in ours."""
    interval = setting["max_iters_per_group"] if setting["sample_strategy"] == "decay" else setting["iters_per_group"]
    stride = setting["prog_overlap_step"] if setting["prog_overlap"] else setting["group_size"]
    options = {"strategy": setting["sample_strategy"], "interval": interval, "stride": stride, "decay_start": 13}
    if setting["sample_strategy"] == "decay":
        options["min_interval"] = setting["min_iters_per_group"]
    return options


@pytest.mark.parametrize("name", ["default_mixgrpo_sh", "flash_sh", "small_overlap2_rollback", "decay", "exp_decay"])
def test_case_03c_ours_cut_at_its_end_is_mix_grpo(name):
    setting, reference = rows("03c", name)
    size, end = setting["group_size"], setting["max_timesteps"]
    ours = [
        sde_window(
            num_steps=end + size + 1, size=size, window_range=(0, end + size), step=step, **strategy_options(setting)
        )
        for step in range(len(reference))
    ]
    assert [tuple(step for step in window if step < end) for window in ours] == reference


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("default_mixgrpo_sh", 20 * 25),
        ("flash_sh", 20 * 20),
        ("cli_defaults_no_overlap_clip", 5 * 25),
        ("small_no_overlap_rollback", 2 * 2),
        ("small_overlap2_rollback", 3 * 2),
        ("exp_decay", 16 * 5 + 3 * 4 + 3),
    ],
)
def test_case_03c_whole_windows_are_equal(name, whole):
    setting, reference = rows("03c", name)
    size, end = setting["group_size"], setting["max_timesteps"]

    def ours(step):
        return sde_window(num_steps=end + 2, size=size, window_range=(0, end), step=step, **strategy_options(setting))

    assert [ours(step) for step in range(whole)] == reference[:whole]
    assert len(reference[whole]) < size  # here MixGRPO begins to cut
    assert all(len(ours(step)) == size for step in range(len(reference)))
    covered = {step for row in range(len(reference)) for step in ours(row)}
    assert covered == set(range(end))


def test_case_03c_where_mix_grpo_cuts_ours_lies_against_the_end():
    setting, reference = rows("03c", "small_no_overlap_rollback")
    for step, window in enumerate(reference):  # the same cycle of 3 windows, of which MixGRPO's last one has 2 steps
        ours = sde_window("progressive", 10, 3, (0, 8), step=step, interval=2, stride=setting["group_size"])
        assert ours == (window if len(window) == 3 else (5, 6, 7))


def test_case_03c_frozen_window_is_the_first():
    _, reference = rows("03c", "flash_star_sh")
    assert [sde_window("first", 25, 4, (0, 23), step=step) for step in range(60)] == reference


def test_case_03c_random_windows_are_the_same_set():
    _, reference = rows("03c", "random_seed_100_plus_iter")
    ours = {sde_window("random", 25, 4, (0, 23), step=step) for step in range(2000)}
    assert ours == {tuple(range(start, start + 4)) for start in range(20)}
    assert set(reference) <= ours
    assert reference[0] == (0, 1, 2, 3)  # MixGRPO does not draw the first one


@pytest.mark.parametrize(
    ("name", "cycle"),
    [("progressive_default", 3 * 25), ("progressive_size4_0_23", 6 * 25), ("progressive_size3_1_8", 3 * 2)],
)
def test_case_03d_verl_omni_first_cycle(name, cycle):
    setting, reference = rows("03d", name)
    size, bounds = setting["sde_window_size"], tuple(setting["sde_window_range"])
    reference = [tuple(range(start, end)) for start, end in reference]
    ours = [
        sde_window("progressive", 30, size, bounds, step=step, interval=setting["iters_per_group"], stride=size)
        for step in range(cycle + 1)
    ]
    assert ours[:cycle] == reference[:cycle]
    assert set(reference[cycle:]) == {reference[cycle - 1]}  # it stays
    assert ours[cycle] == ours[0]  # ours goes back


def test_case_03d_random_windows_are_the_same_set():
    _, reference = rows("03d", "random_seed42")
    ours = {sde_window("random", 10, 2, (0, 5), seed=42, step=step) for step in range(200)}
    assert ours == {tuple(range(start, end)) for start, end in reference}

# SPDX-License-Identifier: Apache-2.0
"""Rules for sounds, computed by hand."""

import math

import numpy as np
import pytest
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video
from omnitrl.rewards import DurationReward, LoudnessReward, RewardError, RewardRunner, SilenceReward


RATE = 1000


def constant(level, seconds=0.1, channels=1):
    return Audio(np.full((channels, round(seconds * RATE)), level, dtype=np.float32), RATE)


def sine(amplitude):
    return Audio(amplitude * np.sin(2 * np.pi * np.arange(RATE) / 20, dtype=np.float64)[None], RATE)


def decibels(level):
    return 10 ** (level / 20)


def test_loudness_is_the_level_in_decibels_of_full_scale():
    wide = LoudnessReward(low=-1, high=0, tolerance=100)  # 1 - (-1 - level) / 100
    scores = wide(completions=[constant(1.0), constant(0.1), sine(1.0), constant(0.0)])
    assert scores == pytest.approx([1.0, 0.81, 1 - (20 * math.log10(math.sqrt(2)) - 1) / 100, 0.0], abs=1e-6)


def test_loudness_falls_linearly_beyond_its_bounds():
    levels = [-45, -40, -35, -30, -20, -10, -7.5, 0]
    scores = LoudnessReward()(completions=[constant(decibels(level)) for level in levels])
    assert scores == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.0], abs=1e-5)


def test_loudness_is_the_mean_power_of_all_channels():
    one_silent = Audio(np.array([[0.2] * 8, [0.0] * 8], dtype=np.float32), RATE)  # -13.98 - 3.01 dB
    (score,) = LoudnessReward(low=-10, high=0, tolerance=10)([one_silent])
    assert score == pytest.approx(1 - (16.9897 - 10) / 10, abs=1e-5)


def test_silence_is_counted_in_windows_of_20_ms():
    samples = np.zeros((1, 110), dtype=np.float32)  # 5 windows of 20 samples and one of 10
    samples[0, 25] = 0.5
    samples[0, 100:] = decibels(-61)
    assert SilenceReward()([Audio(samples, RATE)]) == [pytest.approx(-90 / 110)]
    assert SilenceReward(threshold=-62)([Audio(samples, RATE)]) == [pytest.approx(-80 / 110)]
    assert SilenceReward()([constant(0.1), constant(0.0)]) == [0.0, -1.0]


def test_the_duration_that_is_asked_for():
    frames = Video(np.zeros((12, 4, 4, 3), np.uint8), 8.0)  # 1.5 s
    sounds = [constant(0.1, 0.5), constant(0.1, 2.0), constant(0.1, 1.0), frames]
    assert DurationReward()(completions=sounds, duration=[1.0, 1.0, None, 1.0]) == [
        0.5,
        0.5,
        None,
        pytest.approx(2 / 3),
    ]
    assert DurationReward(seconds=2.0)(completions=sounds, duration=[None, 4.0, None, None]) == [0.25, 0.5, 0.5, 0.75]
    assert DurationReward(seconds=2.0)(completions=sounds[:2]) == [0.25, 1.0]


def test_by_name_in_the_runner_the_sound_of_a_video_is_heard():
    film = Video(np.zeros((4, 4, 4, 3), np.uint8), 8.0, audio=constant(0.1, 1.0))
    with RewardRunner(["loudness", "silence", "duration"]) as runner:
        runner.submit([{"prompt": "", "duration": 1.0}] * 2, [film, constant(0.0, 1.0)])
        assert runner.collect().rewards.tolist() == [[1.0, 0.0, 0.5], [0.0, -1.0, 1.0]]
    assert LoudnessReward()(completions=[film]) == [1.0]


@pytest.mark.parametrize(
    ("completion", "error", "message"),
    [
        (Image.new("RGB", (6, 4)), RewardError, r"completions\[0\]: expected a sound .*, got an image of 4×6"),
        (Video(np.zeros((4, 4, 4, 3), np.uint8), 8.0), RewardError, "got a video without sound"),
        (Audio(np.zeros((1, 0), np.float32), RATE), RewardError, "got one without a sample"),
        (constant(math.nan), ValueError, r"completions\[0\]: the sound has NaN or infinite samples"),
    ],
)
@pytest.mark.parametrize("reward", [LoudnessReward(), SilenceReward()])
def test_what_is_no_sound(reward, completion, error, message):
    with pytest.raises(error, match=message):
        reward(completions=[completion])


def test_a_sound_with_nan_is_a_failure_in_the_runner():
    with RewardRunner("loudness", max_failed_fraction=1.0) as runner:
        runner.submit([{"prompt": ""}] * 2, [constant(math.nan), constant(0.1)])
        scored = runner.collect()
    assert math.isnan(scored.rewards[0, 0])
    assert scored.rewards[1, 0] == 1.0
    assert scored.failures == {"LoudnessReward": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoudnessReward(low=-10, high=-30), "low must be below high .* for example -30, -10 and 10"),
        (lambda: LoudnessReward(tolerance=0), "tolerance above 0"),
        (lambda: DurationReward(seconds=0), "seconds=0 must be above 0: give for example 10.0"),
        (lambda: DurationReward()([constant(0.1)], duration=[-1.0]), r"duration\[0\]=-1.0 must be above 0"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()

# SPDX-License-Identifier: Apache-2.0
"""How videos move, computed by hand."""

import numpy as np
import pytest
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.media import Video
from omnitrl.rewards import MovingReward, RewardError, RewardRunner, flicker_reward, motion_reward


def video(*frames):
    """A video of frames of 1×2 pixels, each a pair of greys or colours."""
    pixels = [[[level] * 3 if isinstance(level, int) else level for level in frame] for frame in frames]
    return Video(np.array(pixels, dtype=np.uint8)[:, None], 8.0)


STILL = video((51, 204), (51, 204), (51, 204))
SWAPPED = video((51, 204), (204, 51), (51, 204))  # moves, at constant brightness
BLINKING = video((0, 0), (255, 255), (0, 0), (255, 255))
DAWN = video((0, 0), (51, 51), (102, 102), (153, 153))
RED = video(((255, 0, 0), 0), ((0, 0, 0), 0), ((0, 0, 0), 0))


@pytest.mark.parametrize(
    ("completion", "motion", "flicker"),
    [
        (STILL, 0.0, 0.0),
        (SWAPPED, 0.6, 0.0),
        (BLINKING, 1.0, -2.0),
        (DAWN, 0.2, 0.0),
        (RED, 0.299 / 4, -0.299 / 2),
        (video((0, 0), (255, 255)), 1.0, None),
        (video((0, 0)), None, None),
    ],
)
def test_motion_and_flicker(completion, motion, flicker):
    expected = [value if value is None else pytest.approx(value, abs=1e-12) for value in (motion, flicker)]
    assert [motion_reward([completion])[0], flicker_reward([completion])[0]] == expected


def test_the_rule_against_stills():
    barely = video((0, 0), (1, 1))  # 1/255 = 0.0039
    more = video((0, 0), (2, 2))
    assert MovingReward()(completions=[STILL, barely, more, SWAPPED, video((0, 0))]) == [0.0, 0.0, 1.0, 1.0, None]
    assert MovingReward(threshold=0.5)(completions=[DAWN, SWAPPED]) == [0.0, 1.0]
    with pytest.raises(InputError, match=r"threshold=0 must be above 0 and at most 1: use 0\.005"):
        MovingReward(threshold=0)


def test_by_name_in_the_runner():
    with RewardRunner(["motion", "flicker", "moving"]) as runner:
        runner.submit([{"prompt": ""}] * 2, [BLINKING, np.array(DAWN)])
        scored = runner.collect()
        assert runner.names == ["motion_reward", "flicker_reward", "MovingReward"]
    assert scored.rewards.numpy() == pytest.approx(np.array([[1.0, -2.0, 1.0], [0.2, 0.0, 1.0]]), abs=1e-12)


@pytest.mark.parametrize("reward", [motion_reward, flicker_reward, MovingReward()])
def test_what_is_no_video(reward):
    with pytest.raises(RewardError, match=r"completions\[1\]: expected a video .*, got an image of 4×6"):
        reward(completions=[STILL, Image.new("RGB", (6, 4))])

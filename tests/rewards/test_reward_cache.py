# SPDX-License-Identifier: Apache-2.0
"""Values of deterministic rewards are kept, and nothing else changes."""

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.media import Audio, Video
from omnitrl.rewards import RewardRunner, groupwise, reward_traits
from omnitrl.rewards.cache import digest
from tests.rewards.runner_helpers import NAN, rows, score


def picture(level):
    return Image.new("RGB", (2, 2), (level, 0, 0))


def red(calls, **traits):
    @reward_traits(deterministic=True, **traits)
    def red(prompts, completions, wanted, log_extra):
        calls.append(list(prompts))
        log_extra("level", [image.getpixel((0, 0))[0] for image in completions])
        return [abs(image.getpixel((0, 0))[0] - w) for image, w in zip(completions, wanted, strict=True)]

    return red


def test_equal_media_and_columns_are_asked_about_once():
    calls = []
    with RewardRunner(red(calls), cache_size=10) as runner:
        first = score(runner, "a", "b", completions=[picture(10), picture(20)], wanted=[0, 5])
        runner.submit(rows("b", "a", "a", wanted=[5, 0, 1]), [picture(20), picture(10), picture(10)])
        second = runner.collect()
    assert first.rewards[:, 0].tolist() == [10, 15]
    assert first.metrics["rewards/red/cached"] == 0
    assert second.rewards[:, 0].tolist() == [15, 10, 9]
    assert second.extras == {"level": [20, 10, 10]}
    assert second.metrics == {"rewards/red/cached": 2, "rewards/red/failed": 0}
    assert calls == [["a", "b"], ["a"]]


def test_the_sound_of_a_video_is_another_medium_than_the_video():
    films = [Video(np.full((2, 2, 2, 3), level, np.uint8), 8.0, Audio(np.ones((1, 4)), 4)) for level in (1, 2)]

    @reward_traits(media="audio", deterministic=True)
    def loud(completions):
        return [float(sound.samples.max()) for sound in completions]

    @reward_traits(media="video", deterministic=True)
    def bright(completions):
        return [float(film.frames.max()) for film in completions]

    with RewardRunner([loud, bright], cache_size=10) as runner:
        found = [score(runner, "a", completions=[film]) for film in films]
    assert [batch.rewards.tolist() for batch in found] == [[[1, 1]], [[1, 2]]]
    assert found[1].metrics["rewards/loud/cached"] == 1


def test_columns_that_the_reward_does_not_take_do_not_matter():
    calls = []
    with RewardRunner(red(calls), cache_size=10) as runner:
        score(runner, "a", completions=[picture(1)], wanted=[0], number=[1])
        score(runner, "a", completions=[picture(1)], wanted=[0], number=[2])
    assert calls == [["a"]]


def test_every_value_is_the_same_with_and_without():
    generator = np.random.default_rng(0)
    chunks = [[(str(p), picture(int(m)), int(w)) for p, m, w in generator.integers(0, 3, (4, 3))] for _ in range(20)]
    found = []
    for size in (0, 1, 5, 100):
        calls = []
        with RewardRunner(red(calls, batch_size=3), cache_size=size) as runner:
            for chunk in chunks:
                prompts, media, wanted = zip(*chunk, strict=True)
                runner.submit(rows(*prompts, wanted=wanted), media)
            batch = runner.collect()
        found.append((batch.rewards.tolist(), batch.extras, batch.failures))
    assert found[0] == found[1] == found[2] == found[3]


def test_what_was_not_asked_about_for_longest_is_forgotten():
    calls = []
    with RewardRunner(red(calls), cache_size=2) as runner:
        for level in (1, 2, 1, 3, 1, 2):
            score(runner, str(level), completions=[picture(level)], wanted=[0])
    assert calls == [["1"], ["2"], ["3"], ["2"]]


def test_failures_and_what_has_no_content_are_asked_about_again():
    calls = []

    @reward_traits(deterministic=True)
    def reward(prompts, completions):
        calls.append(prompts[0])
        return [NAN if prompts[0] == "nan" else None]

    with RewardRunner(reward, cache_size=10, max_failed_fraction=1) as runner:
        for prompt in ("nan", "nan", "none", "none"):
            score(runner, prompt, completions=[picture(1)])
        for _ in range(2):
            score(runner, "object", completions=[object()])
    assert calls == ["nan", "nan", "none", "object", "object"]


def test_rewards_that_do_not_say_so_and_groups_are_not_kept():
    calls = []

    def undeclared(prompts):
        calls.append("undeclared")
        return [1.0]

    @groupwise
    @reward_traits(deterministic=True)
    def compared(prompts):
        calls.append("compared")
        return [1.0]

    @reward_traits(deterministic=True)
    def measured(prompts, log_metric):
        log_metric("m", 1.0)  # of the whole call, which cannot be said again
        calls.append("measured")
        return [1.0]

    with RewardRunner([undeclared, compared, measured], cache_size=10) as runner:
        for _ in range(2):
            runner.submit(rows("a"), [picture(1)], groups=[0], group_size=1)
            batch = runner.collect()
            assert batch.metrics["m"] == 1.0
    assert sorted(calls) == ["compared"] * 2 + ["measured"] * 2 + ["undeclared"] * 2
    assert [name for name in batch.metrics if name.endswith("cached")] == ["rewards/measured/cached"]


PAIRS = [
    (picture(1), picture(2)),
    (picture(1), picture(1).convert("RGBA")),
    (np.zeros((2, 3)), np.zeros((3, 2))),
    (np.zeros(4, dtype=np.float32), np.zeros(2, dtype=np.float64)),
    (torch.zeros(4), torch.zeros(2, 2)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
    (Video(np.zeros((2, 2, 2, 3), np.uint8), 8.0), Video(np.zeros((2, 2, 2, 3), np.uint8), 16.0)),
    (Audio(np.zeros((1, 4), np.float32), 8), Audio(np.zeros((1, 4), np.float32), 16)),
    ("1", 1),
    (1, 1.0),
    (1, True),
    ("ab", b"ab"),
    (["a", "b"], ["ab"]),
    (["a", ["b"]], [["a"], "b"]),
    ({"a": 1}, {"a": 2}),
    (None, "None"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_different_content_has_different_hashes(one, other):
    assert digest(one) != digest(other)
    assert digest(one) == digest(one) is not None


def test_equal_content_has_equal_hashes():
    assert digest({"a": 1, "b": [picture(3)]}) == digest({"b": [picture(3)], "a": 1})
    array = np.arange(12).reshape(3, 4)
    assert digest(array.T) == digest(array.T.copy())
    assert digest(object()) is digest({"a": {1, 2}}) is digest(np.array([object()])) is None

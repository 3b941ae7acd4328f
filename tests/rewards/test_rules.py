# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.media import Video
from omnitrl.rewards import (
    AspectRatioReward,
    RewardError,
    RewardRunner,
    RewardTraits,
    SizeReward,
    TextLengthReward,
    latent_scale_reward,
)
from omnitrl.rewards.traits import traits_of
from tests.rewards.test_ocr import render


WIDE, TALL = Image.new("RGB", (64, 32)), np.zeros((64, 32, 3), np.uint8)
FILM = Video(np.zeros((2, 32, 48, 3), np.uint8), 8.0)


def test_the_size_that_a_row_asks_for():
    media = [WIDE, TALL, FILM, torch.zeros(3, 32, 64), WIDE]
    heights, widths = [32, 32, 32, 32, None], [64, 64, 48, None, None]
    assert SizeReward()(completions=media, height=heights, width=widths) == [1.0, 0.0, 1.0, 1.0, None]
    assert SizeReward(width=64)(completions=media, height=heights) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert SizeReward(height=64, width=64)(completions=[WIDE], height=[32], width=[None]) == [1.0]


def test_the_shape_that_a_row_asks_for():
    media = [WIDE, TALL, FILM, WIDE]
    assert AspectRatioReward(ratio=1.0)(completions=media) == [0.5, 0.5, pytest.approx(2 / 3), 0.5]
    asked = AspectRatioReward()(completions=media, height=[512, 1024, 512, 9], width=[1024, 1024, 1024, None])
    assert asked == [1.0, 0.5, 0.75, None]


def test_the_length_of_a_text():
    texts = ["", "four", "a red cat", "  1234567890  ", "x" * 40]
    assert TextLengthReward(target=10)(completions=texts) == pytest.approx([0.0, 0.4, 0.9, 1.0, 0.0])
    assert TextLengthReward(target=10, tolerance=5)(completions=texts) == pytest.approx([0.5, 0.9, 1.0, 1.0, 0.0])
    assert TextLengthReward(target=2, unit="words")(completions=texts) == pytest.approx([0.0, 0.5, 0.5, 0.5, 0.5])
    assert TextLengthReward(target=4)(completions=["four"] * 3, text_length=[8, None, 4]) == [0.5, 1.0, 1.0]
    assert TextLengthReward()(completions=["four"] * 2, text_length=[None, 2]) == [None, 0.0]


def test_the_length_of_a_chat_is_that_of_its_last_words():
    chat = [{"role": "user", "content": "How many legs?"}, {"role": "assistant", "content": "four"}]
    assert TextLengthReward(target=8)(completions=[chat, "eight"]) == [0.5, 0.625]


def test_the_length_of_the_text_in_a_picture():
    assert TextLengthReward(target=3)(completions=[render("CAT"), "CATS", Image.new("RGB", (64, 32), "white")]) == [
        1.0,
        pytest.approx(2 / 3),
        0.0,
    ]


def test_by_name_in_the_runner():
    rows = [{"prompt": "", "height": 32, "width": 64, "text_length": 4}]
    with RewardRunner(["size", "aspect_ratio"]) as runner:
        runner.submit(rows, [TALL])
        assert runner.collect().rewards.tolist() == [[0.0, 0.25]]
    with RewardRunner("text_length") as runner:
        runner.submit(rows, ["five!"])
        assert runner.collect().rewards.tolist() == [[0.75]]


def test_the_scale_of_latents():
    half, one, two = torch.tensor([[-0.5, 0.5]]), torch.tensor([1.0, 3.0]), torch.tensor([[0.0, 4.0]] * 3)
    assert latent_scale_reward(completions=[half, one, two, torch.ones(4)]) == [
        pytest.approx(-math.log(2)),
        0.0,
        pytest.approx(-math.log(2)),
        pytest.approx(math.log(1e-6)),
    ]
    assert latent_scale_reward([torch.tensor([-1e3, 1e3], dtype=torch.bfloat16)]) == [pytest.approx(-math.log(1000))]
    assert traits_of(latent_scale_reward) == RewardTraits(media=("latents",), deterministic=True)


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (WIDE, "expected latents, a floating point tensor, got Image"),
        (torch.ones(2, dtype=torch.int64), "int64 values"),
    ],
)
def test_what_are_no_latents(latents, message):
    with pytest.raises(RewardError, match=rf"completions\[0\]: .*{message}"):
        latent_scale_reward([latents])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SizeReward(height=0), "height=0 must be above 0: give for example 512"),
        (lambda: AspectRatioReward(ratio=-1.0), "ratio=-1.0 must be above 0"),
        (lambda: TextLengthReward(target=0), "target=0 must be above 0: give for example 40"),
        (lambda: TextLengthReward(tolerance=-1), "tolerance=-1 must be at least 0"),
        (lambda: TextLengthReward(unit="tokens"), "unit='tokens' must be 'characters' or 'words'"),
        (lambda: TextLengthReward()(["a"], text_length=[0]), r"text_length\[0\]=0 must be above 0"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()

# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from omnitrl.media import Video
from omnitrl.rewards import (
    RewardError,
    RewardRunner,
    brightness_reward,
    get_reward,
    jpeg_compressibility_reward,
    jpeg_incompressibility_reward,
    statistics,
    to_pil,
)


COLOUR_NAMES = ["contrast", "entropy", "saturation", "colourfulness", "sharpness"]
GOLDEN = Path(__file__).parents[1] / "golden" / "08b_reward_jpeg"


@pytest.fixture(scope="module")
def golden():
    case = json.loads((GOLDEN / "case.json").read_text())
    same_encoder = case["parameters"]["pillow"] == PIL.__version__
    return load_file(GOLDEN / "tensors.safetensors"), 1e-12 if same_encoder else 0.02


def as_png(golden):
    return [Image.open(GOLDEN / name) for name in ("smooth.png", "noise.png")]


def as_arrays(golden):
    return [image.numpy() for image in golden["images"]]


def as_float_tensors(golden):
    return [image.permute(2, 0, 1).float() / 255 for image in golden["images"]]


def as_uint8_tensors(golden):
    return [image.permute(2, 0, 1) for image in golden["images"]]


@pytest.mark.parametrize("form", [as_png, as_arrays, as_float_tensors, as_uint8_tensors])
def test_golden_08b_jpeg(golden, form):
    tensors, tolerance = golden
    images = form(tensors)
    size = jpeg_incompressibility_reward(completions=images)
    small = jpeg_compressibility_reward(completions=images)
    assert size == pytest.approx(tensors["flow_grpo_incompressibility"].tolist(), rel=tolerance)
    assert small == pytest.approx(tensors["flow_grpo_compressibility"].tolist(), rel=tolerance)
    assert small == pytest.approx(tensors["verl_compressibility"].tolist(), rel=tolerance)
    assert small == pytest.approx(tensors["flow_grpo_compressibility_float_tensor"].tolist(), rel=tolerance)
    assert size[0] < size[1]


def test_brightness_is_the_mean_luma():
    colours = ["black", "white", (255, 0, 0), (0, 255, 0), (0, 0, 255)]
    scores = brightness_reward(completions=[Image.new("RGB", (8, 4), colour) for colour in colours], prompts=["x"] * 5)
    assert scores == pytest.approx([0, 1, 0.299, 0.587, 0.114], abs=0.5 / 255)
    half = np.zeros((4, 8, 3), np.uint8)
    half[:2] = 255
    assert brightness_reward([half]) == [0.5]


@pytest.mark.parametrize(
    ("name", "unit"),
    [("contrast", 1), ("entropy", 8), ("saturation", 1), ("colourfulness", 100), ("sharpness", 1000)],
)
def test_rewards_of_pixels_are_statistics_in_a_unit(name, unit):
    images = [Image.effect_noise((16, 12), 40).convert("RGB"), Image.new("RGB", (16, 12), (200, 100, 50))]
    scores = get_reward(name)(completions=images, prompts=["", ""])
    assert scores == pytest.approx([getattr(statistics, name)(image) / unit for image in images], rel=1e-12)


def test_values_of_one_picture_by_hand():
    red_and_grey = np.array([[[255, 0, 0], [128, 128, 128]]] * 2, dtype=np.uint8)  # luma 76 and 128
    values = {name: get_reward(name)(completions=[red_and_grey])[0] for name in COLOUR_NAMES}
    assert values == {
        "contrast": pytest.approx(26 / 255),
        "entropy": 0.125,
        "saturation": 0.5,
        # the halves are 255, 127.5 and 0, 0 in the opponent colours: deviation and mean are both half of that
        "colourfulness": pytest.approx(1.3 * np.hypot(127.5, 63.75) / 100),
        "sharpness": pytest.approx((2 * 52) ** 2 / 1000),  # each pixel sees the other column on both sides
    }


@pytest.mark.parametrize("name", [*COLOUR_NAMES, "brightness", "jpeg_compressibility", "jpeg_incompressibility"])
def test_the_runner_says_which_reward_does_not_take_videos_and_what_does(name):
    def score(video):
        with RewardRunner(name) as runner:
            runner.submit([{"prompt": ""}], [video])
            return runner.collect()

    with pytest.raises(RewardError, match=rf"{name}_reward.*framewise\(reward\)"):
        score(Video(np.zeros((2, 4, 4, 3), np.uint8), 8.0))


def test_to_pil_gives_the_same_pixels_for_every_form():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    chw = torch.from_numpy(pixels).permute(2, 0, 1)
    forms = [
        Image.fromarray(pixels),
        pixels,
        pixels.astype(np.float64) / 255,
        chw,
        chw.float() / 255,
        chw.double().requires_grad_() / 255,
        Image.fromarray(pixels).convert("RGBA"),
        pixels[:, ::-1][:, ::-1],
    ]
    for form in forms:
        image = to_pil(form)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), pixels)


def test_to_pil_reads_grey_images_and_clamps_overshoot():
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for form in (grey, grey[..., None], torch.from_numpy(grey)[None], Image.fromarray(grey)):
        assert np.array_equal(np.asarray(to_pil(form)), np.repeat(grey[..., None], 3, axis=-1))
    assert np.asarray(to_pil(torch.tensor([[-0.02, 0.5, 1.1]])))[0, :, 0].tolist() == [0, 128, 255]
    assert np.asarray(to_pil(torch.tensor([[0.25]], dtype=torch.bfloat16)))[0, 0].tolist() == [64, 64, 64]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.full((3, 4, 4), -1.0), r"range \[-1, -1\].*image / 2 \+ 0.5"),
        (torch.full((3, 4, 4), 255.0), r"range \[255, 255\]"),
        (np.zeros((5, 4, 4, 3), np.uint8), r"video or batch of shape \(5, 4, 4, 3\)"),
        (np.zeros((3, 8, 8), np.uint8), r"ndarray of shape \(3, 8, 8\)"),
        (torch.zeros(8, 8, 3), r"Tensor of shape \(8, 8, 3\)"),
        (np.zeros((4, 4, 3), np.int64), "got int64"),
        ("cat.png", "got str"),
    ],
)
def test_to_pil_says_what_is_wrong(image, message):
    with pytest.raises(RewardError, match=message):
        to_pil(image)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_image_that_is_not_finite_is_never_scored(value):
    image = torch.zeros(3, 4, 4)
    image[0, 1, 2] = value
    with pytest.raises(ValueError, match=r"completions\[1\]: the image has NaN or infinite pixels"):
        brightness_reward([torch.zeros(3, 4, 4), image])

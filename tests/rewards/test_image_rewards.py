# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from omnitrl.rewards import (
    RewardError,
    brightness_reward,
    jpeg_compressibility_reward,
    jpeg_incompressibility_reward,
    to_pil,
)


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
    assert size[0] < size[1]


def test_brightness_is_the_mean_luma():
    colours = ["black", "white", (255, 0, 0), (0, 255, 0), (0, 0, 255)]
    scores = brightness_reward(completions=[Image.new("RGB", (8, 4), colour) for colour in colours], prompts=["x"] * 5)
    assert scores == pytest.approx([0, 1, 0.299, 0.587, 0.114], abs=0.5 / 255)
    half = np.zeros((4, 8, 3), np.uint8)
    half[:2] = 255
    assert brightness_reward([half]) == [0.5]


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
    with pytest.raises(ValueError, match="NaN or infinite"):
        brightness_reward([image])

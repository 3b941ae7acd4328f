# SPDX-License-Identifier: Apache-2.0
"""The differentiable forms of built-in rewards have the values of the others, and gradients that lead upwards."""

import numpy as np
import pytest
import torch

from omnitrl.rewards import DifferentiableRewards, get_reward


NAMES = ["brightness", "contrast", "saturation", "colourfulness", "sharpness"]
# What the rounding of luma to 8 bit may change: half a level in each pixel. For sharpness, whose noise of 20 / 12 is
# small beside the value, relatively.
TOLERANCE = {"brightness": 0.5 / 255, "contrast": 0.5 / 255, "saturation": 1e-6, "colourfulness": 1e-6}


def images(grey=False):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (3, 12, 16, 1 if grey else 3), dtype=np.uint8)
    pixels[1] //= 4  # dark
    pixels[2, :, :8] = (200, 100, 50)[:1] if grey else (200, 100, 50)
    return np.broadcast_to(pixels, (3, 12, 16, 3))


def tensor_of(pixels):
    return torch.from_numpy(np.array(pixels)).movedim(-1, 1).float() / 255


def values(name, pixels):
    return DifferentiableRewards(name)([""] * len(pixels), pixels, [{"prompt": ""}] * len(pixels))[:, 0]


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_pictures(name):
    pixels = images()
    expected = get_reward(name)(completions=list(pixels))
    tolerance = {"abs": TOLERANCE[name]} if name in TOLERANCE else {"rel": 0.01}
    assert values(name, tensor_of(pixels)).tolist() == pytest.approx(expected, **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_values_of_greys_are_exact(name):
    pixels = images(grey=True)
    expected = get_reward(name)(completions=list(pixels))
    assert values(name, tensor_of(pixels)).tolist() == pytest.approx(expected, rel=1e-5, abs=5e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_differences(name):
    form = get_reward(name).differentiable
    pixels = (tensor_of(images()).double() * 0.9 + 0.05).requires_grad_()
    (gradient,) = torch.autograd.grad(form(completions=pixels).sum(), pixels)
    for seed in range(3):
        step = 1e-6 * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            change = form(completions=pixels + step) - form(completions=pixels - step)
        assert float(change.sum()) == pytest.approx(float(2 * (gradient * step).sum()), rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_flat_pictures_have_a_finite_gradient(name, level):
    leaf = torch.full((1, 3, 8, 8), level, requires_grad=True)
    value = values(name, leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert bool(gradient.isfinite().all())
    assert float(value.detach()) == pytest.approx(level if name == "brightness" else 0.0, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_takes_them_by_name(name):
    DifferentiableRewards(name).probe(tensor_of(images()), [{"prompt": ""}] * 3)

# SPDX-License-Identifier: Apache-2.0
"""Statistics of an image, computed by hand."""

import io
import math

import cv2
import numpy as np
import pytest
from PIL import Image

from omnitrl.rewards import RewardError, statistics


RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def picture(*rows):
    """An image of rows of colours or greys."""
    pixels = np.array(rows, dtype=np.uint8)
    return Image.fromarray(pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=-1))


def impulse(height, width, y, x):
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[y, x] = 255
    return picture(*pixels)


@pytest.mark.parametrize(
    ("statistic", "image", "expected"),
    [
        (statistics.brightness, picture([255, 0]), 0.5),
        (statistics.brightness, picture([RED]), 76 / 255),  # 76.245, rounded
        (statistics.contrast, picture([90, 90]), 0.0),
        (statistics.contrast, picture([255, 0]), 0.5),
        (statistics.contrast, picture([0, 51, 102, 153]), math.sqrt(5) / 10),  # 0, 0.2, 0.4 and 0.6
        (statistics.entropy, picture([7, 7, 7, 7]), 0.0),
        (statistics.entropy, picture([0, 255], [255, 0]), 1.0),
        (statistics.entropy, picture([1, 2, 3, 4]), 2.0),
        (statistics.entropy, picture([9, 9, 9, 8]), 0.8112781244591328),
        (statistics.entropy, picture(*np.arange(256).reshape(16, 16)), 8.0),
        (statistics.saturation, picture([RED, WHITE, BLACK, (200, 100, 50)]), (1 + 0 + 0 + 0.75) / 4),
        (statistics.saturation, picture([130, 7]), 0.0),
        (statistics.colourfulness, picture([0, 77, 255]), 0.0),
        (statistics.colourfulness, picture([RED]), 0.3 * math.sqrt(255**2 + 127.5**2)),
        (statistics.colourfulness, picture([RED, GREEN], [BLUE, WHITE]), math.sqrt(32512.5 + 24384.375)),
        (statistics.colourfulness, picture([RED, GREEN]), 255 + 0.3 * 127.5),
        (statistics.sharpness, picture([90, 90], [90, 90]), 0.0),
        (statistics.sharpness, impulse(5, 5, 2, 2), (4**2 + 4) * 255**2 / 25),
        (
            statistics.sharpness,
            impulse(3, 3, 0, 1),
            (25 / 9 - 1 / 81) * 255**2,
        ),  # its neighbours on the border see it twice
        (statistics.sharpness, picture([0, 255], [255, 0]), 1020**2),
    ],
)
def test_values_by_hand(statistic, image, expected):
    assert statistic(image) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_sharpness_is_that_of_opencv():
    grey = np.random.default_rng(0).integers(0, 256, (13, 9), dtype=np.uint8)
    assert statistics.sharpness(grey) == pytest.approx(cv2.Laplacian(grey, cv2.CV_64F).var(), rel=1e-12)


def test_sharpness_and_entropy_fall_when_a_picture_is_blurred():
    rows = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
    blurred = cv2.GaussianBlur(rows, (0, 0), 2)
    assert statistics.sharpness(blurred) < statistics.sharpness(rows) / 100
    assert statistics.entropy(blurred) < statistics.entropy(rows)


def test_the_kilobytes_are_those_of_the_file():
    image = Image.effect_noise((64, 48), 50).convert("RGB")
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95)
    assert statistics.jpeg_kilobytes(image) == len(file.getvalue()) / 1000


def test_a_line_of_pixels_has_no_sharpness():
    with pytest.raises(RewardError, match="at least 2×2 pixels, got 1×3"):
        statistics.sharpness(picture([1, 2, 3]))

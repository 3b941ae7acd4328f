# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.report import before_after, image_grid, timeline
from omnitrl.report.grid import GAP, MARGIN, _wrap


def solid(color, size=(64, 32)):
    return Image.new("RGB", size, color)


def box_of(picture, color):
    """(left, top, right, bottom) of the pixels of one colour, right and bottom exclusive."""
    mask = np.all(np.asarray(picture) == np.array(color), axis=-1)
    rows, columns = np.nonzero(mask.any(axis=1))[0], np.nonzero(mask.any(axis=0))[0]
    assert mask.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)  # one full rectangle
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1


RED, GREEN, BLUE, GOLD = (255, 0, 0), (0, 255, 0), (0, 0, 255), (250, 200, 10)


def test_tiles_lie_row_by_row_and_small_ones_are_doubled():
    grid = image_grid([solid(RED), solid(GREEN), solid(BLUE)], columns=2)
    assert box_of(grid, RED) == (MARGIN, MARGIN, MARGIN + 128, MARGIN + 64)
    assert box_of(grid, GREEN) == (MARGIN + 128 + GAP, MARGIN, MARGIN + 256 + GAP, MARGIN + 64)
    assert box_of(grid, BLUE) == (MARGIN, MARGIN + 64 + GAP, MARGIN + 128, MARGIN + 128 + GAP)
    assert grid.size == (2 * MARGIN + 256 + GAP, 2 * MARGIN + 128 + GAP)
    assert grid.getpixel((0, 0)) == (255, 255, 255)


def test_enlarging_keeps_pixels_sharp():
    tile = Image.new("RGB", (2, 1))
    tile.putpixel((0, 0), RED)
    tile.putpixel((1, 0), BLUE)
    grid = image_grid([tile])  # 64 times
    assert box_of(grid, RED) == (MARGIN, MARGIN, MARGIN + 64, MARGIN + 64)
    assert box_of(grid, BLUE) == (MARGIN + 64, MARGIN, MARGIN + 128, MARGIN + 64)


@pytest.mark.parametrize(
    ("size", "scale", "shown"),
    [
        ((48, 48), None, (144, 144)),  # the whole factor that reaches 128
        ((128, 96), None, (128, 96)),
        ((256, 256), None, (256, 256)),
        ((1024, 512), None, (256, 128)),
        ((512, 1024), None, (128, 256)),
        ((64, 32), 3, (192, 96)),
        ((300, 300), 1, (300, 300)),
    ],
)
def test_size_of_a_tile(size, scale, shown):
    left, top, right, bottom = box_of(image_grid([solid(RED, size)], scale=scale), RED)
    assert (right - left, bottom - top) == shown


def test_captions_are_dark_on_white_under_their_tile():
    plain, captioned = (image_grid([solid(RED), solid(RED)], captions=c) for c in (None, ["", "WORD\n0.50"]))
    assert captioned.height > plain.height
    below = np.asarray(captioned.convert("L"))[MARGIN + 66 :]
    assert below[:, : MARGIN + 128].min() == 255  # the empty caption
    assert below[:, MARGIN + 128 + GAP :].min() < 120


def test_a_title_moves_the_tiles_down():
    grid = image_grid([solid(RED)], title="step 3")
    assert box_of(grid, RED)[1] > MARGIN
    assert np.asarray(grid.convert("L"))[: box_of(grid, RED)[1] - GAP].min() < 80


def test_transparent_pictures_lie_on_white_and_grey_ones_become_rgb():
    clear = Image.new("RGBA", (200, 200), (255, 0, 0, 0))
    grid = image_grid([clear, Image.new("L", (200, 200), 40)])
    assert grid.mode == "RGB"
    assert grid.getpixel((MARGIN + 100, MARGIN + 100)) == (255, 255, 255)
    assert grid.getpixel((MARGIN + 200 + GAP + 100, MARGIN + 100)) == (40, 40, 40)


def test_pictures_that_are_given_stay_as_they_are():
    image = solid(RED, (1024, 512))
    image_grid([image, None])
    assert image.size == (1024, 512)


def test_a_missing_picture_is_an_empty_tile():
    grid = image_grid([None, solid(RED)])
    assert grid.getpixel((MARGIN + 2, MARGIN + 2)) == (239, 242, 245)
    assert box_of(grid, RED)[0] == MARGIN + 128 + GAP


def test_before_lies_above_after():
    picture = before_after(
        [solid(RED), solid(GREEN)], [solid(BLUE), solid(GOLD)], ["a", "b"], "before 0.5", "after 0.9"
    )
    red, green, blue, gold = (box_of(picture, color) for color in (RED, GREEN, BLUE, GOLD))
    assert red[0] == blue[0] < green[0] == gold[0]
    assert red[1] == green[1] < blue[1] == gold[1]
    assert blue[1] > red[3] + 40  # captions and a heading between them


def test_captions_may_differ_after():
    same = before_after([solid(RED)], [solid(RED)], ["0.50"])
    other = before_after([solid(RED)], [solid(RED)], ["0.50"], after_captions=["0.99"])
    half = same.height // 2
    difference = np.abs(np.asarray(same, dtype=int) - np.asarray(other, dtype=int)).sum(axis=(1, 2))
    assert difference[:half].sum() == 0
    assert difference[half:].sum() > 0


def test_timeline_has_a_row_for_each_evaluation():
    picture = timeline(
        [("step 0", [solid(RED), solid(GREEN)]), ("step 20", [solid(BLUE), solid(GOLD)])], ["CAT", "DOG"]
    )
    red, green, blue, gold = (box_of(picture, color) for color in (RED, GREEN, BLUE, GOLD))
    assert green == (red[0] + 128 + GAP, red[1], red[2] + 128 + GAP, red[3])
    assert blue == (red[0], red[1] + 64 + GAP, red[2], red[3] + 64 + GAP)
    assert gold[:2] == (green[0], blue[1])
    assert red[0] > MARGIN + 40  # room for the labels


def test_a_long_caption_is_cut_and_keeps_its_reward():
    lines = _wrap("an astronaut riding a horse on the far side of the moon at night\n0.71", 128)
    assert len(lines) == 3
    assert lines[0].startswith("an astronaut")
    assert lines[1].endswith("…")
    assert lines[2] == "0.71"
    assert _wrap("CAT", 128) == ["CAT"]
    assert _wrap("W" * 80, 128)[0].endswith("W…")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: image_grid([]), "images is empty"),
        (lambda: image_grid([solid(RED)], ["a", "b"]), "2 captions for 1 pictures"),
        (lambda: image_grid([solid(RED)], columns=0), "columns=0"),
        (lambda: image_grid([solid(RED)], scale=0), "scale=0"),
        (lambda: before_after([solid(RED)], [], ["a"]), "before has 1 pictures and after has 0"),
        (lambda: timeline([]), "rows is empty"),
        (lambda: timeline([("a", [None]), ("b", [None, None])]), "Row 'b' has 2 pictures and row 'a' has 1"),
        (lambda: timeline([("a", [None])], ["x", "y"]), "2 captions for row 'a' for 1 pictures"),
    ],
)
def test_wrong_lengths_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()

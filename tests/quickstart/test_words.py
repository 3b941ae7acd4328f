# SPDX-License-Identifier: Apache-2.0
import random
import subprocess
import sys

import numpy as np
import pytest

from omnitrl.quickstart import GLYPHS, rows, words


def test_splits_have_their_sizes_and_share_no_word():
    sizes = {split: len(listed) for split, listed in words.WORDS.items()}
    assert sizes == {"train": 73, "heldout": 32, "unseen": 32}
    everything = [word for listed in words.WORDS.values() for word in listed]
    assert len(set(everything)) == 137
    assert all(len(word) == 3 and word.isascii() and word.isalpha() and word.isupper() for word in everything)


def test_rows_are_prompts_in_the_order_of_the_list():
    assert rows("heldout")[:2] == [{"prompt": "CAT"}, {"prompt": "DOG"}]
    assert [row["prompt"] for row in rows("unseen")] == list(words.WORDS["unseen"])


def test_unknown_split_is_named():
    with pytest.raises(ValueError, match=r"split='test' is not one of 'train', 'heldout', 'unseen': use 'train'"):
        rows("test")


def test_plain_word_is_black_on_white_and_centred():
    image = words.render_word("HOH")
    pixels = np.asarray(image)
    assert image.size == (64, 32)
    assert image.mode == "RGB"
    assert pixels.min() == 0
    assert (pixels[0] == 255).all()  # the first row is background
    assert 0.15 < (pixels < 128).mean() < 0.5
    ink = (pixels < 128).any(axis=(0, 2)).nonzero()[0]
    assert abs(ink[0] - (63 - ink[-1])) <= 2  # H is symmetric: as much room on the left as on the right


def test_words_differ_and_the_plain_picture_does_not_change():
    assert words.render_word("CAT").tobytes() == words.render_word("CAT").tobytes()
    assert words.render_word("CAT").tobytes() != words.render_word("CAR").tobytes()


def test_rng_draws_both_polarities_within_the_colour_ranges():
    rng = random.Random(0)
    corners = [np.asarray(words.render_word("CAT", rng))[0, 0] for _ in range(40)]
    dark, light = [c for c in corners if c.max() <= 70], [c for c in corners if c.min() >= 185]
    assert len(dark) + len(light) == 40
    assert len(dark) >= 10
    assert len(light) >= 10


def test_jitter_moves_the_word():
    def left_edges(jitter):
        images = [np.asarray(words.render_word("HHH", random.Random(seed), jitter), np.int64) for seed in range(12)]
        return {int((abs(i - i[0, 0]).sum(axis=2) > 200).any(axis=0).nonzero()[0][0]) for i in images}

    assert len(left_edges(0)) == 1
    assert len(left_edges(1)) == 3


def test_import_is_light():
    code = (
        "import sys, omnitrl.quickstart;"
        "print([name for name in ('torch', 'diffusers', 'matplotlib', 'PIL', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert GLYPHS.endswith("glyphs")

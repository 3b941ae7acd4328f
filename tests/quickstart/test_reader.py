# SPDX-License-Identifier: Apache-2.0
import random

import numpy as np
import pytest
import torch

from omnitrl.quickstart import words
from omnitrl.quickstart.reader import _POOL, GlyphReader, _draw, targets_of, train_reader


def pixels_of(texts, seed=5):
    rng = random.Random(seed)
    images = [np.asarray(words.render_word(text, rng)) for text in texts]
    return torch.from_numpy(np.stack(images)).movedim(-1, 1).float() / 255


@pytest.fixture(scope="module")
def reader():
    return train_reader(seed=0, steps=150)


@pytest.mark.slow
def test_it_reads_words_that_it_has_not_seen(reader):
    texts = [*words.WORDS["heldout"], *words.WORDS["unseen"]]
    found = reader.log_probs(pixels_of(texts)).argmax(dim=2)
    assert (found == targets_of(texts)).float().mean() > 0.95


def test_no_word_of_the_other_splits_is_drawn_for_training():
    rng = random.Random(0)
    drawn = {_draw(rng) for _ in range(4 * _POOL)}
    assert not drawn & {*words.WORDS["heldout"], *words.WORDS["unseen"]}
    assert drawn & set(words.WORDS["train"])


@pytest.mark.slow
def test_the_reward_is_the_mean_probability_of_the_letters_of_the_last_word(reader):
    pixels = pixels_of(["CAT", "DOG"])
    log_probs = reader.log_probs(pixels).double().exp()
    first = (log_probs[0, 0, 2] + log_probs[0, 1, 0] + log_probs[0, 2, 19]) / 3
    second = (log_probs[1, 0, 3] + log_probs[1, 1, 14] + log_probs[1, 2, 6]) / 3
    for prompts in (["CAT", "DOG"], ["Realistic photo. CAT", "bad. dog"]):
        assert reader(prompts, pixels).tolist() == pytest.approx([first.item(), second.item()], abs=1e-6)
    assert reader(["CAT", "CAT"], pixels)[0] > 0.8
    assert reader(["CAT", "CAT"], pixels)[1] < 0.4


@pytest.mark.slow
def test_dark_and_light_read_alike(reader):
    pixels = pixels_of(words.WORDS["heldout"])
    texts = list(words.WORDS["heldout"])
    assert abs(reader(texts, pixels) - reader(texts, 1 - pixels)).mean() < 0.15


@pytest.mark.slow
def test_its_gradient_makes_a_picture_more_legible(reader):
    pixels = pixels_of(["CAT"]).lerp(pixels_of(["DOG"]), 0.5).requires_grad_()
    before = reader(["CAT"], pixels)
    (gradient,) = torch.autograd.grad(before.sum(), pixels)
    after = reader(["CAT"], (pixels + 0.5 * gradient / gradient.norm()).clamp(0, 1))
    assert after > before + 0.01


def test_the_same_seed_gives_the_same_reader_and_leaves_the_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = train_reader(seed=1, steps=2), train_reader(seed=1, steps=2)
    assert torch.equal(torch.rand(2), expected)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert not any(p.requires_grad for p in first.parameters())


def test_a_blank_picture_has_a_finite_gradient():
    pixels = torch.full((1, 3, 32, 64), 0.5, requires_grad=True)
    (gradient,) = torch.autograd.grad(GlyphReader()(["CAT"], pixels).sum(), pixels)
    assert gradient.isfinite().all()

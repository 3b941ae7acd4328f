# SPDX-License-Identifier: Apache-2.0
"""A small network that reads the words of the quickstart, as a differentiable reward for them."""

from __future__ import annotations

import functools
import random
import string
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnitrl.quickstart.words import HEIGHT, WIDTH, WORDS, render_word


LETTERS = string.ascii_uppercase
_POOL = 2048  # pictures that training draws from
_HIDDEN = frozenset(WORDS["unseen"]) | frozenset(WORDS["heldout"])


class GlyphReader(nn.Module):
    """
    Reads three-letter words off pictures of 64 × 32 pixels; about 94,000 weights.

    As a reward it is the mean probability of the letters of the prompt's last word, between 0 and 1. The last word,
    so that prompts with a control word before them, as [`SRPOTrainer`] makes them, ask for the same picture.

    Example:

    ```python
    >>> reader = train_reader(seed=0)
    >>> trainer = SRPOTrainer(GLYPHS, reader, args, train_dataset=rows("train"))
    ```
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
            nn.SiLU(),
        )
        self.letters = nn.Linear(2 * width * (HEIGHT // 8) * (WIDTH // 8), 3 * len(LETTERS))

    def log_probs(self, pixels: Tensor) -> Tensor:
        """
        Log-probs (B, 3, 26) of the letters at the three places.

        Args:
            pixels (`Tensor`):
                (B, 3, 32, 64) in [0, 1], dark on light or light on dark.
        """
        grey = pixels.float().mean(dim=1, keepdim=True)
        grey = grey - grey.mean(dim=(2, 3), keepdim=True)
        grey = grey / (grey.square().mean(dim=(2, 3), keepdim=True) + 1e-3).sqrt()
        return self.letters(self.features(grey).flatten(1)).unflatten(1, (3, len(LETTERS))).log_softmax(dim=-1)

    def forward(self, prompts: list[str], completions: Tensor, **kwargs: Any) -> Tensor:
        """The reward (B,), see [`omnitrl.rewards.differentiable`]."""
        targets = targets_of(prompts).to(completions.device)
        return self.log_probs(completions).gather(2, targets[..., None]).exp().mean(dim=(1, 2))


def targets_of(prompts: list[str]) -> Tensor:
    """Numbers (B, 3) of the letters of each prompt's last word."""
    return torch.tensor([[LETTERS.index(letter) for letter in prompt.split()[-1].upper()] for prompt in prompts])


def train_reader(seed: int = 0, steps: int = 400, batch_size: int = 64, width: int = 16) -> GlyphReader:
    """
    Trains a [`GlyphReader`] on drawn words, some of them blurred, blended or noisy.

    It sees random letters and never a word of the splits `"heldout"` and `"unseen"`.

    Args:
        seed (`int`, defaults to 0):
            Decides everything that is drawn.
        steps (`int`, defaults to 400):
            Optimizer steps.

    Returns:
        [`GlyphReader`], frozen.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reader, rng = GlyphReader(width), random.Random(seed)
        words = [_draw(rng) for _ in range(_POOL)]
        pictures = np.stack([np.asarray(render_word(word, rng, jitter=2)) for word in words])
        pixels, targets = torch.from_numpy(pictures).movedim(-1, 1).float() / 255, targets_of(words)
        optimizer = torch.optim.AdamW(reader.parameters(), lr=3e-3, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
        for _ in range(steps):
            first, second = torch.randint(_POOL, (2, batch_size))
            share = 0.4 * torch.rand(batch_size)
            log_probs = reader.log_probs(_worn(pixels[first], pixels[second], share))
            own, other = (log_probs.gather(2, targets[chosen][..., None])[..., 0] for chosen in (first, second))
            loss = -torch.lerp(own, other, share[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return reader.requires_grad_(False).eval()


def reader_reward(prompts: list[str], completions: Tensor, **kwargs: Any) -> Tensor:
    """The reward of a reader that is trained at the first call; for command lines, `omnitrl.quickstart.reader:…`."""
    return _reader().to(completions.device)(prompts, completions)


@functools.cache
def _reader() -> GlyphReader:
    return train_reader()


def _draw(rng: random.Random) -> str:
    word = "".join(rng.choice(LETTERS) for _ in range(3))
    return _draw(rng) if word in _HIDDEN else word


def _worn(pixels: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Pictures with a share of others in them, blurred by chance, with noise: what a generator makes of words."""
    share = share[:, None, None, None]
    mixed = (1 - share) * pixels + share * others
    blurred = nn.functional.avg_pool2d(mixed, 3, stride=1, padding=1, count_include_pad=False)
    mixed = torch.lerp(mixed, blurred, torch.rand_like(share))
    return mixed + 0.3 * torch.rand_like(share) * torch.randn_like(mixed)

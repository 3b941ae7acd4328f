# SPDX-License-Identifier: Apache-2.0
"""
Direct-Align and Semantic Relative Preference, the two parts of [SRPO](https://huggingface.co/papers/2509.06942).

A clean sample is mixed with *known* noise, the network takes one short step with gradient, and the noise is taken out
again in closed form. The result is sharp at any noise level, so that a differentiable reward can be asked about it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from omnitrl.algorithms._tensors import at_least_float32, check_same_shape
from omnitrl.algorithms.matching import broadcast_sigma


# The recovery multiplies the error of the network by 1 / (1 - sigma).
_MAX_SIGMA_TO = 0.99

ALIGN_BRANCHES: dict[str, tuple[float, float]] = {"denoise": (0.1, 0.25), "inversion": (0.3, 0.01)}
"""The branches, and the strength of the relative preference at the cleanest and at the noisiest drawn level."""


class AlignLevels(NamedTuple):
    """
    The two noise levels of one Direct-Align step.

    Attributes:
        sigma_from (`float`):
            Where noise is mixed in and the network is called.
        sigma_to (`float`):
            Where its step ends and the noise is taken out. Below `sigma_from` in the branch `"denoise"`, above it in
            `"inversion"`.
        position (`float`):
            Place of the drawn level in its range, from just above 0 (cleanest) to just below 1 (noisiest), for
            [`preference_strength`].
    """

    sigma_from: float
    sigma_to: float
    position: float


def _check_branch(branch: str) -> None:
    if branch not in ALIGN_BRANCHES:
        raise ValueError(f"branch={branch!r} is not known: use one of {', '.join(map(repr, ALIGN_BRANCHES))}.")


def direct_align_levels(
    sigmas: Tensor,
    index: int,
    branch: str = "denoise",
    step_range: tuple[int, int] = (5, 25),
    gap: int = 100,
    num_points: int = 1000,
) -> AlignLevels:
    """
    Choose the levels of one Direct-Align step from a fine, even grid between two levels of a sampler.

    Both branches recover the sample at (about) the level of `index`: `"denoise"` comes there from the noisier side,
    `"inversion"` from the cleaner one. The step is `gap` points long, less near the ends of the range.

    Args:
        sigmas (`Tensor` of shape `(T + 1,)`):
            Noise levels of a sampler, decreasing. 50 steps with shift 3 in the paper's recipe for FLUX.1-dev.
        index (`int`):
            The drawn point, `1..num_points - 1`, counted from the clean end. Draw it alike on all ranks or not, as
            the caller wants.
        branch (`str`, defaults to `"denoise"`):
            A key of `ALIGN_BRANCHES`.
        step_range (`tuple[int, int]`, defaults to `(5, 25)`):
            The sampler's steps between whose levels the grid lies, the noisier one first.
        gap (`int`, defaults to 100):
            Length of the step in points, at least 1. The `groundtruth_ratio` of 0.9 in the authors' code comes to 100
            points of 1000, for 0.1 * 1000 is rounded down to 99 there before 1 is added.
        num_points (`int`, defaults to 1000):
            Points of the grid, at least 2.

    Returns:
        [`AlignLevels`].

    Raises:
        `ValueError`: An unknown branch, a range outside the sampler, a gap below 1, or an index off the grid.

    Example:

    ```python
    >>> sigmas = torch.linspace(1, 0, 51)
    >>> levels = direct_align_levels(sigmas, 400)
    >>> round(levels.sigma_from, 4), round(levels.sigma_to, 4)
    (0.6998, 0.6598)
    ```
    """
    _check_branch(branch)
    noisy_step, clean_step = step_range
    if not 0 <= noisy_step < clean_step < sigmas.shape[0]:
        raise ValueError(
            f"step_range={tuple(step_range)} must be two rising steps of the {sigmas.shape[0] - 1} of the sampler: "
            f"use (0, {sigmas.shape[0] // 2})."
        )
    if gap < 1:
        raise ValueError(f"gap={gap} points is no step: use 100.")
    if not 1 <= index < num_points:
        raise ValueError(f"index={index} is not a point 1..{num_points - 1} of the grid: use {num_points // 2}.")
    # The authors' grid is float32, and its points are the levels that the network is told.
    points = torch.linspace(float(sigmas[noisy_step]), float(sigmas[clean_step]), num_points)
    gap = min(gap, index, num_points - index)
    clean = index if branch == "denoise" else max(index - gap, 1)
    cleaner, noisier = points[num_points - clean].item(), points[num_points - min(clean + gap, num_points)].item()
    sigma_from, sigma_to = (noisier, cleaner) if branch == "denoise" else (cleaner, noisier)
    return AlignLevels(sigma_from, sigma_to, index / (num_points - 1))


def direct_align_recover(
    latents: Tensor, velocity: Tensor, noise: Tensor, sigma_from: Tensor | float, sigma_to: Tensor | float
) -> Tensor:
    r"""
    Step from one level to the other and take the known noise out:
    \\( \hat x_0 = (x + (t' - t) v - t' \epsilon) / (1 - t') \\).

    With the exact velocity \\( \epsilon - x_0 \\) the clean latents come back exactly, from either side. An error
    \\( \delta v \\) comes back as \\( \frac{t' - t}{1 - t'} \delta v \\): with a minus sign when the step goes down,
    a plus sign when it goes up. That is why the inversion branch swaps the good and the bad prompt.

    Args:
        latents (`Tensor` of shape `(B, ...)`):
            [`noised`] latents at `sigma_from`.
        velocity (`Tensor` of shape `(B, ...)`):
            Velocity of the policy there, with gradient.
        noise (`Tensor` of shape `(B, ...)`):
            The noise that was mixed in.
        sigma_from (`Tensor` of shape `(B,)`, `(B, 1, ..., 1)` or of one element, or `float`):
            Level \\( t \\) of `latents`.
        sigma_to (`Tensor` of shape `(B,)`, `(B, 1, ..., 1)` or of one element, or `float`):
            Level \\( t' \\) of the recovery, at most 0.99.

    Returns:
        `Tensor` of shape `(B, ...)`: predicted clean latents, float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ, a level outside 0..1, or `sigma_to` above 0.99.

    Example:

    ```python
    >>> clean, noise = torch.full((1, 2), 0.5), torch.ones(1, 2)
    >>> latents = 0.5 * clean + 0.5 * noise
    >>> direct_align_recover(latents, noise - clean, noise, sigma_from=0.5, sigma_to=0.25)
    tensor([[0.5000, 0.5000]])
    ```
    """
    check_same_shape(latents=latents, velocity=velocity, noise=noise)
    latents, velocity, noise = at_least_float32(latents, velocity, noise)
    # Compared in float32 or better: 0.99 itself is allowed whatever its dtype.
    highest = torch.as_tensor(sigma_to, dtype=torch.float64).max().item()
    if highest > _MAX_SIGMA_TO + 1e-6:
        raise ValueError(
            f"sigma_to={highest:g} leaves so little of the sample that its recovery is multiplied by "
            f"{1 / max(1 - highest, 1e-6):.3g}: use {_MAX_SIGMA_TO} or less, a later step in `step_range`."
        )
    start = broadcast_sigma(sigma_from, latents, "sigma_from")
    end = broadcast_sigma(sigma_to, latents, "sigma_to")
    return (latents + (end - start) * velocity - end * noise) / (1 - end)


def preference_strength(branch: str, position: float) -> float:
    """
    Strength of the relative preference at a drawn level, linear in its position.

    | branch | cleanest | noisiest |
    |---|---|---|
    | `"denoise"` | 0.1 | 0.25 |
    | `"inversion"` | 0.3 | 0.01 |

    Args:
        branch (`str`):
            A key of `ALIGN_BRANCHES`.
        position (`float`):
            0 for the cleanest level of the range, 1 for the noisiest; [`direct_align_levels`] returns it.

    Returns:
        `float`: `strength` of [`relative_preference`].

    Raises:
        `ValueError`: An unknown branch, or a position outside 0..1.

    Example:

    ```python
    >>> preference_strength("denoise", 0.5)
    0.175
    ```
    """
    _check_branch(branch)
    if not 0 <= position <= 1:
        raise ValueError(f"position={position:g} is a place from 0 (cleanest) to 1 (noisiest): use 0.5.")
    clean, noisy = ALIGN_BRANCHES[branch]
    return clean + (noisy - clean) * position


def relative_preference(reward_first: Tensor, reward_second: Tensor, strength: Tensor | float) -> Tensor:
    """
    How much a picture is liked under one prompt more than under another: `(1 + strength) * first - second`.

    The two prompts differ in one word of praise or blame. In the denoise branch the praising prompt is the first, in
    the inversion branch the blaming one. With equal rewards `strength * reward` is left.

    Args:
        reward_first (`Tensor` of shape `(B,)`):
            Reward under the first prompt, with gradient.
        reward_second (`Tensor` of shape `(B,)`):
            Reward under the second prompt, with gradient.
        strength (`Tensor` of shape `(B,)`, or `float`):
            From [`preference_strength`].

    Returns:
        `Tensor` of shape `(B,)`, float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ.

    Example:

    ```python
    >>> relative_preference(torch.tensor([0.5]), torch.tensor([0.25]), 0.5)
    tensor([0.5000])
    ```
    """
    check_same_shape(reward_first=reward_first, reward_second=reward_second)
    if isinstance(strength, Tensor) and strength.ndim:
        check_same_shape(reward_first=reward_first, strength=strength)
    reward_first, reward_second = at_least_float32(reward_first, reward_second)
    return (1 + strength) * reward_first - reward_second


def srpo_loss(relative: Tensor, margin: float = 0.7) -> Tensor:
    """
    The loss of SRPO: `relu(margin - relative)`, without gradient where the preference is above the margin.

    Args:
        relative (`Tensor` of shape `(B,)`):
            From [`relative_preference`].
        margin (`float`, defaults to 0.7):
            Preference that is good enough. In units of the reward, so 0.7 suits cosine similarities.

    Returns:
        `Tensor` of shape `(B,)`, float32 (float64 if the input has it).

    Example:

    ```python
    >>> srpo_loss(torch.tensor([0.5, 0.9]))
    tensor([0.2000, 0.0000])
    ```
    """
    (relative,) = at_least_float32(relative)
    return torch.relu(margin - relative)

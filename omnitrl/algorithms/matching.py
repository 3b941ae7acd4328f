# SPDX-License-Identifier: Apache-2.0
"""
Forward-process training: noise a finished sample again and match its velocity. DiffusionNFT and AWM.

No transition has to be stochastic and no step of the rollout has to be kept: clean latents and rewards are enough, so
any solver may have made them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from omnitrl.algorithms._tensors import at_least_float32, check_same_shape, per_row, sample_mean


# A noise level of 0 leaves nothing to predict and one of 1 nothing of the sample. One part in a thousand of the path
# is the finest step that the networks' own time input resolves.
_EDGE = 1e-3

# Some schedulers' first level lies a rounding above 1, and `int(0.29 * 100)` is 28.
_ROUNDING = 1e-6

# Below this the adaptive weight of DiffusionNFT is held, or an exact prediction would divide by zero.
_SMALLEST_WEIGHT = 1e-5

# Keeps the slope of the two Huber weightings finite where the error is 0.
_HUBER_SHIFT = 1e-10


def broadcast_sigma(sigma: Tensor | float, like: Tensor, name: str = "sigma") -> Tensor:
    """
    Noise levels as a factor of latents.

    Args:
        sigma (`Tensor` of shape `(B,)`, `(B, 1, ..., 1)` or of one element, or `float`):
            Noise levels in 0..1.
        like (`Tensor` of shape `(B, ...)`):
            The latents, whose dtype, device and number of dimensions are taken.
        name (`str`, defaults to `"sigma"`):
            What to call the levels in an error.

    Returns:
        `Tensor` of shape `(B, 1, ..., 1)` or `(1, 1, ..., 1)`.

    Raises:
        `ValueError`: A level outside 0..1, or neither one level nor one for each row.
    """
    # Checked where it lies, which is mostly the CPU: the accelerator need not be waited for.
    levels = torch.as_tensor(sigma)
    outside = levels[~((levels >= 0) & (levels <= 1 + _ROUNDING))]
    if outside.numel():
        raise ValueError(
            f"`{name}` is a noise level from 0 (data) to 1 (noise), got {outside[0].item():g}: divide timesteps by "
            f"1000, so 0.5 for 500."
        )
    # A `float` is cast once: by way of float32 it would lose half its digits.
    return per_row(sigma, like, name).reshape(-1, *[1] * (like.ndim - 1))


def noised(latents_clean: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    r"""
    A point of the straight path from data to noise of [rectified flow](https://huggingface.co/papers/2209.03003):
    \\( x_t = (1 - t) x_0 + t \epsilon \\).

    Args:
        latents_clean (`Tensor` of shape `(B, ...)`):
            Clean latents `x_0`.
        noise (`Tensor` of shape `(B, ...)`):
            Standard normal noise.
        sigma (`Tensor` of shape `(B,)`, `(B, 1, ..., 1)` or of one element, or `float`):
            Noise levels `t`, 0 for data and 1 for noise.

    Returns:
        `Tensor` of shape `(B, ...)`, float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ, or a level is outside 0..1.

    Example:

    ```python
    >>> noised(torch.zeros(1, 2), torch.ones(1, 2), 0.25)
    tensor([[0.2500, 0.2500]])
    ```
    """
    check_same_shape(latents_clean=latents_clean, noise=noise)
    latents_clean, noise = at_least_float32(latents_clean, noise)
    level = broadcast_sigma(sigma, latents_clean)
    return (1 - level) * latents_clean + level * noise


def velocity_target(latents_clean: Tensor, noise: Tensor) -> Tensor:
    r"""
    The velocity of the path of [`noised`], the same at every level: \\( \epsilon - x_0 \\).

    Args:
        latents_clean (`Tensor` of shape `(B, ...)`):
            Clean latents.
        noise (`Tensor` of shape `(B, ...)`):
            The noise that they were mixed with.

    Returns:
        `Tensor` of shape `(B, ...)`, float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ.

    Example:

    ```python
    >>> velocity_target(torch.full((1, 2), 0.5), torch.ones(1, 2))
    tensor([[0.5000, 0.5000]])
    ```
    """
    check_same_shape(latents_clean=latents_clean, noise=noise)
    latents_clean, noise = at_least_float32(latents_clean, noise)
    return noise - latents_clean


def matching_error(velocity: Tensor, target: Tensor) -> Tensor:
    """
    Mean squared error of a predicted velocity, the loss of pre-training, for each row.

    Args:
        velocity (`Tensor` of shape `(B, ...)`):
            Prediction.
        target (`Tensor` of shape `(B, ...)`):
            [`velocity_target`].

    Returns:
        `Tensor` of shape `(B,)`: mean over the elements, not their sum; float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ.

    Example:

    ```python
    >>> matching_error(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2))
    tensor([5.])
    ```
    """
    check_same_shape(velocity=velocity, target=target)
    velocity, target = at_least_float32(velocity, target)
    return sample_mean((velocity - target).square())


def _in_range(fractions: Tensor, low: float, high: float) -> Tensor:
    """Fractions 0..1 as noise levels of the part `low..high` of the way, off both ends of the path."""
    cleanest, noisiest = max(1 - high, _EDGE), min(1 - low, 1 - _EDGE)
    return cleanest + (noisiest - cleanest) * fractions


def _uniform(
    count: int, generator: torch.Generator, grid: Tensor | None, low: float, high: float
) -> tuple[Tensor, Tensor | None]:
    """All levels alike."""
    return _in_range(torch.rand(count, generator=generator), low, high), None


def _logit_normal(
    count: int, generator: torch.Generator, grid: Tensor | None, low: float, high: float
) -> tuple[Tensor, Tensor | None]:
    """The middle of the part more often than its ends, as Stable Diffusion 3 was trained."""
    return _in_range(torch.randn(count, generator=generator).sigmoid(), low, high), None


def grid_steps(num_steps: int, low: float = 0.0, high: float = 1.0) -> range:
    """
    Steps of a sampler that lie in the part `low..high` of the way from noise (0) to data (1).

    Args:
        num_steps (`int`):
            Steps of the sampler, T.
        low (`float`, defaults to 0.0):
            Where the part begins.
        high (`float`, defaults to 1.0):
            Where the part ends.

    Returns:
        `range`: `floor(low * T)` to `floor(high * T) - 1`, which may be empty.

    Example:

    ```python
    >>> grid_steps(10, high=0.99)
    range(0, 9)
    ```
    """
    return range(math.floor(low * num_steps + _ROUNDING), math.floor(high * num_steps + _ROUNDING))


def _grid(
    count: int, generator: torch.Generator, grid: Tensor | None, low: float, high: float
) -> tuple[Tensor, Tensor | None]:
    """Levels of the sampler's own table in random order, each of them once before any comes again."""
    if grid is None or grid.ndim != 1 or grid.shape[0] < 2:
        given = "None" if grid is None else f"shape {tuple(grid.shape)}"
        raise ValueError(
            f"sigma_sampling='grid' draws from the sampler's sigmas, got grid={given}: pass `table.sigmas` of shape "
            f"(T + 1,)."
        )
    num_steps = grid.shape[0] - 1
    part = grid_steps(num_steps, low, high)
    if not part:
        raise ValueError(
            f"low={low:g}, high={high:g} of a grid of {num_steps} steps holds none of them: use low=0.0, high=1.0."
        )
    rounds = -(-count // len(part))
    steps = torch.cat([part[0] + torch.randperm(len(part), generator=generator) for _ in range(rounds)])[:count]
    return grid.detach().to("cpu", torch.float32)[steps], steps


SigmaSampling = Callable[[int, torch.Generator, Tensor | None, float, float], tuple[Tensor, Tensor | None]]

SIGMA_SAMPLINGS: dict[str, SigmaSampling] = {"uniform": _uniform, "logit_normal": _logit_normal, "grid": _grid}


def sample_sigmas(
    sampling: str,
    count: int,
    generator: torch.Generator,
    grid: Tensor | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """
    Draw the noise levels at which one sample is trained.

    `low` and `high` cut out a part of the way in *sampling* order, from noise (0) to data (1), as a window of steps
    does: the first 90 % of the way is `high=0.9`, the noisiest half `high=0.5`.

    | sampling | levels |
    |---|---|
    | `"uniform"` | uniform over the part |
    | `"logit_normal"` | sigmoid of a standard normal, squeezed into the part |
    | `"grid"` | steps `floor(low * T)` to `floor(high * T) - 1` of the sampler, in random order, without replacement |

    The grid without its last step, as [DiffusionNFT](https://huggingface.co/papers/2509.16117) trains, is
    `high=0.99`. The first two stay 0.001 away from 0 and 1. A grid never gives its final 0, and gives its first level
    even if that is 1. No time shift is applied: pass the result through [`time_shift`] for one.

    Args:
        sampling (`str`):
            A key of `SIGMA_SAMPLINGS`.
        count (`int`):
            Number of levels, at least 1. More than the part of a grid has: every level again, in a new order.
        generator (`torch.Generator`):
            Generator on the CPU, so that the levels are the same on every device.
        grid (`Tensor` of shape `(T + 1,)`, *optional*):
            Noise levels of the sampler. Needed for `"grid"`.
        low (`float`, defaults to 0.0):
            Where the part begins.
        high (`float`, defaults to 1.0):
            Where the part ends.

    Returns:
        `tuple` of the levels, a `Tensor` of shape `(count,)`, float32 on the CPU, and for `"grid"` the steps of the
        sampler that they belong to, `(count,)` of int64, otherwise `None`.

    Raises:
        `ValueError`: An unknown sampling, a count below 1, an empty part, or no grid where one is needed.

    Example:

    ```python
    >>> grid = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    >>> sigmas, steps = sample_sigmas("grid", 2, torch.Generator().manual_seed(0), grid, high=0.5)
    >>> sorted(steps.tolist()), sorted(sigmas.tolist())
    ([0, 1], [0.75, 1.0])
    ```
    """
    if sampling not in SIGMA_SAMPLINGS:
        raise ValueError(
            f"sigma_sampling={sampling!r} is not known: use one of {', '.join(map(repr, SIGMA_SAMPLINGS))}."
        )
    if count < 1:
        raise ValueError(f"count={count} draws no noise level: use 1 or more.")
    if not 0 <= low < high <= 1:
        raise ValueError(f"low={low:g}, high={high:g} is no part of the way from 0 to 1: use low=0.0, high=1.0.")
    return SIGMA_SAMPLINGS[sampling](count, generator, grid, low, high)


NFT_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda advantages: advantages,
    "positive_only": lambda advantages: advantages.clamp(min=0),
    "negative_only": lambda advantages: advantages.clamp(max=0),
    "one_only": lambda advantages: (advantages > 0).to(advantages.dtype),
    "binary": torch.sign,
}


def optimality_probability(advantages: Tensor, advantage_clip: float = 5.0, mode: str = "all") -> Tensor:
    r"""
    Probability that a sample is one of the good ones, the only thing that
    [DiffusionNFT](https://huggingface.co/papers/2509.16117) takes of its reward:
    \\( q = \mathrm{clip}(1/2 + A / (2 A_{max}), 0, 1) \\).

    | mode | advantages, after the clip to `±advantage_clip` |
    |---|---|
    | `"all"` | as they are |
    | `"positive_only"` | those below 0 become 0 |
    | `"negative_only"` | those above 0 become 0 |
    | `"one_only"` | 1 above 0, otherwise 0 |
    | `"binary"` | the sign |

    The last two are not scaled to the clip: at the default of 5 they give 0.6, 0.5 and 0.4.

    Args:
        advantages (`Tensor` of shape `(B,)`):
            Group advantages. Detached.
        advantage_clip (`float`, defaults to 5.0):
            \\( A_{max} \\), above 0.
        mode (`str`, defaults to `"all"`):
            A key of `NFT_MODES`.

    Returns:
        `Tensor` of shape `(B,)` with values in 0..1, float32 (float64 if the input has it).

    Raises:
        `ValueError`: An unknown mode, or a clip that is not above 0.

    Example:

    ```python
    >>> optimality_probability(torch.tensor([-9.0, 0.0, 2.5]))
    tensor([0.0000, 0.5000, 0.7500])
    ```
    """
    if mode not in NFT_MODES:
        raise ValueError(f"nft_mode={mode!r} is not known: use one of {', '.join(map(repr, NFT_MODES))}.")
    if not advantage_clip > 0:
        raise ValueError(f"advantage_clip={advantage_clip:g} scales the advantages and must be above 0: use 5.0.")
    (advantages,) = at_least_float32(advantages.detach())
    chosen = NFT_MODES[mode](advantages.clamp(-advantage_clip, advantage_clip))
    return (chosen / (2 * advantage_clip) + 0.5).clamp(0, 1)


class NFTLoss(NamedTuple):
    """
    The loss of [`nft_loss`] and its two sides. All of shape `(B,)`.

    Attributes:
        loss (`Tensor`):
            Loss of each row, with gradient.
        positive_error (`Tensor`):
            Error of the policy leant towards the trained one, over its adaptive weight, detached.
        negative_error (`Tensor`):
            Error of the policy leant away from it, over its adaptive weight, detached.
    """

    loss: Tensor
    positive_error: Tensor
    negative_error: Tensor


def _weighted_error(predicted: Tensor, latents_clean: Tensor, adaptive: bool) -> Tensor:
    """Mean squared error of predicted clean latents, over their mean absolute error where it is `adaptive`."""
    gap = predicted - latents_clean
    error = sample_mean(gap.square())
    return error / sample_mean(gap.detach().abs()).clamp(min=_SMALLEST_WEIGHT) if adaptive else error


def nft_loss(
    velocity: Tensor,
    velocity_old: Tensor,
    latents: Tensor,
    latents_clean: Tensor,
    sigma: Tensor | float,
    optimality: Tensor,
    mix_beta: float = 1.0,
    adaptive: bool = True,
) -> NFTLoss:
    r"""
    The negative-aware loss of [DiffusionNFT](https://huggingface.co/papers/2509.16117).

    Two policies are formed around the old one, one towards the trained policy and one away from it:
    \\( v^\pm = v_{old} \pm \beta (v - v_{old}) \\). Good samples pull the first to their velocity, bad ones the
    second: \\( (q \, \ell^+ + (1 - q) \, \ell^-) / \beta \\), with \\( \ell^\pm \\) the mean squared error of the
    clean latents \\( x_t - t v^\pm \\) over their mean absolute error (a weight without gradient, at least 1e-5).

    At `velocity == velocity_old` the gradient does not depend on `mix_beta`, is 0 for `optimality = 1/2` and points
    away from the sample below that. For a sample alone, unweighted, the loss is least at
    \\( v_{old} + ((2q - 1) / \beta)(v^* - v_{old}) \\): the smaller `mix_beta`, the further the policy is led.

    The public implementations multiply the loss by the bound of the advantages, \\( A_{max} = 5 \\), which is part of
    the gradient's size in their recipes. This function does not: the caller does.

    Args:
        velocity (`Tensor` of shape `(B, ...)`):
            Velocity of the policy that is trained, at `latents`.
        velocity_old (`Tensor` of shape `(B, ...)`):
            Velocity of the policy that made the samples. Detached.
        latents (`Tensor` of shape `(B, ...)`):
            The noised samples, from [`noised`]. Detached.
        latents_clean (`Tensor` of shape `(B, ...)`):
            The samples. Detached.
        sigma (`Tensor` of shape `(B,)`, `(B, 1, ..., 1)` or of one element, or `float`):
            Noise levels of `latents`.
        optimality (`Tensor` of shape `(B,)`):
            From [`optimality_probability`]. Detached.
        mix_beta (`float`, defaults to 1.0):
            \\( \beta \\), above 0. 0.1 in the paper's recipe for text rendering.
        adaptive (`bool`, defaults to `True`):
            Divide by the mean absolute error. Without it, `optimality = 1` and `mix_beta = 1` is plain fine-tuning
            with weight `sigma²`.

    Returns:
        [`NFTLoss`] in float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ, `mix_beta` is not above 0, or `optimality` or `sigma` is outside 0..1.

    Example:

    ```python
    >>> clean, noise = torch.zeros(1, 4), torch.ones(1, 4)
    >>> velocity = torch.full((1, 4), 0.5)
    >>> nft_loss(velocity, velocity, noised(clean, noise, 0.5), clean, 0.5, torch.ones(1)).loss
    tensor([0.2500])
    ```
    """
    check_same_shape(velocity=velocity, velocity_old=velocity_old, latents=latents, latents_clean=latents_clean)
    if not mix_beta > 0:
        raise ValueError(f"mix_beta={mix_beta:g} divides the loss and must be above 0: use 1.0, or 0.1.")
    velocity, velocity_old, latents, latents_clean = at_least_float32(
        velocity, velocity_old.detach(), latents.detach(), latents_clean.detach()
    )
    quality = per_row(optimality.detach(), velocity, "optimality")
    if not ((quality >= 0) & (quality <= 1)).all():
        raise ValueError(
            f"`optimality` is a probability in 0..1, got {quality.tolist()}: pass optimality_probability(advantages)."
        )
    level = broadcast_sigma(sigma, velocity)
    step = mix_beta * (velocity - velocity_old)
    positive = _weighted_error(latents - level * (velocity_old + step), latents_clean, adaptive)
    negative = _weighted_error(latents - level * (velocity_old - step), latents_clean, adaptive)
    loss = (quality * positive + (1 - quality) * negative) / mix_beta
    return NFTLoss(loss=loss, positive_error=positive.detach(), negative_error=negative.detach())


OLD_POLICY_SCHEDULES: dict[str, Callable[[int], float]] = {
    "copy": lambda step: 0.0,
    "linear": lambda step: min(0.001 * step, 0.5),
    "delayed": lambda step: 0.0 if step < 75 else min(0.0075 * (step - 75), 0.999),
    "awm": lambda step: min(0.001 * step, 0.3),
}


def old_policy_decay(schedule: str, step: int, max_decay: float | None = None) -> float:
    r"""
    How much of the old policy stays when it is moved to the trained one:
    \\( \theta_{old} \leftarrow d \, \theta_{old} + (1 - d) \, \theta \\).

    | schedule | decay after optimizer step `n` | used by |
    |---|---|---|
    | `"copy"` | 0 | the trained policy itself makes the rollouts |
    | `"linear"` | `min(0.001 n, 0.5)` | DiffusionNFT, most recipes |
    | `"delayed"` | 0 below step 75, then `min(0.0075 (n - 75), 0.999)` | DiffusionNFT, text rendering |
    | `"awm"` | `min(0.001 n, 0.3)` | the averaged reference of AWM |

    Args:
        schedule (`str`):
            A key of `OLD_POLICY_SCHEDULES`.
        step (`int`):
            Optimizer steps done so far, at least 0.
        max_decay (`float`, *optional*):
            Upper bound, in 0..1, beside that of the schedule.

    Returns:
        `float`: The decay, in 0..1.

    Raises:
        `ValueError`: An unknown schedule, a negative step, or a bound outside 0..1.

    Example:

    ```python
    >>> old_policy_decay("linear", 100), old_policy_decay("delayed", 100), old_policy_decay("linear", 100, 0.05)
    (0.1, 0.1875, 0.05)
    ```
    """
    if schedule not in OLD_POLICY_SCHEDULES:
        known = ", ".join(map(repr, OLD_POLICY_SCHEDULES))
        raise ValueError(f"old_policy_schedule={schedule!r} is not known: use one of {known}.")
    if step < 0:
        raise ValueError(f"step={step} counts optimizer steps and is at least 0: use step=0 at the start.")
    if max_decay is not None and not 0 <= max_decay <= 1:
        raise ValueError(f"max_decay={max_decay:g} is a share of the old weights in 0..1: use 0.5.")
    decay = OLD_POLICY_SCHEDULES[schedule](step)
    return decay if max_decay is None else min(decay, max_decay)


def _huber(error: Tensor, sigma: Tensor, power: float) -> Tensor:
    return sigma * ((error + _HUBER_SHIFT).sqrt() - _HUBER_SHIFT**0.5)


def _ghuber(error: Tensor, sigma: Tensor, power: float) -> Tensor:
    return sigma / power * ((error + _HUBER_SHIFT).pow(power) - _HUBER_SHIFT**power)


AWM_WEIGHTINGS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "uniform": lambda error, sigma, power: error,
    "t": lambda error, sigma, power: sigma * error,
    "t2": lambda error, sigma, power: sigma.square() * error,
    "huber": _huber,
    "ghuber": _ghuber,
}


def awm_log_likelihood(
    velocity: Tensor, target: Tensor, sigma: Tensor | float, weighting: str = "ghuber", power: float = 0.25
) -> Tensor:
    r"""
    What stands in for the log-likelihood of a sample in
    [Advantage Weighted Matching](https://huggingface.co/papers/2509.25050): the negative, weighted loss of
    pre-training at one noise and one level.

    Feed it to [`clipped_policy_loss`] as `log_probs`, with the value *at the same noise and level* before the update
    as `old_log_probs`. On policy the gradient is that of the weighted loss times the advantage. For a ratio of the
    whole sample in place of one per level, take the mean over the levels first.

    | weighting | of the error \\( \ell \\) at level \\( t \\), with \\( \delta = 10^{-10} \\) |
    |---|---|
    | `"uniform"` | \\( \ell \\) |
    | `"t"` | \\( t \ell \\) |
    | `"t2"` | \\( t^2 \ell \\) |
    | `"huber"` | \\( t (\sqrt{\ell + \delta} - \sqrt{\delta}) \\) |
    | `"ghuber"` | \\( (t / p) ((\ell + \delta)^p - \delta^p) \\) |

    Args:
        velocity (`Tensor` of shape `(B, ...)`):
            Velocity of the policy at the noised samples.
        target (`Tensor` of shape `(B, ...)`):
            [`velocity_target`].
        sigma (`Tensor` of shape `(B,)`, `(B, 1, ..., 1)` or of one element, or `float`):
            Noise levels.
        weighting (`str`, defaults to `"ghuber"`):
            A key of `AWM_WEIGHTINGS`.
        power (`float`, defaults to 0.25):
            \\( p \\) of `"ghuber"`, above 0; the others ignore it.

    Returns:
        `Tensor` of shape `(B,)`, at most 0, float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes differ, an unknown weighting, a power that is not above 0, or a level outside 0..1.

    Example:

    ```python
    >>> awm_log_likelihood(torch.full((1, 4), 2.0), torch.zeros(1, 4), 0.5, weighting="t")
    tensor([-2.])
    ```
    """
    if weighting not in AWM_WEIGHTINGS:
        raise ValueError(
            f"awm_weighting={weighting!r} is not known: use one of {', '.join(map(repr, AWM_WEIGHTINGS))}."
        )
    if not power > 0:
        raise ValueError(f"power={power:g} must be above 0: use 0.25.")
    error = matching_error(velocity, target)
    level = broadcast_sigma(sigma, error)
    return -AWM_WEIGHTINGS[weighting](error, level, power)

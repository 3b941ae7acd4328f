# SPDX-License-Identifier: Apache-2.0
"""
One step of a sampler as a distribution.

Every transition here is linear in the latents `x` and the velocity `v`, with coefficients that depend on the schedule
only: `x_next ~ N(cx * x + cv * v, std² I)`. So a whole sampler is a table with three numbers a step, made once from
the sigmas, and rollout and replay read the same row. `std` is always the **total** standard deviation of the step,
with sqrt(step size) in it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from omnitrl.algorithms._tensors import at_least_float32, check_same_shape, per_row, sample_mean
from omnitrl.algorithms.sigmas import make_sigma_table


# A first sigma of 1 means (1 - sigma) = 0. UniPC starts at 0.999999, and casts give 0.9999999: the same endpoint,
# where the unguarded formula has a std of hundreds.
_PURE_NOISE = 1 - 1e-5


class TransitionTable(NamedTuple):
    """
    Mean and noise of each step of a sampler: `mean = latents_coef * latents + velocity_coef * velocity`.

    Built by [`transition_table`]. Keep it on the CPU: an `int` step then costs no transfer and no synchronisation.

    Attributes:
        latents_coef (`Tensor` of shape `(T,)`, float32):
            Factor of the current latents.
        velocity_coef (`Tensor` of shape `(T,)`, float32):
            Factor of the predicted velocity (negative: sigma falls).
        std (`Tensor` of shape `(T,)`, float32):
            Total standard deviation of the step, 0 where the step is deterministic.
    """

    latents_coef: Tensor
    velocity_coef: Tensor
    std: Tensor

    @property
    def num_steps(self) -> int:
        """`int`: Number of steps `T`."""
        return self.std.shape[0]

    @property
    def stochastic(self) -> Tensor:
        """`Tensor` of shape `(T,)`, bool: the steps that draw noise, and so have a density."""
        return self.std > 0


def _marginal_preserving_sde(
    sigma: Tensor, sigma_next: Tensor, diffusion_squared: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """Euler-Maruyama step of the reverse SDE that has the marginals of the flow, for a diffusion coefficient²."""
    dt = sigma_next - sigma
    drift = diffusion_squared / (2 * sigma)
    return 1 + drift * dt, (1 + drift * (1 - sigma)) * dt, (diffusion_squared * -dt).sqrt()


def flow_sde(
    sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float
) -> tuple[Tensor, Tensor, Tensor]:
    r"""
    The SDE of [Flow-GRPO](https://huggingface.co/papers/2505.05470): diffusion \\( a \sqrt{\sigma / (1 - \sigma)} \\).

    At `sigma = 1` the denominator is 0, so there (and only there) `1 - sigma_max` takes its place. The total std of
    the first step is then exactly `noise_level`. On all other steps the velocity coefficient is
    `(1 + noise_level² / 2) * (sigma_next - sigma)`.

    Args:
        sigma (`Tensor`):
            Current noise levels, above 0, any shape.
        sigma_next (`Tensor`):
            Next noise levels, of the shape of `sigma`.
        sigma_max (`Tensor`):
            Second level of the schedule, used only where `sigma` is 1 (up to rounding, `sigma > 1 - 1e-5`).
        noise_level (`float`):
            The paper's `a`, 0.7 there.

    Returns:
        `tuple` of the latents coefficient, the velocity coefficient and the total std, each of the shape of `sigma`.
    """
    below_one = torch.where(sigma > _PURE_NOISE, sigma_max, sigma)
    return _marginal_preserving_sde(sigma, sigma_next, noise_level**2 * sigma / (1 - below_one))


def dance_sde(
    sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float
) -> tuple[Tensor, Tensor, Tensor]:
    """
    The SDE of [DanceGRPO](https://huggingface.co/papers/2505.07818): the same family as [`flow_sde`] with a constant
    diffusion coefficient.

    Args:
        sigma (`Tensor`):
            Current noise levels, above 0, any shape.
        sigma_next (`Tensor`):
            Next noise levels, of the shape of `sigma`.
        sigma_max (`Tensor`):
            Not used: the step is finite at `sigma = 1`.
        noise_level (`float`):
            The paper's `eta`, 0.3 there.

    Returns:
        `tuple` of the latents coefficient, the velocity coefficient and the total std, each of the shape of `sigma`.
    """
    return _marginal_preserving_sde(sigma, sigma_next, noise_level**2)


def cps(sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float) -> tuple[Tensor, Tensor, Tensor]:
    """
    The coefficients-preserving step of [Flow-CPS](https://huggingface.co/papers/2509.05952).

    The predicted noise keeps a share `cos(noise_level * pi / 2)` of the next level and fresh noise takes the rest, so
    that the total noise is exactly `sigma_next` at every step and no noise is left over in the samples. `std` is
    `sigma_next * sin(noise_level * pi / 2)`.

    Args:
        sigma (`Tensor`):
            Current noise levels, any shape.
        sigma_next (`Tensor`):
            Next noise levels, of the shape of `sigma`.
        sigma_max (`Tensor`):
            Not used.
        noise_level (`float`):
            The paper's `eta`, in `[0, 1]`, typically 0.7 to 0.9. At 1 nothing of the predicted noise is kept, which is
            the sampler of consistency models and of diffusers' `stochastic_sampling`.

    Returns:
        `tuple` of the latents coefficient, the velocity coefficient and the total std, each of the shape of `sigma`.
    """
    angle = noise_level * math.pi / 2
    kept = sigma_next * math.cos(angle)
    return 1 - sigma_next + kept, kept * (1 - sigma) - (1 - sigma_next) * sigma, sigma_next * math.sin(angle)


def ode(sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float) -> tuple[Tensor, Tensor, Tensor]:
    """
    The Euler step of the probability-flow ODE, without noise. It has no density.

    Args:
        sigma (`Tensor`):
            Current noise levels, any shape.
        sigma_next (`Tensor`):
            Next noise levels, of the shape of `sigma`.
        sigma_max (`Tensor`):
            Not used.
        noise_level (`float`):
            Not used.

    Returns:
        `tuple` of ones, the step `sigma_next - sigma`, and zeros, each of the shape of `sigma`.
    """
    return torch.ones_like(sigma), sigma_next - sigma, torch.zeros_like(sigma)


SDE_TYPES: dict[str, Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]] = {
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
    "cps": cps,
    "ode": ode,
}


def transition_table(
    sigmas: Tensor | Sequence[float],
    sde_type: str = "flow_sde",
    noise_level: float = 0.7,
    sde_steps: Iterable[int] = (),
) -> TransitionTable:
    """
    Make the transition table of a sampler: the named SDE on `sde_steps`, the ODE on all other steps.

    ODE rows are the Euler step of diffusers, bit for bit: coefficient 1, and `sigma_next - sigma` in float32. SDE rows
    are computed in float64 from the float32 sigmas and rounded once.

    Args:
        sigmas (`Tensor` or sequence of `float`, length `T + 1`):
            Noise levels, as [`make_sigma_table`] checks them.
        sde_type (`str`, defaults to `"flow_sde"`):
            A key of `SDE_TYPES`: `"flow_sde"`, `"dance_sde"`, `"cps"` or `"ode"`.
        noise_level (`float`, defaults to 0.7):
            Strength of the noise, at least 0, for `"cps"` at most 1. 0 gives the ODE row.
        sde_steps (iterable of `int`, defaults to no step):
            Indices of the stochastic steps, in `0..T-2`. The last step is always an ODE step.

    Returns:
        [`TransitionTable`] of `T` rows, on the device of `sigmas`.

    Raises:
        `ValueError`: An unknown `sde_type`, a noise level out of range, or a step that cannot be stochastic.

    Example:

    ```python
    >>> table = transition_table([1.0, 0.75, 0.5, 0.0], "flow_sde", noise_level=0.7, sde_steps=[0])
    >>> table.stochastic.tolist()
    [True, False, False]
    >>> round(table.std[0].item(), 4)
    0.7
    ```
    """
    sigmas = make_sigma_table(sigmas).sigmas
    num_steps = sigmas.shape[0] - 1
    _check_noise(sde_type, noise_level)
    steps = _check_sde_steps(sde_steps, num_steps)
    # (3, T), the ODE row of each step to begin with. Without noise an SDE is that row too, and exactly so.
    rows = torch.stack(ode(sigmas[:-1], sigmas[1:], sigmas[1], 0.0))
    if steps and noise_level > 0:
        # On the CPU because some accelerators have no float64.
        exact = sigmas.to("cpu", torch.float64)
        now, then = exact[steps], exact[[step + 1 for step in steps]]
        values = torch.stack(SDE_TYPES[sde_type](now, then, exact[1], noise_level))
        rows[:, steps] = values.to(rows)
    return TransitionTable(*rows)


def _check_noise(sde_type: str, noise_level: float) -> None:
    """Raise a `ValueError` for an unknown SDE or a noise level it cannot have."""
    if sde_type not in SDE_TYPES:
        raise ValueError(f"sde_type={sde_type!r} is not known: use one of {', '.join(map(repr, SDE_TYPES))}.")
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level={noise_level} must be a finite number of at least 0: use 0.7.")
    if sde_type == "cps" and noise_level > 1:
        raise ValueError(
            f"noise_level={noise_level} must be at most 1 for sde_type='cps', where 1 replaces all noise: use 0.8."
        )


def _check_sde_steps(sde_steps: Iterable[int], num_steps: int) -> list[int]:
    """The steps as a sorted list, each of them one that may be stochastic."""
    steps = sorted({int(step) for step in sde_steps})
    if not steps:
        return steps
    if steps[0] < 0 or steps[-1] >= num_steps:
        wrong = steps[0] if steps[0] < 0 else steps[-1]
        raise ValueError(f"sde_steps has {wrong}, but a sampler of {num_steps} steps has steps 0..{num_steps - 1}.")
    if steps[-1] == num_steps - 1:
        allowed = f"use steps 0..{num_steps - 2}" if num_steps > 1 else "use 2 sampler steps or more"
        raise ValueError(f"sde_steps has {num_steps - 1}, but the last step is an ODE step, {allowed}.")
    return steps


def _at_step(column: Tensor, step: int | Tensor, like: Tensor) -> Tensor:
    """One entry of a table column as a 0-d tensor, or one per row as `(B, 1, ..., 1)` beside `like`."""
    if isinstance(step, Tensor) and step.ndim:
        if step.shape != like.shape[:1]:
            raise ValueError(
                f"`step` has one index per row, got shape {tuple(step.shape)} for {like.shape[0]} rows: pass an int "
                f"for all rows or a tensor of shape ({like.shape[0]},)."
            )
        rows = column.to(like.device)[step.to(like.device)]
        return rows.reshape(-1, *[1] * (like.ndim - 1))
    if not 0 <= step < column.shape[0]:
        raise ValueError(f"step={int(step)} is not one of the {column.shape[0]} steps 0..{column.shape[0] - 1}.")
    return column[step]


def transition_mean(latents: Tensor, velocity: Tensor, table: TransitionTable, step: int | Tensor) -> Tensor:
    """
    Mean of one step: `latents_coef[step] * latents + velocity_coef[step] * velocity`.

    An `int` step and a tensor of steps give the same bits, so a replay that mixes steps in one batch reproduces the
    rollout exactly.

    Args:
        latents (`Tensor` of shape `(B, ...)`):
            Current latents, in the precision in which they are stored.
        velocity (`Tensor` of shape `(B, ...)`):
            Predicted velocity, noise minus data.
        table ([`TransitionTable`]):
            Coefficients of all steps.
        step (`int` or `Tensor` of shape `(B,)`, int64):
            The step of all rows, or of each row.

    Returns:
        `Tensor` of shape `(B, ...)`, float32 (float64 if an input has it).

    Raises:
        `ValueError`: The shapes of `latents` and `velocity` differ, or `step` is out of range or of another length.
    """
    check_same_shape(latents=latents, velocity=velocity)
    latents, velocity = at_least_float32(latents, velocity)
    # Two products and a sum, not a fused multiply-add: that rounds once less than diffusers' Euler step, and law 2 is
    # about bits. The sum is in place, so the only temporary is the second product.
    mean = velocity * _at_step(table.velocity_coef, step, velocity)
    return mean.add_(latents * _at_step(table.latents_coef, step, latents))


def transition_std(latents: Tensor, table: TransitionTable, step: int | Tensor) -> Tensor:
    """
    Total standard deviation of one step, in a shape that multiplies noise of the shape of `latents`.

    Args:
        latents (`Tensor` of shape `(B, ...)`):
            Latents that say how many rows and dimensions there are, and on which device.
        table ([`TransitionTable`]):
            Coefficients of all steps.
        step (`int` or `Tensor` of shape `(B,)`, int64):
            The step of all rows, or of each row.

    Returns:
        `Tensor` of shape `(1, 1, ..., 1)` for an `int` step, `(B, 1, ..., 1)` for a tensor of steps, float32. 0 where
        the step is deterministic.
    """
    return _at_step(table.std, step, latents).reshape(-1, *[1] * (latents.ndim - 1)).to(latents.device)


def _gaussian(mean_square: Tensor, std: Tensor) -> Tensor:
    """Log-density of a normal distribution per latent element: the only form whose ratio is a likelihood ratio."""
    return -mean_square / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


def _squared_error(mean_square: Tensor, std: Tensor) -> Tensor:
    """Minus the squared error, without the variance and the normaliser: log-ratios are `2 std²` times smaller."""
    return -mean_square


LOG_PROB_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gaussian": _gaussian,
    "squared_error": _squared_error,
}

LOG_PROB_REDUCTIONS = ("mean", "sum")


DEFAULT_NOISE_LEVEL = 0.7
"""The `a` of the Flow-GRPO paper."""

Modalities = Sequence[tuple[slice, float]]
"""Parts of the latents' first dimension, each with the weight of its log-prob."""


def weighted_modalities(parts: Mapping[str, slice], weights: Mapping[str, float] | None) -> Modalities:
    """
    The modalities that count in a log-prob, each with its weight.

    Args:
        parts (mapping of `str` to `slice`):
            Which of the latents' first dimension each modality has; empty for a model of one modality.
        weights (mapping of `str` to `float`, *optional*):
            Of each modality; `None` takes one mean over the elements of all of them, as verl-omni does.

    Returns:
        `list` of parts with a weight above 0; empty where no weights are given.

    Raises:
        `ValueError`: The names are not those of `parts`, a weight is negative, or all are 0.

    Example:

    ```python
    >>> weighted_modalities({"video": slice(0, 12), "audio": slice(12, 16)}, {"video": 1.0, "audio": 0.0})
    [(slice(0, 12, None), 1.0)]
    ```
    """
    if weights is None:
        return []
    if set(weights) != set(parts):
        known = f"this model has {sorted(parts)}" if parts else "this model has one modality, so leave it out"
        raise ValueError(f"modality_weights={dict(weights)} must name each modality once: {known}.")
    numbers = all(isinstance(weight, int | float) and 0 <= weight < math.inf for weight in weights.values())
    if not numbers or not any(weights.values()):
        raise ValueError(
            f"modality_weights={dict(weights)} must be finite numbers, at least 0 and not all 0: use "
            f"{dict.fromkeys(parts, 1.0)}."
        )
    return [(parts[name], weight) for name, weight in weights.items() if weight > 0]


def gaussian_log_prob(
    sample: Tensor,
    mean: Tensor,
    std: Tensor | float,
    reduction: str = "mean",
    form: str = "gaussian",
    modalities: Modalities = (),
) -> Tensor:
    r"""
    Log-probability of `sample` under one stochastic step \\( N(\mu, s^2 I) \\).

    The mean over the latent elements is what every diffusion RL code base uses. It makes the ratio a geometric mean
    per element, and log-ratios `D` times smaller than those of the joint density (`reduction="sum"`): clip ranges are
    1e-5 to 1e-3 rather than 0.2, and they depend on the resolution.

    Args:
        sample (`Tensor` of shape `(B, ...)`):
            The latents that were drawn, exactly as stored. Detached.
        mean (`Tensor` of shape `(B, ...)`):
            Mean of the step, see [`transition_mean`].
        std (`Tensor` of shape `(B, 1, ..., 1)`, `(B,)` or of one element, or `float`):
            Total standard deviation of the step, see [`transition_std`].
        reduction (`str`, defaults to `"mean"`):
            `"mean"` or `"sum"` over all elements of a sample.
        form (`str`, defaults to `"gaussian"`):
            A key of `LOG_PROB_FORMS`. `"gaussian"` is the log-density. `"squared_error"` is `-(sample - mean)²` alone,
            which Flow-CPS, verl-omni and Flow-Factory use for `cps` steps.
        modalities (sequence of `(slice, float)`, *optional*):
            Parts of dimension 1 whose log-probs are added with these weights, see [`weighted_modalities`] and
            [`multimodal_log_prob`].

    Returns:
        `Tensor` of shape `(B,)`, float32 (float64 if an input has it).

    Raises:
        `ValueError`: The step is deterministic, so that it has no density; or a shape, `reduction` or `form` is wrong.

    Example:

    ```python
    >>> gaussian_log_prob(torch.zeros(1, 2), torch.zeros(1, 2), 1.0)
    tensor([-0.9189])
    ```
    """
    if reduction not in LOG_PROB_REDUCTIONS:
        known = " or ".join(map(repr, LOG_PROB_REDUCTIONS))
        raise ValueError(f"reduction={reduction!r} is not known: use {known}.")
    if form not in LOG_PROB_FORMS:
        raise ValueError(f"form={form!r} is not known: use one of {', '.join(map(repr, LOG_PROB_FORMS))}.")
    check_same_shape(sample=sample, mean=mean)
    sample, mean = at_least_float32(sample.detach(), mean)
    std = per_row(std, mean, "std")
    if not (std > 0).all():
        raise ValueError(
            f"A deterministic step has no density, got std={std.min().item():g}: ask for the log-prob of stochastic "
            f"steps only, those where `TransitionTable.stochastic` is True."
        )
    squares = (sample - mean).square()
    if not modalities:
        return _reduced(squares, std, reduction, form)
    log_probs = {str(i): _reduced(squares[:, part], std, reduction, form) for i, (part, _) in enumerate(modalities)}
    return multimodal_log_prob(log_probs, {str(i): weight for i, (_, weight) in enumerate(modalities)})


def _reduced(squares: Tensor, std: Tensor, reduction: str, form: str) -> Tensor:
    """Log-probs (B,) of squared deviations (B, ...)."""
    log_prob = LOG_PROB_FORMS[form](sample_mean(squares), std)
    return log_prob * squares[0].numel() if reduction == "sum" else log_prob


def multimodal_log_prob(log_probs: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    r"""
    Log-probability of a step over several modalities, as video and audio: \\( \sum_m w_m \log p_m \\).

    The log-ratio of two policies is then \\( \sum_m w_m \log r_m \\) with the same weights. Code bases differ in
    them: verl-omni joins the tokens of LTX-2 and takes one mean, which is [`token_weights`]; Flow-Factory samples
    the audio by ODE steps, which is `{"video": 1.0, "audio": 0.0}`.

    Args:
        log_probs (mapping of `str` to `Tensor` of shape `(B,)`):
            Log-probs of each modality, see [`gaussian_log_prob`]. A modality of weight 0 may be missing, as a
            deterministic step has no log-prob, and is not read where it is there.
        weights (mapping of `str` to `float`):
            Weight of each modality, at least 0, not all of them 0. They need not sum to 1.

    Returns:
        `Tensor` of shape `(B,)`, float32 (float64 if an input has it).

    Raises:
        `ValueError`: A modality has no weight, a weight above 0 has no modality, a weight is negative or not finite,
        all are 0, or shapes differ.

    Example:

    ```python
    >>> multimodal_log_prob({"video": torch.tensor([-1.0]), "audio": torch.tensor([-3.0])}, {"video": 1, "audio": 0.5})
    tensor([-2.5000])
    ```
    """
    for name in log_probs:
        if name not in weights:
            raise ValueError(
                f"The modality {name!r} has no weight, got weights for {sorted(weights)}: add {name!r}: 1.0, "
                f"or 0.0 to leave it out of the policy."
            )
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"The weight of {name!r} must be a finite number of at least 0, got {weight}: use 1.0.")
        if weight > 0 and name not in log_probs:
            raise ValueError(
                f"The modality {name!r} has weight {weight} and no log-prob, got log-probs of {sorted(log_probs)}: "
                f"use weight 0.0 for a modality that is sampled without noise."
            )
    counted = [name for name, weight in weights.items() if weight > 0]
    if not counted:
        raise ValueError(f"No modality has a weight above 0, got {dict(weights)}: give one of them weight 1.0.")
    check_same_shape(**{name: log_probs[name] for name in counted})
    tensors = at_least_float32(*(log_probs[name] for name in counted))
    total = weights[counted[0]] * tensors[0]
    for name, log_prob in zip(counted[1:], tensors[1:], strict=True):
        total = total + weights[name] * log_prob
    return total


def token_weights(sizes: Mapping[str, int]) -> dict[str, float]:
    """
    Weights with which [`multimodal_log_prob`] is one mean over the latent elements of all modalities together, as
    verl-omni takes it for LTX-2: each modality counts by its size.

    Args:
        sizes (mapping of `str` to `int`):
            Latent elements per sample of each modality (tokens times channels), above 0.

    Returns:
        `dict[str, float]`: Weights in the order of `sizes`, which sum to 1.

    Raises:
        `ValueError`: There is no modality, or a size is below 1.

    Example:

    ```python
    >>> token_weights({"video": 3000, "audio": 1000})
    {'video': 0.75, 'audio': 0.25}
    ```
    """
    empty = [name for name, size in sizes.items() if size < 1]
    if empty or not sizes:
        raise ValueError(
            f"Each modality has at least one latent element, got sizes {dict(sizes)}: pass {{'video': 1000}} for one "
            f"modality, and leave out those that are not generated."
        )
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items()}

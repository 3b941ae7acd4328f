# SPDX-License-Identifier: Apache-2.0
"""The sigma table of a sampler: made once, checked once, then passed around and read by step index."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor


# Schedulers that shift the grid in float32 may land one rounding above 1 for some shifts. Their value is kept.
_ABOVE_ONE = 1e-6

Number = TypeVar("Number", float, Tensor)


class SigmaTable(NamedTuple):
    """
    Noise levels of a sampler with `T` steps, and what the network is told at each step.

    Step `j` goes from `sigmas[j]` to `sigmas[j + 1]` and calls the network with `timesteps[j]`. Build one with
    [`make_sigma_table`], which checks it. Consumers take a step *index*: looking a noise level up by its float value
    fails as soon as a cast rounds it.

    Attributes:
        sigmas (`Tensor` of shape `(T + 1,)`, float32):
            Strictly decreasing noise levels from at most 1 (pure noise) to exactly 0 (data).
        timesteps (`Tensor` of shape `(T,)`, float32):
            Time input of the network, in the network's own units (`1000 * sigma` for SD3).
    """

    sigmas: Tensor
    timesteps: Tensor

    @property
    def num_steps(self) -> int:
        """`int`: Number of network calls `T`."""
        return self.sigmas.shape[0] - 1


def make_sigma_table(
    sigmas: Tensor | Sequence[float],
    timesteps: Tensor | Sequence[float] | None = None,
    num_steps: int | None = None,
) -> SigmaTable:
    """
    Check the noise levels that a scheduler or an engine reports, and return them as a table.

    The values are taken over as they are. Recomputing them (`timesteps / 1000`) is off by a rounding for some steps,
    which is enough to move a replayed log-prob.

    Args:
        sigmas (`Tensor` or sequence of `float`, length `T + 1`):
            Strictly decreasing noise levels, the first at most 1, the last exactly 0.
        timesteps (`Tensor` or sequence of `float`, length `T`, *optional*):
            Time input of the network. Defaults to `1000 * sigmas[:-1]`.
        num_steps (`int`, *optional*):
            The number of steps that was asked for. A table of another length is refused.

    Returns:
        [`SigmaTable`] in float32, on the device of `sigmas`.

    Raises:
        `ValueError`: A value is not finite, the levels do not decrease from at most 1 to exactly 0, or a length is
        wrong.

    Example:

    ```python
    >>> table = make_sigma_table([1.0, 0.75, 0.0])
    >>> table.num_steps, table.timesteps.tolist()
    (2, [1000.0, 750.0])
    ```
    """
    sigmas = torch.as_tensor(sigmas, dtype=torch.float32).detach()
    if sigmas.ndim != 1 or sigmas.shape[0] < 2:
        raise ValueError(
            f"`sigmas` is one row of at least 2 noise levels, got shape {tuple(sigmas.shape)}: [1.0, 0.0] is one step."
        )
    count = sigmas.shape[0] - 1
    if num_steps is not None and count != num_steps:
        raise ValueError(
            f"num_steps={num_steps} needs {num_steps + 1} sigmas ({num_steps} steps and the final 0), got {count + 1} "
            f"({count} steps): pass {num_steps + 1} sigmas, or num_steps={count}."
        )
    _check_noise_levels(sigmas)
    if timesteps is None:
        timesteps = sigmas[:-1] * 1000
    timesteps = torch.as_tensor(timesteps, dtype=torch.float32, device=sigmas.device).detach()
    if timesteps.shape != (count,):
        raise ValueError(
            f"{count + 1} sigmas make {count} steps, got timesteps of shape {tuple(timesteps.shape)}: pass {count} "
            f"timesteps, or None for 1000 * sigma."
        )
    if not timesteps.isfinite().all():
        raise ValueError(f"`timesteps` must be finite, got {timesteps.tolist()}: pass None for 1000 * sigma.")
    return SigmaTable(sigmas, timesteps)


def _check_noise_levels(sigmas: Tensor) -> None:
    """Raise a `ValueError` unless `sigmas` decrease strictly from at most 1 to exactly 0."""
    if not sigmas.isfinite().all():
        raise ValueError(
            f"`sigmas` must be finite, got {sigmas.tolist()}: some schedulers divide by zero for a single step, use 2 "
            f"steps or more."
        )
    if sigmas[0] > 1 + _ABOVE_ONE:
        raise ValueError(
            f"`sigmas` are noise levels of at most 1, got {sigmas[0].item():g} first: divide timesteps by 1000 to get "
            f"sigmas."
        )
    if sigmas[-1] != 0:
        raise ValueError(f"The last sigma must be exactly 0 (clean latents), got {sigmas[-1].item():g}: append 0.0.")
    rises = (sigmas[1:] >= sigmas[:-1]).nonzero().flatten()
    if rises.numel():
        at = int(rises[0])
        raise ValueError(
            f"`sigmas` must decrease at every step, got {sigmas[at].item():g} then {sigmas[at + 1].item():g} at step "
            f"{at}: pass them in sampling order, like [1.0, 0.5, 0.0]."
        )


def time_shift(u: Number, shift: float) -> Number:
    """
    Shift uniform times towards the noisy end: `shift * u / (1 + (shift - 1) * u)`.

    Args:
        u (`float` or `Tensor`):
            Times in `[0, 1]`.
        shift (`float`):
            Strength, above 0; 1 leaves `u` alone. 3 for SD3, 5 for HunyuanVideo.

    Returns:
        The shifted times, of the type and shape of `u`.

    Raises:
        `ValueError`: `shift` is not above 0.
    """
    if shift <= 0:
        raise ValueError(f"shift={shift} must be above 0: use 1.0 for no shift, or 3.0 as SD3 does.")
    return shift * u / (1 + (shift - 1) * u)


def shifted_sigmas(num_steps: int, shift: float) -> Tensor:
    """
    The grid of [DanceGRPO](https://huggingface.co/papers/2505.07818): uniform times from 1 to 0, shifted.

    It is *not* the grid of diffusers' `FlowMatchEulerDiscreteScheduler`, which shifts the end of its grid twice: with
    10 steps and shift 3 the last level above 0 is 0.25 here and 0.0089 there. Never mix the two in one run.

    Args:
        num_steps (`int`):
            Number of steps `T`, at least 1.
        shift (`float`):
            See [`time_shift`].

    Returns:
        `Tensor` of shape `(T + 1,)`, float32, from exactly 1 to exactly 0.

    Raises:
        `ValueError`: `num_steps` is below 1 or `shift` is not above 0.

    Example:

    ```python
    >>> shifted_sigmas(2, shift=3.0).tolist()
    [1.0, 0.75, 0.0]
    ```
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1: use 10 for rollouts.")
    uniform = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return time_shift(uniform, shift).to(torch.float32)

# SPDX-License-Identifier: Apache-2.0
"""
Solvers for the deterministic stretches of a sampler.

Like a transition, a solver step is linear: `x_next = a * x + b * v + c * x0_previous`, where `x0_previous` is the data
that the step before predicted. So a solver is a table with three numbers a step, made once from the sigmas. There is
no density here: the stochastic steps of a rollout are in [`transition_table`].
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from omnitrl.algorithms._tensors import at_least_float32, check_same_shape, per_row
from omnitrl.algorithms.sigmas import SigmaTable, make_sigma_table


class SolverTable(NamedTuple):
    """
    Coefficients of each step: `latents_coef * latents + velocity_coef * velocity + history_coef * x0_previous`.

    Built by [`solver_table`]. Keep it on the CPU, where reading a coefficient costs no synchronisation. A row of zeros
    is a step that the solver does not take (a stochastic one).

    Attributes:
        latents_coef (`Tensor` of shape `(T,)`, float32):
            Factor of the current latents.
        velocity_coef (`Tensor` of shape `(T,)`, float32):
            Factor of the predicted velocity (negative: sigma falls).
        history_coef (`Tensor` of shape `(T,)`, float32):
            Factor of the data predicted at the step before, 0 where the step needs none.
    """

    latents_coef: Tensor
    velocity_coef: Tensor
    history_coef: Tensor

    @property
    def num_steps(self) -> int:
        """`int`: Number of steps `T` of the sampler, stochastic ones included."""
        return self.latents_coef.shape[0]

    @property
    def needs_history(self) -> Tensor:
        """`Tensor` of shape `(T,)`, bool: the steps that take the data predicted at the step before."""
        return self.history_coef != 0


def _euler(sigmas: Tensor, multistep: list[int]) -> Tensor:
    """Rows of the Euler step, which is the first-order DPM-Solver++ step too: both are exact for a constant `x0`."""
    return torch.stack([torch.ones_like(sigmas[1:]), sigmas[1:] - sigmas[:-1], torch.zeros_like(sigmas[1:])])


def _dpmpp_2m(sigmas: Tensor, multistep: list[int]) -> Tensor:
    r"""
    DPM-Solver++(2M), midpoint form: the predicted data is extrapolated in \\( \lambda = \log((1 - t) / t) \\).

    With `r = (lambda_next - lambda) / (lambda - lambda_before)` the step takes `x0 + r / 2 * (x0 - x0_before)` for the
    data, where the first-order step takes `x0`. Coming from `t = 1`, `lambda_before` is minus infinity and `r` is 0:
    the Euler step, without a special case.
    """
    rows = _euler(sigmas, multistep)
    if multistep:
        # In float64, because near both ends a lambda is the logarithm of a small difference; and on the CPU, because
        # some accelerators have no float64. A first sigma of 1 + 1e-7 is pure noise and has no logarithm.
        exact = sigmas.to("cpu", torch.float64).clamp(max=1)
        before, now, then = (exact[[step + shift for step in multistep]] for shift in (-1, 0, 1))
        log_snr, log_snr_before, log_snr_next = (((1 - t) / t).log() for t in (now, before, then))
        half_ratio = (log_snr_next - log_snr) / (log_snr - log_snr_before) / 2
        share = 1 - then / now  # of the data in the step
        values = torch.stack([1 + share * half_ratio, (then - now) * (1 + half_ratio), -share * half_ratio])
        rows[:, multistep] = values.to(rows)
    return rows


ODE_SOLVERS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {"euler": _euler, "dpmpp_2m": _dpmpp_2m}


def solver_table(
    sigmas: Tensor | Sequence[float], solver: str = "euler", ode_steps: Iterable[int] = ()
) -> SolverTable:
    """
    Make the solver table of a sampler: the named solver on `ode_steps`, zeros on all other steps.

    `"euler"` rows are the ODE rows of [`transition_table`], bit for bit. `"dpmpp_2m"` is the second-order multistep
    solver of [DPM-Solver++](https://huggingface.co/papers/2211.01095) in its midpoint form, which
    [MixGRPO-Flash](https://huggingface.co/papers/2507.21802) and
    [DiffusionNFT](https://huggingface.co/papers/2509.16117) use. It needs no more network calls a step: it also reads
    what the step before predicted. The first step of every stretch of neighbouring ODE steps has no such prediction
    and is an Euler step, and so is the last step of the sampler, where the second order is not finite.

    Args:
        sigmas (`Tensor` or sequence of `float`, length `T + 1`):
            Noise levels, as [`make_sigma_table`] checks them.
        solver (`str`, defaults to `"euler"`):
            A key of `ODE_SOLVERS`: `"euler"` or `"dpmpp_2m"`.
        ode_steps (iterable of `int`, defaults to no step):
            Indices of the deterministic steps, in `0..T-1`.

    Returns:
        [`SolverTable`] of `T` rows, on the device of `sigmas`.

    Raises:
        `ValueError`: An unknown `solver`, or a step that the sampler does not have.

    Example:

    ```python
    >>> table = solver_table([1.0, 0.75, 0.5, 0.25, 0.0], "dpmpp_2m", ode_steps=[1, 2, 3])
    >>> table.needs_history.tolist()
    [False, False, True, False]
    >>> table.latents_coef.tolist()
    [0.0, 1.0, 1.25, 1.0]
    ```
    """
    sigmas = make_sigma_table(sigmas).sigmas
    num_steps = sigmas.shape[0] - 1
    if solver not in ODE_SOLVERS:
        raise ValueError(f"ode_solver={solver!r} is not known: use one of {', '.join(map(repr, ODE_SOLVERS))}.")
    steps = sorted({int(step) for step in ode_steps})
    wrong = [step for step in steps if not 0 <= step < num_steps]
    if wrong:
        raise ValueError(f"ode_steps has {wrong[0]}, but a sampler of {num_steps} steps has steps 0..{num_steps - 1}.")
    multistep = [step for step in steps if step - 1 in steps and step < num_steps - 1]
    table = torch.zeros(3, num_steps, dtype=sigmas.dtype, device=sigmas.device)
    table[:, steps] = ODE_SOLVERS[solver](sigmas, multistep)[:, steps]
    return SolverTable(*table)


def solver_step(latents: Tensor, velocity: Tensor, history: Tensor | None, table: SolverTable, step: int) -> Tensor:
    """
    One deterministic step: `latents_coef * latents + velocity_coef * velocity + history_coef * history`.

    Args:
        latents (`Tensor` of shape `(B, ...)`):
            Current latents.
        velocity (`Tensor` of shape `(B, ...)`):
            Predicted velocity, noise minus data.
        history (`Tensor` of shape `(B, ...)` or `None`):
            What [`predicted_data`] gave at the step before. Not read where `SolverTable.needs_history` is False.
        table ([`SolverTable`]):
            Coefficients of all steps.
        step (`int`):
            The step of all rows.

    Returns:
        `Tensor` of shape `(B, ...)`, float32 (float64 if an input has it).

    Raises:
        `ValueError`: The step is not one of the solver's, needs a history that is `None`, or shapes differ.

    Example:

    ```python
    >>> table = solver_table([1.0, 0.5, 0.0], "euler", ode_steps=[0, 1])
    >>> solver_step(torch.ones(1, 2), torch.ones(1, 2), None, table, step=0)
    tensor([[0.5000, 0.5000]])
    ```
    """
    if not 0 <= step < table.num_steps:
        raise ValueError(f"step={int(step)} is not one of the {table.num_steps} steps 0..{table.num_steps - 1}.")
    if table.velocity_coef[step] == 0:
        raise ValueError(
            f"step={int(step)} is not one of the deterministic steps of this table: add it to `ode_steps` of "
            f"solver_table, or draw it from its transition."
        )
    check_same_shape(latents=latents, velocity=velocity)
    latents, velocity = at_least_float32(latents, velocity)
    # Products and sums in the order of `transition_mean`, so that an Euler row gives the bits of the ODE transition.
    moved = (velocity * table.velocity_coef[step]).add_(latents * table.latents_coef[step])
    if not table.needs_history[step]:
        return moved
    if history is None:
        raise ValueError(
            f"step={int(step)} of a multistep solver needs the data predicted at step {int(step) - 1}, got "
            f"history=None: pass predicted_data(latents, velocity, sigma) of that step."
        )
    check_same_shape(latents=latents, history=history)
    return moved.add_(history.to(moved) * table.history_coef[step])


def predicted_data(latents: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """
    The clean data that a velocity predicts: `x0 = latents - sigma * velocity`.

    Args:
        latents (`Tensor` of shape `(B, ...)`):
            Latents at noise level `sigma`.
        velocity (`Tensor` of shape `(B, ...)`):
            Velocity there, noise minus data.
        sigma (`float` or `Tensor` of one element or of shape `(B,)`):
            Noise level of all rows, or of each row.

    Returns:
        `Tensor` of shape `(B, ...)`, float32 (float64 if an input has it).

    Raises:
        `ValueError`: Shapes differ, or `sigma` has neither one value nor one per row.

    Example:

    ```python
    >>> predicted_data(torch.ones(1, 2), torch.ones(1, 2), 0.75)
    tensor([[0.2500, 0.2500]])
    ```
    """
    check_same_shape(latents=latents, velocity=velocity)
    latents, velocity = at_least_float32(latents, velocity)
    level = per_row(sigma, latents, "sigma").reshape(-1, *[1] * (latents.ndim - 1))
    return latents - level * velocity


def thin_tail(table: SigmaTable, last_step: int, ratio: float) -> SigmaTable:
    """
    A sampler with fewer steps after its last stochastic one: the tail of
    [MixGRPO-Flash](https://huggingface.co/papers/2507.21802).

    Of the `R = T - 1 - last_step` steps after `last_step`, `max(1, floor(ratio * R))` are kept. Their grid points are
    taken from the table, evenly by index and with both ends, so the tail starts where `last_step` ends, ends at
    exactly 0, and the network sees only noise levels and timesteps that the table has. Step indices up to `last_step`
    keep their meaning.

    Args:
        table ([`SigmaTable`]):
            The sampler at full length.
        last_step (`int`):
            The last stochastic step, in `0..T-2`.
        ratio (`float`):
            Share of the steps after it that is kept, in `(0, 1]`. 0.4 in MixGRPO-Flash, 0.2 with a frozen window. 1
            gives the table back.

    Returns:
        [`SigmaTable`] of `last_step + 1 + max(1, floor(ratio * R))` steps.

    Raises:
        `ValueError`: `ratio` or `last_step` is out of range.

    Example:

    ```python
    >>> table = make_sigma_table([1.0, 0.875, 0.75, 0.5, 0.25, 0.0])
    >>> thin_tail(table, last_step=0, ratio=0.5).sigmas.tolist()
    [1.0, 0.875, 0.5, 0.0]
    ```
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"tail_ratio={ratio} must be above 0 and at most 1: use 1.0 to keep every step, or 0.4.")
    num_steps = table.num_steps
    if not 0 <= last_step <= num_steps - 2:
        raise ValueError(
            f"last_step={last_step} leaves no tail in a sampler of {num_steps} steps: use 0 to {num_steps - 2}."
        )
    remaining = num_steps - 1 - last_step
    # A product that should be whole counts as whole: 0.29 of 100 steps is 29, whatever the float product says.
    kept = max(1, int(ratio * remaining + 1e-9))
    # Rounded half up in whole numbers. Neighbours are at least `remaining / kept >= 1` apart, so none comes twice.
    points = [last_step + 1 + (2 * index * remaining + kept) // (2 * kept) for index in range(kept + 1)]
    grid = [*range(last_step + 1), *points]
    return SigmaTable(table.sigmas[grid], table.timesteps[grid[:-1]])

# SPDX-License-Identifier: Apache-2.0
"""
Which steps of a rollout are stochastic, and which of those are trained.

Everything here is a pure function of `(seed, step)`: all members of a group and all ranks get the same steps without
talking to each other, and a resumed run continues where it was.
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence


def _generator(purpose: str, seed: int, step: int) -> random.Random:
    """A private generator. `hash()` of Python differs between processes, so the key goes through SHA-256."""
    key = hashlib.sha256(f"{purpose}/{seed}/{step}".encode()).digest()
    return random.Random(int.from_bytes(key[:8], "big"))


def _all(low: int, high: int, size: int, seed: int, step: int, interval: int) -> int:
    """Every step of the range: Flow-GRPO and DanceGRPO."""
    return low


def _first(low: int, high: int, size: int, seed: int, step: int, interval: int) -> int:
    """The noisiest steps of the range, always the same: Flow-GRPO-Fast and MixGRPO's frozen window."""
    return low


def _random(low: int, high: int, size: int, seed: int, step: int, interval: int) -> int:
    """A start drawn anew for each step, uniform over all windows that fit the range."""
    return _generator("window", seed, step // interval).randint(low, high - size)


def _progressive(low: int, high: int, size: int, seed: int, step: int, interval: int) -> int:
    """From the start of the range to its end, one step further every `interval`, then back to the start: MixGRPO."""
    return low + (step // interval) % (high - size - low + 1)


WINDOW_STRATEGIES: dict[str, Callable[[int, int, int, int, int, int], int]] = {
    "all": _all,
    "first": _first,
    "random": _random,
    "progressive": _progressive,
}


def sde_window(
    strategy: str,
    num_steps: int,
    size: int | None = None,
    window_range: tuple[int, int] | None = None,
    seed: int = 0,
    step: int = 0,
    interval: int = 1,
) -> tuple[int, ...]:
    """
    The stochastic steps of one rollout, as [MixGRPO](https://huggingface.co/papers/2507.21802) and Flow-GRPO-Fast
    choose them.

    The window is contiguous, lies in the range, has exactly `size` steps, and never holds the last step of the
    sampler, which is an ODE step.

    | strategy | window |
    |---|---|
    | `"all"` | the whole range |
    | `"first"` | the first `size` steps of the range |
    | `"random"` | `size` steps, the start uniform over all that fit, drawn anew every `interval` |
    | `"progressive"` | `size` steps, from the start of the range one on every `interval`, then again |

    Args:
        strategy (`str`):
            A key of `WINDOW_STRATEGIES`.
        num_steps (`int`):
            Number of sampler steps `T`, at least 2.
        size (`int`, *optional*):
            Steps in the window. Needed for `"random"` and `"progressive"`; the whole range for `"all"` and `"first"`.
        window_range (`tuple[int, int]`, *optional*):
            The window stays in `low..high-1`. Defaults to `(0, T - 1)`; a larger `high` is clipped to that.
        seed (`int`, defaults to 0):
            Seed of the run.
        step (`int`, defaults to 0):
            Global step of the run, or number of the rollout.
        interval (`int`, defaults to 1):
            For how many steps a window stays. 25 in the MixGRPO recipe.

    Returns:
        `tuple[int, ...]`: Step indices, ascending, never empty.

    Raises:
        `ValueError`: An unknown strategy, or a size or a range that cannot hold a window.

    Example:

    ```python
    >>> sde_window("all", num_steps=4)
    (0, 1, 2)
    >>> [sde_window("progressive", num_steps=5, size=2, step=step) for step in range(4)]
    [(0, 1), (1, 2), (2, 3), (0, 1)]
    ```
    """
    if strategy not in WINDOW_STRATEGIES:
        known = ", ".join(map(repr, WINDOW_STRATEGIES))
        raise ValueError(f"sde_window_strategy={strategy!r} is not known: use one of {known}.")
    if interval < 1 or step < 0:
        raise ValueError(f"interval={interval} must be at least 1 and step={step} at least 0: use interval=1, step=0.")
    low, high = _check_range(num_steps, window_range)
    size = _check_size(strategy, size, low, high)
    start = WINDOW_STRATEGIES[strategy](low, high, size, seed, step, interval)
    return tuple(range(start, start + size))


def _check_range(num_steps: int, window_range: tuple[int, int] | None) -> tuple[int, int]:
    """The range with its end clipped before the last step, and at least one step in it."""
    if num_steps < 2:
        raise ValueError(
            f"num_inference_steps={num_steps} leaves no stochastic step (the last one is an ODE step): use 2 or more."
        )
    low, high = window_range if window_range is not None else (0, num_steps - 1)
    clipped = min(high, num_steps - 1)
    if low < 0 or low >= clipped:
        raise ValueError(
            f"sde_window_range=({low}, {high}) holds none of the steps 0..{num_steps - 2} that may be stochastic with "
            f"{num_steps} sampler steps: use (0, {num_steps - 1})."
        )
    return low, clipped


def _check_size(strategy: str, size: int | None, low: int, high: int) -> int:
    """The size of the window, which must fit the range and mean something for the strategy."""
    room = high - low
    if size is None:
        if strategy in ("random", "progressive"):
            raise ValueError(
                f"sde_window_strategy={strategy!r} needs the size of the window: set sde_window_size={min(2, room)}, "
                f"or use sde_window_strategy='all'."
            )
        return room
    if not 1 <= size <= room:
        raise ValueError(
            f"sde_window_size={size} does not fit steps {low}..{high - 1} (the last sampler step is an ODE step): use "
            f"1 to {room}."
        )
    if strategy == "all" and size != room:
        raise ValueError(
            f"sde_window_size={size} has no meaning for sde_window_strategy='all', which takes all {room} steps: "
            f"leave it None, or use sde_window_strategy='first'."
        )
    return size


def trained_steps(sde_steps: Sequence[int], fraction: float, seed: int, step: int) -> tuple[int, ...]:
    """
    A random share of the stochastic steps, to be trained in this step of the run.

    `max(1, floor(fraction * n))` of the `n` steps are drawn, as DanceGRPO does with a share of 0.6. A product that
    should be whole counts as whole (0.29 of 100 is 29, whatever the rounding of the float product).

    Args:
        sde_steps (sequence of `int`):
            The stochastic steps, see [`sde_window`].
        fraction (`float`):
            Share that is trained, in `(0, 1]`.
        seed (`int`):
            Seed of the run.
        step (`int`):
            Global step of the run, or number of the rollout.

    Returns:
        `tuple[int, ...]`: Step indices, ascending, never empty.

    Raises:
        `ValueError`: `fraction` is not in `(0, 1]`, or there is no stochastic step.

    Example:

    ```python
    >>> trained_steps((0, 1, 2), fraction=1.0, seed=0, step=0)
    (0, 1, 2)
    ```
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"timestep_fraction={fraction} must be above 0 and at most 1: use 1.0 to train every step.")
    if not sde_steps:
        raise ValueError("There is no stochastic step to train, got sde_steps=(): use sde_window_strategy='all'.")
    count = max(1, math.floor(fraction * len(sde_steps) + 1e-9))
    return tuple(sorted(_generator("trained_steps", seed, step).sample(list(sde_steps), count)))

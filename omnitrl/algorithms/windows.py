# SPDX-License-Identifier: Apache-2.0
"""
Which steps of a rollout are stochastic, and which of those are trained.

Everything here is a pure function of `(seed, step)`: all members of a group and all ranks get the same steps without
talking to each other, and a resumed run continues where it was.

A sliding window reaches the end of its range even where the stride does not divide the way: the last window then lies
against the end, so every step of the range is covered in a cycle. (MixGRPO's own schedule cuts its last windows, down
to an empty one.)
"""

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


def _generator(purpose: str, seed: int, step: int) -> random.Random:
    """A private generator. `hash()` of Python differs between processes, so the key goes through SHA-256."""
    key = hashlib.sha256(f"{purpose}/{seed}/{step}".encode()).digest()
    return random.Random(int.from_bytes(key[:8], "big"))


class WindowRequest(NamedTuple):
    """
    The checked arguments of [`sde_window`], as every entry of `WINDOW_STRATEGIES` takes them.

    Attributes:
        low (`int`): First step of the range.
        high (`int`): The step after the last one of the range.
        size (`int`): Steps in the window, `1..high - low`.
        seed (`int`): Seed of the run.
        step (`int`): Global step of the run, or number of the rollout.
        interval (`int`): For how many steps a window stays.
        stride (`int`): How far a sliding window moves, `1..size`.
        min_interval (`int`): For how many steps the last window of `"decay"` stays.
        decay_rate (`float`): Rate of `"exp_decay"` per step of the sampler.
        decay_start (`int`): Distance from `low` at which `"exp_decay"` begins.
    """

    low: int
    high: int
    size: int
    seed: int
    step: int
    interval: int = 1
    stride: int = 1
    min_interval: int = 1
    decay_rate: float = 0.1
    decay_start: int = 0

    @property
    def starts(self) -> list[int]:
        """Starts of a sliding window, in order. The last one that fits is always among them, whatever the stride."""
        last = self.high - self.size
        return [*range(self.low, last, self.stride), last]


def _from(start: int, request: WindowRequest) -> tuple[int, ...]:
    """The window that begins at `start`."""
    return tuple(range(start, start + request.size))


def _slide(request: WindowRequest, stays: Sequence[int]) -> tuple[int, ...]:
    """The window at `request.step`, where the window at each start stays for so many steps; after the last, again."""
    ends = list(accumulate(stays))
    return _from(request.starts[bisect_right(ends, request.step % ends[-1])], request)


def _all(request: WindowRequest) -> tuple[int, ...]:
    """Every step of the range: Flow-GRPO and DanceGRPO."""
    return _from(request.low, request)


def _first(request: WindowRequest) -> tuple[int, ...]:
    """The noisiest steps of the range, always the same: MixGRPO-Flash*, whose window is frozen."""
    return _from(request.low, request)


def _random(request: WindowRequest) -> tuple[int, ...]:
    """A start drawn anew every `interval`, uniform over all windows that fit the range."""
    draw = _generator("window", request.seed, request.step // request.interval)
    return _from(draw.randint(request.low, request.high - request.size), request)


def _progressive(request: WindowRequest) -> tuple[int, ...]:
    """From the start of the range to its end, `stride` further every `interval`, then back to the start: MixGRPO."""
    return _slide(request, [request.interval] * len(request.starts))


def _decay(request: WindowRequest) -> tuple[int, ...]:
    """As progressive, with a stay that falls linearly: noisy steps, which set the layout, are trained for longer."""
    reach = request.high - request.size - request.low
    if reach == 0:
        return _from(request.low, request)
    # In whole numbers, because a float that falls short of one would lose a step of the stay.
    stays = [
        (request.interval * (reach - gone) + request.min_interval * gone) // reach
        for gone in (start - request.low for start in request.starts)
    ]
    return _slide(request, stays)


def _exp_decay(request: WindowRequest) -> tuple[int, ...]:
    """As progressive, with a stay that falls exponentially from `decay_start` on."""
    gone = [max(0, start - request.low - request.decay_start) for start in request.starts]
    return _slide(request, [max(1, math.ceil(request.interval * math.exp(-request.decay_rate * l))) for l in gone])


def _scattered(request: WindowRequest) -> tuple[int, ...]:
    """Steps drawn without replacement every `interval`, not necessarily neighbours: Flow-Factory's `sde_steps`."""
    draw = _generator("scattered", request.seed, request.step // request.interval)
    return tuple(sorted(draw.sample(range(request.low, request.high), request.size)))


WINDOW_STRATEGIES: dict[str, Callable[[WindowRequest], tuple[int, ...]]] = {
    "all": _all,
    "first": _first,
    "random": _random,
    "progressive": _progressive,
    "decay": _decay,
    "exp_decay": _exp_decay,
    "scattered": _scattered,
}


def sde_window(
    strategy: str,
    num_steps: int,
    size: int | None = None,
    window_range: tuple[int, int] | None = None,
    seed: int = 0,
    step: int = 0,
    interval: int = 1,
    stride: int = 1,
    min_interval: int = 1,
    decay_rate: float = 0.1,
    decay_start: int = 0,
) -> tuple[int, ...]:
    """
    The stochastic steps of one rollout, as [MixGRPO](https://huggingface.co/papers/2507.21802) and Flow-GRPO-Fast
    choose them.

    The steps lie in the range, are exactly `size`, and never hold the last step of the sampler, which is an ODE step.
    All strategies but `"scattered"` give neighbours.

    | strategy | steps |
    |---|---|
    | `"all"` | the whole range |
    | `"first"` | the first `size` steps of the range |
    | `"random"` | `size` steps, the start uniform over all that fit, drawn anew every `interval` |
    | `"progressive"` | `size` steps, from the start of the range `stride` on every `interval`, then again |
    | `"decay"` | the same, staying for `interval` steps at first and falling linearly to `min_interval` at the end |
    | `"exp_decay"` | the same, staying for `max(1, ceil(interval * exp(-decay_rate * distance)))` steps |
    | `"scattered"` | `size` steps of the range drawn without replacement every `interval` |

    Args:
        strategy (`str`):
            A key of `WINDOW_STRATEGIES`.
        num_steps (`int`):
            Number of sampler steps `T`, at least 2.
        size (`int`, *optional*):
            Steps in the window. Needed by all strategies but `"all"` and `"first"`, which default to the whole range.
        window_range (`tuple[int, int]`, *optional*):
            The window stays in `low..high-1`. Defaults to `(0, T - 1)`; a larger `high` is clipped to that.
        seed (`int`, defaults to 0):
            Seed of the run.
        step (`int`, defaults to 0):
            Global step of the run, or number of the rollout.
        interval (`int`, defaults to 1):
            For how many steps a window stays (the first window, for the two decays). 25 in the MixGRPO recipe.
        stride (`int`, defaults to 1):
            How many sampler steps a sliding window moves at a time, `1..size`.
        min_interval (`int`, defaults to 1):
            For how many steps the last window of `"decay"` stays, `1..interval`. Used by `"decay"` only.
        decay_rate (`float`, defaults to 0.1):
            How fast the stay falls per sampler step. Used by `"exp_decay"` only.
        decay_start (`int`, defaults to 0):
            Distance of the window from the start of the range up to which the stay is `interval`; what lies beyond is
            the `distance` of `"exp_decay"`. 13 in MixGRPO.

    Returns:
        `tuple[int, ...]`: Step indices, ascending, never empty.

    Raises:
        `ValueError`: An unknown strategy, a size or a range that cannot hold a window, or an option out of range.

    Example:

    ```python
    >>> sde_window("all", num_steps=4)
    (0, 1, 2)
    >>> [sde_window("progressive", num_steps=5, size=2, step=step) for step in range(4)]
    [(0, 1), (1, 2), (2, 3), (0, 1)]
    >>> [sde_window("progressive", num_steps=6, size=2, step=step, stride=2) for step in range(4)]
    [(0, 1), (2, 3), (3, 4), (0, 1)]
    ```
    """
    if strategy not in WINDOW_STRATEGIES:
        known = ", ".join(map(repr, WINDOW_STRATEGIES))
        raise ValueError(f"sde_window_strategy={strategy!r} is not known: use one of {known}.")
    low, high = _check_range(num_steps, window_range)
    size = _check_size(strategy, size, low, high)
    request = WindowRequest(low, high, size, seed, step, interval, stride, min_interval, decay_rate, decay_start)
    _check_options(request)
    return WINDOW_STRATEGIES[strategy](request)


def _check_options(request: WindowRequest) -> None:
    """Raise a `ValueError` for a number that no schedule can follow, also where this strategy would not read it."""
    if request.step < 0:
        raise ValueError(f"step={request.step} must be at least 0: use step=0 for the first rollout.")
    if request.interval < 1:
        raise ValueError(
            f"sde_window_interval={request.interval} must be at least 1: use 1 to move the window with every rollout."
        )
    if not 1 <= request.stride <= request.size:
        raise ValueError(
            f"sde_window_stride={request.stride} would leave steps between two windows of {request.size} that are "
            f"never stochastic, or not move: use 1 to {request.size}, or sde_window_strategy='first' to stay."
        )
    if not 1 <= request.min_interval <= request.interval:
        raise ValueError(
            f"sde_window_min_interval={request.min_interval} must be at least 1 and at most "
            f"sde_window_interval={request.interval}, from which the stay falls: use 1."
        )
    if not 0 <= request.decay_rate < math.inf:
        raise ValueError(f"sde_window_decay_rate={request.decay_rate} must be a finite number of at least 0: use 0.1.")
    if request.decay_start < 0:
        raise ValueError(
            f"sde_window_decay_start={request.decay_start} must be at least 0: use 0 to let the stay fall at once."
        )


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
        if strategy not in ("all", "first"):
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

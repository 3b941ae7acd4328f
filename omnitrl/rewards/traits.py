# SPDX-License-Identifier: Apache-2.0
"""What a reward says of itself, so that the runner calls it in the way that suits it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from omnitrl.errors import InputError


MEDIA_KINDS = ("image", "video", "audio", "text", "latents")
"""What a reward may look at."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RewardTraits:
    """
    How a reward wants to be called.

    A function gets them from [`reward_traits`] or [`groupwise`], an object or a class has them as its attribute
    `traits`. A reward without traits is called with whatever media there are, for each chunk of samples as it comes.

    Args:
        media (`tuple[str, ...]`):
            The kinds of media that it takes, of `MEDIA_KINDS`, a single one also as a string; empty for whatever is
            decoded. With `"latents"`, which stands alone, `completions` are the clean latents, one float32 tensor a
            row, and nothing is decoded where all rewards are such.
        groupwise (`bool`):
            Called once for each group, with all of its members at once but for those that could not be decoded.
        deterministic (`bool`):
            The same media and columns always give the same value, whatever else is in the call, so that a value may be
            kept and used again (`reward_cache_size`).
        batch_size (`int`, *optional*):
            Most rows of one call. Larger chunks are cut, and small ones that wait are joined; which ones meet depends
            on how long others took.
        in_process (`bool`):
            Called in processes of its own (`reward_num_processes`), for rewards of pure Python that would hold the
            interpreter's lock; one that takes longer than the time-out is killed. The reward must be importable by
            name, and its arguments and answers are pickled between the processes.
    """

    media: tuple[str, ...] = ()
    groupwise: bool = False
    deterministic: bool = False
    batch_size: int | None = None
    in_process: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "media", _kinds(self.media))
        unknown = sorted(set(self.media) - set(MEDIA_KINDS))
        if unknown:
            raise InputError(f"media={unknown[0]!r} is unknown: use {', '.join(map(repr, MEDIA_KINDS))}.")
        if "latents" in self.media and len(self.media) > 1:
            raise InputError(f"media={self.media} mixes latents with decoded media: use 'latents' alone.")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size={self.batch_size} must be at least 1: use 16, or None for no bound.")
        if self.groupwise and self.batch_size is not None:
            raise InputError("A groupwise reward is called with whole groups: leave batch_size out.")


def _kinds(media: str | Sequence[str]) -> tuple[str, ...]:
    """Kinds of media, of which one may be given as it is."""
    return (media,) if isinstance(media, str) else tuple(media)


NO_TRAITS = RewardTraits()


def reward_traits(
    media: str | tuple[str, ...] = (),
    groupwise: bool = False,
    deterministic: bool = False,
    batch_size: int | None = None,
    in_process: bool = False,
) -> Callable[[F], F]:
    """
    Decorator that states the [`RewardTraits`] of a reward function.

    Example:

    ```python
    @reward_traits(media="image", deterministic=True)
    def red_share(completions, **kwargs):
        return [np.asarray(image)[..., 0].mean() / 255 for image in completions]
    ```
    """
    traits = RewardTraits(_kinds(media), groupwise, deterministic, batch_size, in_process)

    def decorate(function: F) -> F:
        function.traits = traits  # type: ignore[attr-defined]
        return function

    return decorate


def groupwise(function: F) -> F:
    """
    Decorator for a reward that compares the members of a group: it is called with one whole group at a time.

    Example:

    ```python
    @groupwise
    def brightest(completions, **kwargs):
        means = [np.asarray(image).mean() for image in completions]
        return [float(mean == max(means)) for mean in means]
    ```
    """
    function.traits = replace(traits_of(function), groupwise=True)  # type: ignore[attr-defined]
    return function


def traits_of(function: Any) -> RewardTraits:
    """
    The traits of a reward: its own, else those of the function within a `partial`, or of the method that an object is
    called by; the usual ones where none are stated.
    """
    while isinstance(function, functools.partial) and not hasattr(function, "traits"):
        function = function.func
    method = getattr(function, "forward", type(function).__call__)  # a module's __call__ hands everything to forward
    found = (getattr(one, "traits", None) for one in (function, method))
    return next((traits for traits in found if isinstance(traits, RewardTraits)), NO_TRAITS)


def differentiable_as(form: Callable[..., Any]) -> Callable[[F], F]:
    """
    Decorator that names the form of a reward that a gradient is taken through, as its attribute `differentiable`.

    That form takes `completions` as one tensor (B, 3, H, W) of pixels in [0, 1] and returns a tensor (B,): see
    [`DifferentiableRewards`]. An object has such a callable, or a module, as its attribute or property
    `differentiable`.

    Args:
        form (`Callable`):
            The same reward as a function of tensors.

    Example:

    ```python
    def red_share_of_pixels(completions, **kwargs):
        return completions[:, 0].mean(dim=(1, 2))


    @differentiable_as(red_share_of_pixels)
    def red_share(completions, **kwargs):
        return [np.asarray(image)[..., 0].mean() / 255 for image in completions]
    ```
    """

    def decorate(function: F) -> F:
        function.differentiable = form  # type: ignore[attr-defined]
        return function

    return decorate


def differentiable_form(reward: Any) -> Callable[..., Any] | None:
    """
    The form of a reward that a gradient is taken through, where it names one; see [`differentiable_as`].

    Args:
        reward (`Callable`):
            A reward. A `functools.partial` of one has the form of that one, with the same arguments filled in.

    Returns:
        `Callable` or `None`: `None` for a reward that names none, which may be such a form itself.
    """
    form = getattr(reward, "differentiable", None)
    if form is None and isinstance(reward, functools.partial):
        inner = differentiable_form(reward.func)
        return None if inner is None else functools.partial(inner, *reward.args, **reward.keywords)
    return form if callable(form) else None

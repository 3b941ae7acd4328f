# SPDX-License-Identifier: Apache-2.0
"""One reward as the runner sees it: its name, the arguments that it accepts, and the reading of what it returns."""

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from omnitrl.errors import InputError, RunError

from .traits import NO_TRAITS, RewardTraits, traits_of


RewardFunc = Callable[..., Any]
"""A callable `(*, prompts, completions, ...) -> list[float | None]`, or a coroutine of it. See [`omnitrl.rewards`]."""

# The keywords that the runner fills; a dataset column may not have one of these names.
RUNNER_ARGUMENTS = ("prompts", "completions", "trainer_state", "log_metric", "log_extra")


class RewardError(RunError):
    """
    A reward cannot be used: it broke the calling contract, or it failed too often.

    A reward may raise it itself to stop the run at once; any other exception is retried.
    """


class RewardUnavailable(RunError):
    """
    The service behind a reward is away for now: connection refused, starting, overloaded.

    Raise it from a reward, and the runner waits for the service, up to its `max_wait`, asking again with growing waits
    and with one call at a time. Any other exception is retried `max_retries` times.

    Args:
        message (`str`):
            What was tried and what came back; it is shown when the wait has no end.
        retry_after (`float`, *optional*):
            Seconds after which the service asks to be called again.

    Example:

    ```python
    >>> raise RewardUnavailable("the scorer at http://10.0.0.7:8000 answers 503", retry_after=5.0)
    Traceback (most recent call last):
    ...
    omnitrl.rewards.contract.RewardUnavailable: the scorer at http://10.0.0.7:8000 answers 503
    ```
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Reward:
    """
    A reward function with what is known of it before the first call.

    Args:
        function (`Callable`):
            What to call.
        name (`str`):
            Unique name, used in metrics and messages.
        is_async (`bool`):
            Whether calling it returns a coroutine.
        accepts (`frozenset[str]` or `None`):
            Names of the keywords that it takes; `None` means any.
        requires (`frozenset[str]`):
            Those among them that have no default.
        traits ([`RewardTraits`]):
            How it wants to be called.
    """

    function: RewardFunc
    name: str
    is_async: bool
    accepts: frozenset[str] | None
    requires: frozenset[str]
    traits: RewardTraits = NO_TRAITS

    @classmethod
    def from_callable(cls, function: RewardFunc, name: str) -> "Reward":
        """
        Looks at the signature of `function`.

        Raises:
            `TypeError`: if `function` has positional-only parameters, which cannot be filled by keyword.
            [`~omnitrl.errors.InputError`]: if it cannot be called in a process of its own, though its traits ask it.
        """
        accepts, requires = _parameters(function, name)
        is_async, traits = is_async_callable(function), traits_of(function)
        if traits.in_process and (is_async or isinstance(function, nn.Module)):
            raise InputError(
                f"reward {name!r} is {'asynchronous' if is_async else 'a module'}, which runs in this process: use "
                "in_process=False, which is for functions of pure Python."
            )
        return cls(function, name, is_async, accepts, requires, traits)

    def move(self, device: str | torch.device) -> None:
        """
        Moves a reward that is a model or has a method `to` as models do, or sets its attribute `device`, which says
        where it will be loaded; any other stays as it is.

        Raises:
            [`~omnitrl.errors.InputError`]: there is no such device.
        """
        model: Any = _unwrap_partial(self.function)
        try:
            if callable(getattr(model, "to", None)):
                model.to(device)
            elif hasattr(model, "device"):
                model.device = torch.device(device)
        except (RuntimeError, AssertionError) as error:  # what PyTorch raises for a device that it has not
            raise InputError(
                f"reward {self.name!r} cannot be moved to device={str(device)!r} ({error}): use 'cpu', or None to "
                "leave it where it is."
            ) from error

    def check(self, available: Set[str]) -> None:
        """
        Checks that every argument that the function requires is among the `available` ones.

        Raises:
            `RewardError`: naming the first one that is not.
        """
        missing = sorted(self.requires - available)
        if missing:
            columns = sorted(available - set(RUNNER_ARGUMENTS))
            raise RewardError(
                f"reward {self.name!r} requires the argument {missing[0]!r}, which is neither a dataset column (there "
                f"are: {', '.join(columns) or 'none besides the prompt'}) nor one of {', '.join(RUNNER_ARGUMENTS)}: "
                f"rename it, for example to 'completions' for the media, or give it a default."
            )

    def arguments(self, available: dict[str, Any]) -> dict[str, Any]:
        """Those of the `available` keywords that the function takes."""
        if self.accepts is None:
            return available
        return {key: value for key, value in available.items() if key in self.accepts}

    def call(self, arguments: dict[str, Any]) -> Any:
        """Calls the function. Gradients are off in the threads where the runner does this."""
        model = _unwrap_partial(self.function)
        if isinstance(model, nn.Module) and model.training:
            model.eval()
        return self.function(**arguments)

    def values(self, returned: Any, count: int, prompts: Sequence[str] = ()) -> list[float | None]:
        """
        Reads the answer as `count` numbers; `None`, NaN and infinity are kept.

        Args:
            returned (`Any`):
                What the function returned.
            count (`int`):
                Rows that it was called with.
            prompts (`list[str]`, *optional*):
                Theirs, for the sentences.

        Raises:
            `RewardError`: if it is no sequence, has another length, or holds something that is not a number.
        """
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise RewardError(
                f"reward {self.name!r} returned a coroutine: define it with `async def` to have it awaited."
            )
        items = returned.tolist() if isinstance(returned, (torch.Tensor, np.ndarray)) else returned
        if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
            raise RewardError(
                f"reward {self.name!r} returned {_kind(returned)} for {count} rows, expected a list of {count} "
                f"numbers (or None), for example {[0.5] * min(count, 2)}.{_of_prompts(prompts)}"
            )
        if len(items) != count:
            raise RewardError(
                f"reward {self.name!r} returned {len(items)} values for {count} rows: it must return one value per "
                f"row, and None where it does not apply.{_of_prompts(prompts)}"
            )
        where = prompts if len(prompts) == count else [None] * count
        return [self._number(item, row, prompt) for row, (item, prompt) in enumerate(zip(items, where, strict=True))]

    def _number(self, item: Any, row: int, prompt: str | None) -> float | None:
        if item is None:
            return None
        if isinstance(item, (torch.Tensor, np.ndarray)) and item.ndim == 0:
            item = item.item()
        if isinstance(item, (numbers.Real, np.bool_)):
            return float(item)
        raise RewardError(
            f"reward {self.name!r} returned {_kind(item)} for row {row} ({item!r:.80}): every value must be a number "
            f"or None, for example 0.5.{_of_prompts([] if prompt is None else [prompt])}"
        )


def is_async_callable(function: RewardFunc) -> bool:
    """
    Whether calling `function` returns a coroutine.

    `inspect.iscoroutinefunction` alone looks at an object and not at its `__call__`, so that it takes an object with
    `async __call__` for a synchronous one.
    """
    function = _unwrap_partial(function)
    if isinstance(function, nn.Module):
        return inspect.iscoroutinefunction(function.forward)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def callable_name(function: RewardFunc) -> str:
    """Name of a function or method, and of an object that has one; class name of any other object."""
    function = _unwrap_partial(function)
    # Brackets are awkward in the metric names of most trackers.
    return getattr(function, "__name__", type(function).__name__).strip("<>")


def unique_names(functions: Iterable[RewardFunc]) -> list[str]:
    """Names of the functions in order; a repeated one gets the suffix `_1`, `_2`, and so on."""
    names: list[str] = []
    for function in functions:
        base = name = callable_name(function)
        suffix = 0
        while name in names:
            suffix += 1
            name = f"{base}_{suffix}"
        names.append(name)
    return names


def _unwrap_partial(function: RewardFunc) -> RewardFunc:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _parameters(function: RewardFunc, name: str) -> tuple[frozenset[str] | None, frozenset[str]]:
    # A module's __call__ takes anything and hands it to forward, whose signature is the one that counts.
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return None, frozenset()
    kinds = inspect.Parameter
    if any(p.kind is kinds.POSITIONAL_ONLY and p.default is kinds.empty for p in parameters):
        raise TypeError(
            f"reward {name!r} has positional-only parameters, but rewards are called by keyword: write it as "
            f"`def {name}(prompts, completions, **kwargs)`."
        )
    by_keyword = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    accepts = None if takes_any else frozenset(p.name for p in by_keyword)
    return accepts, frozenset(p.name for p in by_keyword if p.default is kinds.empty)


def _of_prompts(prompts: Sequence[str]) -> str:
    """Of which prompts something is said, as a sentence, or nothing where they are not known."""
    return f" That was for the {quoted_prompts(prompts)}." if prompts else ""


def quoted_prompts(prompts: Sequence[str]) -> str:
    """The first of some prompts, in short, for a sentence: `"prompt 'a cat' and 3 others"`."""
    distinct = list(dict.fromkeys(str(prompt) for prompt in prompts))
    others = f" and {len(distinct) - 1} other{'s' if len(distinct) > 2 else ''}" if len(distinct) > 1 else ""
    first = distinct[0] if len(distinct[0]) <= _PROMPT_LENGTH else f"{distinct[0][:_PROMPT_LENGTH]}…"
    return f"prompt {first!r}{others}"


# Characters of a prompt that a sentence quotes.
_PROMPT_LENGTH = 60


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"

# SPDX-License-Identifier: Apache-2.0
"""
Rewards that a gradient is taken through, for algorithms that learn from it ([`SRPOTrainer`]).

A differentiable reward is called like any other ([`omnitrl.rewards`]), with two differences: `completions` is one
tensor (B, 3, H, W) of pixels in [0, 1], and it returns a tensor (B,) that depends on them differentiably. A reward of
pictures that has such a form beside it ([`differentiable_as`]) may be given as it is, by its name for example.

Example:

```python
def red_share(completions, **kwargs):
    return completions[:, 0].mean(dim=(1, 2))
```
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnitrl.errors import InputError

from .contract import RUNNER_ARGUMENTS, Reward, RewardError, RewardFunc, unique_names
from .media import to_pil
from .registry import get_reward
from .traits import differentiable_form


class DifferentiableRewards:
    """
    Several differentiable rewards with their weights.

    Modules among them are frozen and put into evaluation mode.

    Args:
        reward_funcs (`Callable`, `str`, or a list of them):
            The rewards; a string is the name of a built-in one that has a differentiable form, such as
            `"brightness"`, or a path `package.module:function`.
        weights (`list[float]`, *optional*):
            One per reward, 1.0 each by default.

    Raises:
        [`~omnitrl.errors.InputError`]: no reward, or another number of weights.
    """

    def __init__(
        self, reward_funcs: str | RewardFunc | Sequence[str | RewardFunc], weights: list[float] | None = None
    ) -> None:
        given: list[Any] = [reward_funcs]
        if isinstance(reward_funcs, Sequence) and not (isinstance(reward_funcs, str) or callable(reward_funcs)):
            given = list(reward_funcs)
        functions = [get_reward(spec) for spec in given]
        if not functions:
            raise InputError("There is no reward: pass a function, or a list of them, as `reward_funcs`.")
        self.weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(self.weights) != len(functions):
            raise InputError(
                f"reward_weights has {len(self.weights)} values for {len(functions)} reward(s): give one for each."
            )
        forms = [differentiable_form(function) or function for function in functions]
        for form in forms:
            if isinstance(form, nn.Module):
                form.requires_grad_(False).eval()
        self._given = functions
        self._rewards = [Reward.from_callable(f, n) for f, n in zip(forms, unique_names(functions), strict=True)]

    @property
    def names(self) -> list[str]:
        """Unique names, used in metrics and messages."""
        return [reward.name for reward in self._rewards]

    def to(self, device: torch.device | str) -> "DifferentiableRewards":
        """Moves the modules among the rewards."""
        for reward in self._rewards:
            if isinstance(reward.function, nn.Module):
                reward.function.to(device)
        return self

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Tensor,
        rows: Sequence[dict[str, Any]],
        trainer_state: Any = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> Tensor:
        """
        Calls the rewards.

        Args:
            prompts (`Sequence[str]`):
                B prompts, which need not be those of the rows.
            completions (`Tensor`):
                (B, 3, H, W) in [0, 1].
            rows (`Sequence[dict]`):
                B dataset rows, for the other columns.
            trainer_state, log_metric:
                Passed on.

        Returns:
            `Tensor`: (B, F) float32, a column for each reward.

        Raises:
            [`~omnitrl.rewards.RewardError`]: a reward wants an argument that there is not, or returned something else
            than a tensor (B,).
        """
        columns = {name: [row.get(name) for row in rows] for row in rows for name in row if name != "prompt"}
        log_metric = log_metric or (lambda name, value: None)
        given = {"prompts": list(prompts), "completions": completions, **columns}
        given |= {"trainer_state": trainer_state, "log_metric": log_metric}
        return torch.stack([_call(reward, given, len(rows)) for reward in self._rewards], dim=1)

    def probe(self, pixels: Tensor, rows: Sequence[dict[str, Any]]) -> None:
        """
        Checks on an example that each reward has a gradient that can be followed.

        Args:
            pixels (`Tensor`):
                (B, 3, H, W) in [0, 1], what the decoder makes.
            rows (`Sequence[dict]`):
                B dataset rows.

        Raises:
            [`~omnitrl.errors.InputError`]: a reward returns numbers, or its gradient is missing or not finite.
        """
        for i, reward in enumerate(self._rewards):
            leaf = pixels.detach().clone().requires_grad_()
            try:
                with torch.enable_grad():
                    value = self([row["prompt"] for row in rows], leaf, rows)[:, i]
                    gradient = _gradient(value, leaf)
            except RewardError as error:
                raise InputError(str(error)) from error
            if gradient is None:
                raise InputError(
                    f"reward {reward.name!r} has no gradient with respect to the pixels: compute it of the tensor "
                    "`completions` with torch alone, without `detach`, `no_grad`, rounding or a way over PIL."
                )
            if not bool(gradient.isfinite().all()):
                raise InputError(
                    f"reward {reward.name!r} has a gradient that is not finite on an example of the decoder: keep its "
                    "logarithms, roots and divisions away from 0, for example with `clamp(min=1e-6)`."
                )

    def ordinary(self) -> list[RewardFunc]:
        """
        The same rewards for media, without a gradient: as they were given where they have a form for either, and else
        with pictures that become a tensor.
        """
        return [
            given if reward.function is not given else _for_media(reward)
            for given, reward in zip(self._given, self._rewards, strict=True)
        ]


def _gradient(value: Tensor, leaf: Tensor) -> Tensor | None:
    if not value.requires_grad:
        return None
    return torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0]


def _call(reward: Reward, given: dict[str, Any], count: int) -> Tensor:
    if reward.is_async:
        raise RewardError(f"reward {reward.name!r} is asynchronous: a differentiable reward is a plain function.")
    reward.check(given.keys() - {name for name in RUNNER_ARGUMENTS if name not in given})
    value = reward.call(reward.arguments(given))
    if not isinstance(value, Tensor):
        raise RewardError(
            f"reward {reward.name!r} returned a value of type {type(value).__name__}, which has no gradient: pass a "
            "reward that takes `completions` as a tensor (B, 3, H, W) in [0, 1] and returns a tensor (B,), such as "
            "`lambda completions, **_: completions.mean(dim=(1, 2, 3))` or 'brightness', and give others as "
            "`eval_reward_funcs`."
        )
    if value.shape != (count,):
        raise RewardError(
            f"reward {reward.name!r} returned a tensor of shape {tuple(value.shape)} for {count} rows: return one "
            f"number for each, of shape ({count},)."
        )
    return value.float()


def _for_media(reward: Reward) -> RewardFunc:
    def score(prompts: list[str], completions: list[Any], **kwargs: Any) -> list[float]:
        device = _device_of(reward.function)
        pixels = np.stack([np.asarray(to_pil(image)) for image in completions])
        given = {"prompts": prompts, "completions": torch.from_numpy(pixels).movedim(-1, 1).float().to(device) / 255}
        with torch.no_grad():
            return _call(reward, given | kwargs, len(prompts)).tolist()

    score.__name__ = reward.name
    return score


def _device_of(function: Any) -> torch.device:
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    return parameters[0].device if parameters else torch.device("cpu")

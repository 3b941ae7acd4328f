# SPDX-License-Identifier: Apache-2.0
"""A second set of the trained weights that stands in for them for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; of a whole one, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class PolicyAverage:
    """
    An average of the trained weights over time: the old policy of DiffusionNFT, the average that AWM stays close to.

    With LoRA it is a second set of adapter weights; with full fine-tuning, of all weights. The two sets change places
    while the average is used, so that adapters, whole networks, DDP and FSDP2 need no case of their own. Use it before
    the forward that has a backward: autograd must not see the exchange.

    Args:
        parameters (`Sequence[nn.Parameter]`):
            The trained parameters; the average starts equal to them.

    Example:

    ```python
    >>> average = PolicyAverage(parameters)
    >>> average.blend(parameters, decay=0.9)
    >>> with average.applied(parameters), torch.no_grad():
    ...     old_velocity = policy(latents, timesteps, conditions)
    ```
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._weights = [local(p.detach()).clone() for p in parameters]

    @torch.no_grad()
    def blend(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        """`average = decay · average + (1 - decay) · trained`; a decay of 0 copies the trained weights exactly."""
        for weight, parameter in zip(self._weights, parameters, strict=True):
            if decay == 0:
                weight.copy_(local(parameter.detach()))
            else:
                weight.lerp_(local(parameter.detach()), 1 - decay)

    @contextmanager
    def applied(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Exchanges the average and the trained weights; both are back at the end, bit for bit."""
        self._exchange(parameters)
        try:
            yield
        finally:
            self._exchange(parameters)

    def _exchange(self, parameters: Sequence[nn.Parameter]) -> None:
        # One by one, so that no third set of weights is ever there; in place, so that views of them stay valid.
        for weight, parameter in zip(self._weights, parameters, strict=True):
            trained = local(parameter.data)
            kept = trained.clone()
            trained.copy_(weight)
            weight.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """The weights of this process."""
        return {"weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for weight, saved in zip(self._weights, state["weights"], strict=True):
            weight.copy_(saved)

# SPDX-License-Identifier: Apache-2.0
"""What a trainer gives to the engine that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from omnitrl.models import FlowModel


def _do_nothing() -> None:
    return None


def _no_weights() -> dict[str, dict[str, Tensor]]:
    return {}


def _alone(values: list[Any]) -> list[Any]:
    return values


@dataclass(frozen=True)
class EngineContext:
    """
    What an engine is made of.

    Args:
        model ([`~omnitrl.models.FlowModel`]):
            The family, with the networks that are trained.
        args (`Any`, *optional*):
            The trainer's config, of which an engine reads the options that are its own.
        policy (`Callable[[], Callable]`, *optional*):
            Returns the module whose `forward` is the velocity; Accelerate may replace it when training begins.
        batch_size (`int`, defaults to 8):
            Samples per network call in this process.
        autocast (`Callable[[], ContextManager]`, *optional*):
            Precision context of network calls.
        half (`bool`, defaults to `False`):
            Whether networks compute in less than float32.
        on_step (`Callable[[], None]`, *optional*):
            Called while samples are made, several times a second; may raise to interrupt.
        weights (`Callable[[], Mapping]`, *optional*):
            Gives the trained weights, network → name → tensor, on the process of rank 0; every process calls it.
        gather (`Callable[[list], list]`, *optional*):
            Joins the lists of all processes; every process calls it.
        rank, world_size (`int`):
            Number of this process, and how many there are.
    """

    model: FlowModel
    args: Any = None
    policy: Callable[[], Callable[..., Tensor]] | None = None
    batch_size: int = 8
    autocast: Callable[[], AbstractContextManager] = nullcontext
    half: bool = False
    on_step: Callable[[], None] = _do_nothing
    weights: Callable[[], Mapping[str, Mapping[str, Tensor]]] = _no_weights
    gather: Callable[[list[Any]], list[Any]] = _alone
    rank: int = 0
    world_size: int = 1

# SPDX-License-Identifier: Apache-2.0
"""What workers of all kinds of models know of weights: an adapter's names and scale, what has arrived, a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


UNUSABLE = -2
"""Weight version of a server some of whose weights are new and some old."""


EXPERTS = ".experts."
"""What names of the weights of experts have in them."""


@dataclass
class Arriving:
    """
    Whole weights of a version, which come in several messages.

    Args:
        version (`int`):
            Theirs.
        following (`int`):
            Index of the message that comes next.
        sent (`list[str]`):
            Names of the tensors that have come.
    """

    version: int
    following: int = 0
    sent: list[str] = field(default_factory=list)


def take_bucket(arriving: Arriving | None, head: Mapping[str, Any], names: Iterable[str]) -> Arriving:
    """
    Notes that a message has come.

    Raises:
        `ValueError`: it is not the one that follows on what came before it.
    """
    if arriving is None or (arriving.version, arriving.following) != (head["version"], head["index"]):
        raise ValueError(
            f"Bucket {head['index']} of the weights {head['version']} does not follow on what came before it."
        )
    arriving.following += 1
    arriving.sent += names
    return arriving


def lora_a(module: str) -> str:
    """Name of the first tensor of a module's adapter."""
    return f"{module}.lora_A.weight"


def lora_b(module: str) -> str:
    """Name of the second one."""
    return f"{module}.lora_B.weight"


def scaling(config: Mapping[str, Any], name: str, rank: int) -> float:
    """What PEFT multiplies the update of a module by."""
    from peft.utils.other import get_pattern_key

    patterns = config.get("alpha_pattern") or {}
    key = get_pattern_key(list(patterns), name.partition(".")[2])
    alpha = float(patterns.get(key, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def report_on(version: int, expected: list[str], missing: list[str]) -> dict[str, Any]:
    """The fields of a [`~omnitrl.rollout.WeightReport`]."""
    return {
        "version": version,
        "bound": len(expected) - len(missing),
        "expected": len(expected),
        "missing": missing[:20],
    }


def quantization_method(quantization: Any) -> str | None:
    """Name of a quantization method."""
    if quantization is None:
        return None
    name = getattr(quantization, "get_name", None)
    return str(name()) if callable(name) else str(quantization)

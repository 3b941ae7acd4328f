# SPDX-License-Identifier: Apache-2.0
"""Which numbers say that a run is well, and what is known of their healthy range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Health(NamedTuple):
    """
    A metric to watch.

    Attributes:
        label (`str`): heading of its plot.
        note (`str`): what to expect and what to do.
        low (`float`, *optional*): lower end of the healthy band, in the metric's unit.
        high (`float`, *optional*): upper end of it.
    """

    label: str
    note: str
    low: float | None = None
    high: float | None = None


HEALTH = {
    "ratio/sum_log_std": Health(
        "update size: std of the summed log-ratio",
        "Healthy between 0.3 and 1 after the last update of a rollout. Lower learns slowly; above it, lower the "
        "learning rate or make fewer updates per rollout.",
        0.3,
        1.0,
    ),
    "clip_ratio/region_mean": Health(
        "clipped share of the ratios",
        "A few per cent at most after the first steps. More means that updates are too large for the clip range.",
    ),
    "frac_reward_zero_std": Health(
        "groups with equal rewards",
        "Such groups teach nothing. Near 1: the reward cannot tell samples apart, or the prompts are solved.",
    ),
    "kl": Health(
        "KL to the reference",
        "Grows slowly. A jump often comes with pictures that please the reward alone: look at the samples.",
    ),
    "watch/diversity": Health(
        "diversity: how far members of a group are apart",
        "May shrink somewhat as the policy learns. A steady fall says that all samples become alike.",
    ),
    "watch/entropy": Health("entropy of the pictures, in bits", "A steady fall says that pictures become flat."),
    "watch/saturation": Health("saturation of the pictures", "Rises where a reward likes gaudy colours."),
    "watch/jpeg_kilobytes": Health(
        "size of the pictures as JPEG, in kB", "Falls when detail is lost, and rises with noise and grids."
    ),
    "grad_norm": Health("gradient norm", "Steady after the first steps. Spikes: lower the learning rate."),
    "step_time": Health("seconds per step", "Steady. A slow rise points to a memory leak or a busy machine."),
}


def health_keys(history: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of [`HEALTH`] that the history has numbers for, in its order."""
    present = {key for row in history for key, value in row.items() if value is not None}
    return [key for key in HEALTH if key in present]


def series(history: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """The points (step, value) of a metric, in order; rows without it or without a number are left out."""
    return [(row["step"], row[key]) for row in history if row.get(key) is not None and row.get("step") is not None]

# SPDX-License-Identifier: Apache-2.0
"""Curves of a run as PNG files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrl.errors import InputError
from omnitrl.report.health import HEALTH, Health, series
from omnitrl.report.records import eval_set_of, format_duration, set_label


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, Any]]

TRAINING_COLOR = "#0969da"
SET_COLORS = ("#d1570a", "#1a7f5a", "#8250df", "#a4510f", "#57606a")
BAND_COLOR = "#2da44e"
MUTED, LINE = "#59636e", "#d1d9e0"


def evaluated_sets(history: History) -> list[str]:
    """Names of the sets with rewards in the history, the held-out set `"eval"` first."""
    names = {eval_set_of(key) for row in history for key, value in row.items() if value is not None}
    return sorted((name for name in names if name is not None), key=lambda name: (name != "eval", name))


def has_rewards(history: History) -> bool:
    """Whether there is a reward to draw, of training or of an evaluation."""
    return bool(series(history, "reward") or evaluated_sets(history))


def reward_curve(history: History, path: str | os.PathLike[str], title: str = "Reward") -> None:
    """
    Draw the reward over the steps: training as a line with a band of one standard deviation, evaluations as points.

    Args:
        history (`Sequence[Mapping[str, Any]]`):
            Rows of `metrics.jsonl`. Read are `step`, `reward`, `reward_std`, `eval_reward`, `eval_<set>_reward`, and
            `seconds`, which labels a second axis.
        path (`str` or `os.PathLike`):
            PNG to write; its folder is made if need be.
        title (`str`, *optional*, defaults to `"Reward"`):
            Heading.

    Raises:
        InputError: there is no reward in the history.

    Example:

    ```python
    >>> reward_curve(read_metrics("run/metrics.jsonl"), "run/reward_curve.png")
    ```
    """
    if not has_rewards(history):
        raise InputError(
            "history has no reward to draw: give rows with 'step' and 'reward' or 'eval_reward', for example "
            "[{'step': 1, 'reward': 0.5}]."
        )
    figure = _figure(7.2, 4.0)
    axes = figure.add_subplot()
    _style(axes)
    _draw_training(axes, history)
    for name, color in zip(evaluated_sets(history), cycle(SET_COLORS), strict=False):
        points = series(history, f"{name}_reward")
        steps, rewards = zip(*points, strict=True)
        label = f"{set_label(name)}: {rewards[0]:.3f} → {rewards[-1]:.3f}"
        axes.plot(steps, rewards, color=color, marker="o", markersize=5, linewidth=1.6, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.legend(frameon=False, loc="best", fontsize=9)
    _label_seconds(axes, history)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    _save(figure, path)


def small_multiples(history: History, keys: Sequence[str], path: str | os.PathLike[str]) -> None:
    """
    Draw one small plot for each metric, the healthy band shaded where one is known.

    Args:
        history (`Sequence[Mapping[str, Any]]`):
            Rows of `metrics.jsonl`.
        keys (`Sequence[str]`):
            Metrics to draw, for example `["kl", "ratio/sum_log_std"]`. One without numbers gets an empty plot.
        path (`str` or `os.PathLike`):
            PNG to write; its folder is made if need be.

    Raises:
        InputError: `keys` is empty.
    """
    if not keys:
        raise InputError("keys is empty: name at least one metric, for example ['kl'].")
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    figure = _figure(3.4 * columns, 2.3 * rows)
    for index, key in enumerate(keys):
        axes = figure.add_subplot(rows, columns, index + 1)
        _style(axes)
        health = HEALTH.get(key, Health(key, ""))
        points = series(history, key)
        if health.low is not None and health.high is not None:
            axes.axhspan(health.low, health.high, color=BAND_COLOR, alpha=0.12, linewidth=0)
        if points:
            steps, values = zip(*points, strict=True)
            marker = "o" if len(points) < 3 else ""
            axes.plot(steps, values, color=TRAINING_COLOR, linewidth=1.3, marker=marker, markersize=3)
        else:
            axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=MUTED, fontsize=8)
        axes.set_title(health.label, loc="left", fontsize=8.5)
    _save(figure, path)


def _draw_training(axes: Axes, history: History) -> None:
    points = series(history, "reward")
    if not points:
        return
    steps, rewards = zip(*points, strict=True)
    stds = dict(series(history, "reward_std"))
    if stds:
        low = [reward - stds.get(step, 0.0) for step, reward in points]
        high = [reward + stds.get(step, 0.0) for step, reward in points]
        axes.fill_between(steps, low, high, color=TRAINING_COLOR, alpha=0.12, linewidth=0, label="± reward_std")
    marker = "o" if len(points) < 3 else ""
    axes.plot(steps, rewards, color=TRAINING_COLOR, linewidth=1.4, marker=marker, markersize=3, label="training")


def _label_seconds(axes: Axes, history: History) -> None:
    """A second axis on top: the same ticks, labelled with the time that had passed."""
    clock = series(history, "seconds")
    if len(clock) < 2:
        return
    import numpy as np
    from matplotlib.ticker import FuncFormatter

    steps, seconds = zip(*sorted(clock), strict=True)

    def passed(step: float, _: int) -> str:
        inside = steps[0] <= step <= steps[-1]
        return format_duration(float(np.interp(step, steps, seconds))) if inside else ""

    upper = axes.twiny()
    upper.set_xlim(axes.get_xlim())
    upper.set_xticks([tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]])
    upper.xaxis.set_major_formatter(FuncFormatter(passed))
    upper.tick_params(colors=MUTED, labelsize=8, length=0)
    for spine in upper.spines.values():
        spine.set_visible(False)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no display, no global state, no figure that stays in memory.
    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(colors=MUTED, labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(True, axis="y", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png")

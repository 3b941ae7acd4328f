# SPDX-License-Identifier: Apache-2.0
"""The progress of a run in a terminal: a live bar for people, plain lines for logs."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omnitrl.report.records import eval_set_of, format_duration, format_number, set_label


if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

# What a log line shows, in this order, and how it is called there.
KEY_FIGURES = {
    "reward": "reward",
    "reward_std": "±",
    "loss": "loss",
    "kl": "kl",
    "ratio/sum_log_std": "log-ratio std",
    "clip_ratio/region_mean": "clipped",
    "frac_reward_zero_std": "equal groups",
    "grad_norm": "grad",
    "step_time": "seconds/step",
}
LIVE_FIGURES = ("reward", "reward_std", "ratio/sum_log_std")


class Progress:
    """
    Shows how far a run is.

    In a terminal it is a live bar with the step, the phase, the reward and the time that is left. Elsewhere, as in
    the log of a CI job, it is one line for each logged step. Use it as a context manager, or call `stop` in a
    `finally`, so that the cursor comes back after Ctrl-C; if neither is done it comes back when Python exits.

    Args:
        console (`rich.console.Console`, *optional*):
            Where to write. By default the standard error stream, as standard output may be piped.

    Example:

    ```python
    >>> with Progress() as progress:
    ...     progress.start(60, "FlowGRPO")
    ...     progress.phase("rollout 1/4")
    ...     progress.advance(1, {"reward": 0.52})
    ```
    """

    def __init__(self, console: Console | None = None) -> None:
        if console is None:
            from rich.console import Console

            console = Console(stderr=True)
        self.console = console
        self.live = console.is_terminal and not console.is_dumb_terminal
        self.title, self.total, self.step = "", 0, 0
        self.metrics: dict[str, float] = {}
        self._phase = ""
        self._started = self._stepped = time.monotonic()
        self._first_step = 0
        self._display: Live | None = None
        self._restore: weakref.finalize | None = None

    def start(self, total_steps: int, title: str, initial_step: int = 0) -> None:
        """
        Begin to show.

        Args:
            total_steps (`int`):
                Steps of the whole run.
            title (`str`):
                What is running, for example `"FlowGRPO"`.
            initial_step (`int`, *optional*, defaults to 0):
                Steps done before this process, after a resume; the time left is estimated from the steps that follow.
        """
        self.stop()
        self.title, self.total = title, max(int(total_steps), 0)
        self.step = self._first_step = initial_step
        self._started = self._stepped = time.monotonic()
        if not self.live:
            resumed = f", from step {initial_step}" if initial_step else ""
            self._line(f"{title}: {self.total} steps{resumed}")
            return
        from rich.live import Live

        self._display = Live(
            get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True, auto_refresh=True
        )
        # Live hides the cursor. An exception that nobody catches ends Python without `stop`: show it again then.
        self._restore = weakref.finalize(self, self._display.stop)
        self._display.start()

    def phase(self, name: str) -> None:
        """
        Say what is being done now.

        Args:
            name (`str`):
                For example `"rollout 3/4"`, `"rewards"`, `"train"`, `"eval"`, `"save"`. Not shown in plain logs,
                which would drown in it.
        """
        self._phase = name

    def advance(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """
        Say that a step is done.

        Args:
            step (`int`):
                Steps done so far.
            metrics (`Mapping[str, Any]`, *optional*):
                What was logged. Without metrics just the bar moves, and a plain log gets a line only with figures that
                are worth one.
        """
        if step != self.step:
            self.step, self._stepped = step, time.monotonic()
        numbers = {key: float(value) for key, value in (metrics or {}).items() if _is_number(value)}
        self.metrics.update(numbers)
        line = "" if self.live else self._plain_line(numbers)
        if line:
            self._line(line)

    def message(self, text: str) -> None:
        """
        Write a line that stays, above the bar.

        Args:
            text (`str`):
                The line, as it is: square brackets are no markup.
        """
        self._line(text)

    def table(self, title: str, rows: Sequence[Sequence[Any]]) -> None:
        """
        Write a small table that stays.

        Args:
            title (`str`):
                Heading.
            rows (`Sequence[Sequence[Any]]`):
                The first row is the header.
        """
        from rich import box
        from rich.table import Table
        from rich.text import Text

        header, *body = rows
        table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
        for index, name in enumerate(header):
            table.add_column(Text(str(name)), justify="left" if index == 0 else "right", overflow="fold")
        for row in body:
            texts = [format_number(cell) if cell is None or isinstance(cell, float) else str(cell) for cell in row]
            table.add_row(*map(Text, texts))
        self.console.print(table)

    def stop(self) -> None:
        """Take the bar away and show the cursor again; stopping twice is fine."""
        if self._restore is not None:
            self._restore()  # calls `Live.stop` once, and never again
        self._display = self._restore = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def seconds_left(self) -> float | None:
        """Estimated seconds to the last step, `None` before the first step of this process is done."""
        done = self.step - self._first_step
        if done <= 0 or self.total <= 0:
            return None
        return (self._stepped - self._started) / done * max(self.total - self.step, 0)

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _plain_line(self, metrics: Mapping[str, float]) -> str:
        parts = _figures(metrics, KEY_FIGURES)
        if not parts:
            return ""
        left = self.seconds_left()
        if left:
            parts.append(f"left {format_duration(left)}")
        return "  ".join([f"step {self.step}/{self.total}" if self.total else f"step {self.step}", *parts])

    def _render(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        count = f"{self.step}/{self.total}"
        width = self.console.width
        left = self.seconds_left()
        times = format_duration(time.monotonic() - self._started)
        if left is not None:
            times += f" · {format_duration(left)} left"
        bar = Table.grid(padding=(0, 1))
        # The title, then the times give way on a narrow terminal; the count never does.
        cells: list[RenderableType] = [Text(self.title, style="bold", no_wrap=True)] if width >= 70 else []
        room = width - len(count) - (len(self.title) + 2 if cells else 0) - (len(times) if width >= 50 else 0) - 6
        if room >= 4:
            cells.append(ProgressBar(total=max(self.total, 1), completed=self.step, width=min(room, 60)))
        cells.append(Text(count, style="cyan", no_wrap=True))
        if width >= 50:
            cells.append(Text(times, style="dim", no_wrap=True))
        bar.add_row(*cells)
        figures = _figures(self.metrics, {key: KEY_FIGURES[key] for key in LIVE_FIGURES})
        words = [self._phase, *figures] if self._phase else figures
        status = Text(" · ".join(words), no_wrap=True, overflow="ellipsis")
        lines = Table.grid()
        lines.add_row(bar)
        lines.add_row(status)
        return lines


def _figures(metrics: Mapping[str, float], names: Mapping[str, str]) -> list[str]:
    """The named figures in words, the spread beside its mean, and then the rewards of evaluated sets."""
    shown: list[str] = []
    for key, label in names.items():
        if key not in metrics:
            continue
        text = f"{label} {format_number(metrics[key])}"
        if key == "reward_std" and shown:
            shown[-1] += f" {text}"
        else:
            shown.append(text)
    for key, value in metrics.items():
        name = eval_set_of(key)
        if name is not None:
            shown.append(f"{set_label(name)} {format_number(value)}")
    return shown


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C that waits for a moment at which nothing is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType


class Interrupts:
    """
    Turns the first Ctrl-C into a request that is honoured at the next safe point; the second acts at once.

    A `KeyboardInterrupt` in the midst of an optimizer step would leave half of the weights updated. Within the
    context, the first SIGINT only sets a flag; [`~Interrupts.check`], called between network calls and micro-batches,
    raises it, and so does the end of the context, so that none is lost. Outside the main thread signals cannot be
    handled, and nothing changes.

    Args:
        announce (`Callable[[str], None]`):
            Says to the user what will happen.

    Attributes:
        forced (`bool`): Whether the second Ctrl-C ended the context, at a point where things may be half done.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._requested = False
        self._at_once = False
        self._previous: signal.Handlers | Callable | int | None = None
        self.forced = False

    def __enter__(self) -> Interrupts:
        self._requested = self._at_once = self.forced = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if Ctrl-C was pressed since the context was entered."""
        if self._requested:
            self._requested = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A stretch that Ctrl-C may break anywhere, such as a wait for others; the first one acts in it."""
        self._at_once = True
        try:
            self.check()  # of one that came before
            yield
        finally:
            self._at_once = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._at_once:
            raise KeyboardInterrupt
        if self._requested:
            self.forced = True
            raise KeyboardInterrupt
        self._requested = True
        with contextlib.suppress(RuntimeError):  # the signal came while the same stream was written to
            self._announce("Interrupted: stopping at the next safe point (press Ctrl-C again to stop at once).")

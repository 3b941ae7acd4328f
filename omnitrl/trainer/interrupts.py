# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C that waits for a moment at which nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Interrupts:
    """
    Turns the first Ctrl-C into a request that is honoured at the next safe point; the second acts at once.

    A `KeyboardInterrupt` in the midst of an optimizer step would leave half of the weights updated. Within the
    context, the first SIGINT only sets a flag; [`~Interrupts.check`], called between network calls and micro-batches,
    raises it. Outside the main thread signals cannot be handled, and nothing changes.

    Args:
        announce (`Callable[[str], None]`): Says to the user what will happen.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._requested = False
        self._previous: signal.Handlers | Callable | int | None = None

    def __enter__(self) -> Interrupts:
        self._requested = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if Ctrl-C was pressed since the context was entered."""
        if self._requested:
            self._requested = False
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        self._announce("Interrupted: stopping at the next safe point (press Ctrl-C again to stop at once).")

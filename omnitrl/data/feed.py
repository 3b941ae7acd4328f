# SPDX-License-Identifier: Apache-2.0
"""The rows that each rollout takes, all of one size, from a dataset or from a stream."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from omnitrl.data.rows import StoredRows, naming, sentence
from omnitrl.data.stream import BucketStream
from omnitrl.data.streamed import StreamedPrompts
from omnitrl.errors import InputError


Row = dict[str, Any]

# Sizes of a stream that can wait for a rollout's worth of rows; each may hold that many of them in memory.
MAX_WAITING_SIZES = 256


class PromptFeed(Protocol):
    """Which rows a rollout takes: a function of its number, the same on every process."""

    @property
    def prompts_per_rollout(self) -> int:
        """Rows of a rollout."""

    def row(self, rollout: int, group: int) -> Row:
        """The row of a group of a rollout."""

    def where(self, rollout: int, group: int) -> str:
        """What to call it in an error."""

    def size(self, rollout: int) -> Any:
        """Size of the media of a rollout."""

    def other(self, rollout: int, group: int, draw: int) -> Row:
        """Another row of the same size, by a random number."""


class StoredFeed:
    """
    A [`PromptFeed`] from a dataset.

    Args:
        rows ([`StoredRows`]):
            The dataset.
        stream ([`BucketStream`]):
            Which of them each rollout takes.
    """

    def __init__(self, rows: StoredRows, stream: BucketStream) -> None:
        self.rows, self.stream = rows, stream
        self._last: tuple[int, list[int]] = (-1, [])

    @property
    def prompts_per_rollout(self) -> int:
        """Rows of a rollout."""
        return self.stream.prompts_per_rollout

    def row(self, rollout: int, group: int) -> Row:
        """The row of a group of a rollout."""
        return self.rows[self._number(rollout, group)]

    def where(self, rollout: int, group: int) -> str:
        """What to call it in an error."""
        return self.rows.where(self._number(rollout, group))

    def size(self, rollout: int) -> Any:
        """Size of the media of a rollout."""
        return self.stream.size(rollout)

    def other(self, rollout: int, group: int, draw: int) -> Row:
        """Another row of the same size, of which there must be two."""
        rows = self.stream.others(rollout)
        own = rows.index(self._number(rollout, group))
        return self.rows[rows[(own + 1 + draw % (len(rows) - 1)) % len(rows)]]

    def _number(self, rollout: int, group: int) -> int:
        """Number of a group's row; those of the last rollout are kept, since a permutation has all rows."""
        if self._last[0] != rollout:
            self._last = (rollout, self.stream.indices(rollout))
        return self._last[1][group]


class StreamFeed:
    """
    A [`PromptFeed`] from a stream: a rollout is the next rows that make a whole one of a size.

    ```
    rows       a0 a1 b0 a2 a3 b1 b2 …     two sizes, 2 prompts a rollout
    rollouts   (a0 a1) (a2 a3) (b0 b1) …  in the order in which they are full; b0 waits for b1
    ```

    Rows of one size come in the order of the stream, each once in a pass. What is kept are the last rollout and the
    rows that wait. Rollouts are meant to be asked for in order: an earlier one, and the first of a resumed run, reads
    the stream from its beginning.

    Args:
        prompts ([`StreamedPrompts`]):
            The stream.
        prompts_per_rollout (`int`):
            Rows of a rollout.
        size_of (`Callable[[dict], Hashable]`):
            The size of a row; raises for one that cannot be made.
    """

    def __init__(self, prompts: StreamedPrompts, prompts_per_rollout: int, size_of: Callable[[Row], Hashable]) -> None:
        self.prompts = prompts
        self._per_rollout = prompts_per_rollout
        self._size_of = size_of
        self._sizes: list[Hashable] = []
        self._last: tuple[int, list[tuple[str, Row]]] = (-1, [])
        self._full = self._fill()

    @property
    def prompts_per_rollout(self) -> int:
        """Rows of a rollout."""
        return self._per_rollout

    def row(self, rollout: int, group: int) -> Row:
        """The row of a group of a rollout."""
        return self._rollout(rollout)[group][1]

    def where(self, rollout: int, group: int) -> str:
        """What to call it in an error."""
        return self._rollout(rollout)[group][0]

    def size(self, rollout: int) -> Any:
        """Size of the media of a rollout."""
        if rollout >= len(self._sizes):
            self._rollout(rollout)
        return self._sizes[rollout]

    def other(self, rollout: int, group: int, draw: int) -> Row:
        """Another row of the rollout, of which there must be two."""
        count = self._per_rollout
        return self.row(rollout, (group + 1 + draw % (count - 1)) % count)

    def _rollout(self, rollout: int) -> list[tuple[str, Row]]:
        if rollout < self._last[0]:
            self._full, self._last = self._fill(), (-1, [])
        while self._last[0] < rollout:
            number = self._last[0] + 1
            size, rows = next(self._full)
            self._last = (number, rows)
            if number == len(self._sizes):
                self._sizes.append(size)
        return self._last[1]

    def _fill(self) -> Iterator[tuple[Hashable, list[tuple[str, Row]]]]:
        """Sizes and rows of the rollouts, from the beginning of the stream."""
        waiting: dict[Hashable, list[tuple[str, Row]]] = {}
        for where, row in self.prompts.rows():
            with naming(where):
                size = self._size_of(row)
            waiting.setdefault(size, []).append((where, row))
            if len(waiting[size]) == self._per_rollout:
                yield size, waiting.pop(size)
            elif len(waiting) > MAX_WAITING_SIZES:
                raise InputError(
                    f"{sentence(where)} is of one more of {len(waiting)} sizes that wait for {self._per_rollout} "
                    "rows to make a rollout: round sizes to a few, for example to those of a list of aspect ratios."
                )

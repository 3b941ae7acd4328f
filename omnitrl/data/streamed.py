# SPDX-License-Identifier: Apache-2.0
"""Prompts that are streamed: read forward, again and again, with no more than a few rows in memory."""

from collections.abc import Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from omnitrl.data.rows import sentence
from omnitrl.errors import InputError


if TYPE_CHECKING:
    from datasets import IterableDataset

# Rows that are drawn from at random; the default of `datasets`.
SHUFFLE_BUFFER = 1000


class StreamedPrompts:
    """
    Prompts of a `datasets.IterableDataset`, which is begun anew whenever it ends.

    Its rows are checked as they are read. A pass over a shuffled stream has an order of its own, that of
    `IterableDataset.set_epoch`.

    Args:
        dataset (`datasets.IterableDataset`):
            Rows with a `prompt`; not split by node, since every process reads all of it and takes its own samples.
        name (`str`, *optional*, defaults to `"the stream"`):
            What to call it in an error.

    Raises:
        [`~omnitrl.errors.InputError`]: there are no rows, or the first one has no `prompt`.

    Example:

    ```python
    >>> import datasets
    >>> from itertools import islice
    >>> prompts = StreamedPrompts(datasets.Dataset.from_dict({"prompt": ["a", "b"]}).to_iterable_dataset())
    >>> [row["prompt"] for _, row in islice(prompts.rows(), 3)]
    ['a', 'b', 'a']
    ```
    """

    def __init__(self, dataset: "IterableDataset", name: str = "the stream") -> None:
        self.name = name
        self._dataset = dataset
        self._first: list[dict[str, Any]] = []
        self._first = self.head(1)

    @property
    def column_names(self) -> list[str]:
        """Columns of the first row."""
        return list(self._first[0])

    def head(self, number: int) -> list[dict[str, Any]]:
        """The first rows of the stream, fewer where it has fewer."""
        if len(self._first) < number:
            rows = islice(self._passes(1), number)
            self._first = [row for _, row in rows]
        return self._first[:number]

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """All rows without end, each with what to call it in an error."""
        return self._passes(None)

    def _passes(self, number: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
        for turn in count() if number is None else range(number):
            self._dataset.set_epoch(turn)
            empty = True
            for place, row in enumerate(self._dataset):
                empty = False
                where = f"row {place} of {self.name}" + (f" in pass {turn}" if turn else "")
                yield where, _checked(row, where)
            if empty:
                raise InputError(f"{sentence(self.name)} has no rows: give at least one prompt.")

    def shuffled(self, seed: int, buffer_size: int = SHUFFLE_BUFFER) -> "StreamedPrompts":
        """The same rows, each drawn from the next `buffer_size` of them."""
        return StreamedPrompts(self._dataset.shuffle(seed=seed, buffer_size=buffer_size), self.name)


def _checked(row: dict[str, Any], where: str) -> dict[str, Any]:
    if "prompt" not in row:
        raise InputError(
            f"{sentence(where)} has no column 'prompt', it has {list(row)}: rename the one with the prompts, for "
            f'example dataset.rename_column("{next(iter(row), "caption")}", "prompt").'
        )
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        found = "a blank prompt" if isinstance(prompt, str) else f"a {type(prompt).__name__} as its prompt"
        raise InputError(
            f"{sentence(where)} has {found}: leave such rows out with "
            'dataset.filter(lambda row: bool(row["prompt"] and row["prompt"].strip())).'
        )
    return row

# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl`: one JSON object a line, complete at any moment, without duplicates after a resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from omnitrl.errors import InputError


class MetricsWriter:
    """
    Appends rows of numbers to a JSON-lines file; each row is on disk when `write` returns.

    NaN and infinities become `null`, for JSON has no such numbers. A last line that an interrupted process left
    half-written is removed when the file is opened.

    Args:
        path (`str` or `os.PathLike`):
            The file, made with its folders if it does not exist.
        truncate_after_step (`int`, *optional*):
            Drop rows whose `step` is greater, so that a run resumed at that step does not repeat them. By default
            every row is kept.
        start_over (`bool`, *optional*, defaults to `False`):
            Begin with an empty file; one that exists is kept under the same name with `.bak` added.

    Raises:
        InputError: the file cannot be opened; the sentence says what to do.

    Attributes:
        last_row (`dict[str, Any]`):
            The row written last, as JSON holds it.

    Example:

    ```python
    >>> with MetricsWriter("run/metrics.jsonl", truncate_after_step=20) as writer:
    ...     writer.write({"step": 21, "reward": 0.61})
    ```
    """

    def __init__(
        self, path: str | os.PathLike[str], truncate_after_step: int | None = None, start_over: bool = False
    ) -> None:
        self.path = Path(path)
        self.last_row: dict[str, Any] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if start_over and self.path.is_file():
                os.replace(self.path, self.path.with_name(self.path.name + ".bak"))
            self._repair(truncate_after_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(
                f"Cannot write {self.path} ({reason[0].lower()}{reason[1:]}): choose an output_dir that this user may "
                f"write to, for example output_dir='./runs/first'."
            ) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """
        Append one row and flush it.

        Args:
            row (`Mapping[str, Any]`):
                Flat metrics; tensors and arrays of one element become numbers.
        """
        self.last_row = {key: _plain(value) for key, value in row.items()}
        self._file.write(json.dumps(self.last_row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _repair(self, truncate_after_step: int | None) -> None:
        if not self.path.exists():
            return
        text = self.path.read_text(encoding="utf-8", errors="replace")
        rows = _parse(text, self.path)
        if truncate_after_step is not None:
            rows = [row for row in rows if (row.get("step") or 0) <= truncate_after_step]
        repaired = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if repaired != text:
            # Written beside and renamed: a crash here must not lose the rows that were good.
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text(repaired, encoding="utf-8")
            os.replace(temporary, self.path)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """
    Read `metrics.jsonl`.

    Args:
        path (`str` or `os.PathLike`):
            The file. Half a line at its end is ignored: the run may be writing it just now.

    Returns:
        `list[dict[str, Any]]`: the rows in the order of the file; missing numbers are `None`.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: a line other than the last is not a JSON object.

    Example:

    ```python
    >>> rewards = [row["reward"] for row in read_metrics("run/metrics.jsonl") if "reward" in row]
    ```
    """
    file = Path(path)
    return _parse(file.read_text(encoding="utf-8", errors="replace"), file)


def _parse(text: str, path: Path) -> list[dict[str, Any]]:
    # Not `splitlines`: it also splits at characters that JSON strings may hold, such as U+2028.
    lines = text.split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif any(later.strip() for later in lines[number:]):
            raise InputError(
                f"Line {number} of {path} is not a JSON object: {line[:60]!r}. Delete that line to go on, or move the "
                "file away to start a new one."
            )
    return rows


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None

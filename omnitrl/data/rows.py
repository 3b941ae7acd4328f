# SPDX-License-Identifier: Apache-2.0
"""Rows of a dataset with numbers and names for errors, and the pictures that they point to."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrl.errors import InputError
from omnitrl.media import is_url


if TYPE_CHECKING:
    from datasets import Dataset

# Rows whose pictures are looked at before training begins. Reading all of a set of a million would take longer than a
# short run; later rows are looked at when they are used.
CHECKED_ROWS = 4096

# Columns that hold pictures, which may be paths.
PICTURE_COLUMNS = ("image", "images", "chosen", "rejected")


def sentence(where: str) -> str:
    """The name of a row or of a dataset, as the beginning of a sentence."""
    return where[0].upper() + where[1:] if where.startswith(("the ", "row ")) else where


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts before the sentence of an error which row it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{sentence(where)}: {error}") from error


class StoredRows:
    """
    Rows of a dataset by their numbers.

    Args:
        dataset (`datasets.Dataset`):
            The rows.
        name (`str`):
            What to call it in an error.

    Example:

    ```python
    >>> import datasets
    >>> rows = StoredRows(datasets.Dataset.from_dict({"prompt": ["a cat"]}), "train_dataset")
    >>> rows[0], rows.where(0)
    ({'prompt': 'a cat'}, 'row 0 of train_dataset')
    ```
    """

    def __init__(self, dataset: "Dataset", name: str) -> None:
        self.name = name
        self._dataset = dataset
        self._undecoded = _undecoded(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """
        A row as the dataset gives it.

        Raises:
            [`~omnitrl.errors.InputError`]: a picture in it cannot be decoded; the message names the row and the file.
        """
        try:
            return self._dataset[index]
        except (OSError, SyntaxError) as error:
            files = [path for value in self.undecoded(index).values() for path in _paths(value)]
            raise InputError(
                f"{sentence(self.where(index))} has a picture that cannot be read"
                f"{f' ({files[0]})' if len(files) == 1 else f' (one of {files})' if files else ''}: leave the row out."
            ) from error

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._dataset.column_names)

    def undecoded(self, index: int) -> dict[str, Any]:
        """A row with the bytes or paths of its pictures, as they are stored."""
        return self._undecoded[index]

    def only(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """All rows, with these columns alone."""
        return iter(self._dataset.select_columns([name for name in columns if name in self.columns]))

    def where(self, index: int) -> str:
        """What to call a row in an error."""
        return f"row {index} of {self.name}"


def _undecoded(dataset: "Dataset") -> "Dataset":
    for column, feature in dataset.features.items():
        stored = _undecoded_feature(feature)
        if stored is not None:
            dataset = dataset.cast_column(column, stored)
    return dataset


def _undecoded_feature(feature: Any) -> Any:
    """The feature of a picture, or of a list of them, without the decoding; `None` for others."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False) if feature.decode else None
    if isinstance(feature, datasets.List | datasets.LargeList):
        inner = _undecoded_feature(feature.feature)
        return None if inner is None else type(feature)(inner)
    return None


def _paths(value: Any) -> list[str]:
    """The files that stored pictures came from."""
    if isinstance(value, Mapping):
        return [value["path"]] if value.get("path") else []
    return [path for item in value for path in _paths(item)] if isinstance(value, list) else []


def with_paths(dataset: "Dataset", folder: Path) -> "Dataset":
    """
    The same dataset with relative paths of pictures made absolute.

    Args:
        dataset (`datasets.Dataset`):
            What a file holds.
        folder (`Path`):
            Where that file is, which the paths are relative to.
    """
    import datasets
    import pyarrow as pa

    table = dataset.data.table
    for column in PICTURE_COLUMNS:
        if column not in table.column_names or isinstance(dataset.features[column], datasets.Image):
            continue
        field = table.schema.field(column)
        if _holds_paths(field.type):
            values = [_absolute(value, folder) for value in table[column].to_pylist()]
            index = table.schema.get_field_index(column)
            table = table.set_column(index, field, pa.chunked_array([pa.array(values, field.type)]))
    return dataset if table is dataset.data.table else datasets.Dataset(table, info=dataset.info)


def _holds_paths(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_paths(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.get_field_index("path") >= 0
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(item, folder) for item in value]
    if isinstance(value, dict):
        stored = value.get("bytes") is not None
        return value if stored else {**value, "path": _absolute(value["path"], folder)}
    if not value or is_url(value):
        return value
    return os.path.normpath(folder.absolute() / value)  # an absolute one stays as it is

# SPDX-License-Identifier: Apache-2.0
"""What the rows of a dataset ask of a model: that it reads their images, and that it makes media of their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omnitrl.data import CHECKED_ROWS, PreferenceRows, StoredRows, StreamedPrompts, naming
from omnitrl.errors import InputError
from omnitrl.models import FlowModel, MediaSize
from omnitrl.models.size import SIZE_COLUMNS


Rows = StoredRows | PreferenceRows


def numbered(dataset: Any, name: str) -> Rows:
    """The rows of a dataset by number; pairs have numbers already."""
    return dataset if isinstance(dataset, PreferenceRows) else StoredRows(dataset, name)


def finite(rows: Any) -> Any:
    """Rows for evaluation; raises for a stream."""
    if isinstance(rows, StreamedPrompts):
        raise InputError(
            "eval_dataset is a stream, but every evaluation takes the same rows: take as many as you want with "
            "`Dataset.from_list(list(stream.take(100)))`."
        )
    return rows


def check_pictures(model: FlowModel, rows: Rows) -> None:
    """
    Reads the headers of the condition images of the first rows, where the model takes any.

    Raises:
        [`~omnitrl.errors.InputError`]: images are missing or too many, or one cannot be read; names row and file.
    """
    if model.num_images[1] == 0:
        return
    for index in range(min(len(rows), CHECKED_ROWS)):
        with naming(rows.where(index)):
            model.images(rows.undecoded(index), whole=False)


def check_equal_pictures(model: FlowModel, dataset: Any, name: str) -> None:
    """
    Raises unless all rows have condition images of the same sizes, for runs whose weights are sharded.

    Rows whose images have unequal sizes go through the network one after the other, and a process with more of them
    would wait for ever for shards of the others.
    """
    if model.num_images[1] == 0:
        return
    advice = "bring all images to one size, or use DDP in place of FSDP or DeepSpeed."
    if isinstance(dataset, StreamedPrompts):
        raise InputError(
            f"{name} is a stream with condition images, whose sizes nobody knows beforehand, but with sharded weights "
            f"they must be equal: {advice}"
        )
    rows, first = numbered(dataset, name), None
    for index in range(len(rows)):
        with naming(rows.where(index)):
            sizes = [image.size for image in model.images(rows.undecoded(index), whole=False)]
        if first is not None and sizes != first:
            raise InputError(
                f"Condition images of {rows.where(index)} are of (width, height) {sizes}, and those of row 0 of "
                f"{first}, but with sharded weights all processes must make the same network calls: {advice}"
            )
        first = sizes


def size_of_row(model: FlowModel, row: dict[str, Any], size: MediaSize) -> MediaSize:
    """
    The whole size of a row's media: its columns, else `size`, else what the model makes of it.

    Raises:
        [`~omnitrl.errors.InputError`]: the model cannot make it; names the nearest that it can.
    """
    whole = model.size_of(row, size)
    model.latent_shape(whole)
    return whole


def sizes_of(model: FlowModel, rows: Rows, size: MediaSize) -> list[MediaSize]:
    """
    [`size_of_row`] of every row.

    Raises:
        [`~omnitrl.errors.InputError`]: the model cannot make one; names the row and the nearest size that it can.
    """
    # Only a family whose size follows from the images has a `size_of` of its own; an image is opened for nothing else.
    pictures = type(model).size_of is not FlowModel.size_of and None in (size.height, size.width)
    if not pictures and not set(SIZE_COLUMNS) & set(rows.columns):
        return [size_of_row(model, {}, size)] * len(rows)
    known: dict[MediaSize, MediaSize] = {}
    found: list[MediaSize] = []
    for index, row in enumerate(_all(rows) if pictures else rows.only(SIZE_COLUMNS)):
        with naming(rows.where(index)):
            whole = model.size_of(row, size)
            if whole not in known:
                model.latent_shape(whole)
        found.append(known.setdefault(whole, whole))
    return found


def _all(rows: Rows) -> Iterator[dict[str, Any]]:
    return (rows.undecoded(index) for index in range(len(rows)))

# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: a prompt and two pictures of it, of which one is preferred."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from omnitrl.data.prompts import likely_prompt_column, load_named, pick_split
from omnitrl.data.rows import CHECKED_ROWS
from omnitrl.errors import InputError
from omnitrl.media import as_array, read_picture


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

logger = logging.getLogger(__name__)

SIDES = ("chosen", "rejected")

# Names of public datasets in which a label says which of two pictures is preferred (Pick-a-Pic).
_LABELLED = ("jpg_0", "jpg_1", "label_0")


class PreferenceRows(Sequence[dict[str, Any]]):
    """
    Rows of a preference dataset: `prompt`, `chosen`, `rejected` and whatever other columns there are.

    A row is read when it is asked for. Its pictures are as the dataset has them; see [`read_picture`].

    Args:
        source (`Sequence[dict]`):
            The rows as they are stored.
        numbers (`Sequence[int]`):
            Which of them are used.
        name (`str`):
            What to call them in an error.
        labelled (`bool`, defaults to `False`):
            Whether rows have `jpg_0`, `jpg_1` and `label_0` instead of `chosen` and `rejected`.
    """

    def __init__(self, source: Any, numbers: Sequence[int], name: str, labelled: bool = False) -> None:
        self._source, self._numbers, self._labelled = source, numbers, labelled
        self.name = name

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> "PreferenceRows": ...

    def __getitem__(self, index: int | slice) -> "dict[str, Any] | PreferenceRows":
        if isinstance(index, slice):
            return PreferenceRows(self._source, self._numbers[index], self.name, self._labelled)
        row = self._source[self._numbers[index]]
        return _ordered(row) if self._labelled else dict(row)

    def number(self, index: int) -> int:
        """Number of a row in the source, counted from 0."""
        return self._numbers[index]

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the first row."""
        return list(self[0])

    def only(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """All rows, with these columns alone."""
        import datasets

        source = self._source
        if isinstance(source, datasets.Dataset):  # which else reads the pictures too
            source = source.select_columns([name for name in columns if name in source.column_names])
        for number in self._numbers:
            row = source[number]
            yield {name: row[name] for name in columns if name in row}

    def undecoded(self, index: int) -> dict[str, Any]:
        """A row as it is: its pictures are decoded when they are used."""
        return self[index]

    def where(self, index: int) -> str:
        """What to call a row in an error."""
        return f"row {self.number(index)} of {self.name}"

    def checked(self, index: int) -> dict[str, Any]:
        """
        A row whose two pictures are there and can be read.

        Raises:
            [`~omnitrl.errors.InputError`]: they are not; the message names the row.
        """
        row, where = self[index], self.where(index)
        prompt = row["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(
                f"'prompt' of {where} is {_described(prompt)}, but it must be a text such as 'a cat': leave such rows "
                "out, or swap the columns if the pictures stand in it."
            )
        for side in SIDES:
            _check_there(row.get(side), side, where)
        if _identical(row["chosen"], row["rejected"]):
            raise InputError(
                f"'chosen' and 'rejected' of {where} are the same picture, of which neither can be preferred: leave "
                "such rows out."
            )
        _check_scores(row, where)
        return row


def load_preferences(
    source: "Dataset | DatasetDict | PreferenceRows | Sequence[Mapping[str, Any]] | str | os.PathLike[str]",
    split: str = "train",
) -> PreferenceRows:
    """
    Loads preference pairs and makes sure that they can be used.

    Each row has a text `prompt`, and as `chosen` and `rejected` one of

    - a picture: a PIL image, a path, a dictionary with `bytes` or `path` as `datasets.Image(decode=False)` gives it,
      or an array of shape (height, width, 3) with 8-bit values or values in [0, 1],
    - clean latents, as `FlowModel.encode_images` makes them: a tensor, or an array or nested lists of their shape.

    Where `score_chosen` and `score_rejected` are there, the first must be the higher one. A dataset with the columns
    `caption`, `jpg_0`, `jpg_1` and `label_0` of Pick-a-Pic is taken as it is: `label_0` is 1 where `jpg_0` is
    preferred and 0 where `jpg_1` is, and rows with 0.5 (a tie) or no label are left out.

    Paths of pictures in a file are relative to its folder. The first 4096 rows are checked, pictures included, and
    later ones when they are used.

    Args:
        source (`Dataset`, `DatasetDict`, `list[dict]`, `str` or `os.PathLike`):
            Rows, or where they are: a `.parquet`, `.jsonl`, `.json` or `.csv` file, a folder that
            `Dataset.save_to_disk` wrote, or the id of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Which split to take where the source has several.

    Returns:
        [`~omnitrl.data.PreferenceRows`].

    Raises:
        [`~omnitrl.errors.InputError`]: a column is missing, a picture is missing or cannot be read, or the two
            pictures of a row are the same or stand in the wrong order by their scores; the message names the row.

    Example:

    ```python
    >>> from PIL import Image
    >>> from omnitrl.data import load_preferences
    >>> black, white = Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64), "white")
    >>> len(load_preferences([{"prompt": "snow", "chosen": white, "rejected": black}]))
    1
    ```
    """
    import datasets

    if isinstance(source, PreferenceRows):
        return source
    name = "the dataset"
    if isinstance(source, (str, os.PathLike)):
        name, source = str(source), load_named(source, split)
    if isinstance(source, datasets.DatasetDict):
        source = pick_split(source, split, name)
    if isinstance(source, datasets.Dataset):
        pairs = _from_dataset(source, name)
    elif isinstance(source, (list, tuple)):
        pairs = _from_rows(source, name)
    else:
        raise InputError(
            f"Preference pairs can be a datasets.Dataset, a list of dictionaries, a file or a Hub id, got "
            f'{type(source).__name__}: for example [{{"prompt": "a cat", "chosen": "a.png", "rejected": "b.png"}}].'
        )
    for index in range(min(len(pairs), CHECKED_ROWS)):
        row = pairs.checked(index)
        for side in SIDES:
            if _is_picture(row[side]):
                read_picture(row[side], f"{side!r} of row {pairs.number(index)} of {name}", whole=False)
    return pairs


def has_pairs(source: Any, split: str = "train") -> bool:
    """Whether a source has pairs of pictures in one of the two forms, rather than prompts alone."""
    import datasets

    if isinstance(source, (str, os.PathLike)):
        source = load_named(source, split)
    if isinstance(source, datasets.DatasetDict):
        source = pick_split(source, split, "the dataset")
    columns: list[str] = []
    if isinstance(source, datasets.Dataset):
        columns = source.column_names
    elif isinstance(source, Sequence) and source and isinstance(source[0], Mapping):
        columns = list(source[0])
    return bool({*SIDES, *_LABELLED} & set(columns))


def _from_dataset(dataset: "Dataset", name: str) -> PreferenceRows:
    import datasets

    columns = list(dataset.column_names)
    labelled = _check_columns(columns, name)
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image) and feature.decode:
            # The bytes as they are stored: they are compared, and read when they are needed.
            dataset = dataset.cast_column(column, datasets.Image(decode=False))
    numbers: Sequence[int] = range(len(dataset))
    if labelled:
        numbers = _decided(dataset["label_0"][:], name)
    return _not_empty(PreferenceRows(dataset, numbers, name, labelled))


def _from_rows(rows: Sequence[Any], name: str) -> PreferenceRows:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(
                f"Row {number} of {name} is a {type(row).__name__}, but a pair is a dictionary such as "
                '{"prompt": "a cat", "chosen": "a.png", "rejected": "b.png"}.'
            )
    labelled = _check_columns(list(rows[0]), name) if rows else False
    numbers: Sequence[int] = range(len(rows))
    if labelled:
        numbers = _decided([row.get("label_0") for row in rows], name)
    return _not_empty(PreferenceRows(rows, numbers, name, labelled))


def _not_empty(pairs: PreferenceRows) -> PreferenceRows:
    if not len(pairs):
        raise InputError(f"{_sentence(pairs.name)} has no preference pairs: give at least one row with a preference.")
    return pairs


def _check_columns(columns: list[str], name: str) -> bool:
    """Whether a label says which picture is preferred; raises if neither form of columns is there."""
    if set(_LABELLED) <= set(columns) and not set(SIDES) & set(columns):
        needed = ["caption"] if "prompt" not in columns else []
        labelled = True
    else:
        needed, labelled = ["prompt", *SIDES], False
    missing = [column for column in needed if column not in columns]
    if not missing:
        return labelled
    if missing == ["prompt"] or missing == ["caption"]:
        candidate = likely_prompt_column([c for c in columns if c not in (*SIDES, *_LABELLED)])
        raise InputError(
            f"{_sentence(name)} has no column 'prompt', it has {columns}: rename the one with the prompts, for "
            f'example dataset.rename_column("{candidate}", "prompt").'
        )
    raise InputError(
        f"{_sentence(name)} has no column {' and no column '.join(map(repr, missing))}, it has {columns}: preference "
        "pairs need 'prompt', 'chosen' and 'rejected', or 'caption', 'jpg_0', 'jpg_1' and 'label_0' as Pick-a-Pic has "
        "them."
    )


def _decided(labels: Sequence[Any], name: str) -> list[int]:
    """Rows whose label prefers one of the two pictures."""
    ties = sum(label == 0.5 for label in labels)
    unlabelled = sum(label is None for label in labels)
    for number, label in enumerate(labels):
        if label not in (0, 1, 0.5, None):
            raise InputError(
                f"'label_0' of row {number} of {name} is {label!r}, but it must be 1 where 'jpg_0' is preferred, 0 "
                "where 'jpg_1' is, and 0.5 for a tie."
            )
    if ties or unlabelled:
        logger.warning(
            "%s: %d of %d rows are ties and %d have no label; they are left out.",
            _sentence(name),
            ties,
            len(labels),
            unlabelled,
        )
    return [number for number, label in enumerate(labels) if label in (0, 1)]


def _ordered(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of Pick-a-Pic under the names of a preference pair."""
    order = ("jpg_0", "jpg_1") if row["label_0"] == 1 else ("jpg_1", "jpg_0")
    others = {key: value for key, value in row.items() if key not in (*_LABELLED, "caption")}
    prompt = row["prompt"] if "prompt" in row else row["caption"]
    return {**others, "prompt": prompt, "chosen": row[order[0]], "rejected": row[order[1]]}


# Single pictures


def _is_picture(value: Any) -> bool:
    """Whether it can be read without a model; arrays may be latents, whose shape only a model knows."""
    return as_array(value) is None


def _check_there(value: Any, side: str, where: str) -> None:
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if value is None or (isinstance(value, (str, bytes, list)) and not value):
        raise InputError(f"{side!r} of {where} is missing: each row needs two pictures, so leave such rows out.")


def _identical(chosen: Any, rejected: Any) -> bool:
    """Whether the two pictures are one: the same object, path, bytes or pixels."""
    if chosen is rejected:
        return True
    arrays = [as_array(value) for value in (chosen, rejected)]
    if arrays[0] is not None and arrays[1] is not None:
        return arrays[0].shape == arrays[1].shape and bool((arrays[0] == arrays[1]).all())
    if arrays[0] is not None or arrays[1] is not None or type(chosen) is not type(rejected):
        return False
    if isinstance(chosen, Mapping):
        key = "path" if chosen.get("bytes") is None else "bytes"
        return chosen.get(key) == rejected.get(key)
    return bool(chosen == rejected)  # PIL compares mode, size and pixels


def _check_scores(row: Mapping[str, Any], where: str) -> None:
    chosen, rejected = row.get("score_chosen"), row.get("score_rejected")
    if chosen is not None and rejected is not None and not chosen > rejected:
        raise InputError(
            f"{_sentence(where)} has score_chosen={chosen:g} and score_rejected={rejected:g}, so its pictures are "
            "swapped or tied: 'chosen' must be the one with the higher score."
        )


def _described(value: Any) -> str:
    if isinstance(value, str):
        return "blank"
    return "missing" if value is None else f"a {type(value).__name__}"


def _sentence(text: str) -> str:
    """`text` with a capital, unless it is the name of something."""
    return text[0].upper() + text[1:] if text.startswith(("the ", "row ")) else text

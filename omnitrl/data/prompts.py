# SPDX-License-Identifier: Apache-2.0
"""Prompts from wherever people keep them, as a `datasets.Dataset` with a column `prompt`."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrl.data.rows import with_paths
from omnitrl.data.streamed import StreamedPrompts
from omnitrl.errors import InputError, did_you_mean


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def load_prompts(
    source: "Dataset | DatasetDict | IterableDataset | IterableDatasetDict | StreamedPrompts | Sequence[str] | "
    "Sequence[Mapping[str, Any]] | str | os.PathLike[str]",
    split: str = "train",
) -> "Dataset | StreamedPrompts":
    """
    Loads prompts and makes sure that they can be used: a column `prompt` of strings, none of them blank.

    Files are read anew each time and nothing is cached, so that an edited file gives the new prompts. Paths of
    pictures in a file (`image`, `images`) are relative to its folder.

    Args:
        source (`Dataset`, `IterableDataset`, dictionary of either, `list[str]`, `list[dict]`, `str` or `os.PathLike`):
            One of

            - a dataset, which is returned as it is, or a dictionary of them, from which `split` is taken,
            - a stream (`datasets.IterableDataset`), or a dictionary of them; its rows are checked as they are read,
            - a list of prompts, or a list of dictionaries that have a key `prompt`,
            - the path of a file: `.txt` with a prompt a line (blank lines are skipped, spaces around a prompt are
              cut off), `.jsonl` or `.json` with objects, `.csv`, `.parquet`,
            - the path of a folder that `Dataset.save_to_disk` wrote,
            - the id of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Which split to take where the source has several.

    Returns:
        `datasets.Dataset`, or [`~omnitrl.data.StreamedPrompts`] for a stream: the prompts, with all other columns of
            the source, which rewards receive by keyword.

    Raises:
        [`~omnitrl.errors.InputError`]: if there is nothing at the source, if it has no such split, no rows, no column
            `prompt` of strings, or a blank prompt.

    Example:

    ```python
    >>> from omnitrl import load_prompts
    >>> load_prompts([{"prompt": 'a sign that says "OPEN"', "text": "OPEN"}]).column_names
    ['prompt', 'text']
    ```
    """
    import datasets

    name = "The dataset"
    if isinstance(source, (str, os.PathLike)):
        name, source = str(source), load_named(source, split)
    if isinstance(source, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        source = pick_split(source, split, name)
    if isinstance(source, StreamedPrompts):
        return source
    if isinstance(source, datasets.IterableDataset):
        return StreamedPrompts(source)
    if isinstance(source, (list, tuple)):
        source = _from_rows(source, name)
    if not isinstance(source, datasets.Dataset):
        raise InputError(
            f"Prompts can be a datasets.Dataset, a list of strings or dictionaries, a file or a Hub id, got "
            f'{type(source).__name__}: for example load_prompts(["a cat", "a dog"]).'
        )
    _check_prompts(source, name)
    return source


def load_named(source: str | os.PathLike[str], split: str) -> "Dataset | DatasetDict":
    """A file, a folder or a Hub id, in this order."""
    path = Path(source)
    reader = _READERS.get(path.suffix.lower())
    if path.is_dir():
        return _from_folder(path)
    if path.is_file() and reader is None:
        raise InputError(
            f"{source} is of a kind that cannot be read as prompts: use one of {', '.join(_READERS)}, for example a "
            ".txt file with one prompt a line."
        )
    if path.is_file() and reader is not None:
        try:
            return with_paths(reader(path), path.parent)
        except UnicodeDecodeError as error:
            raise InputError(f"{source} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from error
        except OSError as error:
            raise InputError(f"{source} cannot be read ({error.strerror}): check the permissions.") from error
    if reader is not None or isinstance(source, os.PathLike):
        raise InputError(f"There is no file {source}; the working folder is {Path.cwd()}.")
    return _from_hub(str(source), split)


def _from_folder(path: Path) -> "Dataset | DatasetDict":
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise InputError(
            f"The folder {path} was not written by Dataset.save_to_disk: give the path of a file in it, for example "
            f"{path / 'prompts.txt'}."
        ) from error


def _from_hub(name: str, split: str) -> "Dataset":
    import datasets

    if not _HUB_ID.fullmatch(name):
        raise InputError(
            f"{name!r} is neither a file nor the id of a dataset on the Hub: for prompts themselves pass a list, "
            f"load_prompts([{name!r}])."
        )
    try:
        return datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as error:  # ConnectionError and DatasetNotFoundError are kinds of OSError
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"There is no file {name!r}, and it could not be loaded from the Hub either ({reason}): check the "
            "spelling and the network, or give the path of a file such as prompts.txt."
        ) from error


def pick_split(source: Any, split: str, name: str) -> Any:
    """One dataset or stream of a dictionary of them."""
    if split not in source:
        raise InputError(
            f"{name} has no split {split!r}; it has {', '.join(source)}.{did_you_mean(split, source)} Name one of "
            "these with split=."
        )
    return source[split]


def _from_rows(rows: Sequence[Any], name: str) -> "Dataset":
    """A dataset of strings or dictionaries. A key that some rows lack is None there."""
    import datasets
    import pyarrow as pa

    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    rows = [_with_strings(row) if isinstance(row, Mapping) else row for row in rows]
    columns: dict[str, None] = {}  # the keys of all rows, in order: `Dataset.from_list` takes those of the first row
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(
                f"{name} has a {type(row).__name__} as row {number}, but a row is a string or a dictionary such as "
                '{"prompt": "a cat"}.'
            )
        columns.update(dict.fromkeys(row))
    try:
        return datasets.Dataset.from_dict({key: [row.get(key) for row in rows] for key in columns})
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(f"{name} has a column with values of several types ({error}): give it one type.") from error


def _with_strings(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with paths as strings, which a dataset can hold."""
    return {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in row.items()}


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")  # -sig drops the mark that Windows editors put first


def _read_txt(path: Path) -> "Dataset":
    # Not str.splitlines, which also cuts at form feeds and Unicode separators inside a prompt.
    lines = [line.strip() for line in _read_text(path).split("\n")]
    return _from_rows([line for line in lines if line], str(path))


def _read_jsonl(path: Path) -> "Dataset":
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path}, line {number} is not JSON ({error.msg}, column {error.colno}): each line is an object such "
                'as {"prompt": "a cat"}.'
            ) from error
    return _from_rows(rows, str(path))


def _read_json(path: Path) -> "Dataset":
    try:
        rows = json.loads(_read_text(path))
    except json.JSONDecodeError:
        return _read_jsonl(path)  # many .json files hold an object a line
    if not isinstance(rows, list):
        raise InputError(
            f'{path} holds a {type(rows).__name__}, but a list is expected, such as [{{"prompt": "a cat"}}].'
        )
    return _from_rows(rows, str(path))


def _read_csv(path: Path) -> "Dataset":
    import datasets
    import pyarrow as pa
    from pyarrow import csv

    try:
        table = csv.read_csv(
            path,
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types={"prompt": pa.string()}),  # "42" is a prompt as well
        )
    except pa.ArrowInvalid as error:
        raise InputError(f"{path} cannot be read as CSV ({error}): the first line names the columns.") from error
    return datasets.Dataset(table)


def _read_parquet(path: Path) -> "Dataset":
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return datasets.Dataset(parquet.read_table(path))
    except pa.ArrowInvalid as error:
        raise InputError(f"{path} cannot be read as Parquet ({error}).") from error


_READERS: dict[str, Callable[[Path], "Dataset"]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _check_prompts(dataset: "Dataset", name: str) -> None:
    """Refuses a dataset without rows, without prompts or with blank ones."""
    import datasets

    if len(dataset) == 0:
        raise InputError(f"{name} has no rows: give at least one prompt.")
    if "prompt" not in dataset.column_names:
        columns = list(dataset.column_names)
        candidate = likely_prompt_column(columns)
        raise InputError(
            f"{name} has no column 'prompt', it has {columns}: rename the one with the prompts, for example "
            f'dataset.rename_column("{candidate}", "prompt").'
        )
    feature = dataset.features["prompt"]
    if not (isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")):
        raise InputError(
            f"The column 'prompt' of {name} holds {feature}, but it must hold strings: make them with "
            'dataset.map(lambda row: {"prompt": str(row["prompt"])}).'
        )
    row = first_blank(dataset["prompt"][:])
    if row is not None:
        raise InputError(
            f"{name} has a blank prompt in row {row} (counted from 0): leave such rows out with "
            'dataset.filter(lambda row: bool(row["prompt"] and row["prompt"].strip())).'
        )


def likely_prompt_column(columns: list[str]) -> str:
    """The column that is most probably meant, by the names that public datasets use."""
    for usual in ("prompts", "caption", "captions", "text", "Prompt"):
        if usual in columns:
            return usual
    return columns[0] if columns else "caption"


def first_blank(prompts: Iterable[str | None]) -> int | None:
    return next((row for row, prompt in enumerate(prompts) if prompt is None or not prompt.strip()), None)

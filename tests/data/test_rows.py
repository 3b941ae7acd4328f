# SPDX-License-Identifier: Apache-2.0
"""Rows with pictures and sizes from every kind of file."""

import csv
import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from omnitrl import load_preferences, load_prompts
from omnitrl.data import StoredRows
from omnitrl.errors import InputError
from omnitrl.media import read_picture


pytestmark = pytest.mark.compat


def picture(red):
    return Image.new("RGB", (8, 6), (red, 0, 0))


def png(red):
    buffer = io.BytesIO()
    picture(red).save(buffer, "PNG")
    return buffer.getvalue()


def red(value):
    return read_picture(value, "it").getpixel((0, 0))[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two pictures beside the dataset, which is not the working folder."""
    place = tmp_path / "set"
    (place / "pictures").mkdir(parents=True)
    for i in range(2):
        picture(10 + i).save(place / "pictures" / f"{i}.png")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return place


ROWS = [{"prompt": f"p{i}", "image": f"pictures/{i}.png", "height": 64, "width": 64 * (i + 1)} for i in range(2)]


def as_jsonl(folder):
    (folder / "p.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return "p.jsonl"


def as_json(folder):
    (folder / "p.json").write_text(json.dumps(ROWS))
    return "p.json"


def as_csv(folder):
    with (folder / "p.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)
    return "p.csv"


def as_parquet(folder):
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "p.parquet")
    return "p.parquet"


@pytest.mark.parametrize("write", [as_jsonl, as_json, as_csv, as_parquet])
def test_paths_are_relative_to_the_file(folder, write):
    rows = load_prompts(folder / write(folder))
    assert rows.column_names == ["prompt", "image", "height", "width"]
    assert rows["image"][:] == [str(folder / "pictures" / f"{i}.png") for i in range(2)]
    assert [red(value) for value in rows["image"]] == [10, 11]
    assert rows["height"][:] == [64, 64]
    assert rows["width"][:] == [64, 128]


def test_lists_dictionaries_absolute_paths_and_urls(folder):
    absolute = str(folder / "pictures" / "0.png")
    rows = [
        {"prompt": "a", "images": ["pictures/0.png", absolute]},
        {"prompt": "b", "images": ["../set/pictures/1.png"]},
        {"prompt": "c", "images": None},
    ]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = (str(folder / "pictures" / f"{i}.png") for i in range(2))
    assert load_prompts(folder / "p.jsonl")["images"][:] == [[first, first], [second], None]
    (folder / "d.json").write_text(json.dumps([{"prompt": "a", "image": {"path": "pictures/1.png"}}]))
    assert load_prompts(folder / "d.json")["image"][0] == {"path": second}
    (folder / "u.json").write_text(json.dumps([{"prompt": "a", "image": "https://example.com/0.png"}]))
    (row,) = load_prompts(folder / "u.json")
    with pytest.raises(InputError, match=r"it is the URL https://example\.com/0\.png, and pictures are not"):
        read_picture(row["image"], "it")


def test_pairs_beside_their_file(folder):
    pair = {"prompt": "a", "chosen": "pictures/0.png", "rejected": "pictures/1.png"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair))
    (row,) = load_preferences(folder / "pairs.jsonl")
    assert (red(row["chosen"]), red(row["rejected"])) == (10, 11)


def test_pictures_of_a_dataset_reach_rewards_as_it_gives_them(folder):
    """Decoded by `datasets`, whatever a trainer looks at in them."""
    table = {"prompt": ["a", "b"], "image": [{"bytes": png(i), "path": f"{i}.png"} for i in range(2)]}
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    dataset = datasets.Dataset.from_dict(table, features)
    dataset.to_parquet(folder / "p.parquet")
    for source in (dataset, folder / "p.parquet"):
        rows = StoredRows(load_prompts(source), "train_dataset")
        assert [type(rows[i]["image"]).__name__ for i in range(2)] == ["PngImageFile"] * 2
        assert [rows.undecoded(i)["image"] for i in range(2)] == table["image"]
        assert [red(rows[i]["image"]) for i in range(2)] == [0, 1]
        assert list(rows.only(["prompt", "nothing"])) == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_picture_that_datasets_cannot_decode_is_named(tmp_path):
    big = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(big, "PNG")
    values = [{"bytes": png(0), "path": "0.png"}, {"bytes": big.getvalue()[:900], "path": "cut.png"}]
    for feature, column in ((datasets.Image(), values), (datasets.List(datasets.Image()), [[v] for v in values])):
        features = datasets.Features({"prompt": datasets.Value("string"), "image": feature})
        rows = StoredRows(datasets.Dataset.from_dict({"prompt": ["a", "b"], "image": column}, features), "the set")
        rows[0]
        with pytest.raises(InputError, match=r"Row 1 of the set has a picture that cannot be read \(cut.png\)"):
            rows[1]


def test_paths_in_lists_of_rows(tmp_path):
    picture(7).save(tmp_path / "7.png")
    (row,) = load_prompts([{"prompt": "a", "image": tmp_path / "7.png"}])
    assert red(row["image"]) == 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "it is missing: give a path"),
        (3, "it is a int, but a picture is a PIL image"),
        ({"path": None, "bytes": None}, "it is missing"),
        ({"path": "cut.png", "bytes": b"\x89PNG"}, r"it is no picture that can be read \(4 bytes of cut.png\)"),
        ("nowhere.png", "it is the file nowhere.png, which does not exist"),
        (np.zeros((4, 4, 4), dtype=np.uint8), r"it is an array of shape \(4, 4, 4\), but a picture is"),
        (np.zeros((4, 4), dtype=np.uint8), r"it is an array of shape \(4, 4\)"),
    ],
)
def test_what_is_no_picture(value, message):
    with pytest.raises(InputError, match=message) as error:
        read_picture(value, "it")
    assert "\n" not in str(error.value)

# SPDX-License-Identifier: Apache-2.0
import io

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.data import load_preferences
from omnitrl.data.preferences import has_pairs
from omnitrl.errors import InputError
from omnitrl.media import read_picture


def picture(value, size=(8, 8)):
    return Image.new("RGB", size, (value, 0, 0))


def png(value):
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


def row(number=1, **others):
    return {"prompt": f"p{number}", "chosen": picture(number), "rejected": picture(0), **others}


def red(image):
    return image.convert("RGB").getpixel((0, 0))[0]


def refused(source, message):
    with pytest.raises(InputError, match=message) as error:
        load_preferences(source)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


# What is taken


def test_pictures_in_every_form(tmp_path):
    picture(3).save(tmp_path / "3.png")
    pixels = np.full((8, 8, 3), [4, 0, 0], dtype=np.uint8)
    forms = [
        picture(3),
        str(tmp_path / "3.png"),
        tmp_path / "3.png",
        {"bytes": png(3), "path": None},
        {"bytes": None, "path": str(tmp_path / "3.png")},
        png(3),
    ]
    for form in forms:
        (loaded,) = load_preferences([{"prompt": "a", "chosen": form, "rejected": picture(0)}])
        assert red(read_picture(loaded["chosen"], "it")) == 3
    (loaded,) = load_preferences([{"prompt": "a", "chosen": pixels, "rejected": pixels / 255 / 2}])
    assert red(read_picture(loaded["chosen"], "it")) == 4
    assert red(read_picture(loaded["rejected"], "it")) == 2


def test_a_dataset_keeps_its_bytes_and_its_other_columns(tmp_path):
    dataset = datasets.Dataset.from_dict(
        {
            "prompt": ["a", "b"],
            "chosen": [{"bytes": png(1), "path": None}, {"bytes": png(2), "path": None}],
            "rejected": [{"bytes": png(5), "path": None}, {"bytes": png(6), "path": None}],
            "answer": [7, 8],
        },
        features=datasets.Features(
            {
                "prompt": datasets.Value("string"),
                "chosen": datasets.Image(),
                "rejected": datasets.Image(),
                "answer": datasets.Value("int64"),
            }
        ),
    )
    dataset.to_parquet(tmp_path / "pairs.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    for source in (dataset, tmp_path / "pairs.parquet", str(tmp_path / "saved"), datasets.DatasetDict(train=dataset)):
        pairs = load_preferences(source)
        assert [r["answer"] for r in pairs] == [7, 8]
        assert [r["chosen"]["bytes"] for r in pairs] == [png(1), png(2)]
        assert [red(read_picture(r["rejected"], "it")) for r in pairs] == [5, 6]
        assert has_pairs(source)
    assert load_preferences(pairs) is pairs


def test_latents_survive_a_dataset():
    latents = np.random.default_rng(0).normal(size=(2, 4, 3, 3)).astype(np.float32)
    dataset = datasets.Dataset.from_dict(
        {"prompt": ["a"], "chosen": latents[:1].tolist(), "rejected": latents[1:].tolist()}
    )
    (loaded,) = load_preferences(dataset)
    assert np.array_equal(np.asarray(loaded["chosen"], dtype=np.float32), latents[0])


def test_pick_a_pic_is_ordered_by_its_label_and_ties_are_left_out(caplog):
    labels = [1.0, 0.0, 0.5, None, 1.0]
    rows = [
        {"caption": f"c{i}", "jpg_0": png(10 + i), "jpg_1": png(20 + i), "label_0": label, "seed": i}
        for i, label in enumerate(labels)
    ]
    for source in (rows, datasets.Dataset.from_list(rows)):
        caplog.clear()
        pairs = load_preferences(source)
        assert [r["prompt"] for r in pairs] == ["c0", "c1", "c4"]
        assert [red(read_picture(r["chosen"], "it")) for r in pairs] == [10, 21, 14]
        assert [red(read_picture(r["rejected"], "it")) for r in pairs] == [20, 11, 24]
        assert sorted(pairs[0]) == ["chosen", "prompt", "rejected", "seed"]
        assert pairs.number(2) == 4
        assert caplog.messages == ["The dataset: 1 of 5 rows are ties and 1 have no label; they are left out."]


def test_a_slice_is_a_dataset_of_its_rows():
    pairs = load_preferences([row(i) for i in (1, 2, 3)])
    assert [r["prompt"] for r in pairs[1:]] == ["p2", "p3"]
    assert pairs[1:].number(1) == 2
    assert pairs[-1]["prompt"] == "p3"
    with pytest.raises(IndexError):
        pairs[3]


def test_prompts_are_no_pairs():
    assert not has_pairs(["a cat"])
    assert not has_pairs([{"prompt": "a cat"}])
    assert has_pairs([{"prompt": "a cat", "chosen": 1}])
    assert has_pairs([{"jpg_0": 1}])


# What is refused


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "The dataset has no preference pairs"),
        (5, r"Preference pairs can be .*got int: for example \[{"),
        (["a cat"], "Row 0 of the dataset is a str, but a pair is a dictionary such as"),
        (
            [{"prompt": "a", "chosen": 1}],
            r"has no column 'rejected', it has \['prompt', 'chosen'\]: .* or 'caption', 'jpg_0', 'jpg_1' and",
        ),
        ([{"prompt": "a"}], "has no column 'chosen' and no column 'rejected'"),
        ([{"caption": "a", "chosen": 1, "rejected": 2}], r'rename_column\("caption", "prompt"\)'),
        ([{"text": "a", "jpg_0": 1, "jpg_1": 2, "label_0": 1}], r'rename_column\("text", "prompt"\)'),
        ([{"prompt": "a", "jpg_0": 1, "jpg_1": 2}], "has no column 'chosen' and no column 'rejected'"),
        ([{"prompt": "a", "jpg_0": 1, "jpg_1": 2, "label_0": 0.7}], "'label_0' of row 0 .* is 0.7, but it must be 1"),
        ([{"prompt": "a", "jpg_0": 1, "jpg_1": 2, "label_0": 0.5}], "no preference pairs"),
    ],
)
def test_columns_and_labels(source, message):
    refused(source, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": None}, "'chosen' of row 1 of the dataset is missing: each row needs two pictures"),
        ({"rejected": {"bytes": None, "path": None}}, "'rejected' of row 1 of the dataset is missing"),
        ({"rejected": ""}, "'rejected' of row 1 of the dataset is missing"),
        ({"rejected": b""}, "'rejected' of row 1 of the dataset is missing"),
        ({"prompt": " "}, "'prompt' of row 1 of the dataset is blank"),
        ({"prompt": None}, "'prompt' of row 1 of the dataset is missing"),
        (
            {"prompt": picture(1), "chosen": "a cat"},
            "'prompt' of row 1 of the dataset is a Image, .*swap the columns if the pictures stand in it",
        ),
        ({"chosen": "no/such/file.png"}, "'chosen' of row 1 .* is the file no/such/file.png, which does not exist"),
        ({"chosen": b"no picture"}, r"'chosen' of row 1 .* is no picture that can be read \(10 bytes\)"),
        ({"score_chosen": 0.2, "score_rejected": 0.9}, "Row 1 .*score_chosen=0.2 and score_rejected=0.9, .* swapped"),
        ({"score_chosen": 0.5, "score_rejected": 0.5}, "swapped or tied"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(changes, message):
    refused([row(1), row(2, **changes)], message)


def test_one_picture_twice_is_refused_in_every_form(tmp_path):
    same, latents = picture(3), torch.randn(4, 2, 2)
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    for chosen, rejected in (
        (same, same),
        (picture(3), picture(3)),
        (png(3), png(3)),
        ("a.png", "a.png"),
        ({"bytes": png(3), "path": "a"}, {"bytes": png(3), "path": "b"}),
        ({"bytes": None, "path": "a"}, {"bytes": None, "path": "a"}),
        (pixels, pixels.copy()),
        (latents, latents.clone()),
        (latents.tolist(), latents.tolist()),
    ):
        refused(
            [row(1), {"prompt": "a", "chosen": chosen, "rejected": rejected}],
            "'chosen' and 'rejected' of row 1 of the dataset are the same picture",
        )


def test_a_picture_that_breaks_off_is_found_when_it_is_read():
    """At construction only headers are read: decoding all pictures twice would double the time to the first step."""
    big = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(big, "PNG")
    (loaded,) = load_preferences([{"prompt": "a", "chosen": big.getvalue()[:500], "rejected": png(0)}])
    with pytest.raises(InputError, match=r"it is no picture that can be read \(500 bytes\)"):
        read_picture(loaded["chosen"], "it")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((8, 8)), r"array of shape \(8, 8\), but a picture is \(height, width, 3\)"),
        (np.full((8, 8, 3), 2.0), "array of float32 from 2 to 2, but pictures have 8-bit values"),
        (np.full((8, 8, 3), np.nan), "array of float32 from nan to nan"),
        (np.full((8, 8, 3), 300), "array of int64 from 300 to 300"),
    ],
)
def test_arrays_that_are_no_picture(array, message):
    with pytest.raises(InputError, match=message):
        read_picture(array, "it")


def test_later_rows_are_checked_when_they_are_used(monkeypatch):
    monkeypatch.setattr("omnitrl.data.preferences.CHECKED_ROWS", 1)
    pairs = load_preferences([row(1), row(2, chosen=None)])
    with pytest.raises(InputError, match="'chosen' of row 1 of the dataset is missing"):
        pairs.checked(1)

# SPDX-License-Identifier: Apache-2.0
import json
import re

import datasets
import pytest

from omnitrl import load_prompts
from omnitrl.errors import InputError


pytestmark = pytest.mark.compat

PROMPTS = ['a sign that says "OPEN"', "ein Bär im Café", "雪の中の猫"]


def write_txt(folder):
    path = folder / "prompts.txt"
    lines = ["", PROMPTS[0], "   ", PROMPTS[1] + "  ", "", PROMPTS[2], ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    return path


def write_jsonl(folder):
    path = folder / "prompts.jsonl"
    rows = [{"prompt": prompt, "target": f"t{i}"} for i, prompt in enumerate(PROMPTS)]
    rows[1]["only_here"] = "ü"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=row["target"] == "t2") for row in rows), "utf-8")
    return path


def write_json(folder):
    path = folder / "prompts.json"
    path.write_text(json.dumps(PROMPTS), "utf-8")
    return path


def write_csv(folder):
    path = folder / "prompts.csv"
    quoted = ['"' + prompt.replace('"', '""') + '"' for prompt in PROMPTS]
    path.write_text("prompt,score\n" + "".join(f"{prompt},{i}\n" for i, prompt in enumerate(quoted)), "utf-8")
    return path


def write_parquet(folder):
    path = folder / "prompts.parquet"
    datasets.Dataset.from_dict({"prompt": PROMPTS}).to_parquet(path)
    return path


def write_folder(folder):
    path = folder / "saved"
    datasets.Dataset.from_dict({"prompt": PROMPTS}).save_to_disk(path)
    return path


@pytest.mark.parametrize("write", [write_txt, write_jsonl, write_json, write_csv, write_parquet, write_folder])
@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_same_prompts_from_every_kind_of_file(tmp_path, write, kind):
    assert load_prompts(kind(write(tmp_path)))["prompt"][:] == PROMPTS


def test_prompts_from_objects():
    dataset = datasets.Dataset.from_dict({"prompt": PROMPTS})
    assert load_prompts(dataset) is dataset
    assert load_prompts(PROMPTS)["prompt"][:] == PROMPTS
    assert load_prompts([{"prompt": prompt} for prompt in PROMPTS])["prompt"][:] == PROMPTS
    both = datasets.DatasetDict(train=dataset, test=dataset.select([2]))
    assert load_prompts(both)["prompt"][:] == PROMPTS
    assert load_prompts(both, split="test")["prompt"][:] == PROMPTS[2:]


def test_other_columns_are_kept_even_when_the_first_row_lacks_them(tmp_path):
    rows = load_prompts(write_jsonl(tmp_path))
    assert rows.column_names == ["prompt", "target", "only_here"]
    assert rows["target"][:] == ["t0", "t1", "t2"]
    assert rows["only_here"][:] == [None, "ü", None]
    assert load_prompts(write_csv(tmp_path))["score"][:] == [0, 1, 2]


def test_a_line_keeps_what_is_not_a_line_end(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\x0ctwo\u2028three\n# no comment\n", "utf-8")
    assert load_prompts(path)["prompt"][:] == ["one\x0ctwo\u2028three", "# no comment"]


def test_json_with_an_object_a_line_and_csv_with_numbers_for_prompts(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    assert load_prompts(tmp_path / "a.json")["prompt"][:] == ["x", "y"]
    (tmp_path / "a.csv").write_text('prompt\n42\nNA\n"two\nlines"\n')
    assert load_prompts(tmp_path / "a.csv")["prompt"][:] == ["42", "NA", "two\nlines"]


@pytest.mark.parametrize(("name", "old", "new"), [("p.txt", "old", "new"), ("p.jsonl", '{"prompt": "old"}', None)])
def test_an_edited_file_gives_the_new_prompts(tmp_path, name, old, new):
    new = new or old.replace("old", "new")
    path = tmp_path / name
    path.write_text(old)
    assert load_prompts(path)["prompt"][:] == ["old"]
    path.write_text(new)
    assert load_prompts(path)["prompt"][:] == ["new"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / name).write_text(old)
    assert load_prompts(tmp_path / "elsewhere" / name)["prompt"][:] == ["old"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "The dataset has no rows"),
        ({"prompt": ["a"]}, "got dict"),
        ([{"prompt": "a"}, 3], "has a int as row 2"),
        ([{"caption": "a", "id": 1}], "has no column 'prompt', it has ['caption', 'id']"),
        ([{"id": 1, "caption": "a"}], 'dataset.rename_column("caption", "prompt")'),
        (["a", "b", " \t"], "has a blank prompt in row 2"),
        ([{"prompt": "a"}, {"prompt": None}], "has a blank prompt in row 1"),
        ([{"prompt": 1}], "holds Value('int64'), but it must hold strings"),
        ([{"prompt": [{"role": "user", "content": "a"}]}], "but it must hold strings"),
        ([{"prompt": "a"}, {"prompt": 1}], "values of several types"),
        ("nowhere/prompts.txt", "There is no file nowhere/prompts.txt; the working folder is"),
        ("a photo of a cat", "load_prompts(['a photo of a cat'])"),
        ("nobody/nothing-here", "could not be loaded from the Hub either"),
        (datasets.DatasetDict(trian=datasets.Dataset.from_dict({"prompt": ["a"]})), "Did you mean 'trian'?"),
        (datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset(), 'dataset.rename_column("text", "prompt")'),
        (
            datasets.Dataset.from_dict({"prompt": [" "]}).to_iterable_dataset(),
            "Row 0 of the stream has a blank prompt",
        ),
        (datasets.IterableDataset.from_generator(lambda: iter(())), "The stream has no rows"),
    ],
)
def test_a_bad_source_gets_one_sentence_that_helps(source, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load_prompts(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"a\nb\xff\n", "is not UTF-8 text (byte 3)"),
        ("p.txt", b"\n  \n", "has no rows"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', "line 3 is not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": " "}\n', "blank prompt in row 1"),
        ("p.jsonl", b'{"text": "a"}\n', 'rename_column("text", "prompt")'),
        ("p.json", b'{"prompt": ["a"]}', "holds a dict, but a list is expected"),
        ("p.csv", b"prompt,x\na\n", "cannot be read as CSV"),
        ("p.parquet", b"no parquet", "cannot be read as Parquet"),
        ("p.docx", b"a", "use one of .txt, .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_bad_file_gets_a_sentence_that_names_it(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load_prompts(path)
    assert str(path) in str(caught.value)


def test_a_folder_that_is_no_dataset(tmp_path):
    with pytest.raises(InputError, match="was not written by"):
        load_prompts(tmp_path)

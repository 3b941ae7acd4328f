# SPDX-License-Identifier: Apache-2.0
import json
import math

import numpy as np
import pytest
import torch

from omnitrl.errors import InputError
from omnitrl.report import MetricsWriter, read_metrics


def test_each_row_is_on_disk_at_once(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in (1, 2):
        writer.write({"step": step, "reward": 0.25 * step})
        assert len(path.read_text().splitlines()) == step  # while the file is still open
    writer.close()
    assert read_metrics(path) == [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}]


def test_values_become_json(tmp_path):
    values = {
        "nan": math.nan,
        "inf": -math.inf,
        "tensor": torch.tensor(0.5),
        "numpy": np.float32(0.25),
        "count": np.int64(3),
        "flag": True,
        "text": "a\u2028b é",
        "none": None,
        "list": [1, math.nan],
    }
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(values)
        kept = dict(writer.last_row)
    # Strict JSON: Python's parser alone would take NaN.
    row = json.loads((tmp_path / "metrics.jsonl").read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert row == kept == {
        "nan": None, "inf": None, "tensor": 0.5, "numpy": 0.25, "count": 3.0, "flag": True, "text": "a\u2028b é",
        "none": None, "list": [1, None],
    }  # fmt: skip
    assert read_metrics(tmp_path / "metrics.jsonl") == [row]


def test_resume_has_no_step_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (0, 1, 2, 3):
            writer.write({"step": step, "try": 1})
    with MetricsWriter(path, truncate_after_step=2) as writer:
        writer.write({"step": 3, "try": 2})
    assert [(row["step"], row["try"]) for row in read_metrics(path)] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_half_a_line_at_the_end_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": 1}\n{"step": 2, "text": "caf\xc3')  # torn inside a character
    assert read_metrics(path) == [{"step": 1, "x": 1}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 2, "x": 2})
    assert path.read_text() == '{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n'


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    with MetricsWriter(path) as writer:
        writer.write({"step": 3})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_starting_over_keeps_the_earlier_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9}\n')
    with MetricsWriter(path, start_over=True) as writer:
        writer.write({"step": 1})
    assert read_metrics(path) == [{"step": 1}]
    assert read_metrics(tmp_path / "metrics.jsonl.bak") == [{"step": 9}]


def test_a_broken_line_inside_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*metrics\.jsonl is not a JSON object: '\[2\]'"):
        read_metrics(path)


@pytest.mark.parametrize("blocked_by", ["a folder of that name", "a file in place of the folder"])
def test_a_file_that_cannot_be_opened_says_what_to_do(tmp_path, blocked_by):
    path = tmp_path / "out" / "metrics.jsonl"
    if blocked_by == "a folder of that name":
        path.mkdir(parents=True)
    else:
        path.parent.write_text("not a folder")
    with pytest.raises(InputError, match=r"Cannot write .*metrics\.jsonl \(.*output_dir='\./runs/first'"):
        MetricsWriter(path)

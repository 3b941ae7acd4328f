# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
from PIL import Image

from omnitrl.report import EvaluationRecord, RunSummary, Sample, package_versions
from omnitrl.report.records import (
    Headline,
    format_duration,
    format_number,
    headlines,
    matched_samples,
    pick_samples,
    timeline_records,
)


def test_headlines_are_first_and_last_of_each_set(run):
    assert headlines(run) == [
        Headline("eval", "reward", 0.5, 0.8125, 0, 3),
        Headline("eval", "exact_match", 0.25, 0.40625, 0, 3),
        Headline("eval_unseen", "reward", 0.4, 0.3, 0, 3),
    ]
    assert headlines(run)[2].change == pytest.approx(-0.1)


def test_headlines_without_pictures_come_from_the_history(run):
    run.evaluations = []
    assert [(line.set_name, line.before, line.after) for line in headlines(run)] == [
        ("eval", 0.5, 0.8125),
        ("eval_unseen", 0.4, 0.3),
    ]


def test_what_is_no_result_is_no_headline():
    metrics = {
        "reward": 0.5,
        "reward_std": 0.1,
        "rewards/ocr/mean": 0.5,
        "rewards/ocr/std": 0.1,
        "loss": 0.0,
        "x": 1.0,
    }
    run = RunSummary("t", "a", "m", evaluations=[EvaluationRecord(0, "eval", metrics | {"y": math.nan})])
    assert [line.metric for line in headlines(run)] == ["reward", "x"]
    run.evaluations[0].metrics["rewards/jpeg/mean"] = 0.2  # of two rewards each is worth a line
    assert [line.metric for line in headlines(run)] == ["reward", "rewards/ocr/mean", "x", "rewards/jpeg/mean"]


def test_a_record_survives_json_with_its_pictures():
    image = Image.new("RGBA", (512, 300), (255, 0, 0, 255))
    record = EvaluationRecord(
        7, "eval", {"reward": 0.5, "bad": math.nan}, [Sample("p", image, math.nan, "c"), Sample("q")]
    )
    back = EvaluationRecord.from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))
    assert (back.step, back.name, back.metrics["reward"]) == (7, "eval", 0.5)
    assert math.isnan(back.metrics["bad"])
    first, second = back.samples
    assert (first.prompt, first.reward, first.caption) == ("p", None, "c")
    assert (first.image.size, first.image.getpixel((9, 9))) == ((256, 150), (255, 0, 0))
    assert second == Sample("q")
    assert image.size == (512, 300)


def test_different_prompts_are_picked_first():
    samples = [Sample(prompt, reward=index) for index, prompt in enumerate("aabbc")]
    assert [sample.reward for sample in pick_samples(samples, 4)] == [0, 1, 2, 4]
    assert [sample.prompt for sample in pick_samples(samples, 3)] == ["a", "b", "c"]
    assert pick_samples(samples, 0) == []
    assert pick_samples(samples, 99) == samples


def test_samples_are_matched_by_prompt_and_repetition():
    before = EvaluationRecord(
        0, "eval", {}, [Sample(p, reward=r) for p, r in (("a", 1), ("a", 2), ("b", 3), ("c", 4))]
    )
    after = EvaluationRecord(9, "eval", {}, [Sample(p, reward=r) for p, r in (("b", 7), ("a", 5), ("a", 6))])
    pairs = matched_samples([before, after])
    assert [(left.reward, right.reward) for left, right in pairs] == [(1, 5), (2, 6), (3, 7)]


def test_the_timeline_has_the_first_and_the_last():
    picture = [Sample("p", Image.new("RGB", (8, 8)))]
    records = [EvaluationRecord(step, "eval", {}, picture if step != 3 else []) for step in range(12)]
    run = RunSummary("t", "a", "m", evaluations=records)
    assert [record.step for record in timeline_records(run, "eval", limit=4)] == [0, 4, 8, 11]
    run.evaluations = records[:2]
    assert [record.step for record in timeline_records(run, "eval", limit=4)] == [0, 1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.505, "0.505"), (1.0, "1.000"), (0.0, "0.000"), (12.34, "12.3"), (1250, "1,250"), (2.1e-5, "2.1e-05"),
     (-0.2, "-0.200"), (None, "–"), (math.nan, "–"), (math.inf, "–")],
)  # fmt: skip
def test_numbers_as_people_write_them(value, text):
    assert format_number(value) == text


def test_durations_as_people_write_them():
    assert [format_duration(seconds) for seconds in (0.4, 42, 59.7, 200, 7500)] == [
        "0 s", "42 s", "1 min 00 s", "3 min 20 s", "2 h 05 min",
    ]  # fmt: skip


def test_versions_of_what_is_installed():
    versions = package_versions(["pillow", "no-such-package-at-all"])
    import PIL

    assert versions["pillow"] == PIL.__version__
    assert set(versions) == {"python", "platform", "pillow"}


def test_a_label_has_the_reward_unless_it_is_missing():
    assert Sample("cat", reward=0.667).label() == "cat\n0.67"
    assert Sample("cat", reward=math.nan, caption="read: C4T").label() == "cat\nread: C4T"

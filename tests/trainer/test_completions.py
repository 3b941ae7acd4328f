# SPDX-License-Identifier: Apache-2.0
"""Samples of training that a person is shown."""

import logging

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from omnitrl.trainer.completions import caption
from tests.trainer.helpers import WITH_ROLLOUTS, logged, trainer


ONE_UPDATE = {"gradient_accumulation_steps": 2}  # of each rollout


def reads(prompts, log_extra, **kwargs):
    log_extra("read", [prompt[::-1] for prompt in prompts])
    log_extra("sure", [np.float32(0.5)] * len(prompts))
    return [None if prompt == "a sky" else float(len(prompt)) for prompt in prompts]


def counting(completions, **kwargs):
    return [float(i) for i in range(len(completions))]


def tables(tmp_path):
    files = sorted((tmp_path / "out" / "completions").glob("*"))
    return {file.name: parquet.read_table(file).to_pylist() for file in files}


def pictures(tmp_path):
    return sorted(file.name for file in (tmp_path / "out" / "samples").glob("rollout_*"))


def test_a_table_has_all_samples_of_a_rollout_with_what_they_got(tmp_path):
    run = trainer(
        tmp_path, rewards=[reads, counting], reward_weights=[1.0, 0.5], data=["a cat", "a sky"], max_steps=4,
        log_completions=True, logging_steps=2, **ONE_UPDATE,
    )  # fmt: skip
    run.train()
    found = tables(tmp_path)
    assert list(found) == ["completions_00000.parquet", "completions_00002.parquet"]
    for step, rows in zip((0, 2), found.values(), strict=True):
        assert {row["step"] for row in rows} == {step}
        assert [(row["group"], row["member"]) for row in rows] == [(g, m) for g in (0, 1) for m in range(4)]
        assert {(row["prompt"], row["rewards/reads"], row["extra/read"], row["extra/sure"]) for row in rows} == {
            ("a cat", 5.0, "tac a", 0.5),
            ("a sky", None, "yks a", 0.5),
        }
        for row in rows:
            assert row["reward"] == (row["rewards/reads"] or 0) + 0.5 * row["rewards/counting"]
        for group in (0, 1):
            values = np.array([row["reward"] for row in rows if row["group"] == group])
            advantages = [row["advantage"] for row in rows if row["group"] == group]
            np.testing.assert_allclose(advantages, (values - values.mean()) / (values.std() + 1e-4), rtol=1e-5)
    means = [np.mean([row["reward"] for row in rows]) for rows in found.values()]
    assert logged(run, "reward") == pytest.approx(means)


def test_pictures_are_of_the_first_samples_and_on_the_page(tmp_path):
    shown = {"log_completions": True, "save_report": True, "num_samples_to_save": 6, **ONE_UPDATE}
    run = trainer(tmp_path, rewards=reads, data=["a cat"], max_steps=2, **shown)
    run.train()
    assert pictures(tmp_path) == ["rollout_000000.png", "rollout_000001.png"]
    assert [(s.caption, s.reward) for s in run.report.summary.rollout.samples] == [("read: tac a, sure: 0.5", 5.0)] * 6
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    section = page[page.index("Samples of training") :]
    assert "Of the rollout at step 1," in section
    assert section.count('<div class="shot">') == 6
    # Four members in a row of four, the other two below; tiles are enlarged to 128 pixels.
    assert Image.open(tmp_path / "out" / "samples" / "rollout_000001.png").width == 2 * 16 + 4 * 128 + 3 * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ROLLOUTS)
def test_every_trainer_with_rollouts_shows_its_samples(tmp_path, name):
    trainer(tmp_path, name, max_steps=1, log_completions=True, save_report=True).train()
    (rows,) = tables(tmp_path).values()
    assert len(rows) == 8
    assert pictures(tmp_path) == ["rollout_000000.png"]


@pytest.mark.slow
def test_a_new_run_has_no_samples_of_an_older_one_in_its_folder(tmp_path):
    options = {"log_completions": True, "save_report": True, **ONE_UPDATE}
    trainer(tmp_path, max_steps=2, **options).train()
    assert len(tables(tmp_path)) == len(pictures(tmp_path)) == 2
    trainer(tmp_path, max_steps=1, **options).train()
    assert len(tables(tmp_path)) == len(pictures(tmp_path)) == 1


@pytest.mark.slow
def test_a_resumed_run_writes_those_after_its_checkpoint_again(tmp_path):
    options = {"log_completions": True, "save_report": True, "save_strategy": "steps", "save_steps": 1, **ONE_UPDATE}
    trainer(tmp_path, max_steps=3, **options).train()
    whole = tables(tmp_path)
    run = trainer(tmp_path, max_steps=3, **options)
    run.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert tables(tmp_path) == whole
    assert len(whole) == 3


@pytest.mark.parametrize("save_report", [True, False])
def test_samples_of_equal_reward_are_shown_with_the_warning(tmp_path, caplog, save_report):
    def constant(completions, **kwargs):
        return [1.0] * len(completions)

    with caplog.at_level(logging.WARNING, "omnitrl"):
        trainer(
            tmp_path, rewards=constant, max_steps=5, gradient_accumulation_steps=2, save_report=save_report
        ).train()
    (warning,) = (record.getMessage() for record in caplog.records if "same reward" in record.getMessage())
    assert str(tmp_path / "out" / ("samples" if save_report else "completions")) in warning
    assert list(tables(tmp_path)) == ["completions_00002.parquet"]
    assert pictures(tmp_path) == (["rollout_000002.png"] if save_report else [])


def test_a_third_rollout_that_differs_is_no_reason_to_show_it(tmp_path):
    calls = []

    def twice_equal(completions, **kwargs):
        calls.append(len(completions))
        return [float(i) if sum(calls) > 16 else 1.0 for i in range(len(completions))]

    trainer(tmp_path, rewards=twice_equal, max_steps=3, log_completions=True, logging_steps=9, **ONE_UPDATE).train()
    assert sum(calls) == 24
    assert list(tables(tmp_path)) == ["completions_00000.parquet"]


def test_nothing_is_written_unasked(tmp_path):
    trainer(tmp_path, max_steps=4, save_report=True).train()
    assert tables(tmp_path) == {}
    assert pictures(tmp_path) == []


def test_captions_have_words_and_numbers_alone():
    recorded = {"a": "x", "b": np.float64(0.25), "c": np.arange(3), "d": None, "e": True}
    assert caption(recorded) == "a: x, b: 0.25, e: True"

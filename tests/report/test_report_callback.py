# SPDX-License-Identifier: Apache-2.0
import io
import warnings

import pytest
import torch
from PIL import Image
from pyarrow import parquet
from rich.console import Console
from transformers import Trainer, TrainingArguments

from omnitrl.errors import InputError
from omnitrl.report import EvaluationRecord, Progress, ReportCallback, RunSummary, Sample, read_metrics


COLORS = {0: "red", 2: "lime", 3: "gray", 4: "blue"}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}


class TinyTrainer(Trainer):
    """A trainer whose evaluation gives pictures, as ours do."""

    report: ReportCallback

    def evaluate(self, *args, **kwargs):
        step = self.state.global_step
        metrics = {"eval_reward": 0.5 + step / 10}
        image = Image.new("RGB", (64, 32), COLORS[step])
        samples = [Sample(f"word {index % 3}", image, index / 10) for index in range(6)]
        self.log(dict(metrics))
        self.report.record_evaluation(EvaluationRecord(step, "eval", metrics, samples))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def trainer_in(folder, max_steps=4, progress=None, **options):
    rows = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 8
    args = TrainingArguments(
        output_dir=str(folder), max_steps=max_steps, per_device_train_batch_size=1, logging_steps=1, use_cpu=True,
        report_to=[], save_steps=2, eval_strategy="steps", eval_steps=2, eval_on_start=True, disable_tqdm=True,
    )  # fmt: skip
    report = ReportCallback(folder, progress=progress, max_samples=3, **options)
    trainer = TinyTrainer(model=Model(), args=args, train_dataset=rows, eval_dataset=rows[:1], callbacks=[report])
    trainer.report = report
    return trainer


def test_a_run_leaves_its_files(tmp_path):
    file = io.StringIO()
    progress = Progress(Console(file=file, width=80, force_terminal=False))
    summary = RunSummary("My run", "FlowGRPO", "tiny", environment={"device": "a machine"})
    trainer = trainer_in(tmp_path, progress=progress, summary=summary)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row] == [
        (0, 0.5),
        (2, 0.7),
        (4, 0.9),
    ]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert rows[1]["epoch"] == pytest.approx(1 / 8)
    assert rows == trainer.report.summary.history
    names = {path.name for path in (tmp_path / "samples").iterdir()}
    assert names == {"step_000000.png", "step_000002.png", "step_000004.png", "records"}
    for name in ("before_after.png", "timeline.png", "reward_curve.png", "health.png"):
        Image.open(tmp_path / name).verify()
    before_after = Image.open(tmp_path / "before_after.png").convert("RGB")
    middle = before_after.height // 2
    upper = before_after.crop((0, 0, before_after.width, middle))
    lower = before_after.crop((0, middle, *before_after.size))
    assert {color: count for count, color in upper.getcolors(10**6)}[255, 0, 0] == 3 * 128 * 64
    assert {color: count for count, color in lower.getcolors(10**6)}[0, 0, 255] == 3 * 128 * 64
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "finished: 4 steps" in page
    assert "My run" in page
    assert "a machine" in page
    assert ">learning_rate<" in page  # the training arguments
    assert page.count("<img ") == 2 * 3 + 3 * 3  # one of each prompt
    lines = file.getvalue().splitlines()
    assert lines[0] == "My run: 4 steps"
    assert lines[1].startswith("step 0/4  held-out 0.500")
    assert any(line.startswith("step 3/4  loss") for line in lines)


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    trainer_in(tmp_path).train()
    resumed = trainer_in(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert [record.step for record in resumed.report.summary.evaluations] == [0, 2, 4]
    pictures = [record.samples[0].image.getpixel((0, 0)) for record in resumed.report.summary.evaluations]
    assert pictures == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_resuming_removes_what_came_later(tmp_path):
    trainer_in(tmp_path).train()
    (tmp_path / "samples" / "mine.png").write_bytes(b"of somebody else")
    trainer = trainer_in(tmp_path, max_steps=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row] == [1, 2, 3]
    names = {path.name for path in (tmp_path / "samples").iterdir()}
    assert names == {"step_000000.png", "step_000002.png", "step_000003.png", "records", "mine.png"}


def test_a_fresh_run_does_not_mix_with_an_earlier_one(tmp_path):
    trainer_in(tmp_path).train()
    trainer = trainer_in(tmp_path, max_steps=2)
    trainer.evaluate()  # before training: it belongs to the new run
    trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 0, 2]  # by hand, on start, at step 2
    assert len(read_metrics(tmp_path / "metrics.jsonl.bak")) > 4
    assert sorted(path.name for path in (tmp_path / "samples").glob("*.png")) == ["step_000000.png", "step_000002.png"]


def test_evaluating_alone_leaves_the_page_of_an_earlier_run(tmp_path):
    trainer_in(tmp_path).train()
    page = (tmp_path / "report.html").read_text()
    trainer_in(tmp_path).evaluate()
    assert (tmp_path / "report.html").read_text() == page
    trainer_in(tmp_path / "new").evaluate()
    assert "one evaluation so far" in (tmp_path / "new" / "report.html").read_text()


def test_an_interrupted_run_says_where_it_stopped(tmp_path):
    trainer = trainer_in(tmp_path)

    def interrupt(*args, **kwargs):
        if trainer.state.global_step == 3:
            raise KeyboardInterrupt
        return training_step(*args, **kwargs)

    training_step, trainer.training_step = trainer.training_step, interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "running: step 2 of 4" in (tmp_path / "report.html").read_text()
    trainer.report.close()
    assert "stopped at step 3 of 4" in (tmp_path / "report.html").read_text()
    trainer.report.close()
    assert "stopped at step 3 of 4" in (tmp_path / "report.html").read_text()


def test_a_picture_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "samples").write_text("a file where the folder should be")
    trainer = trainer_in(tmp_path)
    with pytest.warns(UserWarning, match="Could not write the report in") as caught:
        trainer.train()
    assert sum("Could not write the report" in str(entry.message) for entry in caught) == 1
    assert trainer.state.global_step == 4
    assert "finished: 4 steps" in (tmp_path / "report.html").read_text()


def test_metrics_that_cannot_be_written_stop_the_run_at_once(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match="choose an output_dir that this user may write to"):
        trainer_in(tmp_path).train()


def test_only_the_main_process_writes(tmp_path):
    trainer = trainer_in(tmp_path / "out")
    trainer.state.is_world_process_zero = False
    report = trainer.report
    report.on_init_end(trainer.args, trainer.state, trainer.control)
    report.on_train_begin(trainer.args, trainer.state, trainer.control)
    report.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 1.0})
    report.record_evaluation(EvaluationRecord(0, "eval", {"reward": 1.0}, [Sample("x", Image.new("RGB", (8, 8)))]))
    report.write_metrics({"x": 1.0}, step=1)
    report.on_train_end(trainer.args, trainer.state, trainer.control)
    assert list((tmp_path / "out").rglob("*.*")) == []


def test_long_runs_keep_the_pictures_that_are_shown(tmp_path):
    report = ReportCallback(tmp_path, max_samples=10)
    for step in (0, 1, 2):
        samples = [Sample(f"p{index}", Image.new("RGB", (512, 512))) for index in range(12)]
        report.record_evaluation(EvaluationRecord(step, "eval", {}, samples))
    assert [len(record.samples) for record in report.summary.evaluations] == [10, 8, 10]
    assert report.summary.evaluations[0].samples[0].image.size == (256, 256)
    report.record_evaluation(EvaluationRecord(2, "eval", {"reward": 1.0}))
    assert [len(record.samples) for record in report.summary.evaluations] == [10, 8, 0]


def test_max_samples_is_checked(tmp_path):
    with pytest.raises(InputError, match="max_samples=-1"):
        ReportCallback(tmp_path, max_samples=-1)


def test_a_table_of_samples_has_what_any_of_them_has(tmp_path):
    """Where a reward has failed for all samples of a process, their rows lack what it records."""
    report = ReportCallback(tmp_path)
    rows = [
        {"prompt": "a", "reward": 0.5, "extra/read": "x", "extra/count": 3, "extra/mixed": 1, "extra/huge": 2**70},
        {"prompt": "b", "reward": float("nan"), "extra/late": True},
    ]
    report.record_completions(7, rows, [], group_size=2)
    found = parquet.read_table(tmp_path / "completions" / "completions_00007.parquet").to_pylist()
    none = dict.fromkeys(["extra/read", "extra/count", "extra/mixed", "extra/huge"])
    assert found == [rows[0] | {"extra/late": None, "extra/huge": str(2**70)}, rows[1] | {"reward": None} | none]

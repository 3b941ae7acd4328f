# SPDX-License-Identifier: Apache-2.0
"""The files of a report in an output folder: where they are, how they are written and read back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omnitrl.report import curves, grid
from omnitrl.report.health import health_keys
from omnitrl.report.metrics import read_metrics
from omnitrl.report.page import write_report
from omnitrl.report.records import EvaluationRecord, RunSummary, is_missing, matched_samples, timeline_records


_OURS = re.compile(
    r"^(?:step_(\d{6,})(?:_[\w.-]+)?\.(?:png|json)|rollout_(\d{6,})\.png|completions_(\d{5,})\.parquet)$"
)


class RunFolder:
    """
    Reads and writes the files that [`ReportCallback`] lists.

    Args:
        root (`str` or `os.PathLike`):
            The output folder; it is made when the first file is written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.metrics = self.root / "metrics.jsonl"
        self.samples = self.root / "samples"
        self.records = self.samples / "records"
        self.completions = self.root / "completions"
        self.reward_curve = self.root / "reward_curve.png"
        self.health = self.root / "health.png"
        self.before_after = self.root / "before_after.png"
        self.timeline = self.root / "timeline.png"
        self.page = self.root / "report.html"

    def save_record(self, record: EvaluationRecord) -> None:
        """Keep an evaluation in a file, so that a resumed run still has its pictures."""
        self.records.mkdir(parents=True, exist_ok=True)
        path = self.records / f"{_stem(record)}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record.to_dict(), ensure_ascii=False), encoding="utf-8")
        os.replace(temporary, path)

    def load_records(self, truncate_after_step: int | None = None) -> list[EvaluationRecord]:
        """
        The evaluations that were kept.

        Args:
            truncate_after_step (`int`, *optional*):
                Remove the files of later steps first. By default all are kept.

        Returns:
            `list[EvaluationRecord]`: in the order of their steps.
        """
        if truncate_after_step is not None:
            self._remove_steps(lambda step: step > truncate_after_step)
        files = [file for file in _own_files(self.records) if file.suffix == ".json"]
        records = [EvaluationRecord.from_dict(json.loads(file.read_text("utf-8"))) for file in files]
        return sorted(records, key=lambda record: record.step)

    def load_history(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, none if there is no such file."""
        return read_metrics(self.metrics) if self.metrics.exists() else []

    def clear(self, keep: Iterable[EvaluationRecord] = ()) -> None:
        """Remove the evaluations, sample pictures and completions of an earlier run, except those of `keep`."""
        kept = {_stem(record) for record in keep}
        for folder in (self.samples, self.records, self.completions):
            for file in _own_files(folder):
                if file.stem not in kept:
                    file.unlink()

    def draw_samples(self, record: EvaluationRecord) -> None:
        """Write the grid of one evaluation into `samples/`."""
        if not record.samples:
            return
        self.samples.mkdir(parents=True, exist_ok=True)
        labels = [sample.label() for sample in record.samples]
        title = f"step {record.step}: {record.headline()}"
        grid.image_grid([sample.image for sample in record.samples], labels, title=title).save(
            self.samples / f"{_stem(record)}.png"
        )

    def save_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the table of a rollout into `completions/`; numbers stay numbers, all else becomes text."""
        import pyarrow as pa
        from pyarrow import parquet

        if not rows:
            return
        self.completions.mkdir(parents=True, exist_ok=True)
        path = self.completions / f"completions_{step:05d}.parquet"
        temporary = path.with_suffix(".tmp")
        names = dict.fromkeys(
            name for row in rows for name in row
        )  # a process may lack what its rewards failed to record
        table = pa.table({name: _table_column([row.get(name) for row in rows]) for name in names})
        parquet.write_table(table, temporary)
        os.replace(temporary, path)

    def draw_completions(self, record: EvaluationRecord, columns: int) -> None:
        """Write pictures of a rollout into `samples/`, so many in a row."""
        if not record.samples:
            return
        self.samples.mkdir(parents=True, exist_ok=True)
        labels = [sample.label() for sample in record.samples]
        title = f"rollout at step {record.step}, with the noise of training"
        grid.image_grid([sample.image for sample in record.samples], labels, columns, title=title).save(
            self.samples / f"rollout_{record.step:06d}.png"
        )

    def draw_rewards(self, run: RunSummary) -> None:
        """Write `reward_curve.png` if there is a reward to draw."""
        if curves.has_rewards(run.history):
            curves.reward_curve(run.history, self.reward_curve, title=run.title)

    def draw_health(self, run: RunSummary) -> None:
        """Write `health.png` if there is a metric of the run's health to draw."""
        keys = health_keys(run.history)
        if keys:
            curves.small_multiples(run.history, keys, self.health)

    def draw_comparisons(self, run: RunSummary) -> None:
        """Write `before_after.png` and `timeline.png` of the first set that has pictures of two evaluations."""
        name = run.pictured_set()
        ends = None if name is None else run.first_and_last(name)
        if name is None or ends is None:
            return
        pairs = matched_samples(ends)
        if pairs and ends[0].step != ends[1].step:
            grid.before_after(
                [before.image for before, _ in pairs],
                [after.image for _, after in pairs],
                captions=[before.label() for before, _ in pairs],
                after_captions=[after.label() for _, after in pairs],
                before_title=f"before: {ends[0].headline()}",
                after_title=f"after {ends[1].step} steps: {ends[1].headline()}",
            ).save(self.before_after)
        records = timeline_records(run, name)
        columns = list(zip(*matched_samples(records), strict=True))
        if len(records) > 1 and columns:
            prompts = [sample.prompt for sample in columns[0]][: grid.TIMELINE_COLUMNS]
            rows = [
                (f"step {record.step}", [sample.image for sample in column][: grid.TIMELINE_COLUMNS])
                for record, column in zip(records, columns, strict=True)
            ]
            grid.timeline(rows, prompts).save(self.timeline)

    def write_page(self, run: RunSummary) -> None:
        """Write `report.html`."""
        self.root.mkdir(parents=True, exist_ok=True)
        write_report(self.page, run)

    def _remove_steps(self, unwanted: Any) -> None:
        for folder in (self.samples, self.records, self.completions):
            for file in _own_files(folder):
                match = _OURS.match(file.name)
                if match and unwanted(int(next(filter(None, match.groups())))):
                    file.unlink()


def _table_column(values: Sequence[Any]) -> list[Any]:
    """Values that one column of a table can hold: numbers (missing ones `None`), lists of numbers, else texts."""
    there = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not _is_huge(value) for value in there):
        number = int if all(isinstance(value, int) for value in there) else float
        return [None if is_missing(value) else number(value) for value in values]
    if all(isinstance(value, list) and all(isinstance(part, float) for part in value) for value in there):
        return list(values)
    return [None if value is None else str(value) for value in values]


def _is_huge(value: int | float) -> bool:
    """Whether a whole number has more digits than a column of numbers keeps."""
    return isinstance(value, int) and value.bit_length() >= 64


def _stem(record: EvaluationRecord) -> str:
    suffix = "" if record.name == "eval" else "_" + re.sub(r"[^\w.-]", "-", record.name)
    return f"step_{record.step:06d}{suffix}"


def _own_files(folder: Path) -> Sequence[Path]:
    # Only names that this class writes: the folder may hold pictures of somebody else.
    return sorted(file for file in folder.iterdir() if _OURS.match(file.name)) if folder.is_dir() else []

# SPDX-License-Identifier: Apache-2.0
"""The Trainer callback that writes metrics, pictures, curves and the run page while a run goes on."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from omnitrl.errors import InputError
from omnitrl.report.folder import RunFolder
from omnitrl.report.grid import TIMELINE_COLUMNS
from omnitrl.report.metrics import MetricsWriter
from omnitrl.report.progress import Progress
from omnitrl.report.records import (
    EvaluationRecord,
    RunSummary,
    Sample,
    column,
    package_versions,
    pick_samples,
)


class ReportCallback(TrainerCallback):
    """
    Writes what a person looks at into the output folder, on the main process only.

    | file | what | when |
    |---|---|---|
    | `metrics.jsonl` | every logged row with `step`, `epoch`, `seconds` | at each log |
    | `samples/step_000123.png` | pictures of the held-out prompts | at each evaluation |
    | `samples/rollout_000123.png` | pictures of training, with its noise | where the trainer shows a rollout |
    | `completions/completions_00123.parquet` | all samples of that rollout with their rewards | the same |
    | `before_after.png`, `timeline.png` | the same prompts over time | at each evaluation |
    | `reward_curve.png` | reward of training and of evaluations | at each evaluation and at the end |
    | `health.png` | KL, clipping, update size, gradient norm, … | at the end |
    | `report.html` | all of it on one page | at each evaluation and at the end |

    A fresh run keeps the `metrics.jsonl` of an earlier one in the same folder as `metrics.jsonl.bak`; a resumed run
    goes on with it. A picture or page that cannot be written is one warning, never the end of the run.

    Args:
        output_dir (`str` or `os.PathLike`):
            The folder.
        progress ([`Progress`], *optional*):
            Bar to drive. By default there is none.
        max_samples (`int`, *optional*, defaults to 16):
            Pictures to keep of each evaluation; different prompts are taken first.
        summary ([`RunSummary`], *optional*):
            What is known of the run beforehand: title, model, configuration, environment, how to load the result. The
            callback fills `status`, `history` and `evaluations`. By default one with the training arguments.

        pictures (`bool`, *optional*, defaults to `True`):
            Whether to write pictures, curves and the page too; `metrics.jsonl` is always written.

    Example:

    ```python
    >>> report = ReportCallback("out", progress=Progress())
    >>> trainer = Trainer(..., callbacks=[report])
    >>> trainer.train()
    >>> report.record_evaluation(EvaluationRecord(step=60, name="eval", metrics={"reward": 0.9}, samples=samples))
    ```
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        progress: Progress | None = None,
        max_samples: int = 16,
        summary: RunSummary | None = None,
        pictures: bool = True,
    ) -> None:
        if max_samples < 0:
            raise InputError(f"max_samples={max_samples} must be 0 or more: use 16, or 0 for no pictures.")
        self.folder = RunFolder(output_dir)
        self.progress = progress
        self.max_samples = max_samples
        self.summary = summary or RunSummary(title="", algorithm="", model_name="")
        self.pictures = pictures
        self._writer: MetricsWriter | None = None
        self._is_main = True
        self._early_rows: list[dict[str, Any]] | None = []  # logged before training; None once it has begun
        self._clock, self._seconds_before = time.monotonic(), 0.0
        self._step = self._total = 0
        self._only_early = False
        self._warned = False

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._is_main = state.is_world_process_zero

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._is_main = state.is_world_process_zero
        if not self._is_main:
            return
        self._describe(args)
        if state.global_step:
            self._resume(state.global_step)
        else:
            self._start_over()
        self._early_rows = None
        self._clock = time.monotonic()
        self._set_running(state)
        if self.progress is not None:
            self.progress.start(state.max_steps, self.summary.title, initial_step=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self.write_metrics(logs, step=state.global_step, epoch=state.epoch)
        if self.progress is not None:
            self.progress.advance(state.global_step, logs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._set_running(state)
        if self.progress is not None:
            self.progress.advance(state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self.refresh()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero and self.progress is not None:
            self.progress.phase("save")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        done, total = state.global_step, state.max_steps
        self.close(f"finished: {done} steps" if done >= total else f"stopped at step {done} of {total}")

    def write_metrics(self, metrics: Mapping[str, Any], step: int, epoch: float | None = None) -> None:
        """
        Append a row to `metrics.jsonl`, for numbers that do not come from the Trainer's log.

        Args:
            metrics (`Mapping[str, Any]`):
                Flat metrics.
            step (`int`):
                Optimizer steps done.
            epoch (`float`, *optional*):
                Passes over the dataset.
        """
        if not self._is_main:
            return
        row = {"step": step, "epoch": epoch, **metrics, "seconds": round(self.seconds(), 3)}
        if self._early_rows is not None:
            self._early_rows.append(row)
        self._append(row)

    def record_evaluation(self, record: EvaluationRecord) -> None:
        """
        Keep the result of an evaluation and write its picture; the trainer calls it before `on_evaluate`.

        Args:
            record ([`EvaluationRecord`]):
                Numbers and pictures. Of the pictures `max_samples` are kept, shrunk to 256 pixels. A record of the
                same step and set replaces the earlier one.
        """
        if not self._is_main:
            return
        kept = replace(record, samples=pick_samples(record.samples, self.max_samples))
        others = [old for old in self.summary.evaluations if (old.step, old.name) != (kept.step, kept.name)]
        self.summary.evaluations = sorted([*others, kept], key=lambda entry: entry.step)
        self._thin_out()
        self._draw(self.folder.save_record, kept)
        self._draw(self.folder.draw_samples, kept)

    def record_completions(
        self, step: int, rows: Sequence[Mapping[str, Any]], samples: list[Sample], group_size: int
    ) -> None:
        """
        Write the table and the pictures of a rollout; the trainer calls it where `log_completions` asks for them.

        Args:
            step (`int`):
                Optimizer steps before the rollout.
            rows (`list[dict]`):
                A row for each sample of all processes, all with the same columns.
            samples (`list[Sample]`):
                The first ones, pictured; at most `max_samples`.
            group_size (`int`):
                Members of a group, which stand in a row where they fit.
        """
        if not self._is_main:
            return
        self._attempt(self.folder.save_completions, step, rows)
        kept = [sample for sample in samples[: self.max_samples] if sample.image is not None]
        record = EvaluationRecord(step, "rollout", samples=pick_samples(kept, len(kept)))
        self._draw(self.folder.draw_completions, record, min(group_size, TIMELINE_COLUMNS))
        if kept:
            self.summary.rollout = record

    def refresh(self) -> None:
        """Draw the reward curve, the comparisons and the page anew; called at each evaluation and at the end."""
        # Before training there is nothing to compare, and an earlier run in this folder may have a full page.
        if self._is_main and (self._early_rows is None or not self.folder.page.exists()):
            for draw in (self.folder.draw_rewards, self.folder.draw_comparisons, self.folder.write_page):
                self._draw(draw, self.summary)

    def close(self, status: str | None = None) -> None:
        """
        Write everything a last time and take the bar away; for the `finally` around training.

        Args:
            status (`str`, *optional*):
                What the page says of the run, for example `"stopped at step 20 of 60"`. By default a run that was
                under way counts as stopped, and one that had ended keeps its status.
        """
        if self.progress is not None:
            self.progress.stop()
        if not self._is_main:
            return
        under_way = self.summary.status.startswith("running")
        if status is None and not under_way:
            return  # closed already
        self.summary.status = status or f"stopped at step {self._step} of {self._total}"
        self.refresh()
        self._draw(self.folder.draw_health, self.summary)

    def seconds(self) -> float:
        """Seconds since training began, those before a resume included; 0 before training."""
        running = self._early_rows is None
        return self._seconds_before + (time.monotonic() - self._clock if running else 0.0)

    def _append(self, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._only_early = not self.folder.metrics.exists()
            self._writer = MetricsWriter(self.folder.metrics)
        self._attempt(self._writer.write, row)
        self.summary.history.append(self._writer.last_row)

    def _start_over(self) -> None:
        """Put the files of an earlier run away; what this object recorded before training stays."""
        early, self.summary.history = self._early_rows or [], []
        if self._early_rows is None:  # this object has trained before: its evaluations are those of the earlier run
            self.summary.evaluations = []
        self._close_writer()
        if self._early_rows and self._only_early:  # there is no earlier run whose rows should be kept
            self.folder.metrics.unlink(missing_ok=True)
        self._writer = MetricsWriter(self.folder.metrics, start_over=True)
        self._attempt(self.folder.clear, self.summary.evaluations)
        for row in early:
            self._append(row)

    def _resume(self, step: int) -> None:
        self._close_writer()
        self._writer = MetricsWriter(self.folder.metrics, truncate_after_step=step)
        self.summary.history = self.folder.load_history()
        self.summary.evaluations = self.folder.load_records(truncate_after_step=step)
        self._thin_out()
        self._seconds_before = max(column(self.summary.history, "seconds"), default=0.0)

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _describe(self, args: TrainingArguments) -> None:
        summary = self.summary
        summary.config = summary.config or args.to_dict()
        summary.environment = summary.environment or package_versions()
        summary.algorithm = summary.algorithm or type(args).__name__.removesuffix("Config")
        summary.title = summary.title or f"{summary.algorithm} run"

    def _set_running(self, state: TrainerState) -> None:
        self._step, self._total = state.global_step, state.max_steps
        self.summary.status = f"running: step {self._step} of {self._total}"

    def _thin_out(self) -> None:
        """Of the evaluations between the first and the last keep what the timeline shows: a long run has many."""
        for name in {record.name for record in self.summary.evaluations}:
            for record in [record for record in self.summary.evaluations if record.name == name][1:-1]:
                record.samples = record.samples[:TIMELINE_COLUMNS]

    def _draw(self, write: Callable[..., None], *what: Any) -> None:
        if self.pictures:
            self._attempt(write, *what)

    def _attempt(self, write: Callable[..., None], *what: Any) -> None:
        """Run a writer of files; a full disk costs the picture, not the run."""
        try:
            write(*what)
        except OSError as error:
            if not self._warned:
                warnings.warn(
                    f"Could not write the report in {self.folder.root} ({error}). Training goes on without it; free "
                    "space or make the folder writable, and the next evaluation writes it again.",
                    stacklevel=2,
                )
            self._warned = True

# SPDX-License-Identifier: Apache-2.0
"""
What each algorithm learns from the same work: held-out OCR reward of the model that ships with omnitrl, at equal
transformer forwards and at equal seconds.

Each run is a process of its own. It trains until it has used up both budgets, and is evaluated where it crosses each
of them. Forwards are network evaluations in samples, of rollouts and of training, evaluations left out; one with a
backward counts as one too. Seconds are CPU seconds of the process, evaluations left out and rewards not, so that they
mean the same on a busy machine. A control is the same run with what tells samples apart given to other samples.

    python benchmarks/learning.py                            # everything, hours
    python benchmarks/learning.py --only flow_grpo,awm       # some, added to what the file has
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from common import environment, parse_args, print_table, write_json


FORWARDS, SECONDS = 20_000, 60.0
SEEDS = (1, 2, 3)
CONTROL_SEEDS = (1,)
OTHERS = {
    "--only": "Algorithms, separated by commas; what the output file has of others stays.",
    "--seeds": "Seeds, separated by commas (default: 1,2,3).",
    "--jobs": "Runs at a time (default: 1).",
    "--teacher": "Folder with the adapter that DiffusionOPD learns from, trained there if it is empty.",
    "--case": "Internal: one run, as JSON.",
}


@dataclass(frozen=True)
class Case:
    """
    One run.

    Args:
        algorithm (`str`): A key of `omnitrl.trainer.TRAINERS`.
        seed (`int`): Of everything that is drawn.
        control (`bool`): Whether it is the control.
        forwards (`int`), seconds (`float`): The budgets.
        quick (`bool`): Few prompts, for a test of the script.
        teacher (`str`): Folder of the teacher's adapter, for DiffusionOPD.
    """

    algorithm: str
    seed: int
    control: bool = False
    forwards: int = FORWARDS
    seconds: float = SECONDS
    quick: bool = False
    teacher: str = ""


# One run


def run(case: Case, folder: str) -> dict[str, Any]:
    """Trains and returns what was measured."""
    meter = Meter(case)
    trainer = build_trainer(case, folder, meter)
    meter.evaluate(trainer, "before")
    started = time.perf_counter()
    trainer.train()
    meter.finish(trainer)
    described = {name: value for name, value in asdict(case).items() if name != "teacher"}  # a path of this machine
    return {**described, "wall_seconds": round(time.perf_counter() - started, 1), **meter.found}


class Meter:
    """Evaluates where a budget is used up, and ends the run when both are."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.found: dict[str, Any] = {}
        self._began: float | None = None
        self._evaluating = 0.0

    def evaluate(self, trainer: Any, name: str) -> None:
        """Held-out reward now, with what it took to come here."""
        from omnitrl.quickstart import rows

        used = {
            "forwards": trainer.num_forwards,
            "seconds": round(self.seconds, 1),
            "updates": trainer.state.global_step,
        }
        began = time.process_time()
        words = rows("heldout")[: 2 if self.case.quick else None]
        metrics = trainer.evaluate(words, metric_key_prefix="eval_budget")
        self._evaluating += time.process_time() - began
        self.found[name] = {"reward": metrics["eval_budget_reward"], **used}

    @property
    def seconds(self) -> float:
        """CPU seconds of training so far."""
        return 0.0 if self._began is None else time.process_time() - self._began - self._evaluating

    def callback(self) -> Any:
        """The callback that watches the budgets."""
        from transformers import TrainerCallback

        meter = self

        class Watch(TrainerCallback):
            trainer: Any = None

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                meter._began, meter._evaluating = time.process_time(), 0.0

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                meter.check(self.trainer, control)

        self.watch = Watch()
        return self.watch

    def check(self, trainer: Any, control: Any) -> None:
        """Called after each optimizer step."""
        if "at_forwards" not in self.found and trainer.num_forwards >= self.case.forwards:
            self.evaluate(trainer, "at_forwards")
        if "at_seconds" not in self.found and self.seconds >= self.case.seconds:
            self.evaluate(trainer, "at_seconds")
        control.should_training_stop = {"at_forwards", "at_seconds"} <= self.found.keys()

    def finish(self, trainer: Any) -> None:
        """A run that its own length ended is a mistake of this script."""
        if not {"at_forwards", "at_seconds"} <= self.found.keys():
            raise RuntimeError(f"{self.case} ended before its budgets: {self.found}")


def build_trainer(case: Case, folder: str, meter: Meter) -> Any:
    """The trainer of a run, with the settings of `omnitrl quickstart`."""
    import torch

    from omnitrl.cli.quickstart import make_trainer

    torch.set_num_threads(1)
    settings = {
        "output_dir": folder,
        "seed": case.seed,
        "use_cpu": True,
        "max_steps": 1_000_000,  # the budgets end it
        "save_strategy": "no",
        "save_report": False,
    }
    given: dict[str, Any] = {"callbacks": [meter.callback()], "eval_dataset": None}
    if case.algorithm == "diffusion_opd":
        given["teacher_adapter"] = case.teacher
    trainer = make_trainer(case.algorithm, settings, control=case.control, **given)
    meter.watch.trainer = trainer
    return trainer


def make_teacher(folder: Path) -> None:
    """What `omnitrl quickstart` leaves behind, for DiffusionOPD to learn from."""
    from omnitrl.cli.quickstart import make_trainer

    print(f"training a teacher in {folder} ...", flush=True)
    settings = {"output_dir": str(folder), "seed": 42, "use_cpu": True, "save_strategy": "no", "save_report": False}
    trainer = make_trainer("flow_grpo", settings)
    trainer.train()
    trainer.save_model()


# All runs


def cases(only: Iterable[str], seeds: Iterable[int], quick: bool, teacher: str) -> list[Case]:
    """All runs, those that are compared first."""
    budget: dict[str, Any] = {"teacher": teacher}
    if quick:
        budget |= {"forwards": 40, "seconds": 1.0, "quick": True}
    names, seeds = list(only), list(seeds)
    runs = [Case(name, seed, **budget) for seed in seeds for name in names]
    controls = [Case(name, seed, True, **budget) for seed in seeds if seed in CONTROL_SEEDS for name in names]
    return runs + controls


def run_in_process(case: Case) -> dict[str, Any]:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--output", str(output)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case} failed:\n{done.stderr[-3000:]}")
        result = json.loads(output.read_text("utf-8"))
    label = f"{case.algorithm}{' control' if case.control else ''} seed {case.seed}"
    at = {name: result[name]["reward"] for name in ("before", "at_forwards", "at_seconds")}
    print(label, " ".join(f"{name} {value:.3f}" for name, value in at.items()), flush=True)
    return result


def table(results: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, header and rows: means over seeds and their range, and the reward of the control."""
    forwards, seconds = results[0]["forwards"], results[0]["seconds"]
    rows = []
    for name in dict.fromkeys(result["algorithm"] for result in results):
        runs = [r for r in results if r["algorithm"] == name and not r["control"]]
        controls = [r for r in results if r["algorithm"] == name and r["control"]]
        row = [name]
        for point in ("at_forwards", "at_seconds"):
            row.append(_mean_and_range([run[point]["reward"] for run in runs]))
            row.append(" ".join(f"{run[point]['reward']:.3f}" for run in controls) or "-")
        row.append(f"{mean(run['at_forwards']['seconds'] for run in runs):.0f}")
        row.append(f"{mean(run['at_forwards']['updates'] for run in runs):.0f}")
        rows.append(row)
    before = _mean_and_range([result["before"]["reward"] for result in results])
    title = f"Held-out OCR reward, {before} before training"
    header = ["", f"at {forwards:,} forwards", "control", f"at {seconds:.0f} s", "control", "s to there", "updates"]
    return title, header, rows


def _mean_and_range(values: list[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main() -> None:
    """Runs what is asked for and merges it into the output file."""
    args = parse_args("learning", __doc__ or "", OTHERS)
    if args.case:
        with tempfile.TemporaryDirectory() as folder:
            result = run(Case(**json.loads(args.case)), folder)
        args.output.write_text(json.dumps(result), encoding="utf-8")
        return
    from omnitrl.trainer import TRAINERS

    only = args.only.split(",") if args.only else ["flow_grpo"] if args.quick else list(TRAINERS)
    seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else (1,) if args.quick else SEEDS
    found = {"environment": environment(args.threads)}
    results: list[dict[str, Any]] = []
    if args.output.is_file():
        results = json.loads(args.output.read_text("utf-8"))["results"]
    teacher = args.teacher or ""
    if "diffusion_opd" in only:
        teacher = teacher or tempfile.mkdtemp(prefix="omnitrl-teacher-")
        if not (Path(teacher) / "adapter_config.json").is_file():
            make_teacher(Path(teacher))
    wanted = cases(only, seeds, args.quick, teacher)
    keys = {(case.algorithm, case.seed, case.control) for case in wanted}
    results = [r for r in results if (r["algorithm"], r["seed"], r["control"]) not in keys]
    with ThreadPoolExecutor(int(args.jobs or 1)) as pool:
        for result in pool.map(run_in_process, wanted):
            results.append(result)
            results.sort(key=lambda r: (list(TRAINERS).index(r["algorithm"]), r["control"], r["seed"]))
            args.output.parent.mkdir(parents=True, exist_ok=True)
            content = {"benchmark": "learning", "quick": args.quick, **found, "results": results}
            args.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print_table(*table(results))
    write_json(args.output, content)


if __name__ == "__main__":
    main()

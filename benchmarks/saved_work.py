# SPDX-License-Identifier: Apache-2.0
"""
What each option saves that saves work: transformer forwards and CPU seconds per trained sample, counted and timed in
real training of the model that ships with omnitrl.

A forward is one evaluation of the network for one sample; a guided evaluation is two. `forwards_per_sample` is what
the trainer logs: all network evaluations of a rollout and of its training, over the samples that are trained.

    python benchmarks/saved_work.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import SUBJECTS, environment, parse_args, print_table, write_json


PROMPTS, GROUP, BATCH = 2, 8, 16
SHARED: dict[str, Any] = {
    "height": 32,
    "width": 64,
    "max_sequence_length": 1,
    "num_inference_steps": 10,
    "guidance_scale": 4.5,
    "num_generations": GROUP,
    "generation_batch_size": PROMPTS * GROUP,
    "per_device_train_batch_size": BATCH,
    "gradient_accumulation_steps": PROMPTS * GROUP // BATCH,
    "save_strategy": "no",
    "save_report": False,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
WINDOW = {"sde_window_strategy": "first", "sde_window_size": 2, "sde_window_range": [4, 6]}
PREFIX = {"same_init_noise": True, "shared_prefix": True}
TAIL = {"ode_solver": "dpmpp_2m", "tail_ratio": 0.4}
MIX: dict[str, Any] = {
    "num_inference_steps": 25,
    "guidance_scale": 1.0,
    "num_generations": 12,
    "generation_batch_size": 12,
    "per_device_train_batch_size": 12,
    "gradient_accumulation_steps": 1,
    "sde_window_interval": 1,
    "sde_window_stride": 4,  # so that the windows of a cycle lie side by side, and each rollout has the next one
}


@dataclass(frozen=True)
class Case:
    """
    One way to train.

    Args:
        options (`dict`): Beside `SHARED`.
        algorithm (`str`): A key of `omnitrl.trainer.TRAINERS`.
        without (`str`): What of the library is switched off, of which there is no option: `"old log-probs"` are then
            recomputed, and each sample and micro-batch has its `"prompts"` encoded anew.
    """

    options: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "flow_grpo"
    without: str = ""


# Each line has the options of the line above, and one more.
STEPS: dict[str, Case] = {
    "all steps trained, KL": Case({"beta": 0.04}),
    "no KL": Case({"beta": 0.0}),
    "a window of 2 steps": Case({"beta": 0.0, **WINDOW}),
    "shared prefix": Case({"beta": 0.0, **WINDOW, **PREFIX}),
    "Flash tail": Case({"beta": 0.0, **WINDOW, **PREFIX, **TAIL}),
    "no guidance in training": Case({"beta": 0.0, **WINDOW, **PREFIX, **TAIL, "guidance_scale_train": 1.0}),
    "no guidance at all": Case({"beta": 0.0, **WINDOW, **PREFIX, **TAIL, "guidance_scale": 1.0}),
}
LAST = STEPS["Flash tail"].options
TWICE = {**LAST, "num_iterations": 2}
# Name -> (without it, with it).
PAIRS: dict[str, tuple[Case, Case]] = {
    "old log-probs of the engine": (Case(LAST, without="old log-probs"), Case(LAST)),
    "prompts encoded once": (Case(LAST, without="prompts"), Case(LAST)),
    "timesteps_per_forward=2": (Case(LAST), Case({**LAST, "timesteps_per_forward": 2})),
    "no guidance in training, rollouts used twice": (Case(TWICE), Case({**TWICE, "guidance_scale_train": 1.0})),
}
# A cycle of MixGRPO's windows of 4 steps out of 25.
CYCLE: dict[str, Case] = {
    "MixGRPO": Case(MIX, "mix_grpo"),
    "MixGRPO, shared prefix": Case({**MIX, "shared_prefix": True}, "mix_grpo"),
    "MixGRPO-Flash": Case({**MIX, **TAIL}, "mix_grpo"),
    "MixGRPO-Flash, shared prefix": Case({**MIX, **TAIL, "shared_prefix": True}, "mix_grpo"),
    "MixGRPO-Flash*": Case({**MIX, **TAIL, "tail_ratio": 0.2, "sde_window_strategy": "first"}, "mix_grpo"),
}
WINDOWS_IN_CYCLE = 6


# One case


def brightness(completions: list[Any], **_: Any) -> list[float]:
    """A reward that takes no time."""
    return [float(image.getpixel((0, 0))[0]) for image in completions]


def make_trainer(case: Case, rollouts: int, folder: str, quick: bool) -> Any:
    """A trainer of the shipped model for so many rollouts; of a tiny one with `quick`."""
    import torch
    from diffusers.utils import logging as diffusers_logging
    from peft import LoraConfig
    from transformers.utils import logging as transformers_logging

    from omnitrl.models import load_flow_model
    from omnitrl.quickstart import GLYPHS, rows
    from omnitrl.trainer import get_trainer

    class TimedTrainer(get_trainer(case.algorithm)):  # type: ignore[misc]
        """Notes the CPU seconds of each rollout and of what is trained on it."""

        def make_rollout(self, rollout: int) -> Any:
            started = time.process_time()
            buffer = super().make_rollout(rollout)
            self.seconds = [*self.seconds, [time.process_time() - started, 0.0]]
            return buffer

        def prepare(self, buffer: Any) -> None:
            super().prepare(buffer)
            if case.without == "old log-probs":
                self._recompute_log_probs(buffer)

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            started, made = time.process_time(), len(self.seconds)
            loss = super().training_step(model, inputs, num_items_in_batch)
            spent = time.process_time() - started
            self.seconds[-1][1] += spent - (self.seconds[-1][0] if len(self.seconds) > made else 0.0)
            return loss

        seconds: list[list[float]] = []

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    subject = SUBJECTS["sd3"](True) if quick else None
    options = {**SHARED, **case.options}
    if subject is not None:
        options |= {"height": subject.size.height, "width": subject.size.width, "max_sequence_length": None}
    args = TimedTrainer.config_class(output_dir=folder, learning_rate=1e-6, max_steps=1, **options)
    args.max_steps = int(rollouts * args.updates_per_rollout)
    model = subject.model if subject else load_flow_model(GLYPHS, max_sequence_length=1, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32)
    return TimedTrainer(model, brightness, args, train_dataset=rows("train"), peft_config=lora)


def count_encoded(model: Any, without_cache: bool) -> list[int]:
    """A list that grows by the rows of each call of the text encoders."""
    from omnitrl.models import Conditions

    encoded: list[int] = []
    encode_row = model.encode_row

    def counted(row: Any, size: Any) -> Any:
        encoded.append(1)
        return encode_row(row, size)

    def each_row(rows: Any, guidance: bool = False, size: Any = None) -> Any:
        positive = Conditions.cat([model.encode_row(row, size) for row in rows])
        empty = [{"prompt": row.get("negative_prompt") or ""} for row in rows] if guidance else []
        negative = Conditions.cat([model.encode_row(row, size) for row in empty]).positive if guidance else {}
        return Conditions(positive.positive, negative)

    model.encode_row = counted
    if without_cache:
        model.encode = each_row
    return encoded


def run_case(case: Case, rollouts: int, quick: bool) -> dict[str, Any]:
    """Trains and reads off what was logged; seconds are without the first rollout and its first-time costs."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, rollouts, folder, quick)
        if case.without == "prompts":
            buffer_of = trainer._buffer_of
            trainer._buffer_of = lambda rollout, requests, *rest: _with_rows(
                trainer, buffer_of, rollout, requests, rest
            )
        encoded = count_encoded(trainer.flow_model, case.without == "prompts")
        rows: list[int] = []
        trainer.flow_model.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
        )
        trainer.train()
    samples = trainer.args.generation_batch_size
    logged = [row["forwards_per_sample"] for row in trainer.state.log_history if "forwards_per_sample" in row]
    timed = trainer.seconds[1:] or trainer.seconds
    return {
        "algorithm": case.algorithm,
        "options": {name: value for name, value in case.options.items() if name not in MIX},
        "forwards_per_sample": mean(logged),
        "forwards_seen_by_the_network": sum(rows) / samples / rollouts,
        "text_encoder_rows_per_sample": sum(encoded) / samples / rollouts,
        "cpu_seconds_per_sample": {
            "rollout": median(rollout for rollout, _ in timed) / samples,
            "training": median(training for _, training in timed) / samples,
        },
        "rollouts": rollouts,
    }


def _with_rows(trainer: Any, buffer_of: Any, rollout: int, requests: Any, rest: Any) -> Any:
    """A buffer with a row of conditions for each sample, as where no group is known."""
    buffer = buffer_of(rollout, requests, *rest)
    guidance = trainer.guidance_scale_train > 1
    buffer.conditions = trainer.flow_model.encode([request.row for request in requests], guidance)
    buffer.condition_rows = list(range(len(requests)))
    return buffer


# Gradients in two processes


def synchronisations(each_backward: bool, quick: bool) -> dict[str, Any]:
    """One optimizer step of this process and another: backward passes, and gradient exchanges that they started."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    exchanged: list[int] = []
    backwards: list[int] = []
    options = {**LAST, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Case(options), 1, folder, quick)

        def hook(state, bucket):  # torch refuses annotations that are strings
            if bucket.index() == 0:
                exchanged.append(1)
            return allreduce_hook(state, bucket)

        step, backward = trainer.training_step, trainer.backward

        def training_step(model: Any, *rest: Any) -> Any:
            if not backwards:
                model.register_comm_hook(None, hook)
                if each_backward:
                    trainer.accelerator.no_sync = lambda model: nullcontext()
            return step(model, *rest)

        trainer.training_step = training_step
        trainer.backward = lambda loss: backwards.append(1) or backward(loss)
        if each_backward:  # the Trainer's loop has its own way to leave exchanges out
            trainer.accelerator.no_sync = lambda model: nullcontext()
        trainer.train()
    sizes = sum(parameter.numel() for parameter in trainer.trainable_parameters())
    return {
        "processes": torch.distributed.get_world_size(),
        "optimizer_steps": trainer.state.global_step,
        "backward_passes": len(backwards),
        "gradient_exchanges": len(exchanged),
        "bytes_of_an_exchange": 4 * sizes,
    }


def in_two_processes(quick: bool) -> dict[str, dict[str, Any]]:
    """[`synchronisations`] with and without the exchanges that are left out."""
    import json

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("each backward", "the last"):
            output = Path(folder) / "result.json"
            env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            words = [*command, "--processes", name, "--output", str(output), *(["--quick"] if quick else [])]
            subprocess.run(words, check=True, env=env, capture_output=True, text=True)
            results[name] = json.loads(output.read_text("utf-8"))
    return results


# Tables


def row_of(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    """A line of the first and third table."""
    seconds = result["cpu_seconds_per_sample"]
    return (
        name,
        f"{result['forwards_per_sample']:.2f}",
        *(f"{1e3 * value:.0f}" for value in (seconds["rollout"], seconds["training"], sum(seconds.values()))),
    )


def tables(content: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Title, header and rows of the tables that the documentation has."""
    header = ("", "forwards", "rollout, CPU ms", "training, CPU ms", "together")
    pairs = []
    for name, pair in content["pairs"].items():
        for which in ("without", "with"):
            encoded = f"{pair[which]['text_encoder_rows_per_sample']:.2f}"
            pairs.append((*row_of(f"{name}: {which}", pair[which]), encoded))
    exchanges = [
        (name, *(str(result[key]) for key in ("backward_passes", "gradient_exchanges", "bytes_of_an_exchange")))
        for name, result in content["exchanges"].items()
    ]
    return [
        (
            "Per trained sample; each line adds an option to those above it",
            header,
            [row_of(name, result) for name, result in content["steps"].items()],
        ),
        ("Per trained sample, alone", (*header, "prompts encoded"), pairs),
        (
            "Per trained sample, over a cycle of 6 windows of 4 in 25 steps",
            header,
            [row_of(name, result) for name, result in content["cycle"].items()],
        ),
        (
            "Gradients exchanged between 2 processes in one optimizer step",
            ("after", "backward passes", "exchanges", "bytes of one"),
            exchanges,
        ),
    ]


def main() -> None:
    help_of_worker = "Internal: one of two processes that exchange gradients after 'each backward' or 'the last'."
    args = parse_args("saved_work", __doc__, {"--processes": help_of_worker})
    import torch

    torch.set_num_threads(args.threads)
    if args.processes:
        result = synchronisations(args.processes == "each backward", args.quick)
        if os.environ["RANK"] == "0":
            write_json(args.output, result)
        return
    rollouts, windows = (1, 2) if args.quick else (3, WINDOWS_IN_CYCLE)
    content = {
        "benchmark": "saved_work",
        "quick": args.quick,
        "environment": environment(args.threads),
        "samples_of_a_rollout": PROMPTS * GROUP,
        "group_size": GROUP,
        "steps": {name: run_case(case, rollouts, args.quick) for name, case in STEPS.items()},
        "pairs": {
            name: {"without": run_case(without, rollouts, args.quick), "with": run_case(case, rollouts, args.quick)}
            for name, (without, case) in PAIRS.items()
        },
        "cycle": {name: run_case(case, windows, args.quick) for name, case in CYCLE.items()},
        "exchanges": in_two_processes(args.quick),
    }
    for title, header, rows in tables(content):
        print_table(title, header, rows)
    write_json(args.output, content)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""
Seconds of a FlowGRPO step whose reward takes time, over those of the step without it.

A reward that waits for a service (it sleeps) takes a tenth to the whole of the time of the rollout. As omnitrl calls
it, it runs beside the rollout; called in the loop, as a script does, it is added to it. The goal is at most 1.05 times
the larger of the reward and everything else, which is what the same step took but for its waits for the reward. So a
machine that is busy with other things slows both sides. The cases take turns in one run, and medians are given.

The network is a tiny one, and each batch of samples and each micro-batch is stretched to a fixed time by sleeping, as
if an accelerator computed it: what is measured is how the parts wait for each other, on a busy machine too.

    python benchmarks/reward_overlap.py
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from common import TINY, environment, parse_args, print_table, sd3_model, write_json


GOAL = 1.05
BATCHES, BATCH_SIZE = 24, 2  # of a rollout
MICRO_BATCHES = 6
SHARES = (0.1, 0.25, 0.5, 1.0)  # of the rollout's time that the reward takes


@dataclass
class Case:
    """One step: seconds that a call of the reward takes, and whether the loop waits for it."""

    share: float = 0.0
    seconds: float = 0.0
    synchronous: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        return "without" if not self.share else f"{'synchronous' if self.synchronous else 'beside'} {self.share:g}"


def rewards_of(current: list[Case]) -> dict[str, Callable[..., Any]]:
    """A function and a coroutine that take as long as the case at hand says."""

    def seconds() -> float:
        return 0.0 if current[0].synchronous else current[0].seconds

    def values(completions: list[Any]) -> list[float]:
        return [float(i) for i in range(len(completions))]

    def in_a_thread(completions: list[Any]) -> list[float]:
        time.sleep(seconds())
        return values(completions)

    async def on_the_loop(completions: list[Any]) -> list[float]:
        await asyncio.sleep(seconds())
        return values(completions)

    return {"function": in_a_thread, "async function": on_the_loop}


def stretched(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The function, taking at least so long."""

    def call(*args: Any, **kwargs: Any) -> Any:
        end = time.perf_counter() + seconds
        result = function(*args, **kwargs)
        time.sleep(max(end - time.perf_counter(), 0))
        return result

    return call


def stretch(trainer: Any, seconds: float, current: list[Case], waits: list[float]) -> None:
    """
    Gives each batch and each micro-batch its time, and lets the loop wait for the reward where the case says so.

    What the loop has waited for the reward is added to `waits`.
    """
    generate, submit, collect = trainer.engine.generate, trainer.rewards.submit, trainer.rewards.collect

    def paced(*args: Any) -> Iterator[Any]:
        batches = iter(generate(*args))
        step = stretched(lambda: next(batches, None), seconds)
        for _ in range(BATCHES):
            yield step()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            waits.append(time.perf_counter() - begun)
            return result

        return call

    def waiting(*args: Any, **kwargs: Any) -> None:
        if current[0].synchronous:
            time.sleep(current[0].seconds)
        submit(*args, **kwargs)

    trainer.engine.generate = paced
    trainer.rewards.submit, trainer.rewards.collect = timed(waiting), timed(collect)
    trainer.training_step = stretched(trainer.training_step, 2 * seconds)


def make_config(updates: int, folder: str) -> Any:
    """One optimizer step a rollout."""
    from omnitrl import FlowGRPOConfig

    return FlowGRPOConfig(
        output_dir=folder,
        height=16,
        width=16,
        beta=0.0,
        guidance_scale=1.0,
        num_inference_steps=2,
        sde_window_size=1,
        num_generations=8,
        generation_batch_size=BATCHES * BATCH_SIZE,
        rollout_batch_size=BATCH_SIZE,
        per_device_train_batch_size=BATCHES * BATCH_SIZE // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=updates,
        save_strategy="no",
        save_report=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


def run_kind(kind: str, batch_seconds: float, repeats: int) -> dict[str, Any]:
    """Steps of one trainer, each of another case in turn."""
    from peft import LoraConfig
    from transformers import TrainerCallback

    from omnitrl import FlowGRPOTrainer

    shares = SHARES[::3] if repeats < 3 else SHARES
    cases = [Case()] + [Case(s, s * batch_seconds, synchronous) for s in shares for synchronous in (False, True)]
    order = [cases[0], *cases * repeats]  # the first step has what is made once
    current = [order[0]]
    waits: list[float] = []
    steps: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}  # seconds, of them waited

    class Turns(TrainerCallback):
        begun = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = time.perf_counter()
            if state.global_step > 1:
                steps[current[0].name].append((now - self.begun, sum(waits)))
            waits.clear()
            if state.global_step < len(order):
                current[0] = order[state.global_step]
            self.begun = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        trainer = FlowGRPOTrainer(
            sd3_model(TINY),
            rewards_of(current)[kind],
            make_config(len(order), folder),
            train_dataset=[{"prompt": f"sign {i}"} for i in range(6)],
            peft_config=LoraConfig(r=4),
            callbacks=[Turns()],
        )
        stretch(trainer, batch_seconds, current, waits)
        trainer.train()
    return {
        "kind": kind,
        "repeats": repeats,
        "seconds_without": median(seconds for seconds, _ in steps["without"]),
        "rows": [_row(steps, share, share * BATCHES * batch_seconds) for share in shares],
    }


def _row(steps: dict[str, list[tuple[float, float]]], share: float, reward: float) -> dict[str, Any]:
    """One share of the rollout's time: steps over what bounds them, beside the rollout and in the loop."""
    row: dict[str, Any] = {"share": share, "reward_seconds": reward}
    for way in ("beside", "synchronous"):
        pairs = steps[f"{way} {share:g}"]
        row[way] = {
            "seconds": median(seconds for seconds, _ in pairs),
            "waited": median(waited for _, waited in pairs),
            "over_larger": median(seconds / max(seconds - waited, reward) for seconds, waited in pairs),
        }
    return row


def table(results: list[dict[str, Any]]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """Title, head and rows of what is printed."""
    ways = {"beside": "", "synchronous": ", in the loop"}
    columns = {"seconds": "step, s", "waited": "of it waiting, s", "over_larger": "step / larger"}
    header = ("reward", "share of rollout", *(column + text for text in ways.values() for column in columns.values()))
    rows = []
    for result in results:
        for row in result["rows"]:
            cells = [f"{row[way][name]:.{3 if name == 'over_larger' else 2}f}" for way in ways for name in columns]
            rows.append((result["kind"], f"{row['share']:g}", *cells))
    return f"A step with a slow reward, goal {GOAL:.2f}", header, rows


def main() -> None:
    args = parse_args("reward_overlap", __doc__)
    import torch

    torch.set_num_threads(args.threads)
    batch_seconds, repeats = (0.05, 1) if args.quick else (0.25, 5)
    results = [run_kind(kind, batch_seconds, repeats) for kind in rewards_of([Case()])]
    print_table(*table(results))
    content = {
        "benchmark": "reward_overlap",
        "quick": args.quick,
        "environment": environment(args.threads),
        "batches": BATCHES,
        "batch_seconds": batch_seconds,
        "micro_batches": MICRO_BATCHES,
        "goal": GOAL,
        "results": results,
    }
    write_json(args.output, content)


if __name__ == "__main__":
    main()

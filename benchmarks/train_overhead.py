# SPDX-License-Identifier: Apache-2.0
"""
CPU seconds of FlowGRPO's training step over bare forward and backward of the same network on the same tensors, for
three families.

Both take the samples of one rollout through the same number of network calls, in turns in one process; the bare loop
has its inputs stacked beforehand and the mean square of the velocity as its loss. What comes between two training
steps (clipping, optimizer, log, callbacks) is printed beside it.

    python benchmarks/train_overhead.py
"""

from __future__ import annotations

import tempfile
import time
from statistics import median
from typing import Any

import numpy as np
from common import (
    SUBJECTS,
    Subject,
    Timing,
    environment,
    interleave,
    median_parts,
    medians,
    num_parameters,
    parse_args,
    print_table,
    write_json,
)


GOAL = 1.05
BARE, TRAINER = "bare forward + backward", "training step"
STEPS, TRAINED = 4, 2
SAMPLES = 4
UPDATES_AFTER = 3  # that show what comes between two training steps


def make_config(subject: Subject, guidance_scale: float, folder: str) -> Any:
    """One rollout of one group, and all updates on it."""
    from omnitrl import FlowGRPOConfig

    sizes = {name: value for name, value in vars(subject.size).items() if value is not None}
    return FlowGRPOConfig(
        output_dir=folder,
        **sizes,
        beta=0.0,
        guidance_scale=guidance_scale,
        num_inference_steps=STEPS,
        sde_window_strategy="first",
        sde_window_size=TRAINED,
        num_generations=SAMPLES,
        per_device_train_batch_size=SAMPLES,
        num_iterations=1 + UPDATES_AFTER,  # one rollout for all of them
        max_steps=1 + UPDATES_AFTER,
        learning_rate=1e-6,
        save_strategy="no",
        save_report=False,
        report_to=[],
        use_cpu=True,
    )


def make_trainer(subject: Subject, lora: bool, guidance_scale: float, repeats: int, folder: str) -> Any:
    """A FlowGRPO trainer whose first training step is the measurement."""
    import torch
    from peft import LoraConfig
    from torch import Tensor

    from omnitrl import FlowGRPOTrainer
    from omnitrl.trainer import replay_trainer
    from omnitrl.trainer.rollouts import ReplayBatches

    class TimedTrainer(FlowGRPOTrainer):
        timings: dict[str, list[Timing]] | None = None
        between: list[float]

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            if self.timings is None:
                self._measure(model, inputs)
                self.between = []
            else:
                self.between.append(time.process_time() - self._ended)
            loss = super().training_step(model, inputs, num_items_in_batch)
            self._ended = time.process_time()
            return loss

        def _measure(self, model: Any, inputs: Any) -> None:
            _, batches = self.next_micro_batch()  # makes the rollout
            network = self.flow_model.transformer
            calls = [self._network_inputs(network, batch) for batch in batches]

            def bare() -> None:
                for args, kwargs in calls:
                    network(*args, **kwargs)[0].square().mean().backward()

            def trainer() -> None:
                self._micro_step = 0
                FlowGRPOTrainer.training_step(self, model, inputs)

            shared = {"network": (network, "forward"), "backward": (torch.Tensor, "backward")}
            watched = {
                **shared,
                "stack rows": (ReplayBatches, "__getitem__"),
                "transition": [(replay_trainer, "transition_mean"), (replay_trainer, "transition_std")],
                "log_prob": (replay_trainer, "gaussian_log_prob"),
                "loss": (replay_trainer, "clipped_policy_loss"),
                "metrics": [(self, "log_ratio"), (self, "log_clipping")],
                "guidance": (self.model, "_velocity"),  # what of the velocity is not the network
            }
            cases = {BARE: (bare, shared), TRAINER: (trainer, watched)}
            self.timings = interleave(cases, repeats, before=lambda: model.zero_grad(set_to_none=True))
            self._micro_step = 0
            model.zero_grad(set_to_none=True)

        def _network_inputs(self, network: Any, batch: Any) -> tuple[Any, Any]:
            """What the network is called with for a batch."""
            seen: list[tuple[Any, Any]] = []
            hook = network.register_forward_pre_hook(lambda _, *call: seen.append(call), with_kwargs=True)
            with torch.no_grad():
                self.call_policy(self.model, batch)
            hook.remove()
            (call,) = seen
            return call

    return TimedTrainer(
        subject.model,
        brightness,
        make_config(subject, guidance_scale, folder),
        train_dataset=["sign 1", "sign 2"],
        peft_config=LoraConfig(r=32, lora_alpha=64) if lora else None,
    )


def brightness(completions: list[Any], **_: Any) -> list[float]:
    """A reward that takes no time."""
    return [float(np.asarray(medium).flat[0]) for medium in completions]


def run_setting(family: str, quick: bool, lora: bool, guidance_scale: float, repeats: int) -> dict[str, Any]:
    """Times one kind of training."""
    subject = SUBJECTS[family](quick)
    parameters = num_parameters(subject.model.transformer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(subject, lora, guidance_scale, repeats, folder)
        trainer.train()
    bare, step = (medians(trainer.timings[name]) for name in (BARE, TRAINER))
    parts = {name: median_parts(timings) for name, timings in trainer.timings.items()}
    of_step = parts[TRAINER]
    return {
        "family": family,
        "network_parameters": parameters,
        "weights": "LoRA r=32" if lora else "all",
        "guidance_scale": guidance_scale,
        "repeats": repeats,
        "trainable_parameters": sum(p.numel() for p in trainer.trainable_parameters()),
        "seconds": {BARE: bare, TRAINER: step},
        "ratios": {key: step[key] / bare[key] for key in ("cpu", "wall")},
        "share_outside_network": 1 - (of_step["network"] + of_step["backward"]) / sum(of_step.values()),
        "parts": parts,
        "cpu_seconds_between_training_steps": median(trainer.between),
    }


def show(results: list[dict[str, Any]]) -> None:
    """Prints the ratios, and where the time goes."""
    rows = [
        (
            result["family"],
            result["weights"],
            result["guidance_scale"],
            f"{result['seconds'][BARE]['cpu']:.3f}",
            f"{result['seconds'][TRAINER]['cpu']:.3f}",
            f"{result['ratios']['cpu']:.3f}",
            f"{result['ratios']['wall']:.3f}",
            f"{result['share_outside_network']:.3f}",
            f"{result['cpu_seconds_between_training_steps']:.3f}",
        )
        for result in results
    ]
    header = ("family", "trained", "guidance", "bare, CPU s", "step, CPU s", "ratio", "wall ratio")
    header = (*header, "outside network", "between steps, CPU s")
    print_table(f"Training step over bare forward and backward, goal {GOAL:.2f}", header, rows)
    names = list(results[0]["parts"][TRAINER])
    header = ("", "family", "trained", "guidance", *names)
    rows = [
        (name, result["family"], result["weights"], result["guidance_scale"])
        + tuple(f"{1e3 * parts.get(part, 0):.2f}" for part in names)
        for result in results
        for name, parts in result["parts"].items()
    ]
    print_table("Where the CPU time goes, ms", header, rows)


def main() -> None:
    args = parse_args("train_overhead", __doc__)
    import torch

    torch.set_num_threads(args.threads)
    repeats = 2 if args.quick else 7
    settings = [("sd3", False, 1.0), ("sd3", True, 4.5), ("qwen_image", True, 1.0), ("wan", True, 1.0)]
    settings += [] if args.quick else [("sd3", True, 1.0), ("qwen_image", True, 4.0), ("wan", True, 4.0)]
    results = []
    for family, lora, guidance in sorted(settings):
        results.append(run_setting(family, args.quick, lora, guidance, repeats))
        print(
            f"{family}, {results[-1]['weights']}, guidance {guidance}: {results[-1]['ratios']['cpu']:.3f}", flush=True
        )
    show(results)
    content = {
        "benchmark": "train_overhead",
        "quick": args.quick,
        "environment": environment(args.threads),
        "samples": SAMPLES,
        "trained_steps": TRAINED,
        "goal": GOAL,
        "worst_ratio": max(result["ratios"]["cpu"] for result in results),
        "results": results,
    }
    write_json(args.output, content)


if __name__ == "__main__":
    main()

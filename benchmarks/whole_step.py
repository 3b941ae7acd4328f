# SPDX-License-Identifier: Apache-2.0
"""
CPU seconds of a whole FlowGRPO step (rollout, reward, training) over a bare loop that does the same work.

The bare loop is what a script would be: prompts are encoded for every sample and padded to the longest that is
allowed, samples are made 16 at a time with the adapters beside the weights, and every trained step of 16 samples goes
forward and backward. omnitrl encodes a prompt once for its group, trims masked padding, and merges adapters while
samples are made (`merge_adapters=True`). Both in turns in one process.

    python benchmarks/whole_step.py
"""

from __future__ import annotations

import tempfile
import time
from statistics import median
from typing import Any

import numpy as np
from common import SUBJECTS, Subject, environment, num_parameters, parse_args, print_table, write_json


GOAL = 0.80
STEPS, TRAINED = 10, 2
GROUP, BATCH = 8, 16  # a rollout is one batch of two groups
NOISE = 0.7


def make_config(subject: Subject, updates: int, folder: str) -> Any:
    """One optimizer step a rollout."""
    from omnitrl import FlowGRPOConfig

    sizes = {name: value for name, value in vars(subject.size).items() if value is not None}
    return FlowGRPOConfig(
        output_dir=folder,
        **sizes,
        beta=0.0,
        guidance_scale=1.0,
        num_inference_steps=STEPS,
        sde_window_strategy="first",
        sde_window_size=TRAINED,
        num_generations=GROUP,
        generation_batch_size=BATCH,
        per_device_train_batch_size=BATCH,
        merge_adapters=True,
        max_steps=updates,
        learning_rate=1e-6,
        save_strategy="no",
        save_report=False,
        report_to=[],
        use_cpu=True,
    )


def brightness(completions: list[Any], **_: Any) -> list[float]:
    """A reward that takes no time."""
    return [float(np.asarray(medium).flat[0]) for medium in completions]


class BareLoop:
    """
    One optimizer step in plain PyTorch.

    Args:
        subject (`Subject`):
            Model and size; the networks have the adapters of the trainer.
        rows (`list[dict]`):
            The prompts of a rollout.
    """

    def __init__(self, subject: Subject, rows: list[dict[str, str]]) -> None:
        import torch

        from omnitrl.algorithms import transition_table

        self.model, self.size = subject.model, subject.size
        self.rows = [row for row in rows for _ in range(GROUP)]
        self.table = self.model.sigmas(STEPS, self.size)
        self.transitions = transition_table(self.table.sigmas, "flow_sde", NOISE, range(TRAINED))
        self.parameters = [p for p in self.model.networks.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6)

    def step(self) -> None:
        """Rollout, reward, training."""
        import torch

        parts, rewards = [], []
        with torch.no_grad():
            for start in range(0, len(self.rows), BATCH):
                conditions = self._conditions(self.rows[start : start + BATCH])
                latents, kept = self._sample(conditions)
                rewards += brightness(self.model.decode(latents, self.size))
                parts.append((conditions, kept))
        grouped = torch.tensor(rewards).view(-1, GROUP)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        for (conditions, kept), advantage in zip(parts, advantages.flatten().split(BATCH), strict=True):
            for step, (latents, following, old) in enumerate(kept):
                ratio = (self._log_prob(latents, following, conditions, step) - old).exp()
                clipped = ratio.clamp(1 - 1e-4, 1 + 1e-4)
                loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
                (loss / len(parts) / len(kept)).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _conditions(self, rows: list[dict[str, str]]) -> Any:
        import torch

        from omnitrl.models import Conditions

        both = Conditions.cat([self.model.encode_row(row, self.size) for row in rows])
        padded = dict(both.positive)
        for name in [name for name in padded if name.endswith("_mask")]:
            for key in (name, name.removesuffix("_mask")):
                missing = self.model.max_sequence_length - padded[key].shape[1]
                empty = padded[key].new_zeros(len(both), missing, *padded[key].shape[2:])
                padded[key] = torch.cat([padded[key], empty], dim=1)
        return Conditions(padded, {}, both.layouts)

    def _sample(self, conditions: Any) -> tuple[Any, list[Any]]:
        import torch

        from omnitrl.algorithms import gaussian_log_prob, transition_mean, transition_std

        latents = torch.randn(len(conditions), *self.model.latent_shape(self.size))
        kept = []
        for step in range(STEPS):
            velocity = self._velocity(latents, conditions, step)
            mean = transition_mean(latents, velocity, self.transitions, step)
            if step >= TRAINED:
                latents = mean
                continue
            std = transition_std(latents, self.transitions, step)
            following = mean + std * torch.randn_like(mean)
            kept.append((latents, following, gaussian_log_prob(following, mean, std)))
            latents = following
        return latents, kept

    def _velocity(self, latents: Any, conditions: Any, step: int) -> Any:
        return self.model.velocity(latents, self.table.timesteps[step].expand(len(latents)), conditions)

    def _log_prob(self, latents: Any, following: Any, conditions: Any, step: int) -> Any:
        from omnitrl.algorithms import gaussian_log_prob, transition_mean, transition_std

        mean = transition_mean(latents, self._velocity(latents, conditions, step), self.transitions, step)
        return gaussian_log_prob(following, mean, transition_std(latents, self.transitions, step))


def run_family(family: str, quick: bool, repeats: int) -> dict[str, Any]:
    """Times steps of the trainer, with one of the bare loop between any two."""
    from peft import LoraConfig
    from transformers import TrainerCallback

    from omnitrl import FlowGRPOTrainer

    subject = SUBJECTS[family](quick)
    parameters = num_parameters(subject.model.transformer)
    rows = [{"prompt": f"sign {i}"} for i in range(BATCH // GROUP)]
    seconds: dict[str, list[float]] = {"omnitrl": [], "bare": []}

    class Turns(TrainerCallback):
        bare: BareLoop | None = None
        begun = 0.0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds["omnitrl"].append(time.process_time() - self.begun)
            if self.bare is None:
                self.bare = BareLoop(subject, rows)
            started = time.process_time()
            self.bare.step()
            seconds["bare"].append(time.process_time() - started)
            self.begun = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        trainer = FlowGRPOTrainer(
            subject.model,
            brightness,
            make_config(subject, 1 + repeats, folder),
            train_dataset=rows,
            peft_config=LoraConfig(r=32, lora_alpha=64),
            callbacks=[Turns()],
        )
        trainer.train()
    largest = max(row["rollout/logp_abs_diff_max"] for row in trainer.state.log_history if "loss" in row)
    medians = {side: median(values[1:]) for side, values in seconds.items()}  # the first has what is made once
    return {
        "family": family,
        "repeats": repeats,
        "network_parameters": parameters,
        "seconds": medians,
        "ratio": medians["omnitrl"] / medians["bare"],
        "largest_log_ratio": largest,
    }


def main() -> None:
    args = parse_args("whole_step", __doc__)
    import torch

    torch.set_num_threads(args.threads)
    repeats = 2 if args.quick else 3
    results = []
    for family in SUBJECTS:
        results.append(run_family(family, args.quick, repeats))
        print(f"{family}: {results[-1]['ratio']:.3f}", flush=True)
    header = ("", "bare, CPU s", "omnitrl, CPU s", "ratio", "largest |log ratio|")
    table = [
        (r["family"], *(f"{r['seconds'][side]:.2f}" for side in ("bare", "omnitrl")), f"{r['ratio']:.3f}")
        + (f"{r['largest_log_ratio']:.1e}",)
        for r in results
    ]
    print_table(f"A whole step over a bare loop, goal {GOAL:.2f}", header, table)
    content = {
        "benchmark": "whole_step",
        "quick": args.quick,
        "environment": environment(args.threads),
        "num_inference_steps": STEPS,
        "trained_steps": TRAINED,
        "batch_size": BATCH,
        "goal": GOAL,
        "results": results,
    }
    write_json(args.output, content)


if __name__ == "__main__":
    main()

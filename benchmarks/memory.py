# SPDX-License-Identifier: Apache-2.0
"""
Peak memory of a whole training run: what a sample more, and what a trained step more, costs.

Each case is a process of its own that makes one rollout and takes one optimizer step; its peak resident memory is
compared with the bytes of what a rollout has to keep: the states around the trained steps, and the media that wait
for a reward that answers only when it has seen them all. The latents are large and the network is small, so that
little else is seen.

    python benchmarks/memory.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Geometry, environment, parse_args, print_table, write_json


MIB = 2**20
SLACK_FRACTION, SLACK_BYTES = 0.02, 3 * MIB  # page rounding and Python objects of a sample; noise
STEPS, BATCH, PROMPTS = 12, 8, 4

# 16 x 64 x 64 latents: 256 KiB a state. 128 x 128 pixels: 64 KiB a picture, as PIL has four bytes a pixel.
GEOMETRY = Geometry(
    layers=2, heads=2, head_dim=16, latent_size=64, patch_size=8, vae_channels=(4, 4), text_length=16, t5_length=16
)

# Without these, freed memory may stay with the process, and the peak says more about malloc than about us.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Case:
    """
    One process.

    Args:
        samples (`int`): Samples in the rollout.
        trained_steps (`int`): Sampler steps that are stochastic and trained.
        late_reward (`bool`): Whether the reward keeps all media of the rollout until it has seen the last.
        lora (`bool`): Whether LoRA is trained, or all weights.
    """

    samples: int
    trained_steps: int
    late_reward: bool = False
    lora: bool = True

    @property
    def latent_bytes(self) -> int:
        """Bytes of the kept states: one more than trained steps, as these are consecutive."""
        g = GEOMETRY
        state = 4 * g.latent_channels * g.latent_size**2
        return self.samples * (self.trained_steps + 1) * state

    @property
    def media_bytes(self) -> int:
        """Bytes of the pictures that wait for the reward."""
        side = GEOMETRY.latent_size * 2 ** (len(GEOMETRY.vae_channels) - 1)
        return self.samples * 4 * side**2 if self.late_reward else 0

    @property
    def kept_bytes(self) -> int:
        """What the rollout has to keep."""
        return self.latent_bytes + self.media_bytes


@dataclass(frozen=True)
class Comparison:
    """Two cases that differ in one thing, and what that is."""

    what: str
    small: Case
    large: Case


def comparisons(quick: bool) -> list[Comparison]:
    """What is compared."""
    if quick:
        return [Comparison("8 to 32 samples and 1 to 4 trained steps", Case(8, 1), Case(32, 4))]
    few, many, steps = 64, 512, 10
    return [
        Comparison(f"{few} to {many} samples", Case(few, 1), Case(many, 1)),
        Comparison(f"{few} to {many} samples, late reward", Case(few, 1, True), Case(many, 1, True)),
        Comparison(f"1 to {steps} trained steps", Case(few, 1), Case(few, steps)),
        Comparison(f"1 to {steps} trained steps, all weights", Case(few, 1, lora=False), Case(few, steps, lora=False)),
    ]


# In the process of a case


def run_case(case: Case, threads: int) -> dict[str, int]:
    """Trains one step on one rollout and returns the peak so far, and the bytes of the rollout's state tensors."""
    import torch
    from common import sd3_model
    from peft import LoraConfig

    from omnitrl import FlowGRPOConfig, FlowGRPOTrainer

    torch.set_num_threads(threads)
    kept = {}

    class WatchedTrainer(FlowGRPOTrainer):
        def make_rollout(self, rollout: int) -> Any:
            buffer = super().make_rollout(rollout)
            kept["tensors"] = _storage_bytes(
                [t for trajectory in buffer.trajectories for t in (trajectory.latents, trajectory.next_latents)]
            )
            return buffer

        def _after_optimizer_step(self) -> None:
            kept["peak"] = peak_bytes()  # what comes after it, such as the report, is not of this rollout
            super()._after_optimizer_step()

    with tempfile.TemporaryDirectory() as folder:
        args = FlowGRPOConfig(
            output_dir=folder,
            beta=0.0,
            guidance_scale=1.0,
            num_inference_steps=STEPS,
            sde_window_strategy="first",
            sde_window_size=case.trained_steps,
            num_generations=case.samples // PROMPTS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=case.samples // BATCH,
            max_steps=1,
            reward_max_pending=None,  # the late reward would never have them all
            save_strategy="no",
            save_report=False,
            report_to=[],
            use_cpu=True,
        )
        trainer = WatchedTrainer(
            sd3_model(GEOMETRY),
            LateReward(case.samples) if case.late_reward else first_pixel,
            args,
            train_dataset=[f"sign {i}" for i in range(PROMPTS)],
            peft_config=LoraConfig(r=4, lora_alpha=8) if case.lora else None,
        )
        trainer.train()
    return {"peak_bytes": kept["peak"], "state_tensor_bytes": kept["tensors"]}


def first_pixel(completions: list[Any], **_: Any) -> list[float]:
    """A reward that answers at once, so that no picture has to wait."""
    return [float(image.getpixel((0, 0))[0]) for image in completions]


class LateReward:
    """A reward that answers when it has been given all samples of the rollout, and so keeps all their media."""

    def __init__(self, samples: int) -> None:
        import asyncio

        self._missing = samples
        self._complete = asyncio.Event()

    async def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        self._missing -= len(completions)
        if not self._missing:
            self._complete.set()
        await self._complete.wait()
        return first_pixel(completions)


def _storage_bytes(tensors: list[Any]) -> int:
    """Bytes of the memory behind `tensors`, shared memory counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    status = Path("/proc/self/status")
    if status.is_file():  # `ru_maxrss` may be that of the process that started this one
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# In the process that compares


def start_case(case: Case, threads: int) -> dict[str, int]:
    """Runs a case in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--threads", str(threads)]
    done = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool, threads: int, repeats: int) -> list[dict[str, Any]]:
    """Runs all cases, each once (several times with `repeats`, of which the lowest peak counts)."""
    measured: dict[Case, dict[str, int]] = {}
    for comparison in comparisons(quick):
        for case in (comparison.small, comparison.large):
            if case not in measured:
                runs = [start_case(case, threads) for _ in range(repeats)]
                measured[case] = min(runs, key=lambda values: values["peak_bytes"])
                print(f"{case}: peak {measured[case]['peak_bytes'] / MIB:.1f} MiB", flush=True)
    return [_compare(comparison, measured) for comparison in comparisons(quick)]


def _compare(comparison: Comparison, measured: dict[Case, dict[str, int]]) -> dict[str, Any]:
    small, large = comparison.small, comparison.large
    expected = large.kept_bytes - small.kept_bytes
    growth = measured[large]["peak_bytes"] - measured[small]["peak_bytes"]
    slack = round(SLACK_FRACTION * expected) + SLACK_BYTES
    return {
        "what": comparison.what,
        "small": asdict(small) | measured[small],
        "large": asdict(large) | measured[large],
        "kept_latent_bytes_growth": large.latent_bytes - small.latent_bytes,
        "kept_media_bytes_growth": large.media_bytes - small.media_bytes,
        "state_tensor_bytes_growth": measured[large]["state_tensor_bytes"] - measured[small]["state_tensor_bytes"],
        "expected_growth_bytes": expected,
        "measured_growth_bytes": growth,
        "slack_bytes": slack,
        "within": growth <= expected + slack,
    }


def show(results: list[dict[str, Any]]) -> None:
    """Prints expected and measured growth."""
    header = ("", "peak before", "peak after", "latents", "media", "expected", "measured", "slack", "within")
    rows = [
        (
            result["what"],
            *(
                f"{value / MIB:.1f}"
                for value in (
                    result["small"]["peak_bytes"],
                    result["large"]["peak_bytes"],
                    result["kept_latent_bytes_growth"],
                    result["kept_media_bytes_growth"],
                    result["expected_growth_bytes"],
                    result["measured_growth_bytes"],
                    result["slack_bytes"],
                )
            ),
            "yes" if result["within"] else "NO",
        )
        for result in results
    ]
    print_table("Growth of peak memory, MiB", header, rows)


def main() -> None:
    args = parse_args("memory", __doc__, {"--case": "Used by the script itself."})
    if args.case:
        print(json.dumps(run_case(Case(**json.loads(args.case)), args.threads)))
        return
    results = run(args.quick, args.threads, repeats=1 if args.quick else 2)
    show(results)
    content = {
        "benchmark": "memory",
        "quick": args.quick,
        "environment": environment(args.threads),
        "latent_shape": [GEOMETRY.latent_channels, GEOMETRY.latent_size, GEOMETRY.latent_size],
        "batch_size": BATCH,
        "slack": f"{SLACK_FRACTION:.0%} of the expected growth + {SLACK_BYTES // MIB} MiB",
        "within": all(result["within"] for result in results),
        "results": results,
    }
    write_json(args.output, content)


if __name__ == "__main__":
    main()

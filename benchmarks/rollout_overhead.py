# SPDX-License-Identifier: Apache-2.0
"""
CPU seconds per sample of omnitrl's local engine over those of the stock diffusers pipeline.

Same network, prompts, seeds, steps and guidance, in turns in one process. Both start from prompts, which nothing has
encoded before, and end with PIL images; the figure without these two ends is given too. The engine is timed as the
ODE sampler that the pipeline is, and with noise in all steps but the last and a log-prob of each, all of them kept.

    python benchmarks/rollout_overhead.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import (
    TINY,
    Geometry,
    environment,
    interleave,
    median_parts,
    medians,
    num_parameters,
    parse_args,
    print_parts,
    print_table,
    sd3_model,
    write_json,
)


GOAL = 1.05
STEPS = 4
ENDS = ("encode", "decode")
STOCK, ODE, SDE = "stock pipeline", "engine, ODE", "engine, SDE + log-probs"


def prompts(batch_size: int) -> list[str]:
    """Distinct prompts, so that the engine has no equal ones to encode once only."""
    return [f"sign {i}" for i in range(batch_size)]  # a token a letter, so short


def make_cases(model: Any, batch_size: int, guidance_scale: float) -> dict[str, tuple[Callable, dict[str, Any]]]:
    """The three ways of making one batch, each with the functions that its time is spent in."""
    import torch

    from omnitrl.models import Policy
    from omnitrl.rollout import LocalEngine, SampleNoise, SampleRequest, SamplingParams, local

    pipe, steps = model.pipeline, tuple(range(STEPS - 1))
    policy = Policy(model)
    engine = LocalEngine(model, policy=lambda: policy, batch_size=batch_size)
    requests = [SampleRequest({"prompt": prompt}, i, 0, i) for i, prompt in enumerate(prompts(batch_size))]

    def stock() -> list[Any]:
        generators = [torch.Generator().manual_seed(i) for i in range(batch_size)]
        return pipe(
            prompts(batch_size),
            num_inference_steps=STEPS,
            guidance_scale=guidance_scale,
            generator=generators,
            max_sequence_length=model.max_sequence_length,
        ).images

    def rollout(**sde: Any) -> list[Any]:
        model._cache.clear()  # the pipeline has to encode, so the engine has to
        model._cache_bytes = 0
        params = SamplingParams(STEPS, guidance_scale, **sde)
        return [trajectory.media for batch in engine.generate(requests, params) for trajectory in batch]

    network = {"network": (model.transformer, "forward")}
    of_pipeline = {
        **network,
        "encode": (pipe, "encode_prompt"),
        "decode": [(pipe.vae, "decode"), (pipe.image_processor, "postprocess")],
        "transition": (pipe.scheduler, "step"),
    }
    of_engine = {
        **network,
        "encode": (model, "encode"),
        "decode": (model, "decode"),
        "transition": [(local, "transition_mean"), (local, "transition_std")],
        "log_prob": (local, "gaussian_log_prob"),
        "noise": [(SampleNoise, "start"), (SampleNoise, "step"), (SampleNoise, "__init__")],
        "keep": [(local._Kept, "add"), (local._Kept, "trajectories")],
        "guidance": (policy, "_velocity"),  # what of the velocity is not the network: casts, joining, guidance
    }
    return {
        STOCK: (stock, of_pipeline),
        ODE: (rollout, of_engine),
        SDE: (lambda: rollout(sde_steps=steps, keep_steps=steps), of_engine),
    }


def pixel_difference(images: list[Any], others: list[Any]) -> int:
    """Largest difference of a pixel's value, of 255, between two lists of pictures: whether they are the same work."""
    import numpy as np

    return max(
        int(np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)).max())
        for a, b in zip(images, others, strict=True)
    )


def run_setting(model: Any, batch_size: int, guidance_scale: float, repeats: int) -> dict[str, Any]:
    """Times one batch size and guidance."""
    cases = make_cases(model, batch_size, guidance_scale)
    difference = pixel_difference(cases[STOCK][0](), cases[ODE][0]())  # and the first, slower calls
    timings = interleave(cases, repeats, warmup=0)
    totals = {name: medians(runs, without=ENDS) for name, runs in timings.items()}
    ratios = {name: {key: totals[name][key] / totals[STOCK][key] for key in totals[name]} for name in (ODE, SDE)}
    per_sample = {name: {key: value / batch_size for key, value in total.items()} for name, total in totals.items()}
    parts = {
        name: {part: seconds / batch_size for part, seconds in median_parts(runs).items()}
        for name, runs in timings.items()
    }
    return {
        "batch_size": batch_size,
        "guidance_scale": guidance_scale,
        "repeats": repeats,
        "largest_pixel_difference_of_ode": difference,
        "seconds_per_sample": per_sample,
        "ratios": ratios,
        "parts": parts,
    }


def show(results: list[dict[str, Any]]) -> None:
    """Prints the ratios, and where the time goes."""
    header = ("", "batch", "guidance", "CPU s/sample", "ratio", "loop only", "wall ratio", "pixels differ by")
    rows = []
    for result in results:
        setting = (result["batch_size"], result["guidance_scale"])
        rows.append((STOCK, *setting, f"{result['seconds_per_sample'][STOCK]['cpu']:.3f}", "", "", "", ""))
        for name in (ODE, SDE):
            ratio = [f"{result['ratios'][name][key]:.3f}" for key in ("cpu", "cpu_without_ends", "wall")]
            difference = result["largest_pixel_difference_of_ode"] if name == ODE else ""
            rows.append((name, *setting, f"{result['seconds_per_sample'][name]['cpu']:.3f}", *ratio, difference))
    print_table(f"Rollout over the stock pipeline, goal {GOAL:.2f} ('loop only': without the two ends)", header, rows)

    print_parts("Where the CPU time goes, ms per sample", results, "batch_size", "batch")


def main() -> None:
    args = parse_args("rollout_overhead", __doc__)
    import torch

    torch.set_num_threads(args.threads)
    geometry = TINY if args.quick else Geometry()
    model = sd3_model(geometry)
    settings = {1: 2, 2: 2} if args.quick else {1: 9, 4: 5, 16: 3}
    results = []
    for batch_size, repeats in settings.items():
        for guidance_scale in (1.0, 4.5):
            results.append(run_setting(model, batch_size, guidance_scale, repeats))
            ratios = ", ".join(f"{name} {ratio['cpu']:.3f}" for name, ratio in results[-1]["ratios"].items())
            print(f"batch {batch_size}, guidance {guidance_scale}: {ratios}", flush=True)
    show(results)
    content = {
        "benchmark": "rollout_overhead",
        "quick": args.quick,
        "environment": environment(args.threads),
        "network_parameters": num_parameters(model.transformer),
        "image_tokens": (geometry.latent_size // geometry.patch_size) ** 2,
        "num_inference_steps": STEPS,
        "goal": GOAL,
        "worst_ratio": max(result["ratios"][name]["cpu"] for result in results for name in (ODE, SDE)),
        "results": results,
    }
    write_json(args.output, content)


if __name__ == "__main__":
    main()

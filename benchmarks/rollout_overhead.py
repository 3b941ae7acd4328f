# SPDX-License-Identifier: Apache-2.0
"""
CPU seconds per sample of omnitrl's local engine over those of the stock diffusers pipeline, for three families.

Same network, prompts, seeds, steps and guidance, in turns in one process. Both start from prompts, which nothing has
encoded before, and end with media; the figure without these two ends is given too. The engine is timed as the ODE
sampler that the pipeline is, and with noise in all steps but the last and a log-prob of each, all of them kept. Rows
"group" have one prompt, as a group of an RL rollout has.

    python benchmarks/rollout_overhead.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import (
    SUBJECTS,
    Subject,
    environment,
    interleave,
    median_parts,
    medians,
    num_parameters,
    parse_args,
    print_table,
    write_json,
)


GOAL = 1.02
STEPS = 4
GUIDANCE = 4.0
ENDS = ("encode", "decode")
STOCK, ODE, SDE = "stock pipeline", "engine, ODE", "engine, SDE + log-probs"


def prompts(batch_size: int, group: bool) -> list[str]:
    """Distinct prompts, so that the engine has no equal ones to encode once only; or the one of a group."""
    return [f"sign {0 if group else i}" for i in range(batch_size)]  # a token a letter, so short


def make_cases(
    subject: Subject, batch_size: int, guidance_scale: float, group: bool
) -> dict[str, tuple[Callable, dict[str, Any]]]:
    """The three ways of making one batch, each with the functions that its time is spent in."""
    from omnitrl.models import Policy
    from omnitrl.rollout import LocalEngine, SampleNoise, SampleRequest, SamplingParams, stepping

    model, steps, texts = subject.model, tuple(range(STEPS - 1)), prompts(batch_size, group)
    pipe, policy = model.pipeline, Policy(model)
    engine = LocalEngine(model, policy=lambda: policy, batch_size=batch_size)
    requests = [SampleRequest({"prompt": prompt}, i, 0, i) for i, prompt in enumerate(texts)]

    def stock() -> Any:
        return subject.stock(texts, STEPS, guidance_scale, range(batch_size))[0]

    def rollout(**sde: Any) -> list[Any]:
        model._cache.clear()  # the pipeline has to encode, so the engine has to
        model._cache_bytes = 0
        params = SamplingParams(STEPS, guidance_scale, subject.size, **sde)
        return [trajectory.media for batch in engine.generate(requests, params) for trajectory in batch]

    network = {"network": (model.transformer, "forward")}
    of_pipeline = {
        **network,
        "encode": (pipe, "encode_prompt"),
        "decode": (pipe.vae, "decode"),
        "transition": (pipe.scheduler, "step"),
    }
    of_engine = {
        **network,
        "encode": (model, "encode"),
        "decode": (model, "decode"),
        "transition": [(stepping, "transition_mean"), (stepping, "transition_std")],
        "log_prob": (stepping, "gaussian_log_prob"),
        "noise": [(SampleNoise, "start"), (SampleNoise, "step"), (SampleNoise, "__init__")],
        "keep": [(stepping.Record, "add"), (stepping.Record, "trajectories")],
        "guidance": (policy, "_velocity"),  # what of the velocity is not the network: casts, joining, guidance
    }
    return {
        STOCK: (stock, of_pipeline),
        ODE: (rollout, of_engine),
        SDE: (lambda: rollout(sde_steps=steps, keep_steps=steps), of_engine),
    }


def pixel_difference(media: Any, others: Any) -> float:
    """Largest difference of a pixel, of 255, between two lists of media: whether they are the same work."""
    import numpy as np

    def levels(medium: Any) -> Any:
        pixels = np.asarray(medium, dtype=float)
        return pixels * 255 if isinstance(medium, np.ndarray) else pixels

    return max(float(np.abs(levels(a) - levels(b)).max()) for a, b in zip(media, others, strict=True))


def run_setting(
    family: str, subject: Subject, batch_size: int, guidance_scale: float, group: bool, repeats: int
) -> dict[str, Any]:
    """Times one batch size and guidance."""
    cases = make_cases(subject, batch_size, guidance_scale, group)
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
        "family": family,
        "batch_size": batch_size,
        "guidance_scale": guidance_scale,
        "group": group,
        "repeats": repeats,
        "largest_pixel_difference_of_ode": difference,
        "seconds_per_sample": per_sample,
        "ratios": ratios,
        "share_outside_network": 1 - parts[SDE]["network"] / sum(parts[SDE].values()),
        "parts": parts,
    }


def show(results: list[dict[str, Any]]) -> None:
    """Prints the ratios, and where the time goes."""
    header = ("", "family", "batch", "guidance", "CPU s/sample", "ratio", "loop only", "wall ratio", "outside network")
    rows, parts_rows, names = [], [], ["network", "encode", "decode", "guidance", "transition", "noise", "log_prob"]
    for result in results:
        batch = f"{result['batch_size']} group" if result["group"] else result["batch_size"]
        setting = (result["family"], batch, result["guidance_scale"])
        rows.append((STOCK, *setting, f"{result['seconds_per_sample'][STOCK]['cpu']:.3f}", "", "", "", ""))
        for name in (ODE, SDE):
            ratio = [f"{result['ratios'][name][key]:.3f}" for key in ("cpu", "cpu_without_ends", "wall")]
            share = f"{result['share_outside_network']:.3f}" if name == SDE else ""
            rows.append((name, *setting, f"{result['seconds_per_sample'][name]['cpu']:.3f}", *ratio, share))
        for name, parts in result["parts"].items():
            times = [f"{1e3 * parts.get(part, 0):.2f}" for part in (*names, "keep", "rest")]
            parts_rows.append((name, *setting, *times))
    print_table(f"Rollout over the stock pipeline, goal {GOAL:.2f} ('loop only': without the two ends)", header, rows)
    header = ("", "family", "batch", "guidance", *names, "keep", "rest")
    print_table("Where the CPU time goes, ms per sample", header, parts_rows)


def main() -> None:
    args = parse_args("rollout_overhead", __doc__)
    import torch

    torch.set_num_threads(args.threads)
    batches, repeats = ((1, 2), 2) if args.quick else ((1, 4, 16), 5)
    results = []
    for family, make in SUBJECTS.items():
        subject = make(args.quick)
        settings = [(size, 1.0, False) for size in batches]
        settings += [(batches[1], GUIDANCE, False), (batches[-1], 1.0, True)]
        for batch_size, guidance_scale, group in settings:
            results.append(run_setting(family, subject, batch_size, guidance_scale, group, repeats))
            ratios = ", ".join(f"{name} {ratio['cpu']:.3f}" for name, ratio in results[-1]["ratios"].items())
            print(f"{family}, batch {batch_size}, guidance {guidance_scale}: {ratios}", flush=True)
    show(results)
    content = {
        "benchmark": "rollout_overhead",
        "quick": args.quick,
        "environment": environment(args.threads),
        "network_parameters": {
            name: num_parameters(make(args.quick).model.transformer) for name, make in SUBJECTS.items()
        },
        "num_inference_steps": STEPS,
        "goal": GOAL,
        "worst_ratio": max(result["ratios"][name]["cpu"] for result in results for name in (ODE, SDE)),
        "results": results,
    }
    write_json(args.output, content)


if __name__ == "__main__":
    main()

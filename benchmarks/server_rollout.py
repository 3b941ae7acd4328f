# SPDX-License-Identifier: Apache-2.0
"""
Rollouts from a real vLLM-Omni server: images per second by the number of requests at the same time and by the way of
batching, the client's own share of the time, seconds per update of the weights, and two servers against one.

Server and client share the machine, and the models are tiny, so that figures say how the ways compare and not how fast
a server is. It needs the servers' environment (`make test-server`), and does nothing without it.

    python benchmarks/server_rollout.py
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from common import environment, parse_args, print_table, write_json


CONCURRENCY = (1, 4, 8, 16)
GROUP = 4
STEPS = 10
RANKS = (4, 32, 256)
# Family -> ways of batching.
BATCHINGS = {"sd3": ("serial", "request"), "qwen-image": ("serial", "request", "step")}
LENGTH = {"sd3": 12, "qwen-image": 32}


@dataclass
class Served:
    """
    Servers of one family, and the engine that asks them.

    Args:
        engine ([`VLLMOmniEngine`]): Its model is the one that is served, with adapters.
        servers (`list`): Processes.
    """

    engine: Any
    servers: list[Any]


@contextmanager
def served(
    folder: Path, family: str, batching: str, count: int = 1, rank: int = 4, whole: bool = False
) -> Iterator[Served]:
    """Starts servers, and an engine for a model with adapters, or with all weights trained."""
    from peft import LoraConfig, get_peft_model

    from omnitrl.models import load_flow_model
    from omnitrl.rollout import EngineContext
    from omnitrl.rollout.vllm_omni.engine import VLLMOmniEngine
    from omnitrl.rollout.vllm_omni.transport import HttpTransport
    from omnitrl.trainer.saving import trained_weights
    from tests.server.checkpoints import SERVED
    from tests.server.environment import rollout_server

    checkpoint = folder / family
    if not checkpoint.exists():
        SERVED[family].build().save_pretrained(checkpoint)
    names = [f"{family}-{batching}-{number}.log" for number in range(count)]
    servers = [rollout_server(checkpoint, folder / name, "--batching", batching) for name in names]
    model = load_flow_model(str(checkpoint), LENGTH[family])
    network = model.networks["transformer"]
    if whole:
        network.requires_grad_(True)
    else:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(model.default_lora_targets))
        model.networks["transformer"] = get_peft_model(network, lora).eval()
    args = SimpleNamespace(
        vllm_max_concurrency=None,
        vllm_server_timeout=60.0,
        vllm_request_timeout=120.0,
        vllm_check_tolerance=None,
    )
    try:
        for server in servers:
            server.start()
        context = EngineContext(model, args, weights=lambda: trained_weights(model))
        engine = VLLMOmniEngine(context, [HttpTransport(s.url) for s in servers], brings_weights=True, sleeps=False)
        engine.update_weights(0)
        yield Served(engine, servers)
        engine.close()
    finally:
        for server in servers:
            server.stop()


def make_images(engine: Any, count: int, concurrency: int, first_seed: int) -> dict[str, float]:
    """Seconds of a rollout and what of them the client's process computed."""
    from omnitrl.models import MediaSize
    from omnitrl.rollout import SampleRequest, SamplingParams

    steps = tuple(range(STEPS - 1))
    params = SamplingParams(STEPS, 3.0, MediaSize(64, 64), sde_steps=steps, keep_steps=steps)
    rows = [{"prompt": f"picture {first_seed} of group {number // GROUP}"} for number in range(count)]
    requests = [SampleRequest(row, i // GROUP, i % GROUP, first_seed + i) for i, row in enumerate(rows)]
    engine.client._concurrency = concurrency
    engine.take_metrics()
    wall, cpu = time.perf_counter(), time.process_time()
    made = sum(len(batch) for batch in engine.generate(requests, params))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert made == count
    return {
        "images_per_second": count / wall,
        "client_share": engine.take_metrics()["rollout/client_share"],
        "client_cpu_milliseconds_per_image": 1e3 * cpu / count,
    }


def rate(engine: Any, images: int, concurrency: int, repeats: int) -> dict[str, float]:
    """Medians over some rollouts, after one that does not count."""
    turns = [make_images(engine, images, concurrency, 1000 * turn + concurrency) for turn in range(repeats + 1)]
    return {key: median(turn[key] for turn in turns[1:]) for key in turns[0]}


def rates(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Images per second of each family and way of batching."""
    results = []
    families = {"sd3": ("request",)} if quick else BATCHINGS
    for family, ways in families.items():
        for batching in ways:
            with served(folder, family, batching) as there:
                for concurrency in CONCURRENCY[:2] if quick else CONCURRENCY:
                    measured = rate(there.engine, 8 if quick else 48, concurrency, 1 if quick else 3)
                    case = {"family": family, "batching": batching, "concurrency": concurrency}
                    results.append(case | measured)
                    print(results[-1], flush=True)
    return results


def two_servers(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Images per second of one server and of two, with as many requests for each."""
    results = []
    for count in (1, 2):
        with served(folder, "sd3", "request", count) as there:
            results.append({"servers": count, **rate(there.engine, 8 if quick else 48, 8, 1 if quick else 3)})
    return results


def updates(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Seconds from the trainer's weights to a server that has them, for adapters of several ranks and all weights."""
    results = []
    for rank in (*RANKS[: 1 if quick else None], None):
        with served(folder, "sd3", "request", rank=rank or 4, whole=rank is None) as there:
            engine, seconds = there.engine, []
            for version in range(1, 4 if quick else 12):
                for parameter in engine.model.networks.parameters():
                    if parameter.requires_grad:
                        parameter.data += 1e-6
                started = time.perf_counter()
                engine.update_weights(version).check()
                seconds.append(time.perf_counter() - started)
            size = sum(len(body) for _, body in engine.client._wanted.messages)
        what = "all weights" if rank is None else f"adapter of rank {rank}"
        results.append({"what": what, "bytes": size, "seconds": median(seconds[1:]), "updates": len(seconds) - 1})
        print(results[-1], flush=True)
    return results


def tables(content: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Title, header and rows of the tables that the documentation has."""
    concurrencies = sorted({result["concurrency"] for result in content["rates"]})
    cases: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for result in content["rates"]:
        cases.setdefault((result["family"], result["batching"]), {})[result["concurrency"]] = result
    by_case = [
        (family, batching, *(f"{found[c]['images_per_second']:.1f}" for c in concurrencies))
        + (f"{100 * max(result['client_share'] for result in found.values()):.1f} %",)
        for (family, batching), found in cases.items()
    ]
    weights = [
        (result["what"], f"{result['bytes'] / 2**20:.2f}", f"{result['seconds']:.3f}") for result in content["updates"]
    ]
    servers = [(str(result["servers"]), f"{result['images_per_second']:.1f}") for result in content["servers"]]
    return [
        (
            "Images per second by requests at the same time",
            ("model", "batching", *map(str, concurrencies), "client's share, at most"),
            by_case,
        ),
        ("Seconds per update of the weights", ("what", "MiB", "seconds"), weights),
        ("Images per second by servers", ("servers", "images per second"), servers),
    ]


def main() -> None:
    args = parse_args("server_rollout", __doc__)
    from tests.server.environment import server_python

    if server_python() is None:
        print("There is no environment for servers, so there is nothing to measure: `make test-server` builds it.")
        return
    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        content = {
            "benchmark": "server_rollout",
            "quick": args.quick,
            "environment": environment(args.threads),
            "steps": STEPS,
            "rates": rates(Path(folder), args.quick),
            "updates": updates(Path(folder), args.quick),
            "servers": two_servers(Path(folder), args.quick),
        }
    for title, header, rows in tables(content):
        print_table(title, header, rows)
    write_json(args.output, content)


if __name__ == "__main__":
    main()

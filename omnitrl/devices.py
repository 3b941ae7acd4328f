# SPDX-License-Identifier: Apache-2.0
"""Where CUDA, Ascend NPU, XPU, MPS and the CPU differ and Accelerate does not hide it.

This is the only file of the package that may name a device. Devices themselves come from Accelerate
(`accelerator.device`); `torch.get_device_module` finds the module that goes with one, also for out-of-tree backends
such as `torch_npu` once they are imported, which Accelerate does.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch


# Backends whose module has the caching allocator's interface (`memory_allocated` and its relatives).
_CACHING_ALLOCATOR = ("cuda", "npu", "xpu")


def device_module(device: torch.device | str) -> ModuleType:
    """
    Finds the PyTorch module of a device: `torch.cuda`, `torch.npu`, `torch.xpu`, `torch.mps` or `torch.cpu`.

    Args:
        device (`torch.device` or `str`):
            A device, with or without an index.

    Returns:
        `ModuleType`: the module.

    Example:

    ```python
    >>> device_module("cpu").__name__
    'torch.cpu'
    ```
    """
    try:
        return torch.get_device_module(device)
    except RuntimeError as error:
        raise RuntimeError(
            f"Device {str(device)!r} has no PyTorch module here: import the package of its backend first "
            "(torch_npu for Ascend), or use 'cpu'."
        ) from error


def device_name(device: torch.device | str) -> str:
    """
    Says what a device is, in words, for reports.

    Args:
        device (`torch.device` or `str`):
            A device.

    Returns:
        `str`: the model of the card, or the number of CPU threads in use.
    """
    device = torch.device(device)
    if device.type in _CACHING_ALLOCATOR:
        return str(device_module(device).get_device_name(device))
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return device.type.upper()


def has_accelerator() -> bool:
    """Whether this machine has a device that is no CPU."""
    return torch.accelerator.is_available()


def synchronize(device: torch.device | str) -> None:
    """
    Waits until everything queued on a device has been done; on a CPU there is nothing to wait for.

    Args:
        device (`torch.device` or `str`):
            A device.
    """
    device = torch.device(device)
    if device.type == "mps":  # there is one such device, and the function takes no argument
        torch.mps.synchronize()
    elif device.type != "cpu":
        device_module(device).synchronize(device)


def empty_cache(device: torch.device | str) -> None:
    """
    Gives memory that the caching allocator holds but no tensor uses back to the device; nothing on a CPU.

    Args:
        device (`torch.device` or `str`):
            A device.
    """
    device = torch.device(device)
    if device.type != "cpu":
        device_module(device).empty_cache()


def memory_stats(device: torch.device | str) -> dict[str, int]:
    """
    Measures how much memory is in use and how much was in use at most.

    Args:
        device (`torch.device` or `str`):
            A device. On an accelerator its tensors are counted, on a CPU the resident set of the process.

    Returns:
        `dict[str, int]`: `allocated` and `peak`, in bytes. The peak counts from the last [`reset_peak_memory`]; MPS
        keeps no peak, and there it equals `allocated`.

    Example:

    ```python
    >>> stats = memory_stats("cpu")
    >>> stats["peak"] >= stats["allocated"] > 0
    True
    ```
    """
    device = torch.device(device)
    if device.type in _CACHING_ALLOCATOR:
        module = device_module(device)
        return {"allocated": module.memory_allocated(device), "peak": module.max_memory_allocated(device)}
    if device.type == "mps":
        allocated = torch.mps.current_allocated_memory()
        return {"allocated": allocated, "peak": allocated}
    allocated = psutil.Process().memory_info().rss
    return {"allocated": allocated, "peak": max(allocated, _peak_resident_bytes())}


def reset_peak_memory(device: torch.device | str) -> bool:
    """
    Starts a new measurement of the peak that [`memory_stats`] reports.

    Args:
        device (`torch.device` or `str`):
            A device.

    Returns:
        `bool`: whether the peak was reset. The peak of a process on a CPU can be reset on Linux only.
    """
    device = torch.device(device)
    if device.type in _CACHING_ALLOCATOR:
        device_module(device).reset_peak_memory_stats(device)
        return True
    if device.type == "cpu" and sys.platform == "linux":
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): 5 resets the peak resident set
        except OSError:  # some containers mount /proc read-only
            return False
        return True
    return False


def _peak_resident_bytes() -> int:
    """The peak resident set of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage's figure cannot be reset, this one can
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others kibibytes


def supports_bf16(device: torch.device | str) -> bool:
    """
    Tells whether a device computes in bfloat16 natively.

    Args:
        device (`torch.device` or `str`):
            A device.

    Returns:
        `bool`: `False` where bfloat16 is missing or emulated.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return True
    if device.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    if device.type == "cuda":  # older cards emulate it, slower than float32
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(device_module(device).is_bf16_supported())


def default_dtype(device: torch.device | str) -> torch.dtype:
    """
    Chooses the dtype for a network where the user did not.

    Args:
        device (`torch.device` or `str`):
            A device.

    Returns:
        `torch.dtype`: bfloat16 on accelerators that have it. Otherwise float32: on a CPU bfloat16 is mostly slower,
        and float16 needs loss scaling and overflows in the activations of large diffusion transformers.
    """
    device = torch.device(device)
    return torch.bfloat16 if device.type != "cpu" and supports_bf16(device) else torch.float32


def autocast(device: torch.device | str, dtype: torch.dtype) -> AbstractContextManager[None]:
    """
    Makes the context in which a network runs in `dtype` while its weights stay as they are.

    Args:
        device (`torch.device` or `str`):
            The device of the network.
        dtype (`torch.dtype`):
            The dtype to compute in. With float32 the context does nothing.

    Returns:
        `AbstractContextManager`: the context.
    """
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype)


def rng_state(device: torch.device | str) -> dict[str, torch.Tensor]:
    """
    Takes PyTorch's random state on the CPU and on a device, for [`set_rng_state`].

    Args:
        device (`torch.device` or `str`):
            A device.

    Returns:
        `dict[str, torch.Tensor]`: the state `"cpu"`, and `"device"` where the device is not the CPU. It can be saved
        with `torch.save`.

    Example:

    ```python
    >>> state = rng_state("cpu")
    >>> first = torch.rand(2)
    >>> set_rng_state("cpu", state)
    >>> torch.equal(torch.rand(2), first)
    True
    ```
    """
    device = torch.device(device)
    state = {"cpu": torch.get_rng_state()}
    if device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    elif device.type != "cpu":
        state["device"] = device_module(device).get_rng_state(device)
    return state


def set_rng_state(device: torch.device | str, state: dict[str, torch.Tensor]) -> None:
    """
    Puts back what [`rng_state`] took.

    Args:
        device (`torch.device` or `str`):
            A device. A state taken on the CPU alone leaves an accelerator's generator as it is.
        state (`dict[str, torch.Tensor]`):
            What [`rng_state`] returned.
    """
    device = torch.device(device)
    torch.set_rng_state(state["cpu"])
    if "device" not in state or device.type == "cpu":
        return
    if device.type == "mps":
        torch.mps.set_rng_state(state["device"])
    else:
        device_module(device).set_rng_state(state["device"], device)


def process_device() -> torch.device:
    """
    Finds the device of this process, for what runs beside a trainer, in a thread too.

    Returns:
        `torch.device`: that of Accelerate where it has been set up, as in a run; otherwise the accelerator of the
        machine, or the CPU.
    """
    from accelerate.state import PartialState  # here: nothing else of this file needs it

    if PartialState._shared_state:  # asking it for a device would set it up, and end a later choice of the CPU
        return torch.device(PartialState().device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def process_group(
    device: torch.device | str, other: str, store: Any, rank: int, size: int, timeout: timedelta
) -> tuple[Any, torch.device]:
    """
    Makes a process group that is apart from PyTorch's default one, for messages between two sides; it waits for all
    members.

    Args:
        device (`torch.device` or `str`):
            Of this member.
        other (`str`):
            Kind of the other side's device.
        store (`torch.distributed.Store`):
            Where the members find each other.
        rank, size (`int`):
            Number of this member, and how many there are.
        timeout (`timedelta`):
            Longest time to find each other.

    Returns:
        `tuple`: the group, NCCL's where both sides have CUDA and Gloo's elsewhere, and the device of its tensors.
    """
    device = torch.device(device)
    if device.type == other == "cuda":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # its watchdog ends the process; who waits for a message gives up before
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options), device
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout), torch.device("cpu")

# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
import torch

from omnitrl import devices


pytestmark = pytest.mark.compat

DEVICES = ["cpu"] + ([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])
MB = 2**20


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def test_the_module_of_a_device(device):
    assert devices.device_module(device).__name__ == f"torch.{device.type}"
    assert devices.device_module(f"{device.type}:0") is devices.device_module(device)


def test_a_device_without_a_backend_says_what_to_import():
    with pytest.raises(RuntimeError, match="'privateuseone:0' has no PyTorch module here"):
        devices.device_module("privateuseone:0")


FOLLOWS_A_TENSOR = """
import sys
import torch
from omnitrl import devices
MB, device = 2**20, torch.device(sys.argv[1])
torch.ones(1, device=device)
before = devices.memory_stats(device)
block = torch.ones(64 * MB, dtype=torch.uint8, device=device)
during = devices.memory_stats(device)
assert 60 * MB < during["allocated"] - before["allocated"] < 80 * MB, (before, during)
assert during["peak"] >= during["allocated"]
del block
devices.empty_cache(device)
after = devices.memory_stats(device)
assert after["peak"] > during["allocated"] - MB  # the kernel counts pages of a process in batches
if devices.reset_peak_memory(device):
    assert devices.memory_stats(device)["peak"] < after["allocated"] + 10 * MB
"""


def test_memory_follows_a_tensor_and_the_peak_can_be_reset(device):
    """In a process of its own: the allocator of one that has run other tests has memory to spare."""
    command = [sys.executable, "-c", FOLLOWS_A_TENSOR, device.type]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process can be reset on Linux only")
def test_the_peak_of_the_process_starts_anew():
    torch.ones(128 * MB, dtype=torch.uint8)
    assert devices.memory_stats("cpu")["peak"] - devices.memory_stats("cpu")["allocated"] > 100 * MB
    if not devices.reset_peak_memory("cpu"):
        pytest.skip("/proc is mounted read-only")
    assert devices.memory_stats("cpu")["peak"] - devices.memory_stats("cpu")["allocated"] < 20 * MB


def test_random_states_repeat_on_both_sides(device):
    state = devices.rng_state(device)
    first = torch.rand(3), torch.rand(3, device=device)
    devices.set_rng_state(device, state)
    again = torch.rand(3), torch.rand(3, device=device)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(torch.rand(3), first[0])
    assert ("device" in state) == (device.type != "cpu")


def test_the_dtype_of_a_network():
    assert devices.supports_bf16("cpu")
    assert devices.default_dtype("cpu") == torch.float32
    for name in DEVICES[1:]:
        expected = torch.bfloat16 if devices.supports_bf16(name) else torch.float32
        assert devices.default_dtype(name) == expected


def test_autocast_computes_in_the_dtype_and_not_at_all_in_float32(device):
    layer = torch.nn.Linear(4, 4, device=device)
    x = torch.ones(1, 4, device=device)
    with devices.autocast(device, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with devices.autocast(device, torch.float32):
        assert layer(x).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


def test_the_name_and_waiting(device):
    assert devices.device_name("cpu") == f"CPU, {torch.get_num_threads()} threads"
    assert devices.device_name(device)
    devices.synchronize(device)


def test_the_device_of_the_process_is_that_of_the_run(monkeypatch):
    from accelerate.state import PartialState

    monkeypatch.setattr(PartialState, "_shared_state", {})
    assert devices.process_device().type == DEVICES[-1]
    assert PartialState._shared_state == {}  # asking does not decide
    monkeypatch.setattr(PartialState, "_shared_state", {"device": torch.device("meta")})
    assert devices.process_device() == torch.device("meta")

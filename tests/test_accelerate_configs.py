# SPDX-License-Identifier: Apache-2.0
"""The launch configurations, read by Accelerate itself, which refuses keys that it does not know."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

import omnitrl


FOLDER = Path(omnitrl.__file__).parent / "accelerate_configs"
EXPECTED = {
    "single_device": (DistributedType.NO, 1),
    "multi_gpu": (DistributedType.MULTI_GPU, 8),
    "fsdp2": (DistributedType.FSDP, 8),
    "zero2": (DistributedType.DEEPSPEED, 8),
    "zero3": (DistributedType.DEEPSPEED, 8),
}


@pytest.mark.compat
@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_reads_it(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes) == EXPECTED[name]
    assert config.fsdp_config.get("fsdp_version", 2) == 2
    assert config.deepspeed_config.get("zero_stage") == {"zero2": 2, "zero3": 3}.get(name)


def test_no_file_is_left_out():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(EXPECTED)

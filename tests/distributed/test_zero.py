# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes under DeepSpeed ZeRO against one process."""

import importlib.util

import pytest

from tests.distributed import zero
from tests.distributed.launch import Launch
from tests.distributed.test_ddp import distance


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs `pip install omnitrl[deepspeed]`"),
]


@pytest.mark.parametrize("name", zero.SCENARIOS)
def test_partitions_train_what_whole_weights_train(name, tmp_path):
    launch = Launch("tests.distributed.zero", tmp_path, name)
    assert launch.wait(120) == 0, launch.output()
    (losses, weights), (others, _) = launch.results(name)
    expected_losses, expected = zero.three_steps(0)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert others == losses
    assert weights.keys() == expected.keys()
    assert distance(expected, weights) <= 1e-5

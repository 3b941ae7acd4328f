# SPDX-License-Identifier: Apache-2.0
"""Law 9 on every algorithm: two gloo processes have the gradient of the one big batch in one process."""

import pytest

from omnitrl.trainer import TRAINERS
from tests.distributed.launch import Launch
from tests.trainer.helpers import same
from tests.trainer.test_gradients import difference, gradient_of_an_update


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All algorithms, one after the other in the same two processes."""
    launch = Launch("tests.distributed.gradients", tmp_path_factory.mktemp("two"), *TRAINERS)
    assert launch.wait(280) == 0, launch.output()
    return launch


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_two_processes_have_the_gradient_of_the_one_big_batch(two, algorithm, tmp_path):
    first, second = two.results(algorithm)
    assert same(first, second)
    whole = gradient_of_an_update(tmp_path, algorithm, parts=1, timesteps_per_forward=100)
    assert difference(whole, first) <= 1e-6

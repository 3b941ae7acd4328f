# SPDX-License-Identifier: Apache-2.0
"""The gradient of one update of each algorithm in two processes, started by `test_gradients.py`."""

from omnitrl.trainer import TRAINERS
from tests.distributed.launch import main
from tests.trainer.test_gradients import gradient_of_an_update, units_of


def scenario(algorithm):
    """Two micro-batches on each process where there is enough for that, and two steps in a network call."""

    def run(place):
        parts = 2 if units_of(algorithm, place) >= 4 else 1
        return gradient_of_an_update(place, algorithm, parts, timesteps_per_forward=2, world_size=2)

    return run


SCENARIOS = {algorithm: scenario(algorithm) for algorithm in TRAINERS}

if __name__ == "__main__":
    main(SCENARIOS)

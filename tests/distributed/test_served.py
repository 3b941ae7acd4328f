# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes that share one rollout server, which has a copy of the model: the run of one process alone."""

from collections import Counter

import pytest

from tests.distributed import served
from tests.distributed.launch import Launch
from tests.distributed.test_ddp import distance
from tests.rollout.stub import LocalService, Stub, refusal
from tests.tiny_models import tiny_model
from tests.trainer.helpers import same


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class Forgetful(Stub):
    """It loses its weights once in each run, in the midst of a rollout, as one that was restarted does."""

    def __init__(self):
        super().__init__(self.forget)
        self.service, self.lost, self._asked = LocalService(tiny_model()), [], Counter()

    def forget(self, path, body):
        if path.endswith("generate"):
            run = self.service.version >> 20  # no two have the same
            self._asked[run] += 1
            if self._asked[run] == 16 and run >= 0:  # the second rollout: after two comparisons and the first one
                self.lost.append(run)
                self.service.lose_weights()
                return refusal(409, "stale", "There are the weights -1.")
        return self.service.answer(path, body)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    server = Forgetful()
    folder, variables = tmp_path_factory.mktemp("two"), {"SERVER": server.url}
    launch = Launch("tests.distributed.served", folder, *served.SCENARIOS, environment=variables)
    try:
        assert launch.wait(280) == 0, launch.output()
    finally:
        server.stop()
    launch.server = server
    return launch


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process learns without a server, by whether all weights are trained."""
    runs = {}

    def run(name):
        kind = name if name == "sharded_networks" else "replicated"  # one process shards nothing
        if kind not in runs:
            runs[kind] = served.SCENARIOS[kind](tmp_path_factory.mktemp(kind))
        return runs[kind]

    return run


@pytest.mark.parametrize("name", served.SCENARIOS)
def test_two_processes_with_a_server_train_what_one_trains_without(name, two, alone):
    first, second = two.results(name)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["sharded"] == second["sharded"] == name.startswith("sharded")
    expected = alone(name)
    assert same(first["weights"], second["weights"])
    assert distance(expected["weights"], first["weights"]) <= 1e-4
    assert first["eval_reward"] == second["eval_reward"] == pytest.approx(expected["eval_reward"], abs=1e-5)
    assert sorted(first["seeds"] + second["seeds"]) == sorted(expected["seeds"])
    assert max(first["mismatch"] + second["mismatch"]) <= 1e-5


def test_weights_are_brought_once_a_step_and_when_they_are_lost(two):
    calls = two.server.service.calls
    assert len(set(two.server.lost)) == len(two.server.lost) == len(served.SCENARIOS)
    # Four updates, the evaluation, and once again what was lost.
    assert (calls.count("adapter"), calls.count("weights")) == (12, 6)

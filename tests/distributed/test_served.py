# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes that share one rollout server, which has a copy of the model: the run of one process alone."""

import pytest

from tests.distributed import served
from tests.distributed.launch import Launch
from tests.distributed.test_ddp import distance
from tests.rollout.stub import LocalService, Stub, refusal
from tests.tiny_models import tiny_model
from tests.trainer.helpers import same


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def server():
    """It loses its weights once, in the midst of a rollout, as one that was restarted does."""
    service = LocalService(tiny_model())
    lost = []

    def answer(path, body):
        made = service.calls.count("generate")
        if path.endswith("generate") and made == 12 and not lost:
            lost.append(service.version)
            service.version = -1
            return refusal(409, "stale", "There are the weights -1.")
        return service.answer(path, body)

    stub = Stub(answer)
    stub.service, stub.lost = service, lost
    yield stub
    stub.stop()


@pytest.mark.parametrize("name", served.SCENARIOS)
def test_two_processes_with_a_server_train_what_one_trains_without(name, server, tmp_path):
    launch = Launch("tests.distributed.served", tmp_path, name, environment={"SERVER": server.url})
    assert launch.wait(200) == 0, launch.output()
    first, second = launch.results(name)
    assert (first["rank"], second["rank"]) == (0, 1)
    alone = served.SCENARIOS[name](tmp_path / "alone")
    assert same(first["weights"], second["weights"])
    assert distance(alone["weights"], first["weights"]) <= 1e-4
    assert first["eval_reward"] == second["eval_reward"] == pytest.approx(alone["eval_reward"], abs=1e-5)
    assert sorted(first["seeds"] + second["seeds"]) == sorted(alone["seeds"])
    assert max(first["mismatch"] + second["mismatch"]) <= 1e-5
    assert len(server.lost) == 1
    # Four updates, the evaluation, and once again what was lost.
    assert server.service.calls.count("adapter") == 6

# SPDX-License-Identifier: Apache-2.0
"""What two processes with one server do, started by `test_engine.py`."""

import os

from omnitrl.models import load_flow_model
from tests.distributed.ddp import share
from tests.distributed.fsdp import SHARDED, weights
from tests.distributed.launch import main
from tests.trainer.helpers import logged, trainer


def four_updates(place, servers=True, **options):
    """A run whose samples are made by the server that `SERVER` names, of the checkpoint `CHECKPOINT`."""
    options |= {"rollout_engine": "vllm_omni", "vllm_server_base_url": os.environ["SERVER"]} if servers else {}
    sizes = {"generation_batch_size": 8, "num_generations": 4}
    model = load_flow_model(os.environ["CHECKPOINT"], 12)
    run = trainer(place, model=model, height=64, width=64, **share(sizes), **options)
    seeds, make_rollout = [], run.make_rollout

    def make_and_keep(rollout):
        buffer = make_rollout(rollout)
        seeds.extend(t.request.seed for t in buffer.trajectories)
        return buffer

    run.make_rollout = make_and_keep
    run.train()
    run.engine.close()  # that of the next run has the server for itself
    return {"weights": weights(run), "seeds": seeds, "differences": logged(run, "rollout/logp_abs_diff_max")}


def sharded(place):
    """The same with weights that FSDP2 shards."""
    return four_updates(place, **SHARDED)


if __name__ == "__main__":
    main({"four_updates": four_updates, "sharded": sharded})

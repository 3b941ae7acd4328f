# SPDX-License-Identifier: Apache-2.0
"""What two processes do whose samples one server makes, started by `test_served.py`; `SERVER` is its URL."""

import os

from torch.distributed.fsdp import FSDPModule

from tests.distributed.ddp import make, recording
from tests.distributed.fsdp import FULL, SHARDED, weights
from tests.distributed.launch import main
from tests.trainer.helpers import logged


def four_updates(place, **options):
    """Four updates and an evaluation of averages, which are other weights at the same step."""
    if "SERVER" in os.environ:
        options |= {"rollout_engine": "vllm_omni", "vllm_server_base_url": os.environ["SERVER"]}
    run = make(place, ema_decay=0.5, vllm_server_timeout=30.0, eval_dataset=["a cat", "a dog"], **options)
    seen = recording(run)
    run.train()
    result = {
        "seeds": [seed for seed, _, _ in seen],
        "eval_reward": run.evaluate()["eval_reward"],
        "weights": weights(run),
        "mismatch": logged(run, "rollout/logp_abs_diff_max"),
        "rank": run.args.process_index,
        "sharded": isinstance(run.model_wrapped, FSDPModule),
    }
    run.engine.close()  # that of the next scenario has the server for itself
    return result


def replicated(place):
    return four_updates(place)


def sharded(place):
    return four_updates(place, **SHARDED)


def sharded_networks(place):
    return four_updates(place, **SHARDED, **FULL)


SCENARIOS = {f.__name__: f for f in (replicated, sharded, sharded_networks)}

if __name__ == "__main__":
    main(SCENARIOS)

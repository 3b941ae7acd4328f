# SPDX-License-Identifier: Apache-2.0
"""What two processes do whose samples one server makes, started by `test_served.py`; `SERVER` is its URL."""

import os

from tests.distributed.ddp import make, recording
from tests.distributed.fsdp import weights
from tests.distributed.launch import main
from tests.trainer.helpers import logged


def replicated(place):
    """Four updates and an evaluation of averages, which are other weights at the same step."""
    options = {}
    if "SERVER" in os.environ:
        options = {"rollout_engine": "vllm_omni", "vllm_server_base_url": os.environ["SERVER"]}
    run = make(place, ema_decay=0.5, vllm_server_timeout=30.0, eval_dataset=["a cat", "a dog"], **options)
    seen = recording(run)
    run.train()
    return {
        "seeds": [seed for seed, _, _ in seen],
        "eval_reward": run.evaluate()["eval_reward"],
        "weights": weights(run),
        "mismatch": logged(run, "rollout/logp_abs_diff_max"),
        "rank": run.args.process_index,
    }


SCENARIOS = {"replicated": replicated}

if __name__ == "__main__":
    main(SCENARIOS)

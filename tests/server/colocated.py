# SPDX-License-Identifier: Apache-2.0
"""
A run with an engine in the trainer's process, and the same run with the local engine; started by `test_colocate.py`.

It runs in the servers' environment: `python -m tests.server.colocated CHECKPOINT FOLDER`.
"""

import json
import sys
from pathlib import Path

from omnitrl.models import load_flow_model
from tests.trainer.helpers import logged, trainable, trainer


def run(place, checkpoint, **options):
    """Three updates, of which two learn from one rollout."""
    model = load_flow_model(checkpoint, 12)
    given = {"max_steps": 3, "height": 64, "width": 64, "guidance_scale": 3.0, "learning_rate": 3e-4, "epsilon": 1e-3}
    return trainer(place, model=model, **given, **options)


def main(checkpoint, folder):
    """Writes what both runs have made of the same start."""
    local = run(folder / "local", checkpoint, rollout_batch_size=1)
    local.train()
    inside = run(folder / "inside", checkpoint, rollout_engine="vllm_omni", vllm_mode="colocate")
    asleep, training_step = [], inside.training_step

    def step(*args, **kwargs):
        loss = training_step(*args, **kwargs)
        asleep.append(inside.engine._asleep)
        return loss

    inside.training_step = step
    inside.train()
    ours, theirs = trainable(inside), trainable(local)
    norm = sum(float(tensor.square().sum()) for tensor in theirs.values()) ** 0.5
    difference = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs) ** 0.5
    result = {
        "rewards": [logged(inside, "reward"), logged(local, "reward")],
        "difference": difference / norm,
        "log_probs": logged(inside, "rollout/logp_abs_diff_max"),
        "asleep": asleep,
    }
    (folder / "result.json").write_text(json.dumps(result))
    inside.engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

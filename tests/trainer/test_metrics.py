# SPDX-License-Identifier: Apache-2.0
"""What becomes of the numbers between two logs."""

import math

import torch

from omnitrl.trainer.metrics import MetricStore


def test_means_leave_nan_out_and_counts_are_summed():
    store = MetricStore()
    store.add("reward", torch.tensor([0.5, math.nan, math.nan, 0.8]))
    store.add("reward", torch.tensor([0.6, 0.7]))
    store.add("nothing", math.nan)
    for value in (1.0, 2.0):
        store.add("rewards/ocr/failed", value)
        store.add("time/rollout", value)
        store.add("logp_abs_diff_max", value)
    drained = store.drain()
    assert math.isclose(drained.pop("reward"), 0.65, rel_tol=1e-6)
    assert drained == {"rewards/ocr/failed": 3.0, "time/rollout": 3.0, "logp_abs_diff_max": 2.0}
    assert store.drain() == {}

# SPDX-License-Identifier: Apache-2.0
"""How a micro-batch is cut into network calls: the right rows, stacked one call at a time."""

import weakref

import pytest
import torch

from tests.trainer.helpers import fresh_rollout, trainer


@pytest.fixture(scope="module")
def buffer(tmp_path_factory):
    return fresh_rollout(trainer(tmp_path_factory.mktemp("run")))  # 8 samples, steps 0, 1 and 2


def test_rows_are_all_samples_at_one_step_after_the_other(buffer):
    batches = buffer.replay([5, 2], timesteps_per_forward=2)
    assert [len(batch) for batch in batches] == [4, 2]
    assert (len(batches), batches.num_rows) == (2, 6)
    assert [batch.steps.tolist() for batch in batches] == [[0, 0, 1, 1], [2, 2]]
    for call, columns in enumerate([(0, 1), (2,)]):
        rows = [(i, k) for k in columns for i in (5, 2)]
        for name, column in (("latents", "latents"), ("next_latents", "next_latents"), ("old_log_probs", "log_probs")):
            expected = torch.stack([getattr(buffer.trajectories[i], column)[k] for i, k in rows])
            assert torch.equal(getattr(batches[call], name), expected)
        assert torch.equal(batches[call].advantages, buffer.advantages[[i for i, _ in rows]])
        wanted = buffer.conditions[[buffer.condition_rows[i] for i, _ in rows]]
        assert torch.equal(batches[call].conditions.positive["prompt_embeds"], wanted.positive["prompt_embeds"])


def test_a_call_that_is_done_is_not_held(buffer):
    """Otherwise the memory of a micro-batch would grow with the trained steps."""
    done = []
    for batch in buffer.replay([0, 1, 2], timesteps_per_forward=1):
        assert all(reference() is None for reference in done)
        done.append(weakref.ref(batch))
        del batch
    assert len(done) == 3

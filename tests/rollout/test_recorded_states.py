# SPDX-License-Identifier: Apache-2.0
"""What the local engine records of a rollout: each state once, in memory that its sample owns."""

import pytest
import torch

from omnitrl.rollout import LocalEngine, SampleRequest, SamplingParams
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def engine():
    return LocalEngine(tiny_model(), batch_size=3)


def sample(engine, keep_steps):
    requests = [SampleRequest({"prompt": f"map {i}"}, group_id=i, member=0, seed=i) for i in range(3)]
    params = SamplingParams(num_inference_steps=5, sde_steps=(0, 1, 2, 3), keep_steps=keep_steps)
    (batch,) = engine.generate(requests, params)
    return batch


def storage(tensor):
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def test_a_sample_owns_its_states_and_holds_each_once(engine):
    batch = sample(engine, (1, 2, 3))
    state_bytes = 4 * batch[0].latents[0].numel()
    for trajectory in batch:
        assert torch.equal(trajectory.latents[1:], trajectory.next_latents[:-1])
        assert storage(trajectory.latents) == storage(trajectory.next_latents)
        assert storage(trajectory.latents)[1] == 4 * state_bytes  # one more than trained steps
        assert trajectory.log_probs.untyped_storage().nbytes() == 3 * 4
    assert len({storage(trajectory.latents) for trajectory in batch}) == 3
    assert not torch.equal(batch[0].latents, batch[1].latents)


def test_steps_with_gaps_record_the_same_states_as_all_steps(engine):
    every, gaps = sample(engine, (0, 1, 2, 3)), sample(engine, (0, 2, 3))
    for full, part in zip(every, gaps, strict=True):
        assert part.steps == (0, 2, 3)
        assert torch.equal(part.latents, full.latents[[0, 2, 3]])
        assert torch.equal(part.next_latents, full.next_latents[[0, 2, 3]])
        assert torch.equal(part.log_probs, full.log_probs[[0, 2, 3]])
        assert part.media.tobytes() == full.media.tobytes()


def test_without_kept_steps_nothing_is_recorded(engine):
    assert [t.latents.numel() + t.next_latents.numel() + t.log_probs.numel() for t in sample(engine, ())] == [0, 0, 0]

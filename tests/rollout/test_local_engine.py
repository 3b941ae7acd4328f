# SPDX-License-Identifier: Apache-2.0
"""The local engine: a sampler whose every state, noise and log-prob is accounted for."""

import math

import pytest
import torch

from omnitrl.algorithms import transition_mean, transition_std, transition_table
from omnitrl.models import MediaSize
from omnitrl.rollout import (
    EngineContext,
    LocalEngine,
    RolloutEngine,
    SampleNoise,
    SampleRequest,
    SamplingParams,
    WeightReport,
    make_engine,
)
from tests.tiny_models import tiny_model


PROMPTS = ["a cat", "two dogs", "a map"]


def requests(count=3, **options):
    return [SampleRequest({"prompt": PROMPTS[i % 3]}, i, 0, seed=100 + i, **options) for i in range(count)]


def run(engine, params, count=3, **options):
    return [t for batch in engine.generate(requests(count, **options), params) for t in batch]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_the_engine_of_a_trainer_follows_the_protocol(model):
    made = make_engine("local", EngineContext(model, batch_size=2))
    assert type(made) is LocalEngine
    assert made.batch_size == 2
    assert isinstance(made, RolloutEngine)
    assert not isinstance(model, RolloutEngine)
    made.health()
    made.sleep()
    made.wake()
    report = made.update_weights(7)
    report.check()
    assert report.version == 7
    assert report.bound == report.expected == sum(1 for _ in model.networks.parameters())
    assert run(made, SamplingParams(2), count=1)[0].weight_version == 7
    assert made.take_metrics() == {}
    made.close()


def test_modules_that_kept_old_weights_are_an_error():
    report = WeightReport(version=3, bound=1, expected=3, missing=["a.lora_A", "a.lora_B"])
    with pytest.raises(RuntimeError, match=r"took 1 of 3 modules of weight version 3; missing are \['a\.lora_A'"):
        report.check()


@pytest.mark.parametrize("sde_type", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_each_state_is_the_mean_plus_its_noise_and_is_scored(model, sde_type, guidance):
    """Replayed by hand: start noise, then one draw for each stochastic step; ODE steps draw nothing."""
    steps, stochastic = 5, (1, 3)
    params = SamplingParams(
        steps, guidance, sde_type=sde_type, noise_level=0.6, sde_steps=stochastic, keep_steps=stochastic
    )
    shape, table = model.latent_shape(), model.sigmas(steps)
    transitions = transition_table(table.sigmas, sde_type, 0.6, stochastic)
    for request, trajectory in zip(requests(), run(LocalEngine(model, batch_size=1), params), strict=True):
        generator = torch.Generator().manual_seed(request.seed)
        latents = torch.randn(1, *shape, generator=generator)
        conditions = model.encode([request.row], guidance=guidance > 1)
        kept = []
        for step in range(steps):
            with torch.no_grad():
                velocity = model.velocity(latents, table.timesteps[step : step + 1], conditions, guidance)
            mean = transition_mean(latents, velocity, transitions, step)
            following = mean
            if step in stochastic:
                std = transition_std(latents, transitions, step)
                following = mean + std * torch.randn(1, *shape, generator=generator)
                density = torch.distributions.Normal(mean, std.expand_as(mean)).log_prob(following).mean()
                kept.append((latents, following, float(density)))
            latents = following
        assert trajectory.steps == stochastic
        for k, (before, after, log_prob) in enumerate(kept):
            assert torch.allclose(trajectory.latents[k], before[0], atol=1e-5)
            assert torch.allclose(trajectory.next_latents[k], after[0], atol=1e-5)
            assert float(trajectory.log_probs[k]) == pytest.approx(log_prob, abs=1e-4)
        assert trajectory.media.size == (64, 64)
        assert trajectory.request.seed == request.seed


@pytest.mark.parametrize("keep", [(), (0,), (0, 1, 2), (0, 2), (1, 3)])
def test_only_the_kept_states_are_kept(model, keep):
    """They share memory where one is before and after; a sample owns its states, so that it can be freed alone."""
    sde = (0, 1, 2, 3)
    everything = run(LocalEngine(model), SamplingParams(5, sde_steps=sde, keep_steps=sde))
    some = run(LocalEngine(model), SamplingParams(5, sde_steps=sde, keep_steps=keep))
    size = math.prod(model.latent_shape())
    for whole, part in zip(everything, some, strict=True):
        assert part.steps == keep
        assert whole.media.tobytes() == part.media.tobytes()
        assert len(part.log_probs) == len(keep)
        for k, step in enumerate(keep):
            assert torch.equal(part.latents[k], whole.latents[step])
            assert torch.equal(part.next_latents[k], whole.next_latents[step])
            assert part.log_probs[k] == whole.log_probs[step]
        if len(keep) > 1 and keep[-1] - keep[0] == len(keep) - 1:
            assert part.latents.untyped_storage().nbytes() == 4 * size * (len(keep) + 1)
            assert part.latents[1].data_ptr() == part.next_latents[0].data_ptr()
    storages = {t.latents.untyped_storage().data_ptr() for t in some}
    assert len(storages) == (3 if keep else 1)


def test_steps_that_are_kept_must_be_stochastic():
    with pytest.raises(ValueError, match=r"keep_steps \[2\] are no stochastic steps: sde_steps are \[0, 1\]"):
        SamplingParams(4, sde_steps=(0, 1), keep_steps=(1, 2))


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (8, [5])])
def test_samples_come_in_order_as_soon_as_a_batch_is_done(model, batch_size, sizes):
    done = []
    engine = LocalEngine(model, batch_size=batch_size, on_step=lambda: done.append(1))
    batches = engine.generate(requests(5), SamplingParams(2))
    seen = []
    for number, batch in enumerate(batches, start=1):
        assert len(done) == 2 * number  # the network calls of later batches have not been made yet
        seen.append([t.request.seed for t in batch])
    assert [len(batch) for batch in seen] == sizes
    assert [seed for batch in seen for seed in batch] == [100, 101, 102, 103, 104]
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        LocalEngine(model, batch_size=0)


def test_no_requests_are_no_samples(model):
    assert list(LocalEngine(model).generate([], SamplingParams(2))) == []


@pytest.mark.parametrize(("guidance", "per_step"), [(1.0, 1), (4.0, 2)])
def test_network_evaluations_are_counted_in_samples(model, guidance, per_step):
    engine = LocalEngine(model, batch_size=2)
    run(engine, SamplingParams(3, guidance))
    assert engine.forwards == 3 * 3 * per_step
    run(engine, SamplingParams(3, guidance), count=1)
    assert engine.forwards == 4 * 3 * per_step


def test_an_interrupt_between_steps_leaves_the_engine_usable(model):
    engine = LocalEngine(model)

    def stop():
        raise KeyboardInterrupt

    engine._on_step = stop
    with pytest.raises(KeyboardInterrupt):
        run(engine, SamplingParams(3))
    engine._on_step = lambda: None
    assert len(run(engine, SamplingParams(3))) == 3


def test_the_policy_is_asked_for_at_each_step(model):
    """Accelerate may replace the module when training begins."""
    calls = []

    def policy():
        def velocity(*args):
            calls.append(1)
            return model.velocity(*args)

        return velocity

    run(LocalEngine(model, policy=policy), SamplingParams(3))
    assert len(calls) == 3


def test_nothing_is_recorded_for_gradients(model):
    model.networks.requires_grad_(True)
    try:
        trajectory = run(LocalEngine(model), SamplingParams(3, sde_steps=(0, 1), keep_steps=(0, 1)))[0]
    finally:
        model.networks.requires_grad_(False)
    assert not any(t.requires_grad for t in (trajectory.latents, trajectory.next_latents, trajectory.log_probs))


def test_a_size_of_ones_own(model):
    (trajectory,) = run(
        LocalEngine(model), SamplingParams(2, size=MediaSize(32, 64), sde_steps=(0,), keep_steps=(0,)), 1
    )
    assert trajectory.latents.shape == (1, 4, 8, 16)
    assert trajectory.media.size == (64, 32)


def test_a_shared_start_is_shared_and_nothing_else():
    shape = (4, 3, 3)
    first, second = SampleNoise(1, start_seed=9), SampleNoise(2, start_seed=9)
    assert torch.equal(first.start(shape), second.start(shape))
    assert not torch.equal(first.step(shape), second.step(shape))
    assert torch.equal(SampleNoise(9).start(shape), SampleNoise(1, start_seed=9).start(shape))
    alone = SampleNoise(1)
    assert torch.equal(alone.start(shape), torch.randn(shape, generator=torch.Generator().manual_seed(1)))


def test_a_summed_log_prob_is_the_mean_times_the_number_of_elements(model):
    mean = SamplingParams(3, sde_steps=(0, 1), keep_steps=(0, 1))
    total = SamplingParams(3, sde_steps=(0, 1), keep_steps=(0, 1), log_prob_reduction="sum")
    averaged, summed = (run(LocalEngine(model), params)[0] for params in (mean, total))
    assert torch.equal(averaged.next_latents, summed.next_latents)
    elements = averaged.latents[0].numel()
    assert torch.allclose(summed.log_probs, averaged.log_probs * elements, rtol=1e-6)


@pytest.mark.parametrize("form", ["gaussian", "squared_error"])
def test_the_form_of_the_log_prob(model, form):
    params = SamplingParams(3, sde_steps=(0, 1), keep_steps=(0, 1), log_prob_form=form)
    log_probs = run(LocalEngine(model), params)[0].log_probs
    assert (log_probs < 0).all()
    other = SamplingParams(3, sde_steps=(0, 1), keep_steps=(0, 1))
    assert torch.equal(log_probs, run(LocalEngine(model), other)[0].log_probs) == (form == "gaussian")

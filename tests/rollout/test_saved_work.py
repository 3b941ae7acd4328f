# SPDX-License-Identifier: Apache-2.0
"""
Network calls that rollouts save: the shared prefix of a group, the second-order solver and the thin tail.

What is saved must change nothing else: each sampler is compared with one that is written out here, in float64.
"""

import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from omnitrl.algorithms import gaussian_log_prob
from omnitrl.models import MediaSize
from omnitrl.rollout import LocalEngine, SampleNoise, SampleRequest, SamplingParams
from tests.marks import first_fast
from tests.tiny_models import tiny_model


PROMPTS = ["a cat", "two dogs", "a map"]
NEGATIVE = "ice and snow"


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def groups(sizes, same_start=True):
    """Requests of groups of these sizes, each with a prompt and a start noise of its own."""
    return [
        SampleRequest(
            {"prompt": PROMPTS[g % 3], "negative_prompt": NEGATIVE},
            group_id=g,
            member=m,
            seed=1000 * g + m,
            start_seed=77 + g if same_start else None,
        )
        for g, size in enumerate(sizes)
        for m in range(size)
    ]


def run(model, requests, params, batch_size=8, policy=None):
    """Samples, how many rows the engine says that it evaluated, and how many reached the network."""
    rows = []
    hook = model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    engine = LocalEngine(model, policy=policy and (lambda: policy), batch_size=batch_size)
    try:
        samples = [t for batch in engine.generate(requests, params) for t in batch]
    finally:
        hook.remove()
    return samples, engine.forwards, sum(rows)


def ode(velocity, latents, sigmas, steps, solver):
    """Deterministic steps in float64; `dpmpp_2m` as its paper writes it, in log-SNR and predicted data."""
    before = None  # log-SNR and predicted data of the step before
    for step in steps:
        t, then = float(sigmas[step]), float(sigmas[step + 1])
        moving = velocity(latents, step).double()
        data = latents - t * moving
        if solver == "euler" or then == 0 or t == 1:
            latents = latents + (then - t) * moving
        else:
            log_snr, log_snr_then = math.log((1 - t) / t), math.log((1 - then) / then)
            h, towards = log_snr_then - log_snr, data
            if before is not None and before[0] > -math.inf:
                towards = data + (data - before[1]) * h / (2 * (log_snr - before[0]))
            latents = then / t * latents - (1 - then) * math.expm1(-h) * towards
        before = (-math.inf if t == 1 else math.log((1 - t) / t), data)
    return latents


# The shared prefix


@pytest.mark.parametrize("guidance", first_fast([4.0, 1.0]))
@pytest.mark.parametrize("batch_size", first_fast([3, 1, 5, 16], 2))  # 3 and 5 cut groups of 4, 4 and 2
def test_members_branch_off_one_state_and_the_rest_is_as_without_sharing(model, batch_size, guidance):
    requests = groups([4, 4, 2])
    options = {"num_inference_steps": 6, "guidance_scale": guidance, "sde_steps": (2, 3), "keep_steps": (2, 3)}
    shared, forwards, rows = run(model, requests, SamplingParams(shared_prefix=True, **options), batch_size)
    alone, all_forwards, all_rows = run(model, requests, SamplingParams(**options), batch_size)

    per_call = 2 if guidance > 1 else 1
    assert forwards == rows == per_call * (3 * 2 + 10 * 4)  # 2 steps a group, then 4 a sample
    assert all_forwards == all_rows == per_call * 10 * 6
    starts = {}
    for one, other in zip(shared, alone, strict=True):
        state = starts.setdefault(one.request.group_id, one.latents[0])
        assert torch.equal(one.latents[0], state)  # bit for bit, whatever batch the member was in
        assert one.steps == (2, 3)
        torch.testing.assert_close(one.latents, other.latents, rtol=0, atol=2e-5)
        torch.testing.assert_close(one.next_latents, other.next_latents, rtol=0, atol=2e-5)
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=1e-5)
        gap = [abs(a - b) for a, b in zip(one.media.tobytes(), other.media.tobytes(), strict=True)]
        assert max(gap) <= 1
    assert len({float(state.sum()) for state in starts.values()}) == 3
    members = [t.next_latents[0] for t in shared if t.request.group_id == 0]
    assert min(float((a - b).abs().max()) for i, a in enumerate(members) for b in members[:i]) > 0.1


def test_the_branching_state_is_the_ode_of_the_groups_own_prompt(model):
    """Two groups may have one start noise; only what has the same prompt too is shared."""
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    requests = [SampleRequest(rows[g], g, m, seed=10 * g + m, start_seed=5) for g in range(3) for m in range(2)]
    params = SamplingParams(5, sde_steps=(3,), keep_steps=(3,), shared_prefix=True)
    samples, forwards, _ = run(model, requests, params, batch_size=4)
    assert forwards == 3 * 3 + 6 * 2
    table = model.sigmas(5)
    noise = SampleNoise(0, 5).start(model.latent_shape())[None]
    for g in range(3):
        conditions = model.encode([rows[g]])

        def velocity(latents, step, conditions=conditions):
            with torch.no_grad():
                return model.velocity(latents.float(), table.timesteps[step].expand(1), conditions)

        expected = ode(velocity, noise.double(), table.sigmas, range(3), "euler")
        for sample in samples[2 * g : 2 * g + 2]:
            torch.testing.assert_close(sample.latents[:1].double(), expected, rtol=0, atol=1e-5)
    assert (samples[0].latents - samples[2].latents).abs().max() > 1e-3


@pytest.mark.parametrize(("height", "width"), [(24, 40), (8, 64), (None, 16)])
def test_odd_sizes(model, height, width):
    params = {"num_inference_steps": 4, "size": MediaSize(height, width), "sde_steps": (1,), "keep_steps": (1,)}
    shared, _, rows = run(model, groups([2, 3]), SamplingParams(shared_prefix=True, **params), batch_size=2)
    alone, _, _ = run(model, groups([2, 3]), SamplingParams(**params), batch_size=2)
    assert rows == 2 * 1 + 5 * 3
    for one, other in zip(shared, alone, strict=True):
        assert one.media.size == (width, height or 64)
        torch.testing.assert_close(one.next_latents, other.next_latents, rtol=0, atol=2e-5)


def test_before_a_window_at_the_start_there_is_nothing_to_share(model):
    options = {"num_inference_steps": 4, "sde_steps": (0, 1), "keep_steps": (0, 1)}
    shared, forwards, _ = run(model, groups([3, 3]), SamplingParams(shared_prefix=True, **options), batch_size=4)
    alone, _, _ = run(model, groups([3, 3]), SamplingParams(**options), batch_size=4)
    assert forwards == 6 * 4
    assert all(torch.equal(a.next_latents, b.next_latents) for a, b in zip(shared, alone, strict=True))
    assert all(a.media.tobytes() == b.media.tobytes() for a, b in zip(shared, alone, strict=True))


def test_members_with_starts_of_their_own_have_nothing_to_share(model):
    params = SamplingParams(4, sde_steps=(2,), shared_prefix=True)
    with pytest.raises(ValueError, match=r"shared_prefix=True needs requests with a start_seed"):
        run(model, groups([2], same_start=False), params)


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_t21_one_start_noise_gives_one_sample_with_the_ode_and_several_with_the_sde(model, shared_prefix):
    def ends(**options):
        params = SamplingParams(4, keep_clean=True, shared_prefix=shared_prefix, **options)
        return [t.clean_latents for t in run(model, groups([3]), params, batch_size=1)[0]]

    deterministic = ends()
    assert all(torch.equal(end, deterministic[0]) for end in deterministic)
    stochastic = ends(sde_steps=(1,))
    assert min(float((stochastic[i] - stochastic[i - 1]).abs().max()) for i in range(3)) > 0.1


# The solver of the deterministic steps and the thin tail


def curved(latents, timesteps, conditions, guidance_scale):
    """A velocity that every solver follows differently, the same formula in float32 and float64."""
    level = timesteps.view(-1, 1, 1, 1) / 1000
    return torch.sin(2 * latents) - latents * level.cos() + level.square()


@pytest.mark.parametrize("ratio", first_fast([0.4, 1.0, 0.2, 0.01], 2))
@pytest.mark.parametrize("window", [(0, 1), (2, 3), (5,), (8,)])
@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
def test_deterministic_stretches_are_the_solver_written_out(model, solver, window, ratio):
    params = SamplingParams(
        10,
        ode_solver=solver,
        sde_steps=window,
        keep_steps=window,
        keep_clean=True,
        tail_ratio=ratio,
        shared_prefix=True,
    )
    samples, forwards, _ = run(model, groups([2, 2]), params, batch_size=3, policy=curved)
    after = 9 - window[-1]
    tail = after if ratio == 1 else max(1, math.floor(ratio * after))
    assert forwards == 2 * window[0] + 4 * (len(window) + tail)

    full = model.sigmas(10)
    for sample in samples:
        table, size = sample.table, window[-1] + 1
        assert table.num_steps == size + tail
        assert table.sigmas[-1] == 0  # the media come from a tail that ends at exactly 0
        assert torch.equal(table.sigmas[: size + 1], full.sigmas[: size + 1])
        assert set(table.sigmas.tolist()) <= set(full.sigmas.tolist())

        def velocity(latents, step, table=table):
            return curved(latents, table.timesteps[step].double().expand(len(latents)), None, 1.0)

        noise = SampleNoise(0, sample.request.start_seed).start(model.latent_shape())[None].double()
        before = ode(velocity, noise, table.sigmas, range(window[0]), solver)
        torch.testing.assert_close(sample.latents[:1].double(), before, rtol=0, atol=1e-5)
        end = ode(velocity, sample.next_latents[-1:].double(), table.sigmas, range(size, table.num_steps), solver)
        torch.testing.assert_close(sample.clean_latents[None].double(), end, rtol=0, atol=1e-5)
        (image,) = model.decode(sample.clean_latents[None])
        assert max(abs(a - b) for a, b in zip(image.tobytes(), sample.media.tobytes(), strict=True)) <= 1


def test_the_second_order_is_another_sampler(model):
    """Otherwise the comparison above would show nothing."""
    ends = {
        solver: run(model, groups([1]), SamplingParams(10, ode_solver=solver, keep_clean=True), policy=curved)[0][0]
        for solver in ("euler", "dpmpp_2m")
    }
    assert (ends["euler"].clean_latents - ends["dpmpp_2m"].clean_latents).abs().max() > 0.01


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_with_a_network_the_engine_is_the_stock_multistep_scheduler(model, guidance):
    params = SamplingParams(8, guidance, ode_solver="dpmpp_2m", keep_clean=True)
    requests = groups([2, 1], same_start=False)
    samples, forwards, rows = run(model, requests, params, batch_size=2)
    assert forwards == rows == 3 * 8 * (2 if guidance > 1 else 1)

    table = model.sigmas(8)
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=2)
    scheduler.set_timesteps(8)
    scheduler.sigmas = table.sigmas.clone()  # the grid of the checkpoint, not one of its own
    scheduler.timesteps = torch.arange(8)  # its steps are then found by number
    latents = torch.stack([SampleNoise(request.seed).start(model.latent_shape()) for request in requests])
    conditions = model.encode([request.row for request in requests], guidance=guidance > 1)
    for step in range(8):
        with torch.no_grad():
            velocity = model.velocity(latents, table.timesteps[step].expand(3), conditions, guidance)
        latents = scheduler.step(velocity, step, latents, return_dict=False)[0]
    ours = torch.stack([sample.clean_latents for sample in samples])
    torch.testing.assert_close(ours, latents, rtol=0, atol=1e-4)


def test_all_savings_at_once_leave_the_stochastic_steps_as_they_are(model):
    """Noise, mean, std and log-prob of the window do not know what was saved around it."""
    options = {"num_inference_steps": 8, "guidance_scale": 4.0, "sde_steps": (2, 4), "keep_steps": (2, 4)}
    requests = groups([3, 2])
    saved, forwards, rows = run(
        model,
        requests,
        SamplingParams(ode_solver="dpmpp_2m", shared_prefix=True, tail_ratio=0.4, keep_means=True, **options),
        batch_size=2,
    )
    assert forwards == rows == 2 * (2 * 2 + 5 * (3 + 1))  # the ODE step 3 lies between the two; 1 of 3 steps follows
    for sample in saved:
        table = sample.table
        noise = SampleNoise(sample.request.seed)  # the start comes from another seed
        for k, step in enumerate(sample.steps):
            t, h = float(table.sigmas[step]), float(table.sigmas[step] - table.sigmas[step + 1])
            std = 0.7 * math.sqrt(t / (1 - t) * h)
            drawn = noise.step(tuple(sample.latents.shape[1:]))
            torch.testing.assert_close(sample.next_latents[k], sample.means[k] + std * drawn, rtol=0, atol=1e-5)
            expected = gaussian_log_prob(sample.next_latents[k : k + 1], sample.means[k : k + 1], torch.tensor(std))
            torch.testing.assert_close(sample.log_probs[k : k + 1], expected, rtol=0, atol=1e-5)
            closed = sample.latents[k] * (1 - 0.49 * h / (2 * (1 - t)))  # and less (1 + a²/2) h v
            velocity = (closed - sample.means[k]) / ((1 + 0.245) * h)
            with torch.no_grad():
                theirs = model.velocity(
                    sample.latents[k : k + 1],
                    table.timesteps[step].expand(1),
                    model.encode([sample.request.row], guidance=True),
                    4.0,
                )
            torch.testing.assert_close(velocity[None], theirs, rtol=0, atol=2e-3)

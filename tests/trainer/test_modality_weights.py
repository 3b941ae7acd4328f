# SPDX-License-Identifier: Apache-2.0
"""Weights of video and audio, in rollouts, in the replay, and in what the trainer makes of both."""

import math

import pytest
import torch

from omnitrl.algorithms import gaussian_log_prob, token_weights, transition_table, weighted_modalities
from omnitrl.errors import InputError
from omnitrl.rollout import LocalEngine, SampleRequest, SamplingParams
from omnitrl.trainer import get_trainer
from tests.marks import first_fast
from tests.tiny import CHECKPOINTS
from tests.trainer.helpers import (
    WITH_REPLAY,
    all_rows,
    config,
    family_run,
    fresh_rollout,
    logged,
    same,
    trainable,
    trainer,
)


TINY = CHECKPOINTS["ltx2"]
STEPS, NOISE = 4, 0.7
WEIGHED = [name for name in WITH_REPLAY if get_trainer(name).weighs_modalities]


@pytest.fixture(scope="module")
def model():
    return TINY.model()


@pytest.fixture(scope="module")
def parts(model):
    found = model.modalities(TINY.size)
    assert list(found) == ["video", "audio"]
    return found["video"], found["audio"]


def run_with(tmp_path, weights, algorithm="flow_grpo", **options):
    return family_run(tmp_path, algorithm, "LTX2Pipeline", modality_weights=weights, **options)


# In the log-prob


def log_density(sample, mean, std):
    """By the book, in float64: the mean over the elements of each row."""
    z = (sample.double() - mean.double()) / std
    return (-0.5 * z.square() - math.log(std) - 0.5 * math.log(2 * math.pi)).mean(dim=1)


@pytest.mark.parametrize(("video", "audio"), [(1.0, 1.0), (1.0, 0.5), (3.0, 0.25), (1.0, 0.0), (0.0, 2.0)])
def test_the_log_ratio_is_the_weighted_sum_of_the_modalities(video, audio):
    parts = {"video": slice(0, 12), "audio": slice(12, 20)}
    weights = {"video": video, "audio": audio}
    generator = torch.Generator().manual_seed(0)
    sample, old, new = torch.randn(3, 5, 20, generator=generator).unbind(0)
    ratio = torch.zeros(5, dtype=torch.float64)
    for name, part in parts.items():
        of_part = [log_density(sample[:, part], mean[:, part], 0.4) for mean in (new, old)]
        ratio += weights[name] * (of_part[0] - of_part[1])
    counted = weighted_modalities(parts, weights)
    ours = [gaussian_log_prob(sample, mean, 0.4, modalities=counted) for mean in (new, old)]
    torch.testing.assert_close((ours[0] - ours[1]).double(), ratio, rtol=1e-5, atol=1e-6)


def test_values_that_can_be_seen_by_eye():
    """Squared errors 1 and 1 in the video and 4 in the audio, with std 1 and no constants."""
    sample, mean = torch.tensor([[1.0, -1.0, 2.0]]), torch.zeros(1, 3)
    parts = {"video": slice(0, 2), "audio": slice(2, 3)}

    def squared_error(weights, reduction="mean"):
        counted = weighted_modalities(parts, weights)
        return gaussian_log_prob(sample, mean, 1.0, reduction, "squared_error", counted).item()

    assert squared_error(None) == -2.0  # (1 + 1 + 4) / 3
    assert squared_error({"video": 1, "audio": 1}) == -5.0
    assert squared_error({"video": 1, "audio": 0.5}) == -3.0
    assert squared_error({"audio": 0.5, "video": 0}) == -2.0
    assert squared_error({"video": 1, "audio": 1}, "sum") == -6.0
    assert squared_error({"video": 0.5, "audio": 0}, "sum") == -1.0


def test_without_weights_each_element_counts_alike():
    parts = {"video": slice(0, 12), "audio": slice(12, 20)}
    sample, mean = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0)).unbind(0)
    assert weighted_modalities(parts, None) == []
    one_mean = gaussian_log_prob(sample, mean, 0.4)
    by_size = weighted_modalities(parts, token_weights({"video": 12, "audio": 8}))
    torch.testing.assert_close(one_mean, gaussian_log_prob(sample, mean, 0.4, modalities=by_size))


@pytest.mark.parametrize(
    "weights",
    [
        {"video": 1.0, "sound": 1.0},
        {"video": 1.0, "audio": math.nan},
        *first_fast(
            [
                {"video": 1.0},
                {"video": 1.0, "audio": 1.0, "text": 1.0},
                {"video": 0.0, "audio": 0.0},
                {"video": 1.0, "audio": -1.0},
                {"video": 1.0, "audio": math.inf},
                {"video": 1.0, "audio": "much"},
                {"video": 1.0, "audio": None},
            ]
        ),
    ],
)
def test_wrong_weights_are_named(tmp_path, weights):
    with pytest.raises(InputError, match=r"modality_weights=\{'video': .*'audio'") as error:
        run_with(tmp_path, weights)
    assert str(weights) in str(error.value)


def test_a_model_of_one_modality_has_no_weights(tmp_path):
    with pytest.raises(InputError, match="this model has one modality, so leave it out"):
        trainer(tmp_path, modality_weights={"video": 1.0, "audio": 1.0})


def test_weights_in_a_file_or_on_the_command_line_are_json(tmp_path):
    assert config(tmp_path, modality_weights='{"video": 1, "audio": 0.5}').weights_of_modalities == {
        "video": 1,
        "audio": 0.5,
    }
    assert config(tmp_path).weights_of_modalities is None
    with pytest.raises(InputError, match="modality_weights='video' is no JSON object"):
        config(tmp_path, modality_weights="video")


# In rollouts


def recorded(model, params, seeds=(11, 12), batch_size=2, start_seed=None):
    """Trajectories, and what the network was asked and said at each step."""
    calls = []

    def policy(latents, timesteps, conditions, guidance_scale):
        velocity = model.velocity(latents, timesteps, conditions, guidance_scale)
        calls.append((latents.clone(), velocity.clone()))
        return velocity

    engine = LocalEngine(model, policy=lambda: policy, batch_size=batch_size)
    requests = [SampleRequest({"prompt": "a cat"}, 0, i, seed, start_seed) for i, seed in enumerate(seeds)]
    return [t for batch in engine.generate(requests, params) for t in batch], calls


def sampling(weights, **options):
    steps = options.pop("sde_steps", (0, 1, 2))
    given = {"size": TINY.size, "noise_level": NOISE, "sde_steps": steps, "keep_steps": steps, "decode": False}
    return SamplingParams(options.pop("num_inference_steps", STEPS), **{**given, **options}, modality_weights=weights)


def still_and_moving(parts, weights):
    video, audio = parts
    return (audio, video) if weights["audio"] == 0 else (video, audio)


@pytest.mark.parametrize("sde_type", first_fast(["flow_sde", "dance_sde", "cps"]))
@pytest.mark.parametrize("weights", [{"video": 1.0, "audio": 0.0}, {"video": 0.0, "audio": 1.0}])
def test_a_modality_of_weight_0_takes_ode_steps_to_the_bit(model, parts, sde_type, weights):
    still, moving = still_and_moving(parts, weights)
    trajectories, calls = recorded(model, sampling(weights, sde_type=sde_type))
    sigmas = model.sigmas(STEPS, TINY.size).sigmas
    for step, (latents, velocity) in enumerate(calls[:3]):
        euler = latents + velocity * (sigmas[step + 1] - sigmas[step])
        following = torch.stack([t.next_latents[step] for t in trajectories])
        assert torch.equal(following[:, still], euler[:, still])
        assert (following[:, moving] - euler[:, moving]).abs().mean() > 0.05
        assert torch.equal(calls[step + 1][0], following)  # what is recorded is what goes on


def test_with_weights_above_0_both_modalities_have_the_noise_of_a_rollout_without_weights(model):
    plain, _ = recorded(model, sampling(None))
    weighted, _ = recorded(model, sampling({"video": 2.0, "audio": 0.1}))
    for a, b in zip(plain, weighted, strict=True):
        assert torch.equal(a.next_latents, b.next_latents)
        assert not torch.allclose(a.log_probs, b.log_probs)


@pytest.mark.parametrize("weights", [{"video": 1.0, "audio": 0.5}, {"video": 1.0, "audio": 0.0}, None])
def test_log_probs_of_a_rollout_are_those_of_the_weighted_modalities(model, parts, weights):
    trajectories, calls = recorded(model, sampling(weights))
    transitions = transition_table(model.sigmas(STEPS, TINY.size).sigmas, "flow_sde", NOISE, (0, 1, 2))
    for step, (latents, velocity) in enumerate(calls[:3]):
        mean = latents * transitions.latents_coef[step] + velocity * transitions.velocity_coef[step]
        following = torch.stack([t.next_latents[step] for t in trajectories])
        std = float(transitions.std[step])
        if weights is None:
            expected = log_density(following, mean, std)
        else:
            expected = sum(
                weight * log_density(following[:, part], mean[:, part], std)
                for part, weight in zip(parts, weights.values(), strict=True)
            )
        ours = torch.stack([t.log_probs[step] for t in trajectories]).double()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_the_samples_do_not_depend_on_the_batch(model):
    weights = {"video": 1.0, "audio": 0.0}
    together, _ = recorded(model, sampling(weights), seeds=(11, 12, 13), batch_size=3)
    alone, _ = recorded(model, sampling(weights), seeds=(13,), batch_size=1)
    torch.testing.assert_close(together[2].next_latents, alone[0].next_latents, rtol=1e-5, atol=1e-5)


def test_a_still_modality_follows_the_shortened_table(model, parts):
    """With a tail that is thinned, and a prefix that is shared."""
    weights = {"video": 1.0, "audio": 0.0}
    params = sampling(weights, num_inference_steps=8, sde_steps=(2, 3), tail_ratio=0.5, shared_prefix=True)
    trajectories, calls = recorded(model, params, start_seed=5)
    sigmas, audio = trajectories[0].table.sigmas, parts[1]
    assert len(sigmas) - 1 == 6  # steps 4 to 7 are thinned to two
    for column, step in enumerate((2, 3)):
        latents, velocity = calls[step]
        following = torch.stack([t.next_latents[column] for t in trajectories])
        euler = latents + velocity * (sigmas[step + 1] - sigmas[step])
        assert torch.equal(following[:, audio], euler[:, audio])
    first, second = (t.latents[0] for t in trajectories)
    assert torch.equal(first, second)


def test_an_engine_names_wrong_weights(model):
    with pytest.raises(ValueError, match=r"must name each modality once: this model has \['audio', 'video'\]"):
        recorded(model, sampling({"video": 1.0}))


# In training


@pytest.mark.parametrize("weights", first_fast([{"video": 1.0, "audio": 0.5}, {"video": 1.0, "audio": 0.0}, None]))
def test_the_ratio_is_1_before_an_update_and_the_weighted_sum_after_it(tmp_path, parts, weights):
    run = run_with(tmp_path, weights)
    buffer = fresh_rollout(run)
    batch = all_rows(buffer)
    with torch.no_grad():
        before = run.replay(run.model, batch, buffer)
        assert (before.log_probs - batch.old_log_probs).abs().max() <= 1e-6
        for p in run.flow_model.networks.parameters():
            if p.requires_grad:
                p.mul_(1.05)
        after = run.replay(run.model, batch, buffer)
    std = before.std.flatten()
    squares = [(batch.next_latents - replayed.mean).double().square() for replayed in (before, after)]
    gain = (squares[0] - squares[1]) / (2 * std.double().square()[:, None])
    of_modality = [gain[:, part].mean(dim=1) for part in parts]
    expected = gain.mean(dim=1)
    if weights:
        expected = sum(w * of for w, of in zip(weights.values(), of_modality, strict=True))
    assert all(of.abs().max() > 1e-3 for of in of_modality)
    torch.testing.assert_close((after.log_probs - batch.old_log_probs).double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("weights", first_fast([{"video": 1.0, "audio": 0.5}, {"video": 1.0, "audio": 0.0}, None]))
def test_the_gradient_at_the_velocity_by_hand(tmp_path, parts, weights):
    """d/dv of `-A r` where `r` is 1, which is `-A w_m (x' - mean) c_v / (s² D_m)`."""
    run = run_with(tmp_path, weights)
    buffer = fresh_rollout(run)
    batch = all_rows(buffer)
    replayed = run.replay(run.model, batch, buffer)
    replayed.velocity.retain_grad()
    run.policy_loss(replayed, batch, buffer).sum().backward()
    coefficient = buffer.transitions.velocity_coef[batch.steps][:, None]
    slope = (batch.next_latents - replayed.mean.detach()) * coefficient / replayed.std.square()
    expected = torch.zeros_like(slope)
    for part, weight in zip(parts, weights.values() if weights else (1.0, 1.0), strict=True):
        expected[:, part] = slope[:, part] * weight / (part.stop - part.start if weights else slope.shape[1])
    expected *= -batch.advantages[:, None]
    assert batch.advantages.abs().min() > 0
    gradient = replayed.velocity.grad
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)
    if weights and weights["audio"] == 0:
        assert not gradient[:, parts[1]].any()


def test_a_modality_of_weight_0_is_trained_only_through_what_the_other_takes_of_it(tmp_path):
    run = run_with(tmp_path, {"video": 1.0, "audio": 0.0}, beta=0.1)
    run._buffer = buffer = fresh_rollout(run)
    for p in run.flow_model.networks.parameters():  # away from the reference, where the KL has no gradient
        if p.requires_grad:
            p.data.mul_(1.05)
    run.compute_row_losses(run.model, all_rows(buffer), buffer).sum().backward()
    named = run.flow_model.networks.named_parameters()
    moved = {name for name, p in named if p.requires_grad and p.grad is not None and p.grad.any()}

    def trained(block, layer):
        return any(f"transformer_blocks.{block}.{layer}." in name for name in moved)

    assert trained(0, "attn1")
    assert trained(1, "attn1")
    assert trained(1, "audio_to_video_attn")
    assert trained(0, "audio_ff")  # the second block's video attends to what it made
    assert not trained(1, "audio_ff")  # leads to the sound alone
    assert not trained(1, "video_to_audio_attn")
    both = run_with(tmp_path, None)
    both._buffer = buffer = fresh_rollout(both)
    both.compute_row_losses(both.model, all_rows(buffer), buffer).sum().backward()
    grads = {name: p.grad for name, p in both.flow_model.networks.named_parameters() if p.requires_grad}
    assert any(g.any() for name, g in grads.items() if "transformer_blocks.1.audio_ff." in name)


@pytest.mark.parametrize("form", first_fast(["flow_grpo", "exact", "velocity"]))
def test_the_divergence_is_weighted_too(tmp_path, parts, form):
    run, buffers = {}, {}
    for name, weights in (("video", {"video": 1.0, "audio": 0.0}), ("both", {"video": 0.5, "audio": 3.0})):
        run[name] = run_with(tmp_path, weights)
        buffers[name] = fresh_rollout(run[name])
    buffer = buffers["both"]
    batch = all_rows(buffer)
    with torch.no_grad():
        replayed = run["both"].replay(run["both"].model, batch, buffer)
        other = replayed.velocity + 0.1 * torch.randn(
            replayed.velocity.shape, generator=torch.Generator().manual_seed(0)
        )
        of_video = run["video"].divergence(form, replayed, other, batch, buffer)
        of_both = run["both"].divergence(form, replayed, other, batch, buffer)
        other[:, parts[1]] = replayed.velocity[:, parts[1]]  # now they differ in the video alone
        of_video_alone = run["both"].divergence(form, replayed, other, batch, buffer)
    difference = (replayed.velocity - other).double()[:, parts[0]].square().mean(dim=1)
    std, coefficient = replayed.std.flatten().double(), buffer.transitions.velocity_coef[batch.steps].double()
    sigmas = buffer.table.sigmas
    dt = (sigmas[batch.steps] - sigmas[batch.steps + 1]).double()
    scale = {"velocity": 1.0, "exact": coefficient**2 / (2 * std**2), "flow_grpo": coefficient**2 * dt / (2 * std**2)}
    torch.testing.assert_close(of_video.double(), difference * scale[form], rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(of_video_alone, 0.5 * of_video, rtol=1e-5, atol=1e-8)
    assert (of_both > 1.5 * of_video).all()


def test_old_log_probs_of_another_guidance_are_weighted_too(tmp_path):
    run = run_with(tmp_path, {"video": 1.0, "audio": 0.5}, guidance_scale=4.0, guidance_scale_train=1.0)
    buffer = fresh_rollout(run)
    batch = all_rows(buffer)
    with torch.no_grad():
        replayed = run.replay(run.model, batch, buffer)
    assert (replayed.log_probs - batch.old_log_probs).abs().max() <= 1e-6


@pytest.mark.parametrize("algorithm", first_fast(WEIGHED))
def test_algorithms_of_log_probs_train_with_weights(tmp_path, algorithm):
    runs = {}
    for name, weights in (("audio", '{"video": 0, "audio": 1}'), ("video", {"video": 1, "audio": 0.0})):
        runs[name] = run_with(tmp_path / name, weights, algorithm, max_steps=2)
        start = trainable(runs[name])
        runs[name].train()
        assert all(math.isfinite(loss) for loss in logged(runs[name], "loss"))
        assert max(logged(runs[name], "rollout/logp_abs_diff_max")) <= 1e-5
        assert not same(start, trainable(runs[name]))
    assert not same(trainable(runs["audio"]), trainable(runs["video"]))


@pytest.mark.parametrize("algorithm", ["grpo_guard", "flow_dppo"])
def test_algorithms_of_means_refuse_weights(tmp_path, algorithm):
    with pytest.raises(InputError, match=r"has no modality_weights, got \{'video': 1.0, 'audio': 0.0\}: leave"):
        run_with(tmp_path, {"video": 1.0, "audio": 0.0}, algorithm)
    run_with(tmp_path, None, algorithm)


def test_which_algorithms_take_weights():
    assert set(WITH_REPLAY) - set(WEIGHED) == {"grpo_guard", "flow_dppo"}


def test_the_spread_of_ratios_is_that_of_the_sum_over_what_is_weighed(tmp_path, parts):
    video, audio = (part.stop - part.start for part in parts)
    log_ratio = torch.tensor([-0.001, 0.001])
    cases = [(None, video + audio), ({"video": 1, "audio": 0}, video), ({"video": 0, "audio": 1}, audio)]
    for weights, elements in cases:
        run = run_with(tmp_path, weights)
        run._buffer = fresh_rollout(run)
        run.state.global_step, run._micro_step = 1, run.args.micro_steps_per_rollout - 1
        run.metrics.drain()
        run.log_ratio(log_ratio, run._buffer)
        assert run.metrics.drain()["ratio/sum_log_std"] == pytest.approx(float(log_ratio.std()) * elements, rel=1e-5)


@pytest.mark.slow
def test_weights_are_resumed(tmp_path):
    """A run in two parts is the run in one."""
    weights = {"video": 1.0, "audio": 0.0}
    whole = run_with(tmp_path / "whole", weights, max_steps=2)
    whole.train()
    first = run_with(tmp_path / "parts", weights, max_steps=1, save_strategy="steps", save_steps=1)
    first.train()
    second = run_with(tmp_path / "parts", weights, max_steps=2)
    second.train(resume_from_checkpoint=True)
    assert same(trainable(whole), trainable(second))

# SPDX-License-Identifier: Apache-2.0
"""What trainers share that add noise to clean samples: levels, noise, splits, the second set of weights, resuming."""

import pytest
import torch

from omnitrl.errors import InputError, RunError
from omnitrl.rollout import LocalEngine, SamplingParams
from omnitrl.trainer import MatchingTrainer, get_trainer
from omnitrl.trainer.averages import PolicyAverage
from tests.marks import first_fast
from tests.trainer.helpers import WITH_ROLLOUTS, config, fresh_rollout, logged, same, trainable, trainer
from tests.trainer.test_laws import StopAt


WITH_NOISE = [name for name in WITH_ROLLOUTS if issubclass(get_trainer(name), MatchingTrainer)]
WITH_AVERAGE = ["diffusion_nft", "awm"]


def rows_of(run, buffer, samples):
    """Every noise level of some samples of a rollout as one batch."""
    run.args.timesteps_per_forward = 100
    return run.cut(buffer, samples)[0]


def gradients(run):
    """What the first update of a run is made of, by name of the weight."""
    kept = {}

    def keep(*_):
        named = run.flow_model.networks.named_parameters()
        kept.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    run.create_optimizer()
    run.optimizer.register_step_pre_hook(keep)
    run.train()
    return kept


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors.values()])


# Levels and noise


def test_rows_are_the_samples_with_noise_at_levels_of_the_grid(tmp_path):
    run = trainer(tmp_path, "awm", num_inference_steps=6, timesteps_per_sample=3, timestep_range=[0.2, 0.9])
    buffer = fresh_rollout(run)
    batch = rows_of(run, buffer, [5, 2])
    assert batch.samples.tolist() == [5, 2] * 3
    assert batch.draws.tolist() == [0, 0, 1, 1, 2, 2]
    for row in range(6):
        clean = buffer.trajectories[int(batch.samples[row])].clean_latents
        level = float(batch.sigmas[row])
        assert torch.equal(batch.clean_latents[row], clean)
        assert torch.allclose(batch.latents[row], (1 - level) * clean + level * batch.noise[row], atol=1e-6)
    grid, steps = buffer.table.sigmas, []
    for sample in (5, 2):
        levels = batch.sigmas[batch.samples == sample]
        steps.append([grid.tolist().index(level) for level in levels.tolist()])
        assert torch.equal(batch.timesteps[batch.samples == sample], buffer.table.timesteps[steps[-1]])
    for drawn in steps:
        assert len(set(drawn)) == 3
        assert set(drawn) <= {1, 2, 3, 4}  # floor(0.2 * 6) to floor(0.9 * 6) - 1
    assert batch.noise.flatten(1).std(dim=1).min() > 0.8
    assert torch.cdist(batch.noise.flatten(1), batch.noise.flatten(1)).fill_diagonal_(9).min() > 1  # none twice


def test_levels_off_the_grid_tell_the_network_1000_sigma(tmp_path):
    run = trainer(tmp_path, "awm", sigma_sampling="uniform", timesteps_per_sample=5, timestep_range=[0.5, 1.0])
    batch = rows_of(run, fresh_rollout(run), [0, 1, 2, 3])
    assert batch.sigmas.max() <= 0.5
    assert len(set(batch.sigmas.tolist())) == 20
    assert torch.allclose(batch.timesteps, 1000 * batch.sigmas)


def test_noise_depends_on_the_sample_and_not_on_its_neighbours(tmp_path):
    run = trainer(tmp_path, "awm")
    buffer, again = fresh_rollout(run), fresh_rollout(run, rollout=1)
    together, alone = rows_of(run, buffer, [1, 3, 6]), rows_of(run, buffer, [3])
    for name in ("noise", "sigmas", "timesteps", "advantages"):
        assert torch.equal(getattr(together, name)[1::3], getattr(alone, name))
    other = rows_of(run, again, [3])
    assert (other.noise - alone.noise).abs().max() > 1


def test_what_is_noised_is_what_the_solver_ended_with(tmp_path):
    """Clean latents are those whose picture was scored, of the solver that was asked for."""
    run = trainer(tmp_path, "diffusion_nft", num_inference_steps=6, model=None)
    assert run.args.ode_solver == "dpmpp_2m"
    buffer = fresh_rollout(run)
    requests = [trajectory.request for trajectory in buffer.trajectories[:2]]
    finals = {}
    for solver in ("dpmpp_2m", "euler"):
        params = SamplingParams(6, 1.0, ode_solver=solver, keep_clean=True, decode=False)
        engine = LocalEngine(run.flow_model, batch_size=4)
        finals[solver] = torch.stack([t.clean_latents for batch in engine.generate(requests, params) for t in batch])
    kept = torch.stack([t.clean_latents for t in buffer.trajectories[:2]])
    assert torch.allclose(kept, finals["dpmpp_2m"], atol=1e-5)
    assert (kept - finals["euler"]).abs().max() > 1e-3


# Splits


@pytest.mark.parametrize(("batch", "accumulation", "timesteps"), first_fast([(4, 2, 2), (8, 1, 1), (1, 8, 3)]))
@pytest.mark.parametrize("algorithm", WITH_AVERAGE)
def test_any_split_gives_the_gradient_of_the_one_big_batch(tmp_path, algorithm, batch, accumulation, timesteps):
    common = {"max_steps": 1, "max_grad_norm": 0.0, "timesteps_per_sample": 3, "beta": 0.1, "rollout_batch_size": 4}
    whole = trainer(tmp_path, algorithm, per_device_train_batch_size=8, timesteps_per_forward=3, **common)
    split = trainer(
        tmp_path,
        algorithm,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        timesteps_per_forward=timesteps,
        **common,
    )
    one, many = gradients(whole), gradients(split)
    assert one.keys() == many.keys()
    assert flat(one).norm() > 0
    assert (flat(one) - flat(many)).norm() <= 1e-5 * flat(one).norm()


# The second set of weights


def test_an_average_blends_and_changes_places_bit_for_bit():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    average = PolicyAverage([parameter])
    parameter.data.copy_(torch.tensor([3.0, 4.1]))
    average.blend([parameter], 0.75)
    version = parameter._version
    with average.applied([parameter]):
        assert torch.allclose(parameter.data, torch.tensor([1.5, 2.525]))
    assert parameter.data.tolist() == torch.tensor([3.0, 4.1]).tolist()
    assert parameter._version == version  # autograd, which may hold it for a backward, sees no change
    with pytest.raises(ZeroDivisionError), average.applied([parameter]):
        raise ZeroDivisionError
    assert parameter.data.tolist() == torch.tensor([3.0, 4.1]).tolist()
    average.blend([parameter], 0.0)
    with average.applied([parameter]):
        assert parameter.data.tolist() == torch.tensor([3.0, 4.1]).tolist()


@pytest.mark.parametrize(("stop", "peft"), first_fast([(1, True), (2, False), (3, True)]))
@pytest.mark.parametrize("algorithm", first_fast(WITH_AVERAGE))
def test_resumed_equals_uninterrupted(tmp_path, algorithm, stop, peft):
    """Steps 1 and 3 lie in the midst of a rollout of two updates; the evaluation average is another one."""
    common = {"max_steps": 4, "ema_decay": 0.9, "beta": 0.1, "timesteps_per_sample": 2, "timesteps_per_forward": 2}
    common |= {"save_strategy": "steps", "save_steps": stop}
    if not peft:
        common["peft_config"] = None
    straight = trainer(tmp_path / "a", algorithm, **common)
    straight.train()
    trainer(tmp_path / "b", algorithm, callbacks=[StopAt(stop)], **common).train()
    resumed = trainer(tmp_path / "b", algorithm, **common)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert same(trainable(straight), trainable(resumed))
    assert all(map(torch.equal, straight.average._weights, resumed.average._weights))
    assert not all(map(torch.equal, straight.average._weights, straight.trainable_parameters()))
    assert all(map(torch.equal, straight.ema.shadow_params, resumed.ema.shadow_params))
    for name in ("loss", "reward", "forwards_per_sample", "kl"):
        assert logged(straight, name)[-1:] == logged(resumed, name)[-1:]


@pytest.mark.parametrize(
    ("saved", "options", "message"),
    [
        ("awm", {"timesteps_per_sample": 2}, "with num_noise_levels=6, which decides how the rest of its rollout"),
        ("awm", {"sigma_sampling": "uniform"}, "with sigma_sampling=grid"),
        ("awm", {"timestep_range": [0.0, 0.5]}, r"with timestep_range=\[0.08, 0.9\]"),
        ("awm", {"ode_solver": "dpmpp_2m"}, "with ode_solver=euler"),
    ],
)
def test_a_checkpoint_of_other_noise_is_refused(tmp_path, saved, options, message):
    common = {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, saved, max_steps=1, **common).train()
    run = trainer(tmp_path / "new", saved, **options)
    with pytest.raises(RunError, match=message):
        run.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))


def test_a_checkpoint_without_the_second_set_of_weights_is_refused(tmp_path):
    trainer(tmp_path, "awm", max_steps=2, save_strategy="steps", save_steps=2, ema_beta=0.0).train()
    run = trainer(tmp_path, "awm")
    with pytest.raises(RunError, match="has no second set of weights, which AWM keeps"):
        run.train(resume_from_checkpoint=True)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma_sampling": "beta"}, "sigma_sampling='beta' is unknown: use one of 'uniform'"),
        ({"timestep_range": [0.5]}, r"timestep_range=\[0.5\] must be two rising numbers in \[0, 1\]: use 0.0 1.0"),
        ({"timestep_range": [0.9, 0.2]}, "must be two rising numbers"),
        (
            {"sigma_sampling": "grid", "timestep_range": [0.0, 0.2]},
            "holds none of the num_inference_steps=4 ",
        ),
        ({"timesteps_per_sample": 0}, "timesteps_per_sample=0 must be at least 1"),
        ({"timesteps_per_sample": None, "sigma_sampling": "uniform"}, "use timesteps_per_sample=4, or sigma_sampl"),
    ],
)
@pytest.mark.parametrize("algorithm", WITH_NOISE)
def test_bad_options(tmp_path, algorithm, options, message):
    with pytest.raises(InputError, match=message):
        config(tmp_path, algorithm, **options)


@pytest.mark.parametrize(("steps", "bounds", "trained"), [(10, [0.0, 0.99], 9), (14, [0.08, 0.9], 11), (4, [0, 1], 4)])
def test_none_trains_every_step_in_the_range_once(tmp_path, steps, bounds, trained):
    options = {"num_inference_steps": steps, "timestep_range": bounds, "timesteps_per_sample": None}
    assert config(tmp_path, "diffusion_nft", **options).num_noise_levels == trained

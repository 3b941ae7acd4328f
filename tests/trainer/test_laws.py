# SPDX-License-Identifier: Apache-2.0
"""The laws of the numbers (design, section 4) on whole trainers and engines; the pure parts are tests of the maths."""

import itertools
import re

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from transformers import TrainerCallback

from omnitrl.algorithms import SDE_TYPES, reward_advantages
from omnitrl.errors import RunError
from omnitrl.models import FAMILIES
from omnitrl.rollout import LocalEngine, SampleRequest, SamplingParams, stable_seed
from omnitrl.trainer import TRAINERS
from tests.marks import first_fast
from tests.tiny_models import by_pipeline, tiny_model
from tests.trainer.helpers import (
    PROMPTS,
    WITH_REPLAY,
    all_rows,
    config,
    fresh_rollout,
    logged,
    same,
    trainable,
    trainer,
)


STOCHASTIC = [name for name in SDE_TYPES if name != "ode"]


def requests(seeds=(1, 2), prompts=PROMPTS):
    return [SampleRequest({"prompt": prompts[i]}, i, 0, seed) for i, seed in enumerate(seeds)]


def sample(engine, params, **kwargs):
    return [t for batch in engine.generate(requests(**kwargs), params) for t in batch]


# Law 1


@pytest.mark.compat
@pytest.mark.parametrize("guidance", first_fast([4.0, 1.0]))
@pytest.mark.parametrize(
    ("algorithm", "sde_type"),
    [
        pytest.param(algorithm, sde_type, marks=[] if fast else pytest.mark.slow)
        for algorithm in WITH_REPLAY
        for sde_type in STOCHASTIC
        for fast in [algorithm == WITH_REPLAY[0] or sde_type == STOCHASTIC[0]]
    ],
)
def test_law_01_replay_by_a_new_object_has_ratio_one(tmp_path, algorithm, sde_type, guidance):
    options = {"sde_type": sde_type, "guidance_scale": guidance, "noise_level": 0.5}
    first = trainer(tmp_path, algorithm, **options)
    buffer = fresh_rollout(first)
    torch.save(buffer.state_dict(), tmp_path / "rollout.pt")

    again = trainer(tmp_path, algorithm, **options)
    again.get_train_dataloader()
    restored = again._restore_rollout(torch.load(tmp_path / "rollout.pt", weights_only=True))
    per_row, rows = 2 if guidance > 1 else 1, 0
    for position in range(2):  # micro-batches as in training: shuffled members of both groups
        for batch in restored.replay(restored.samples_of(position, 4), timesteps_per_forward=1):
            with torch.no_grad():
                log_probs = again.replay(again.model, batch, restored).log_probs
            assert batch.old_log_probs.std() > 1e-4  # not one number everywhere, and finite
            assert (torch.exp(log_probs - batch.old_log_probs) - 1).abs().max() <= 1e-6
            rows += len(batch)
    assert rows == 8 * 3
    assert again._forwards == per_row * rows
    assert first._forwards == per_row * 8 * 4  # as many calls per step in the rollout, of one step more


def test_law_01_batches_of_another_size_differ_in_the_last_bits_only(tmp_path):
    run = trainer(tmp_path, guidance_scale=4.0)
    buffer = fresh_rollout(run)
    batch = all_rows(buffer)  # 24 rows in a call, 4 in the rollout
    with torch.no_grad():
        log_probs = run.replay(run.model, batch, buffer).log_probs
    assert (log_probs - batch.old_log_probs).abs().max() <= 1e-5


@pytest.mark.parametrize("algorithm", first_fast(WITH_REPLAY, 2))
def test_law_01_the_first_update_of_a_run_logs_no_mismatch(tmp_path, algorithm):
    run = trainer(tmp_path, algorithm, max_steps=4)
    run.train()
    assert logged(run, "rollout/logp_abs_diff_max") == pytest.approx([0, 0], abs=1e-6)  # one per rollout of 2 updates
    assert all(value > 0 for value in logged(run, "ratio/sum_log_std"))


def test_law_01_guidance_that_is_trained_is_that_of_the_old_log_probs(tmp_path):
    run = trainer(tmp_path, guidance_scale=4.0, guidance_scale_train=1.0, max_steps=2)
    buffer = fresh_rollout(run)
    batch = all_rows(buffer)
    with torch.no_grad():
        log_probs = run.replay(run.model, batch, buffer).log_probs
    assert (log_probs - batch.old_log_probs).abs().max() <= 1e-5  # batches of other sizes
    unguided = trainer(tmp_path, guidance_scale=4.0, max_steps=2)
    guided = all_rows(fresh_rollout(unguided))
    assert torch.equal(guided.latents, batch.latents)  # samples are made with guidance in both
    assert (guided.old_log_probs - batch.old_log_probs).abs().max() > 1e-4


# Law 2


@pytest.mark.compat
@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("steps", [2, 10])
def test_law_02_without_noise_the_sampler_is_the_stock_pipeline(guidance, steps):
    model = tiny_model()
    seeds = (11, 12, 13)
    stock = {
        "prompt": PROMPTS[:3],
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "max_sequence_length": model.max_sequence_length,
        "generator": [torch.Generator().manual_seed(seed) for seed in seeds],
    }
    images = model.pipeline(**stock).images
    engine = LocalEngine(model, batch_size=2)  # not the batch of the stock run
    ours = sample(engine, SamplingParams(steps, guidance), seeds=seeds)
    for image, trajectory in zip(images, ours, strict=True):
        difference = torch.tensor(list(image.tobytes())) - torch.tensor(list(trajectory.media.tobytes()))
        assert difference.abs().max() <= 1  # of 255: an image is the same but for rounding at .5


@pytest.mark.parametrize(("guidance", "tolerance"), first_fast([(4.5, 1e-5), (1.0, 1e-6)]))
@pytest.mark.parametrize("sde_type", [*STOCHASTIC, "ode"])
def test_law_02_latents_at_noise_zero_are_the_stock_latents(sde_type, guidance, tolerance):
    model, seeds = tiny_model(), (11, 12)
    stock = model.pipeline(
        PROMPTS[:2],
        num_inference_steps=10,
        guidance_scale=guidance,
        max_sequence_length=model.max_sequence_length,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="latent",
    ).images
    final = []
    model.decode = lambda latents, size: final.append(latents) or [None] * len(latents)
    params = SamplingParams(10, guidance, sde_type=sde_type, noise_level=0.0, sde_steps=tuple(range(9)))
    sample(LocalEngine(model, batch_size=2), params, seeds=seeds)
    assert (final[0] - stock).abs().max() <= tolerance


def test_law_02_a_stock_lora_run_equals_ours(tmp_path):
    """What is trained here draws the same picture when stock diffusers has loaded it."""
    run = trainer(tmp_path, max_steps=2)
    run.train()
    run.save_model()
    params = SamplingParams(4)
    ours = sample(run.engine, params, seeds=(5,))[0].media
    tiny_model().pipeline.save_pretrained(tmp_path / "base")
    stock = StableDiffusion3Pipeline.from_pretrained(tmp_path / "base")
    stock.set_progress_bar_config(disable=True)
    stock.load_lora_weights(tmp_path / "out")
    theirs = stock(
        PROMPTS[0],
        num_inference_steps=4,
        guidance_scale=1.0,
        max_sequence_length=12,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    assert max(abs(a - b) for a, b in zip(ours.tobytes(), theirs.tobytes(), strict=True)) <= 1


# Law 3


@pytest.mark.parametrize("steps", [2, 4, 10])
def test_law_03_the_table_is_the_schedulers_own_and_goes_with_the_trajectory(steps):
    """Of the other families, whose schedulers are told more, `tests/models/test_families.py` says the same."""
    model = tiny_model()
    table = model.sigmas(steps)
    scheduler = model.pipeline.scheduler
    scheduler.set_timesteps(steps)
    assert torch.equal(table.sigmas, scheduler.sigmas)
    assert torch.equal(table.timesteps, scheduler.timesteps)
    (first, _) = sample(LocalEngine(model), SamplingParams(steps, sde_steps=(0,), keep_steps=(0,)))
    assert torch.equal(first.table.sigmas, scheduler.sigmas)
    assert len(first.table.sigmas) == steps + 1
    assert first.table.sigmas[-1] == 0


# Law 4


def test_law_04_only_the_network_runs_in_bf16(tmp_path):
    model = tiny_model()
    model.pipeline.to(torch.bfloat16)
    seen = []
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"].dtype), with_kwargs=True
    )
    run = trainer(tmp_path, model=model, max_steps=2)
    run.train()
    assert set(seen) == {torch.bfloat16}
    buffer = fresh_rollout(run, 5)
    trajectory = buffer.trajectories[0]
    tensors = [trajectory.latents, trajectory.next_latents, trajectory.log_probs, buffer.advantages]
    assert {t.dtype for t in [*tensors, *buffer.transitions, *buffer.table]} == {torch.float32}
    assert {p.dtype for p in run.trainable_parameters()} == {torch.float32}
    assert {p.dtype for p in model.networks.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_law_04_full_fine_tuning_trains_float32_weights(tmp_path):
    model = tiny_model()
    model.pipeline.to(torch.bfloat16)
    run = trainer(tmp_path, model=model, peft_config=None)
    assert {p.dtype for p in run.trainable_parameters()} == {torch.float32}


# Law 5


def test_law_05_the_last_step_is_never_stochastic(tmp_path):
    run = trainer(tmp_path)
    buffer = fresh_rollout(run)
    assert buffer.steps == (0, 1, 2)
    assert buffer.transitions.std[-1] == 0
    with pytest.raises(ValueError, match="last step"):
        sample(run.engine, SamplingParams(4, sde_steps=(3,)))


# Law 6


def test_law_06_noise_depends_on_names_and_not_on_ranks_or_batches(tmp_path):
    run = trainer(tmp_path, generation_batch_size=16)
    run.get_train_dataloader()
    whole = run._plan.requests(3)
    halves = []
    for rank in range(2):
        plan = run._plan.__class__(**{**run._plan.__dict__, "rank": rank, "world_size": 2})
        halves += plan.requests(3)
    assert halves == whole
    assert len({request.seed for rollout in range(20) for request in run._plan.requests(rollout)}) == 20 * 16

    params = run.sampling_params(3)
    one_by_one = [t for request in whole for batch in run.engine.generate([request], params) for t in batch]
    together = [t for batch in run.engine.generate(whole, params) for t in batch]
    for alone, batched in zip(one_by_one, together, strict=True):
        assert torch.equal(alone.latents[0], batched.latents[0])  # the start is noise alone
        assert torch.allclose(alone.next_latents, batched.next_latents, atol=2e-5)
    starts = {tuple(t.latents[0].flatten()[:4].tolist()) for t in together}
    assert len(starts) == len(whole)


def test_law_06_members_may_share_their_start_but_not_their_path(tmp_path):
    run = trainer(tmp_path, same_init_noise=True)
    first, second = fresh_rollout(run).trajectories[:2]
    other = fresh_rollout(run).trajectories[4]
    assert torch.equal(first.latents[0], second.latents[0])
    assert not torch.equal(first.latents[0], other.latents[0])
    assert (first.next_latents[-1] - second.next_latents[-1]).abs().max() > 0.1


def test_law_06_seeds_are_stable_over_releases():
    assert stable_seed(42, "sample", 0, 1, 2) == 8606126135596172690
    assert stable_seed(42, "sample", 0, 12) != stable_seed(42, "sample", 0, 1, 2)


# Law 7


def test_law_07_windows_are_shared_and_follow_from_seed_and_rollout(tmp_path):
    options = {"num_inference_steps": 8, "sde_window_strategy": "random", "sde_window_size": 2}
    expected = [config(tmp_path, **options).window(rollout) for rollout in range(6)]
    run = trainer(tmp_path, **options)
    windows = [fresh_rollout(run, rollout).steps for rollout in range(6)]
    assert windows == expected
    assert len(set(windows)) > 1
    for rollout in range(2):
        assert {t.steps for t in fresh_rollout(run, rollout).trajectories} == {windows[rollout]}


# Law 8


def test_law_08_equal_rewards_move_nothing(tmp_path):
    run = trainer(tmp_path, rewards=lambda completions, **_: [0.1] * len(completions), max_steps=2, weight_decay=0.0)
    before = trainable(run)
    run.train()
    assert same(before, trainable(run))
    assert logged(run, "frac_reward_zero_std") == [1.0]


def test_law_08_groups_are_explicit_even_if_prompts_are_equal():
    rewards = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    groups = torch.tensor([0, 0, 1, 1])  # both could be of the prompt 'a cat'
    advantages = reward_advantages(rewards, torch.ones(1), groups, eps=0.0)
    assert advantages.tolist() == [-1, 1, -1, 1]


# Law 9


@pytest.mark.parametrize(
    ("batch", "accumulation", "timesteps"), first_fast([(2, 4, 2), (8, 1, 3), (8, 1, 1), (4, 2, 1), (1, 8, 3)])
)
def test_law_09_any_split_gives_the_gradient_of_the_one_big_batch(tmp_path, batch, accumulation, timesteps):
    def gradients(**options):
        kept = {}
        run = trainer(tmp_path, max_steps=1, max_grad_norm=0.0, beta=1.0, kl_form="exact", **options)

        def keep(*_):
            named = run.flow_model.networks.named_parameters()
            kept.update({name: p.grad.clone() for name, p in named if p.grad is not None})

        run.create_optimizer()
        run.optimizer.register_step_pre_hook(keep)
        run.train()
        return kept

    whole = gradients(per_device_train_batch_size=8, timesteps_per_forward=3)
    split = gradients(
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, timesteps_per_forward=timesteps
    )
    assert whole.keys() == split.keys()
    size = torch.cat([g.flatten() for g in whole.values()]).norm()
    gap = torch.cat([(whole[name] - split[name]).flatten() for name in whole]).norm()
    assert size > 0
    assert gap <= 1e-5 * size, f"{gap / size:.1e}"


# Law 10


@pytest.mark.parametrize(
    ("stop", "options"), first_fast([(3, {}), (2, {}), (1, {"num_iterations": 2}), (2, {"same_init_noise": True})])
)
@pytest.mark.parametrize("peft", [True, False])
def test_law_10_resumed_equals_uninterrupted(tmp_path, stop, options, peft):
    """Steps 1 and 3 lie in the midst of a rollout of two updates."""
    common = {"ema_decay": 0.9, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": stop, **options}
    if not peft:
        common["peft_config"] = None
    straight = trainer(tmp_path / "a", max_steps=5, **common)
    straight.train()
    trainer(tmp_path / "b", max_steps=5, callbacks=[StopAt(stop)], **common).train()
    resumed = trainer(tmp_path / "b", max_steps=5, **common)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    assert same(trainable(straight), trainable(resumed))
    assert all(map(torch.equal, straight.ema.shadow_params, resumed.ema.shadow_params))
    for a, b in zip(_moments(straight), _moments(resumed), strict=True):
        assert torch.equal(a, b)
    assert logged(straight, "reward")[-1:] == logged(resumed, "reward")[-1:]
    assert logged(straight, "loss") == logged(resumed, "loss")


def _moments(run):
    states = run.optimizer.state_dict()["state"]
    return list(itertools.chain.from_iterable([s["exp_avg"], s["exp_avg_sq"], s["step"]] for s in states.values()))


class StopAt(TrainerCallback):
    """Ends a run after a step, as a time limit would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


# Law 11


@pytest.mark.parametrize("value", first_fast(["nan", "inf", "-inf"]))
def test_law_11_a_loss_that_is_not_finite_stops_the_run_with_what_is_needed_to_see_why(tmp_path, value):
    run = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=100)
    good = run.compute_row_losses
    run.compute_row_losses = lambda *a: good(*a).abs() + (float(value) if run.state.global_step == 3 else 0.0)
    with pytest.raises(RuntimeError, match=r"weights of the last step are kept\. Lower learning_rate") as error:
        run.train()
    assert (tmp_path / "out" / "checkpoint-3" / "adapter_model.safetensors").is_file()
    message, buffer = str(error.value), run._buffer
    assert "\n" not in message
    assert f"loss is {value} at optimizer step 3, sampler steps [0, 1, 2], " in message
    samples = sorted(buffer.samples_of(1, 4))  # the second micro-batch of the second rollout
    timesteps = buffer.table.timesteps[:3].tolist()
    for label, values, digits in (
        ("timesteps", timesteps, 1),
        ("rewards", buffer.extras["rewards"][samples].tolist(), 4),
        ("advantages", buffer.advantages[samples].tolist(), 4),
    ):
        shown = re.search(rf"{label} \[([^]]+)\]", message).group(1)
        assert [float(number) for number in shown.split(", ")] == pytest.approx(values, abs=0.6 * 10**-digits)
    assert 0.4 < buffer.extras["rewards"].min() < buffer.extras["rewards"].max() < 0.9  # brightness, as it was scored


@pytest.mark.parametrize("algorithm", first_fast(TRAINERS, 2))
def test_law_11_every_algorithm_stops_at_a_loss_that_is_not_finite(tmp_path, algorithm):
    run = trainer(tmp_path, algorithm, max_steps=4)
    good = run.compute_row_losses
    run.compute_row_losses = lambda *a: good(*a) * (float("nan") if run.state.global_step == 1 else 1.0)
    with pytest.raises(RunError, match=r"loss is nan at optimizer step 1, .*: the weights of the last step are kept"):
        run.train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert all(tensor.isfinite().all() for tensor in trainable(run).values())


def test_law_11_nothing_else_fails_silently(tmp_path):
    with pytest.raises(TypeError, match="noise_levle"):
        config(tmp_path, noise_levle=0.7)
    with pytest.raises(ValueError, match=r"caption.*prompt|prompt.*caption"):
        trainer(tmp_path, data=[{"caption": "a cat"}])
    run = trainer(tmp_path, rewards=lambda completions, **_: [0.0, 1.0], max_steps=1)
    with pytest.raises(RuntimeError, match="returned 2 values for 4 rows"):
        run.train()
    with pytest.raises(ValueError, match=r"(?i)target.modules"):
        trainer(tmp_path, peft_config=LoraConfig(target_modules=["no_such_module"]))


def test_every_family_has_a_tiny_builder():
    assert by_pipeline().keys() == FAMILIES.keys()

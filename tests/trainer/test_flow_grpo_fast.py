# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO-Fast: one ODE prefix for a group, then branches with two stochastic, trained steps."""

import pytest
import torch
from transformers import TrainerCallback

from omnitrl import FlowGRPOConfig
from omnitrl.errors import InputError, RunError
from tests.marks import first_fast
from tests.trainer.helpers import PROMPTS, config, fresh_rollout, logged, same, trainable, trainer


FAST = {
    "num_inference_steps": 8,
    "sde_window_strategy": "random",
    "sde_window_size": 2,
    "sde_window_range": [0, 5],
    "same_init_noise": True,
    "shared_prefix": True,
    "noise_level": 0.8,
    "epsilon": 1e-5,
}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def rollouts_that_branch(args, count=12):
    """Numbers of rollouts whose window has deterministic steps before it."""
    return [rollout for rollout in range(count) if args.window(rollout)[0] > 0]


@pytest.mark.parametrize(("rollout_batch_size", "guidance"), [(3, 1.0), (3, 4.0), (8, 1.0)])
def test_a_group_branches_and_its_replay_has_ratio_one(tmp_path, rollout_batch_size, guidance):
    options = {**FAST, "guidance_scale": guidance, "rollout_batch_size": rollout_batch_size}
    first = trainer(tmp_path, **options)
    rollout = rollouts_that_branch(first.args)[0]
    buffer = fresh_rollout(first, rollout)
    prefix = buffer.steps[0]
    assert prefix > 0
    assert buffer.steps == (prefix, prefix + 1)
    branches = {0: [], 1: []}
    for sample in buffer.trajectories:
        branches[sample.request.group_id].append(sample)
    for members in branches.values():
        assert len(members) == 4
        assert all(torch.equal(sample.latents[0], members[0].latents[0]) for sample in members)
        ends = torch.stack([sample.next_latents[0] for sample in members])
        assert torch.pdist(ends.flatten(1)).min() > 1
    assert not torch.equal(branches[0][0].latents[0], branches[1][0].latents[0])
    per_call = 2 if guidance > 1 else 1
    assert first._forwards == per_call * (2 * prefix + 8 * (8 - prefix))

    torch.save(buffer.state_dict(), tmp_path / "rollout.pt")
    again = trainer(tmp_path, **options)
    again.get_train_dataloader()
    restored = again._restore_rollout(torch.load(tmp_path / "rollout.pt", weights_only=True))
    rows = 0
    for position in range(2):
        for batch in restored.replay(restored.samples_of(position, 4), timesteps_per_forward=1):
            with torch.no_grad():
                log_probs = again.replay(again.model, batch, restored).log_probs
            assert batch.old_log_probs.std() > 1e-4
            # rollouts of other batches than the replay's differ in the last bits
            assert (torch.exp(log_probs - batch.old_log_probs) - 1).abs().max() <= 1e-5
            rows += len(batch)
    assert rows == 8 * 2


def test_a_replay_in_the_batches_of_its_rollout_is_exact(tmp_path):
    run = trainer(tmp_path, **FAST, max_steps=4)
    run.train()
    assert logged(run, "rollout/logp_abs_diff_max") == pytest.approx([0, 0], abs=1e-6)
    assert all(value > 0 for value in logged(run, "ratio/sum_log_std"))


@pytest.mark.parametrize(("tail_ratio", "guidance"), first_fast([(0.5, 1.0), (1.0, 1.0), (0.5, 4.0)]))
def test_the_forwards_that_are_logged_are_those_of_the_window(tmp_path, tail_ratio, guidance):
    """Each rollout has its own window, so the saving differs from rollout to rollout."""
    run = trainer(tmp_path, **FAST, tail_ratio=tail_ratio, guidance_scale=guidance, max_steps=10)
    rows = []
    run.flow_model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    run.train()
    expected = []
    for rollout in range(5):
        start = run.args.window(rollout)[0]
        after = 8 - start - 2
        sampling = (2 * start + 8 * (2 + max(1, int(tail_ratio * after)))) / 8
        expected.append((sampling + 2) * (2 if guidance > 1 else 1))
    assert logged(run, "forwards_per_sample") == pytest.approx(expected)
    assert len(set(expected)) > 1
    assert sum(rows) == pytest.approx(8 * sum(expected))  # what reached the network
    assert run.num_forwards == sum(rows)


def test_all_starts_are_drawn_and_each_draw_is_the_runs(tmp_path):
    """The authors' code draws from the rank's number in each call, so that the window of a rank never moves."""
    args = config(tmp_path, **FAST)
    windows = [args.window(rollout) for rollout in range(400)]
    assert set(windows) == {(start, start + 1) for start in range(4)}
    shares = [windows.count((start, start + 1)) / 400 for start in range(4)]
    assert min(shares) > 0.18
    assert windows == [config(tmp_path, **FAST).window(rollout) for rollout in range(400)]
    assert windows != [config(tmp_path, **FAST, seed=1).window(rollout) for rollout in range(400)]


def test_sharing_changes_the_gradient_by_rounding_only(tmp_path):
    def gradients(**options):
        kept = {}
        run = trainer(tmp_path, **{**FAST, **options}, max_steps=1, max_grad_norm=0.0, per_device_train_batch_size=8)

        def keep(*_):
            named = run.flow_model.networks.named_parameters()
            kept.update({name: p.grad.clone() for name, p in named if p.grad is not None})

        run.create_optimizer()
        run.optimizer.register_step_pre_hook(keep)
        run.train()
        return torch.cat([gradient.flatten() for gradient in kept.values()])

    seed = next(seed for seed in range(20) if config(tmp_path, **FAST, seed=seed).window(0)[0] == 3)
    shared, alone = gradients(seed=seed), gradients(seed=seed, shared_prefix=False)
    assert alone.norm() > 0
    assert (shared - alone).norm() <= 1e-3 * alone.norm()


@pytest.mark.parametrize("stop", first_fast([1, 2, 3]))
def test_resumed_equals_uninterrupted(tmp_path, stop):
    """Steps 1 and 3 lie in the midst of a rollout of two updates, whose tail is short and whose members branched."""
    common = {**FAST, "tail_ratio": 0.4, "ode_solver": "dpmpp_2m", "save_strategy": "steps", "save_steps": stop}
    common["sde_window_range"] = [1, 6]  # each window has steps before it
    straight = trainer(tmp_path / "a", max_steps=5, **common)
    straight.train()
    trainer(tmp_path / "b", max_steps=5, callbacks=[StopAt(stop)], **common).train()
    resumed = trainer(tmp_path / "b", max_steps=5, **common)
    resumed.train(resume_from_checkpoint=True)
    assert same(trainable(straight), trainable(resumed))
    assert logged(straight, "loss") == logged(resumed, "loss")
    assert straight.num_forwards == resumed.num_forwards


@pytest.mark.parametrize("change", [{"shared_prefix": False}, {"tail_ratio": 0.5}, {"ode_solver": "dpmpp_2m"}])
def test_a_rollout_that_was_begun_is_not_gone_on_with_in_another_way(tmp_path, change):
    common = {**FAST, "save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, max_steps=4, callbacks=[StopAt(1)], **common).train()
    other = trainer(tmp_path, max_steps=4, **{**common, **change})
    with pytest.raises(RunError, match=f"written with {next(iter(change))}="):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"same_init_noise": False},
            r"shared_prefix=True needs members that start from one noise: set same_init_noise",
        ),
        ({"sde_window_size": 6}, r"sde_window_size=6 does not fit steps 0\.\.4.*use 1 to 5"),
        ({"tail_ratio": 0.0}, r"tail_ratio=0\.0 must be in \(0, 1\]: use 1\.0"),
        ({"tail_ratio": 1.5}, r"tail_ratio=1\.5 must be in \(0, 1\]"),
        ({"ode_solver": "heun"}, r"ode_solver='heun' is unknown: use one of 'euler', 'dpmpp_2m'"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        FlowGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{**FAST, **options})


def test_prompts_of_different_groups_are_encoded_once_for_a_run(tmp_path):
    run = trainer(tmp_path, **FAST, max_steps=10)
    encoded = []
    encode_row = run.flow_model.encode_row
    run.flow_model.encode_row = lambda row, size: encoded.append([row["prompt"]]) or encode_row(row, size)
    run.train()
    assert sorted(prompt for rows in encoded for prompt in rows) == sorted(PROMPTS)


def test_a_group_that_branches_lies_on_one_device(tmp_path, monkeypatch):
    """Devices that branch off other numbers of groups would make other numbers of collective network calls."""
    monkeypatch.setattr(FlowGRPOConfig, "world_size", 2)
    options = {**FAST, "num_generations": 4, "per_device_train_batch_size": 3}
    message = r"on each of 2 devices.*generation_batch_size=12 makes 3 group\(s\): use generation_batch_size=24\."
    with pytest.raises(InputError, match=message):
        config(tmp_path, **options, generation_batch_size=12)
    assert config(tmp_path, **options, generation_batch_size=24).prompts_per_rollout == 6
    assert config(tmp_path, **{**options, "shared_prefix": False}, generation_batch_size=12).prompts_per_rollout == 3

# SPDX-License-Identifier: Apache-2.0
"""What trainers do for rewards: weights that change, whole groups, latents without decoding, patience."""

import numpy as np
import pytest
import torch

from omnitrl.errors import InputError
from omnitrl.rewards import RewardUnavailable, groupwise, reward_traits
from omnitrl.rewards.weights import WEIGHT_SCHEDULES, scheduled_weights
from tests.tiny_models import tiny_model
from tests.trainer.helpers import brightness, config, fresh_rollout, logged, same, trainable, trainer


def redness(prompts, completions, **kwargs):
    return [float(np.asarray(image)[..., 0].mean() / 255) for image in completions]


# --- schedules of weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("late", 0.25), ("early", 0.75)])
def test_a_schedule_goes_from_the_first_weights_to_the_last(schedule, halfway):
    ways = [scheduled_weights([1.0, 0.0], [0.0, 2.0], schedule, step, 5) for step in (0, 2, 4, 9)]
    assert ways[0] == pytest.approx([1.0, 0.0])
    assert ways[1] == pytest.approx([1 - halfway, 2 * halfway])
    assert ways[2] == ways[3] == pytest.approx([0.0, 2.0])
    shares = [WEIGHT_SCHEDULES[schedule](i / 20) for i in range(21)]
    assert shares == sorted(shares)
    assert scheduled_weights([1.0], [2.0], schedule, 0, 1) == [1.0]


SCHEDULE = {"rewards": [brightness, redness], "reward_weights": [1.0, 0.0], "reward_weights_end": [0.0, 0.5]}


def test_the_weights_of_a_rollout_are_those_of_its_step(tmp_path):
    run = trainer(tmp_path, **SCHEDULE, steps_per_generation=1, generation_batch_size=None, max_steps=3)
    run.train()
    assert logged(run, "rewards/brightness/weight") == pytest.approx([1.0, 0.5, 0.0])
    assert logged(run, "rewards/redness/weight") == pytest.approx([0.0, 0.25, 0.5])
    bright, red = logged(run, "rewards/brightness/mean"), logged(run, "rewards/redness/mean")
    expected = [w * b + v * r for w, b, v, r in zip([1.0, 0.5, 0.0], bright, [0.0, 0.25, 0.5], red, strict=True)]
    assert logged(run, "reward") == pytest.approx(expected, rel=1e-5)


def test_evaluation_weighs_as_the_run_does_in_the_end(tmp_path):
    run = trainer(tmp_path, **SCHEDULE, eval_dataset=["a cat", "two dogs"])
    metrics = run.evaluate()
    assert metrics["eval_reward"] == pytest.approx(0.5 * metrics["eval_rewards/redness/mean"], rel=1e-6)
    assert run.rewards.weights == [1.0, 0.0]


def test_a_weight_that_is_0_for_now_is_not_watched_only(tmp_path):
    def broken(completions):
        raise ValueError("no")

    options = {"reward_max_retries": 0, "reward_weights": [1.0, 0.0]}
    run = trainer(tmp_path, rewards=[brightness, broken], **options, reward_weights_end=[1.0, 1.0])
    with pytest.raises(RuntimeError, match="'broken' failed for 8 of 8 rows"):
        run.train()
    trainer(tmp_path / "watched", rewards=[brightness, broken], **options, max_steps=1).train()


@pytest.mark.parametrize(
    ("algorithm", "options", "steps"),
    [
        ("dance_grpo", {"per_reward_loss": True}, [1]),
        pytest.param("dance_grpo", {"per_reward_loss": True}, [2, 3], marks=pytest.mark.slow),
        pytest.param("flow_grpo", {}, [1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_resumed_goes_on_with_the_same_weights(tmp_path, algorithm, options, steps):
    """In the midst of a rollout too, which is used for two updates."""
    options = {**SCHEDULE, **options, "save_strategy": "steps", "save_steps": 1, "reward_weights_schedule": "cosine"}
    whole = trainer(tmp_path, algorithm, max_steps=4, **options)
    whole.train()
    for step in steps:
        again = trainer(tmp_path / str(step), algorithm, max_steps=4, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
        assert same(trainable(whole), trainable(again)), step
        assert again.rewards.weights == whole.rewards.weights
    assert logged(whole, "rewards/redness/weight") == pytest.approx([0.0, 0.375])  # at steps 0 and 2 of 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_weights_end": [1.0, 2.0]}, "got 2 reward weights for 1 reward functions"),
        ({"reward_weights_end": [0.0]}, "at least one of them not 0"),
        (
            {"reward_weights_schedule": "sine"},
            "'sine' is unknown: use one of 'linear', 'cosine'.* Did you mean 'cosine'",
        ),
        ({"reward_max_wait": -1}, "reward_max_wait=-1 must be at least 0"),
        ({"reward_max_pending": 0}, "reward_max_pending=0 must be at least 1"),
        ({"reward_cache_size": -1}, "reward_cache_size=-1 must be at least 0"),
        ({"reward_num_processes": 0}, "reward_num_processes=0 must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        trainer(tmp_path, **options)


def test_srpo_has_no_schedule_of_weights(tmp_path):
    with pytest.raises(InputError, match=r"reward_weights_end=.* is for rewards of rollouts"):
        config(tmp_path, "srpo", reward_weights_end=[1.0])


# --- groups ---------------------------------------------------------------------------------------------------------


def places(calls):
    """A reward that ranks the members of a group by their brightness."""

    @groupwise
    def place(prompts, completions):
        calls.append(tuple(prompts))
        values = brightness(prompts, completions)
        return [float(sorted(values).index(value)) for value in values]

    return place


def test_a_groupwise_reward_sees_whole_groups_in_training_and_evaluation(tmp_path):
    calls = []
    run = trainer(tmp_path, rewards=places(calls), rollout_batch_size=3, max_steps=2, num_generations_eval=3)
    buffer = fresh_rollout(run)
    assert [len(prompts) for prompts in calls] == [4, 4]
    assert all(len(set(prompts)) == 1 for prompts in calls)
    assert sorted(buffer.extras["rewards"][:4].tolist()) == [0, 1, 2, 3]
    calls.clear()
    metrics = run.evaluate(["a cat", "two dogs"])
    assert calls == [("a cat",) * 3, ("two dogs",) * 3]
    assert metrics["eval_reward"] == pytest.approx(1.0)


def test_evaluation_scores_the_same_samples_with_groups_and_without(tmp_path):
    alone = trainer(tmp_path, num_generations_eval=2).evaluate(["a cat", "two dogs", "a map"])
    run = trainer(tmp_path / "groups", rewards=[brightness, places([])], num_generations_eval=2)
    together = run.evaluate(["a cat", "two dogs", "a map"])
    assert together["eval_rewards/brightness/mean"] == alone["eval_rewards/brightness/mean"]


@pytest.mark.parametrize(
    ("world", "options", "works"),
    [
        (2, {"generation_batch_size": 4}, 8),
        (2, {"generation_batch_size": 12}, 16),
        (2, {"generation_batch_size": 20, "gradient_accumulation_steps": 5, "per_device_train_batch_size": 2}, 40),
        (4, {"generation_batch_size": 32, "per_device_train_batch_size": 2}, None),
        (4, {"generation_batch_size": 24, "per_device_train_batch_size": 1}, 32),
    ],
)
def test_groups_must_be_whole_on_a_device_for_rewards_that_compare(tmp_path, monkeypatch, world, options, works):
    given = {"per_device_train_batch_size": 2, **options}
    made = type(config(tmp_path))
    monkeypatch.setattr(made, "world_size", property(lambda self: world))
    args = config(tmp_path, **given)
    args.check_whole_groups_on_devices([])
    if works is None:
        args.check_whole_groups_on_devices(["place"])
        return
    with pytest.raises(InputError, match=rf"'place' compares .* use generation_batch_size={works}\.") as error:
        args.check_whole_groups_on_devices(["place"])
    assert f"generation_batch_size={options['generation_batch_size']} is" in str(error.value)
    config(tmp_path, **{**given, "generation_batch_size": works}).check_whole_groups_on_devices(["place"])


# --- latents --------------------------------------------------------------------------------------------------------


@reward_traits(media="latents")
def energy(completions, prompts):
    assert all(latents.dtype == torch.float32 for latents in completions)
    return [float(latents.square().mean()) for latents in completions]


@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft"])
def test_nothing_is_decoded_in_training_for_rewards_of_latents(tmp_path, algorithm):
    model, decoded = tiny_model(), []
    decode = model.decode
    model.decode = lambda latents, size: decoded.append(len(latents)) or decode(latents, size)
    run = trainer(tmp_path, algorithm, model=model, rewards=energy)
    buffer = fresh_rollout(run)
    assert decoded == []
    expected = [float(t.clean_latents.square().mean()) for t in buffer.trajectories]
    assert buffer.extras["rewards"].tolist() == pytest.approx(expected)
    assert len(set(expected)) == 8
    metrics = run.evaluate(["a cat", "two dogs"])
    assert sum(decoded) == 2  # for the pictures
    assert metrics["eval_reward"] > 0


def test_media_are_decoded_where_another_reward_looks_at_them(tmp_path):
    run = trainer(tmp_path, rewards=[energy, brightness], reward_weights=[1.0, 0.0], max_steps=1)
    run.train()
    assert logged(run, "rewards/brightness/mean")[0] > 0
    assert logged(run, "reward") == pytest.approx(logged(run, "rewards/energy/mean"))


# --- patience -------------------------------------------------------------------------------------------------------


def test_a_run_whose_reward_was_away_is_the_run_that_was_not_disturbed(tmp_path):
    calls = []

    def away(prompts, completions):
        calls.append(1)
        if 2 <= len(calls) <= 3:
            raise RewardUnavailable("starting")
        return brightness(prompts, completions)

    options = {"max_steps": 2, "reward_max_wait": 60, "reward_max_pending": 4}
    disturbed = trainer(tmp_path, rewards=away, **options)
    disturbed.train()
    undisturbed = trainer(tmp_path / "calm", max_steps=2)
    undisturbed.train()
    assert same(trainable(disturbed), trainable(undisturbed))
    assert logged(disturbed, "rewards/away/failed") == [0]


def test_values_that_are_known_are_counted(tmp_path):
    @reward_traits(deterministic=True)
    def light(completions, prompts):
        return brightness(prompts, completions)

    run = trainer(tmp_path, rewards=light, reward_cache_size=100, max_steps=2, eval_dataset=["a cat"])
    first = run.evaluate()
    again = run.evaluate()
    assert first["eval_reward"] == again["eval_reward"]
    run.train()
    assert logged(run, "rewards/light/cached") == [0]

# SPDX-License-Identifier: Apache-2.0
"""Alarms of over-optimisation, on a model that learns to paint white within some updates, and on scripted rewards."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from PIL import Image

from omnitrl import OverOptimizationCallback
from omnitrl.errors import InputError
from omnitrl.media import Audio, Video
from omnitrl.rewards.statistics import entropy
from omnitrl.trainer.alarms import Figure, Limit, Rule, figure
from omnitrl.trainer.sample_statistics import SampleStatistics, group_distances, small_pictures
from tests.toy_model import Field, ToyModel, model_of
from tests.trainer.helpers import brightness, logged, same, trainable, trainer


RAMP = np.linspace(-32, 32, 64).reshape(8, 8, 1)


class Painter(ToyModel):
    """Points are painted: the first number is how light, the second how red. Light pictures end as plain white."""

    def decode(self, latents, size=None):
        return [painted(*point) for point in latents.flatten(1).tolist()]


def painted(light, red):
    pixels = 128 + RAMP + 40 * light + np.array([20 * red, 0, 0])
    return Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))


def painter():
    torch.manual_seed(0)
    return model_of(Field(), Painter)


def run(tmp_path, watch, **options):
    """A run of a painter in which each step is a rollout and is logged."""
    given = {
        "model": painter(),
        "peft_config": LoraConfig(r=4, lora_alpha=16),
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
    }
    given |= {"max_steps": 12, "learning_rate": 0.02, "lr_scheduler_type": "constant", "callbacks": [watch]}
    return trainer(tmp_path, **{**given, **options})


def scripted(*values):
    """A reward whose mean over a rollout is that of the weights that made it; samples differ, so that they train."""

    def reward(completions, trainer_state, **_):
        return [values[trainer_state.global_step] + 0.005 * (-1) ** i for i in range(len(completions))]

    return reward


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "omnitrl.trainer.over_optimization"]


def checkpoints(trained):
    return sorted(path.name for path in Path(trained.args.output_dir).glob("checkpoint-*"))


ONE_AFTER_ONE = {"save_strategy": "steps", "save_steps": 1}


# A reward that is bought


def test_a_reward_that_whitens_pictures_sounds_the_alarm_at_its_step(tmp_path, caplog):
    """The expected step is that of the samples' own entropies, which the reward has kept."""
    kept = []

    def lightness(prompts, completions, **_):
        kept.extend(entropy(image) for image in completions)
        return brightness(prompts, completions)

    watch = OverOptimizationCallback(statistics={"entropy": 0.3}, baseline=2, patience=2, reward_fall=None)
    trained = run(tmp_path, watch, rewards=lightness)
    trained.train()
    entropies = np.array(kept).reshape(12, 8).mean(axis=1)
    assert logged(trained, "watch/entropy") == pytest.approx(entropies.tolist(), rel=1e-6)
    low = entropies < 0.7 * entropies[:2].mean()
    first = next(i for i in range(1, 12) if low[i - 1] and low[i])
    assert 2 < first < 11
    assert logged(trained, "reward")[-1] > 0.9 > 0.6 > logged(trained, "reward")[0]  # it is learnt
    ((step, sentence),) = watch.alarms
    assert step == first + 1
    assert logged(trained, "watch/alarms") == low.astype(float).tolist()
    assert sentence.startswith(
        f"watch/entropy is {entropies[first]:.4g} at step {step}, for the second time in a row "
    )
    assert f"% below the start, {entropies[:2].mean():.4g}, while the reward has gone from 0." in sentence
    (warning,) = warnings_of(caplog)
    assert warning.startswith(sentence[0].upper() + sentence[1:])
    assert "Look at the samples" in warning
    assert trained.state.global_step == 12


@pytest.mark.slow
def test_a_reward_that_makes_pictures_alike_is_seen_in_their_diversity(tmp_path):
    """A medium grey keeps the detail of each picture, and the members of a group become the same one."""

    def greyness(prompts, completions, **_):
        return [1 - abs(value - 0.5) for value in brightness(prompts, completions)]

    watch = OverOptimizationCallback(statistics={"entropy": 0.3, "diversity": 0.5}, baseline=2, patience=2)
    trained = run(tmp_path, watch, rewards=greyness, learning_rate=0.01)
    trained.train()
    ((_, sentence),) = watch.alarms
    assert sentence.startswith("watch/diversity is 0.")
    assert min(logged(trained, "watch/entropy")) > 5.9


def test_a_healthy_run_sounds_none(tmp_path, caplog):
    """With all that is watched by default."""
    watch = OverOptimizationCallback(baseline=2)
    trained = run(tmp_path, watch, learning_rate=1e-3, max_steps=8)
    trained.train()
    assert watch.alarms == warnings_of(caplog) == []
    for name in ("entropy", "saturation", "jpeg_kilobytes", "diversity", "alarms"):
        assert len(logged(trained, f"watch/{name}")) == 8


def test_stop_ends_the_run_at_the_alarm_and_brings_the_best_back(tmp_path, caplog):
    watch = OverOptimizationCallback("stop", statistics={"entropy": 0.3}, baseline=2, patience=2)
    trained = run(tmp_path, watch, **ONE_AFTER_ONE, save_total_limit=2)
    weights = {}
    save = trained._save_checkpoint

    def keep_and_save(*args):
        weights[trained.state.global_step] = trainable(trained)
        save(*args)

    trained._save_checkpoint = keep_and_save
    trained.train()
    ((step, _),) = watch.alarms
    best = trained.state.best_global_step
    assert trained.state.global_step == step < 12
    assert 0 < best < step - 2  # the last two rollouts before the alarm were out of bounds
    assert checkpoints(trained) == sorted([f"checkpoint-{best}", f"checkpoint-{step}"])
    assert same(trainable(trained), weights[best])
    assert not same(weights[best], weights[step])
    (warning,) = warnings_of(caplog)
    assert f"Training stops here. The best checkpoint before is {trained.state.best_model_checkpoint}" in warning
    rewards = logged(trained, "reward")
    assert trained.state.best_metric == pytest.approx(rewards[best], abs=1e-6)  # of the rollout after it
    page = (Path(trained.args.output_dir) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(page[-1])["step"] == step


def test_a_resumed_run_sounds_the_same_alarms(tmp_path):
    """Stopped in the midst of the baseline, and after the first rollout that is out of bounds."""
    options = {"statistics": {"entropy": 0.3, "diversity": 0.3}, "baseline": 3, "patience": 2}
    faster = {"learning_rate": 0.05, "max_steps": 7, **ONE_AFTER_ONE}
    whole = OverOptimizationCallback(**options)
    run(tmp_path, whole, **faster).train()
    assert whole.alarms
    for step in (2, whole.alarms[0][0] - 1):
        again = OverOptimizationCallback(**options)
        resumed = run(tmp_path, again, **{**faster, "save_strategy": "no"})
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{step}"))
        assert again.alarms == whole.alarms
        assert again.state_dict(7) == whole.state_dict(7)


def test_what_a_broken_off_rollout_has_shown_is_forgotten():
    watch = OverOptimizationCallback()
    watch.load_state_dict({"history": {"the reward": [(1, 0.5, 0.0), (2, 0.2, 0.0)]}, "alarms": [(2, "fallen")]})
    assert watch.state_dict(1) == {"history": {"the reward": [(1, 0.5, 0.0)]}, "alarms": []}


# The best checkpoint, by rewards that are scripted


def test_the_best_checkpoint_is_kept(tmp_path, caplog):
    """Rewards 1, 2, 3, 1: 3 was made by the weights after two updates, and 1 is a loss by more than half."""
    watch = OverOptimizationCallback("keep_best")
    trained = run(tmp_path, watch, rewards=scripted(1, 2, 3, 1), max_steps=4, **ONE_AFTER_ONE, save_total_limit=2)
    kept = {}
    evaluate = trained._preview
    trained._preview = lambda: (kept.update(end=trainable(trained)), evaluate())
    trained.train()
    assert watch.alarms == [(4, "the reward is 1 at step 4, 67% below the one before, 3.")]
    assert (trained.state.best_global_step, trained.state.best_metric) == (2, pytest.approx(3))
    assert checkpoints(trained) == ["checkpoint-2", "checkpoint-4"]
    assert same(kept["end"], trainable(trained))  # before the pictures of the end are made
    (warning,) = warnings_of(caplog)
    assert warning.endswith("checkpoint-2, whose weights come back at the end.")
    other = run(tmp_path / "other", OverOptimizationCallback(), rewards=scripted(1, 2, 3, 1), max_steps=2)
    other.train()
    assert same(trainable(trained), trainable(other))
    trained._load_from_checkpoint(str(tmp_path / "out" / "checkpoint-4"))
    assert not same(trainable(trained), trainable(other))


def test_half_of_the_reward_lost_keeps_the_checkpoint_before(tmp_path):
    """And nothing is brought back where less is lost."""
    for last, alarms in ((0.39, 1), (0.41, 0)):
        watch = OverOptimizationCallback("keep_best")
        rewards = scripted(0.5, 0.6, 0.8, last)
        trained = run(tmp_path / str(last), watch, rewards=rewards, max_steps=4, **ONE_AFTER_ONE, save_total_limit=2)
        trained.train()
        assert len(watch.alarms) == alarms
        assert trained.state.best_model_checkpoint == str(tmp_path / str(last) / "out" / "checkpoint-2")
        assert watch.wants_best == bool(alarms)


def test_checkpoints_between_rollouts_are_rated_by_the_next_one(tmp_path):
    watch = OverOptimizationCallback("keep_best")
    options = {"rewards": scripted(1, 0, 3, 0, 2), "num_iterations": 2, "max_steps": 6, **ONE_AFTER_ONE}
    trained = run(tmp_path, watch, **options)
    trained.train()
    assert [step for step, _ in enumerate(logged(trained, "reward"))] == [0, 1, 2]
    assert trained.state.best_global_step == 2


def test_a_held_out_reward_that_falls_is_held_against_the_trained_one(tmp_path, caplog):
    def trained_on(completions, trainer_state, **_):
        return [0.1 * trainer_state.global_step] * len(completions)

    values = [0.2, 0.5, 0.7, 0.72, 0.7, 0.6, 0.59, 0.58]
    watch = OverOptimizationCallback("keep_best", held_out="reward", statistics={}, baseline=2, patience=2)
    held_out = scripted(*values)  # whose name is "reward", which the log has too
    rewards = {"rewards": [trained_on, held_out], "reward_weights": [1.0, 0.0]}
    trained = run(tmp_path, watch, **rewards, max_steps=8, **ONE_AFTER_ONE)
    trained.train()
    # The best two in a row have the mean 0.71, of which 0.639 is 90 %; the second below it is that of step 7.
    ((step, sentence),) = watch.alarms
    assert step == 7
    assert sentence == (
        "reward is 0.59 at step 7, for the second time in a row 17% below its best, 0.71, while the reward has gone "
        "from 0.05 to 0.6."
    )
    assert (trained.state.best_global_step, trained.state.best_metric) == (3, pytest.approx(0.72))


def test_a_metric_of_evaluations_is_watched(tmp_path):
    held_out = iter([0.9, 0.9, 0.5, 0.5, 0.5, 0.5])
    watch = OverOptimizationCallback(
        "stop", held_out={"eval_reward": 0.2}, statistics={}, reward_fall=None, patience=2
    )

    def reward(completions, trainer_state, **_):
        return [next(held_out) if len(completions) == 1 else 1.0] * len(completions)

    evaluated = {"eval_dataset": ["a cat"], "eval_strategy": "steps", "eval_steps": 1}
    trained = run(tmp_path, watch, rewards=reward, max_steps=6, **evaluated, **ONE_AFTER_ONE)
    trained.train()
    assert trained.state.global_step == 4
    assert [step for step, _ in watch.alarms] == [4]
    assert watch.alarms[0][1].startswith(
        "eval_reward is 0.5 at step 4, for the second time in a row 44% below its best"
    )


def test_what_no_reward_sees_of_a_trainer_without_scored_rollouts(tmp_path):
    """SRPO follows a gradient: its samples are decoded to be watched, and its reward is that of the log."""
    torch.manual_seed(0)
    watch = OverOptimizationCallback(statistics={"entropy": 0.3, "diversity": 0.5})
    options = {"callbacks": [watch], "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 8}
    trained = trainer(tmp_path, "srpo", model=painter(), **options)
    trained.train()
    assert len(logged(trained, "watch/entropy")) == len(logged(trained, "watch/diversity")) == 2
    assert [one.mean for one in watch._history["the reward"]] == logged(trained, "reward")


# Samples


def look(media, names=("entropy",), embed=small_pictures):
    statistics = SampleStatistics(names, embed)
    batch = [SimpleNamespace(request=SimpleNamespace(row={"prompt": "a cat"}), media=one) for one in media]
    statistics.submit(batch[:2])
    statistics.submit(batch[2:])
    looks = statistics.collect()
    statistics.close()
    return looks


def test_pictures_and_middle_frames_are_looked_at_and_nothing_else():
    halves = np.zeros((3, 8, 8, 3), dtype=np.uint8)
    halves[1, :4] = 255
    sound = Audio(np.zeros((1, 8), dtype=np.float32), 8)
    looks = look(
        [Image.new("RGB", (8, 8)), Video(halves, 4.0), sound, torch.zeros(2), None, torch.tensor([torch.nan])]
    )
    assert [one.values[0] for one in looks[:2]] == [0.0, 1.0]
    assert np.mean(looks[1].embedding) == 0.5
    assert all(math.isnan(one.values[0]) and one.embedding is None for one in looks[2:])


def test_the_distances_of_a_group_are_those_of_its_pairs():
    vectors = [[0.0, 0.0], [3.0, 4.0], [6.0, 8.0], [1.0, 1.0], None, None]
    distances = group_distances(vectors, torch.tensor([0, 0, 0, 1, 1, 2]))
    assert distances[0] == pytest.approx((5 + 10 + 5) / 3 / math.sqrt(2))
    assert distances[1:].isnan().all()


def test_black_and_white_pictures_are_one_apart():
    media = [Image.new("RGB", (20, 30)), Image.new("RGB", (20, 30), (255, 255, 255))]
    assert group_distances(small_pictures(media), torch.tensor([4, 4])).tolist() == [1.0]


def test_an_embedding_of_ones_own_sees_all_media():
    sounds = [Audio(np.full((1, 8), 0.5 * i, dtype=np.float32), 8) for i in range(3)]
    looks = look(sounds, names=(), embed=lambda media: [torch.as_tensor(one.samples.mean(axis=1)) for one in media])
    assert [one.embedding for one in looks] == [[0.0], [0.5], [1.0]]


@pytest.mark.parametrize(
    ("embed", "message"),
    [
        (lambda media: [1.0] * len(media), "shape ()"),
        (lambda media: [[1.0]], "1 vectors for 2 media"),
        (lambda media: [[math.nan]] * len(media), "not finite"),
        (lambda media: [[0.0] * (1 + i) for i, _ in enumerate(media)], "numbers, where the first had 1"),
        (lambda media: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_broken_embedding_is_missing_and_said_once(embed, message, caplog):
    looks = look([Image.new("RGB", (8, 8))] * 4, embed=embed)
    assert [one.embedding for one in looks] == [None] * 4
    assert [one.values for one in looks] == [[0.0]] * 4
    (warning,) = [record.getMessage() for record in caplog.records]
    assert message in warning


# Rules


def figures(*means, error=0.0):
    return [Figure(i + 1, mean, error) for i, mean in enumerate(means)]


@pytest.mark.parametrize(
    ("limit", "now", "broken"),
    [
        (Limit(0.5), 1.01, False),
        (Limit(0.5), 0.99, True),
        (Limit(0.5), 9.0, False),
        (Limit(0.5, 1.0), 3.99, False),
        (Limit(0.5, 1.0), 4.01, True),
        (Limit(None, 1.0), 0.0, False),
    ],
)
def test_a_limit_is_a_share_of_the_reference(limit, now, broken):
    """The reference is 2, the mean of the first two."""
    history = figures(1.0, 3.0, 7.0, now)
    assert Rule("x", limit, "first", 2).is_broken(history) == broken
    negative = [one._replace(mean=one.mean - 4) for one in history]  # around -2, on which the shares are the same
    assert Rule("x", limit, "first", 2).is_broken(negative) == broken


def test_a_figure_near_zero_does_not_break_a_limit_by_chance():
    assert Rule("x", Limit(0.5), "last").is_broken(figures(0.01, -0.01))
    assert not Rule("x", Limit(0.5), "last").is_broken(figures(0.01, -0.01, error=0.01))


def test_an_alarm_sounds_when_patience_is_over_and_again_after_a_recovery():
    rule = Rule("x", Limit(0.5), "first", 1, patience=2)
    means = [1, 0.4, 1, 0.4, 0.4, 0.4, 0.4, 1, 0.4, 0.4]
    sounded = [i for i in range(1, 11) if rule.broken_for(figures(*means[:i])) == rule.patience]
    assert sounded == [5, 10]


def test_missing_values_are_no_figures():
    assert figure(3, torch.tensor([math.nan, math.nan])) is None
    assert figure(3, torch.tensor([math.nan, 2.0])) == Figure(3, 2.0, 0.0)
    assert figure(3, torch.tensor([1.0, 2.0, 3.0, math.nan])) == Figure(3, 2.0, pytest.approx(1 / math.sqrt(3)))


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "halt"}, "action='halt' is unknown: use 'warn', 'keep_best', 'stop'"),
        ({"statistics": {"entropi": 0.5}}, "Did you mean 'entropy'?"),
        ({"statistics": {"entropy": -0.5}}, "limit of 'entropy' is -0.5, but it is a share above 0"),
        ({"statistics": {"entropy": (0.5, 1.0, 2.0)}}, "or a pair for fall and rise"),
        ({"statistics": {"entropy": "low"}}, "such as 0.5"),
        ({"reward_fall": 0}, "limit of 'reward_fall' is 0"),
        ({"baseline": 0}, "baseline=0 must be at least 1"),
        ({"patience": 0}, "patience=0 must be at least 1"),
    ],
)
def test_bad_options_get_a_sentence(options, message):
    with pytest.raises(InputError) as error:
        OverOptimizationCallback(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("watched", "options", "message"),
    [
        ({"held_out": "brightnes"}, {}, "Did you mean 'brightness'?"),
        ({"held_out": "eval_reward"}, {}, "set eval_strategy='steps'"),
        ({"action": "keep_best"}, {}, "needs save_strategy='steps'"),
        ({"action": "stop"}, {**ONE_AFTER_ONE, "save_total_limit": 1}, "use save_total_limit=2"),
    ],
)
def test_what_cannot_be_watched_is_said_before_the_run(watched, options, message, tmp_path):
    with pytest.raises(InputError) as error:
        run(tmp_path, OverOptimizationCallback(**watched), **options).train()
    assert message in str(error.value)


def test_a_metric_that_evaluations_do_not_have_is_said_after_the_first(tmp_path):
    watch = OverOptimizationCallback(held_out="eval_rewards/brightnes/mean")
    evaluated = {"eval_dataset": ["a cat"], "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    with pytest.raises(InputError, match="Did you mean 'eval_rewards/brightness/mean'"):
        run(tmp_path, watch, **evaluated).train()


def test_two_of_them_are_one_too_many(tmp_path):
    callbacks = [OverOptimizationCallback(), OverOptimizationCallback()]
    with pytest.raises(InputError, match="There are 2 OverOptimizationCallbacks"):
        run(tmp_path, None, callbacks=callbacks).train()


def test_a_trainer_without_rollouts_has_its_evaluations_watched(tmp_path):
    with pytest.raises(InputError, match="held_out='eval_reward'"):
        trainer(tmp_path, "diffusion_dpo", callbacks=[OverOptimizationCallback()]).train()

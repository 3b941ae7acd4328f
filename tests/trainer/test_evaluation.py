# SPDX-License-Identifier: Apache-2.0
"""Evaluation: stock samples of fixed prompts from fixed noise, with the averaged weights."""

import math

import numpy as np
import pytest
import torch

from omnitrl.rollout import stable_seed
from omnitrl.trainer import FlowGRPOTrainer
from tests.tiny_models import tiny_model
from tests.trainer.helpers import brightness, config, logged, same, trainable, trainer


def keeping(media):
    """A reward that keeps what it sees."""

    def reward(prompts, completions, **kwargs):
        media.extend(zip(prompts, completions, strict=True))
        return brightness(prompts, completions)

    return reward


@pytest.mark.compat
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_samples_are_those_of_the_stock_pipeline(tmp_path, guidance):
    """ODE steps, as many as asked for, the rollout's guidance, and the stock pipeline's own noise for each seed."""
    media = []
    run = trainer(
        tmp_path, rewards=keeping(media), guidance_scale=guidance, num_inference_steps_eval=6, num_generations_eval=2
    )
    prompts = ["a cat", "two dogs"]
    result = run.evaluate(prompts)
    assert [prompt for prompt, _ in media] == [*prompts, *prompts]
    model = run.flow_model
    model.pipeline.transformer = model.transformer
    for i, member in ((0, 0), (1, 0), (0, 1), (1, 1)):
        expected = model.pipeline(
            prompts[i],
            num_inference_steps=6,
            guidance_scale=guidance,
            max_sequence_length=12,
            generator=torch.Generator().manual_seed(stable_seed(42, "eval", i, member)),
        ).images[0]
        ours = media[2 * member + i][1]
        assert np.abs(np.asarray(ours, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1
    scores = brightness(None, [image for _, image in media])
    assert result["eval_reward"] == pytest.approx(np.mean(scores), abs=1e-6)
    assert result["eval_reward_std"] == pytest.approx(np.std(scores), abs=1e-6)
    assert result["eval_rewards/reward/mean"] == result["eval_reward"]


def test_two_evaluations_are_equal(tmp_path):
    """The same noise whenever it happens, and nothing random of the run is used up or disturbed."""
    media = []
    run = trainer(tmp_path, rewards=keeping(media))
    before = torch.get_rng_state()
    prompts = ["a cat", "a dog", "a map"]
    one = run.evaluate(prompts)
    first = [image.tobytes() for _, image in media]
    media.clear()
    two = run.evaluate(prompts)
    assert [image.tobytes() for _, image in media] == first
    assert len(set(first)) == 3
    assert {k: v for k, v in one.items() if "runtime" not in k} == {k: v for k, v in two.items() if "runtime" not in k}
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluating_changes_nothing_of_the_run(tmp_path):
    plain = trainer(tmp_path / "a", max_steps=4, ema_decay=0.9)
    plain.train()
    evaluated = trainer(
        tmp_path / "b", max_steps=4, ema_decay=0.9, eval_dataset=["a cat"], eval_strategy="steps", eval_steps=1
    )
    evaluated.train()
    assert same(trainable(plain), trainable(evaluated))
    assert logged(plain, "loss") == logged(evaluated, "loss")


def test_the_averaged_weights_are_evaluated_and_the_trained_ones_come_back(tmp_path):
    media = []
    run = trainer(tmp_path, rewards=keeping(media), max_steps=4, ema_decay=0.9, learning_rate=1e-2)
    run.train()
    before = trainable(run)
    media.clear()
    run.evaluate(["a cat"])
    with_average = media.pop()[1]
    assert same(before, trainable(run))
    average = run.ema.shadow_params
    run.ema = None
    run.evaluate(["a cat"])
    with_last = media.pop()[1]
    for p, value in zip(run.trainable_parameters(), average, strict=True):
        p.data.copy_(value)
    run.evaluate(["a cat"])
    assert media.pop()[1].tobytes() == with_average.tobytes()
    assert with_last.tobytes() != with_average.tobytes()


def test_the_trained_weights_come_back_after_an_error(tmp_path):
    run = trainer(tmp_path, max_steps=4, ema_decay=0.9, learning_rate=1e-2)
    run.train()
    before = trainable(run)

    def fail(*args):
        raise ValueError("out of memory")

    run.flow_model.decode = fail
    with pytest.raises(ValueError, match="out of memory"):
        run.evaluate(["a cat"])
    assert same(before, trainable(run))


def test_several_sets_have_metrics_of_their_own(tmp_path):
    def length(prompts, **kwargs):
        return [float(len(prompt)) for prompt in prompts]

    sets = {"short": ["ab", "abcd"], "long": ["a" * 10]}
    run = trainer(
        tmp_path,
        rewards=length,
        eval_dataset=sets,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=2,
        eval_on_start=True,
    )
    run.train()
    assert logged(run, "eval_short_reward") == [3.0, 3.0]
    assert logged(run, "eval_long_reward") == [10.0, 10.0]
    assert not logged(run, "eval_reward")
    assert [row["step"] for row in run.state.log_history if "eval_long_reward" in row] == [0, 2]


def test_a_batch_that_does_not_divide_the_prompts(tmp_path):
    """Five prompts by fours: none is left out and none counts twice."""

    def number(prompts, **kwargs):
        return [float(prompt) for prompt in prompts]

    run = trainer(tmp_path, rewards=number)
    assert run.evaluate([str(i) for i in range(5)])["eval_reward"] == 2.0
    assert run.evaluate([str(i) for i in range(10)])["eval_reward"] == 4.5


def test_missing_scores_lower_the_count_and_not_the_mean(tmp_path):
    def sometimes(prompts, **kwargs):
        return [None if prompt == "?" else float(prompt) for prompt in prompts]

    run = trainer(tmp_path, rewards=sometimes, reward_max_retries=0)
    result = run.evaluate(["1", "?", "3", "?"])
    assert result["eval_reward"] == 2.0
    assert result["eval_rewards/missing"] == 2
    nothing = run.evaluate(["?", "?"])
    assert math.isnan(nothing["eval_reward"])
    assert "eval_rewards/missing" not in run.evaluate(["1"])


def test_failed_scores_are_counted_and_those_that_do_not_apply_are_not(tmp_path):
    def breaks(prompts, **kwargs):
        return [None if prompt == "-" else math.nan if prompt == "?" else float(prompt) for prompt in prompts]

    run = trainer(tmp_path, rewards=breaks, reward_max_retries=0)
    result = run.evaluate(["1", "?", "3", "-"])
    assert result["eval_rewards/breaks/failed"] == 1
    assert result["eval_rewards/missing"] == 2
    assert "eval_rewards/breaks/failed" not in run.evaluate(["1", "-"])


def test_what_rewards_record_of_a_sample_is_shown_beside_its_picture(tmp_path):
    def reads(prompts, log_extra, **kwargs):
        log_extra("read", [prompt[::-1] for prompt in prompts])
        log_extra("said", ["so " * 100] * len(prompts))
        log_extra("sure", [0.123456] * len(prompts))
        log_extra("what", [object()] * len(prompts))  # nothing that could be shown
        return [1.0] * len(prompts)

    run = trainer(tmp_path, rewards=[reads, brightness], num_samples_to_save=2)
    run.evaluate(["cat", "dog", "cow"])
    (record,) = run.report.summary.evaluations
    said = " ".join(["so"] * 26 + ["…"])
    assert [(sample.prompt, sample.caption) for sample in record.samples] == [
        ("cat", f"read: tac, said: {said}, sure: 0.123"),
        ("dog", f"read: god, said: {said}, sure: 0.123"),
    ]


def test_only_weighted_rewards_count_and_all_are_logged(tmp_path):
    def one(completions, **kwargs):
        return [1.0] * len(completions)

    def watched(completions, **kwargs):
        return [7.0] * len(completions)

    run = trainer(tmp_path, rewards=[one, watched], reward_weights=[2.0, 0.0])
    result = run.evaluate(["a cat"])
    assert (result["eval_reward"], result["eval_rewards/one/mean"], result["eval_rewards/watched/mean"]) == (
        2.0,
        1.0,
        7.0,
    )


def test_evaluation_is_of_other_noise_than_training(tmp_path):
    run = trainer(tmp_path)
    run.get_train_dataloader()
    trained = {request.seed for rollout in range(50) for request in run._plan.requests(rollout)}
    assert trained.isdisjoint({stable_seed(42, "eval", i, m) for i in range(50) for m in range(4)})


def test_columns_of_the_evaluated_rows_reach_the_rewards(tmp_path):
    def reward(prompts, answer, **kwargs):
        return [float(a) for a in answer]

    run = trainer(
        tmp_path, rewards=reward, data=[{"prompt": "x", "answer": 0}], eval_dataset=[{"prompt": "y", "answer": 5}]
    )
    assert run.evaluate()["eval_reward"] == 5.0


def test_a_model_that_was_made_for_evaluation_alone(tmp_path):
    """Without a training set, and before any training."""
    run = FlowGRPOTrainer(tiny_model(), brightness, config(tmp_path), eval_dataset=["a cat"])
    assert 0 < run.evaluate()["eval_reward"] < 1

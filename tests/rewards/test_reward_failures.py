# SPDX-License-Identifier: Apache-2.0
"""What is tried again, what is missing, and what ends the run (acceptance test A11)."""

import asyncio
import logging
import math
import threading
import time

import numpy as np
import pytest
import torch

from omnitrl.rewards import RewardError, RewardRunner
from tests.rewards.runner_helpers import (
    NAN,
    flaky,
    length,
    length_async,
    rows,
    score,
)


@pytest.mark.parametrize("failure", [ValueError("503"), SystemExit(2), 0.5])
def test_an_exception_or_a_time_out_is_retried(failure):
    reward = flaky([failure], then=[1.0, 0.0])
    with RewardRunner(reward, retry_wait=0.01, timeout=0.2) as runner:
        batch = score(runner, "a", "b")
    assert batch.rewards.tolist() == [[1.0], [0.0]]
    assert batch.failures == {"reward": 0}
    assert reward.calls == [2, 2]


def test_waiting_for_its_turn_does_not_count_as_time_out():
    def reward(prompts):
        time.sleep(0.15)
        return [1.0]

    with RewardRunner(reward, timeout=0.4, max_retries=0) as runner:
        for _ in range(5):
            runner.submit(rows("a"), ["image"])
        assert runner.collect().rewards.tolist() == [[1.0]] * 5


def test_waits_between_attempts_grow():
    times = []

    def reward(prompts):
        times.append(time.perf_counter())
        raise ValueError("no")

    with RewardRunner(reward, retry_wait=0.05, max_retries=2, max_failed_fraction=1) as runner:
        score(runner, "a")
    assert len(times) == 3
    assert 0.05 <= times[1] - times[0] < times[2] - times[1]
    assert times[2] - times[1] >= 0.1


def by_exception(prompts):
    if "bad" in prompts:
        raise ValueError("scorer is down")
    return [float(p) for p in prompts]


def by_exit(prompts):
    if "bad" in prompts:
        raise SystemExit(1)
    return [float(p) for p in prompts]


def by_timeout(prompts):
    if "bad" in prompts:
        time.sleep(1)
    return [0.0 if p == "bad" else float(p) for p in prompts]


async def by_async_timeout(prompts):
    if "bad" in prompts:
        await asyncio.sleep(1)
    return [0.0 if p == "bad" else float(p) for p in prompts]


async def by_async_exit(prompts):
    if "bad" in prompts:
        raise SystemExit(1)
    return [float(p) for p in prompts]


async def by_cancellation(prompts):
    if "bad" in prompts:
        raise asyncio.CancelledError
    return [float(p) for p in prompts]


def by_nan(prompts):
    return [NAN if p == "bad" else float(p) for p in prompts]


def by_infinity(prompts):
    return torch.tensor([math.inf if p == "bad" else float(p) for p in prompts])


def by_none(prompts):
    return [None if p == "bad" else float(p) for p in prompts]


@pytest.mark.parametrize(
    ("reward", "failed"),
    [
        (by_exception, 1),
        (by_exit, 1),
        (by_timeout, 1),
        (by_async_timeout, 1),
        (by_async_exit, 1),
        (by_cancellation, 1),
        (by_nan, 1),
        (by_infinity, 1),
        (by_none, 0),  # does not apply: no failure
    ],
)
def test_a11_a_failed_reward_is_missing_and_never_0(reward, failed, caplog):
    with RewardRunner(reward, retry_wait=0.001, timeout=0.1) as runner, caplog.at_level(logging.WARNING):
        for prompt in ("1", "bad", "0", "1"):
            runner.submit(rows(prompt), ["image"])
        batch = runner.collect()
        total = runner.total(batch.rewards)
    assert batch.rewards[:, 0].isnan().tolist() == [False, True, False, False]
    assert batch.rewards.nanmean().item() == pytest.approx(2 / 3)
    assert total.isnan().tolist() == [False, True, False, False]
    assert batch.failures == {reward.__name__: failed}
    assert batch.metrics[f"rewards/{reward.__name__}/failed"] == failed
    assert len(caplog.records) == failed


def test_a11_the_mean_leaves_failures_out():
    with RewardRunner(lambda prompts: [0.5, NAN, NAN, 0.8, 0.6, 0.7]) as runner:
        batch = score(runner, *"abcdef")
    assert batch.rewards.nanmean().item() == pytest.approx(0.65)
    assert batch.failures == {"lambda": 2}


@pytest.mark.parametrize("broken", [None, torch.tensor([[NAN, 0.5]]), np.array([[math.inf]])])
def test_a11_a_broken_image_is_not_scored(broken):
    seen = []

    def reward(completions, log_extra, prompts, number):
        seen.extend(number)
        log_extra("note", [f"saw {n}" for n in number])
        return [1.0] * len(completions)

    with RewardRunner(reward) as runner:
        batch = score(runner, "a", "b", "c", completions=["image", broken, "image"], number=[0, 1, 2])
    assert seen == [0, 2]
    assert batch.rewards.isnan()[:, 0].tolist() == [False, True, False]
    assert batch.failures == {"reward": 1}
    assert batch.extras == {"note": ["saw 0", None, "saw 2"]}


def test_a11_broken_images_only_end_the_run():
    with RewardRunner(length) as runner:
        runner.submit(rows("a"), [None])
        with pytest.raises(RewardError, match=r"1 of 1 rows.*the media was None or not finite"):
            runner.collect()


def test_too_many_failures_end_the_run():
    with RewardRunner(by_exception, max_retries=0) as runner:
        for prompt in ("bad", "1", "bad", "bad"):
            runner.submit(rows(prompt), ["image"])
        with pytest.raises(
            RewardError, match=r"'by_exception' failed for 3 of 4 rows.*ValueError: scorer is down"
        ) as info:
            runner.collect()
        assert isinstance(info.value.__cause__, ValueError)
        assert score(runner, "1").rewards.tolist() == [[1.0]]  # the failed rows are not kept


def test_the_fraction_itself_is_still_allowed_and_none_does_not_count():
    with RewardRunner(lambda prompts: [NAN, 1.0, None, None], max_failed_fraction=0.25) as runner:
        batch = score(runner, *"abcd")
    assert batch.failures == {"lambda": 1}
    with RewardRunner(lambda prompts: [NAN, NAN, None, None], max_failed_fraction=0.25) as runner:
        with pytest.raises(RewardError, match="it returned nan for row 0"):
            score(runner, *"abcd")


def test_a_watched_reward_only_warns(caplog):
    def broken(prompts):
        raise OSError("disk full")

    with RewardRunner([broken, length], weights=[0, 1], retry_wait=0.001) as runner, caplog.at_level(logging.WARNING):
        runner.submit(rows("abc"), ["image"])
        runner.submit(rows("de"), ["image"])
        batch = runner.collect()
        assert runner.total(batch.rewards).tolist() == [3.0, 2.0]
    assert batch.failures == {"broken": 2, "length": 0}
    assert [r.getMessage() for r in caplog.records] == [
        "reward 'broken' failed for 2 of 2 rows, which are missing, not 0; the first failure: OSError: disk full, for "
        "row 0 (prompt 'abc')"
    ]


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "'reward' returned 1 values for 2 rows"),
        (torch.ones(3), "'reward' returned 3 values for 2 rows"),
        ([1.0, "high"], r"type str for row 1 \('high'\)"),
        (torch.ones(2, 1), "type list for row 0"),
        (0.5, "returned a value of type float for 2 rows"),
        (None, "returned None for 2 rows"),
        ("ab", "returned a value of type str"),
        ({"a": 1.0, "b": 2.0}, "returned a value of type dict"),
    ],
)
def test_a_broken_contract_ends_the_run_without_a_retry(returned, message, weight):
    calls = []

    def reward(prompts):
        calls.append(1)
        return returned

    with RewardRunner([reward, length], weights=[weight, 1.0]) as runner, pytest.raises(RewardError, match=message):
        score(runner, "a", "b")
    assert calls == [1]


def test_numbers_of_any_kind_are_read():
    values = [1, True, np.float32(0.5), np.bool_(True), torch.tensor(0.25), np.int64(3), None]
    with RewardRunner(lambda prompts: values) as runner:
        batch = score(runner, *"abcdefg")
    assert batch.rewards[:6, 0].tolist() == [1.0, 1.0, 0.5, 1.0, 0.25, 3.0]
    assert batch.rewards[6].isnan().all()


def test_a_coroutine_of_a_function_that_is_not_async_is_reported():
    with RewardRunner(lambda prompts: length_async(prompts)) as runner:
        with pytest.raises(RewardError, match="async def"):
            score(runner, "a")


def test_a_missing_package_is_not_retried():
    calls = []

    def reward(prompts):
        calls.append(1)
        raise ImportError('pip install "x"')

    with RewardRunner(reward) as runner, pytest.raises(RewardError, match='cannot be used: pip install "x"'):
        score(runner, "a")
    assert calls == [1]


def test_a_broken_contract_is_reported_at_the_next_chunk():
    with RewardRunner(lambda prompts: []) as runner:
        runner.submit(rows("a"), ["image"])
        time.sleep(0.1)
        with pytest.raises(RewardError, match="0 values for 1 rows"):
            runner.submit(rows("b"), ["image"])
        assert runner.collect().rewards.shape == (0, 1)


def test_calls_that_hang_do_not_take_ever_more_threads():
    end = threading.Event()

    def hangs(prompts):
        end.wait(20)
        return [1.0] * len(prompts)

    with RewardRunner(hangs, timeout=0.02, max_retries=0, max_failed_fraction=1) as runner:
        assert [score(runner, "a").failures for _ in range(12)] == [{"hangs": 1}] * 12
        hanging = [thread for thread in threading.enumerate() if thread.name == "reward-hangs"]
        assert len(hanging) == 8
        end.set()
        for thread in hanging:
            thread.join(5)
        assert score(runner, "a").rewards.tolist() == [[1.0]]


def test_an_attempt_that_came_too_late_records_nothing():
    release = threading.Event()
    attempts = []

    def reward(prompts, log_metric):
        attempts.append(1)
        if len(attempts) == 1:
            release.wait(5)
            log_metric("late", 1.0)
            return [9.0]
        log_metric("late", 2.0)
        release.set()
        return [1.0]

    with RewardRunner(reward, timeout=0.1, retry_wait=0.001) as runner:
        runner.submit(rows("a"), ["image"])
        time.sleep(0.3)
        batch = runner.collect()
    assert batch.rewards.tolist() == [[1.0]]
    assert batch.metrics["late"] == 2.0

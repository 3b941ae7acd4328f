# SPDX-License-Identifier: Apache-2.0
import asyncio
import functools
import logging
import math
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from omnitrl.rewards import RewardError, RewardRunner


NAN = math.nan


def rows(*prompts, **columns):
    return [{"prompt": p, **{k: v[i] for k, v in columns.items()}} for i, p in enumerate(prompts)]


def score(runner, *prompts, completions=None, **columns):
    runner.submit(rows(*prompts, **columns), completions or [f"image of {p}" for p in prompts])
    return runner.collect()


def length(prompts, **kwargs):
    return [len(p) for p in prompts]


async def length_async(prompts, **kwargs):
    await asyncio.sleep(0.001)
    return [len(p) for p in prompts]


class Length:
    def __call__(self, prompts, **kwargs):
        return [len(p) for p in prompts]


class LengthAsync:
    async def __call__(self, prompts, **kwargs):
        return [len(p) for p in prompts]


class LengthModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.5)
        self.grad_enabled = None

    def forward(self, prompts, **kwargs):
        self.grad_enabled = torch.is_grad_enabled()
        return self.dropout(self.weight * torch.tensor([float(len(p)) for p in prompts]))


def flaky(failures, then):
    """A reward that does each of `failures` in turn, and then returns `then`."""
    left = list(failures)
    calls = []

    def reward(prompts, **kwargs):
        calls.append(len(prompts))
        if left:
            failure = left.pop(0)
            if isinstance(failure, BaseException):
                raise failure
            time.sleep(failure)
        return list(then)

    reward.calls = calls
    return reward


# --- the contract ---------------------------------------------------------------------------------------------------


def test_every_kind_of_callable_gives_the_same_numbers():
    kinds = [
        length,
        length_async,
        Length(),
        LengthAsync(),
        LengthModule(),
        functools.partial(length_async),
        Length().__call__,
        lambda prompts: np.array([len(p) for p in prompts], dtype=np.float32),
    ]
    with RewardRunner(kinds) as runner:
        batch = score(runner, "a", "bcd", "")
    assert batch.rewards.dtype == torch.float64
    assert batch.rewards.tolist() == [[1.0] * 8, [3.0] * 8, [0.0] * 8]
    names = ["length", "length_async", "Length", "LengthAsync", "LengthModule", "length_async_1", "__call__", "lambda"]
    assert runner.names == names
    assert batch.failures == dict.fromkeys(names, 0)


def test_modules_run_in_eval_mode_without_gradients():
    module = LengthModule().train()
    with RewardRunner(module) as runner:
        assert score(runner, "abc").rewards.tolist() == [[3.0]]  # dropout would give 0 or 6
    assert module.grad_enabled is False
    assert torch.is_grad_enabled()


def test_async_rewards_run_without_gradients():
    async def graded(prompts):
        return [float(torch.is_grad_enabled()) for _ in prompts]

    with RewardRunner(graded) as runner:
        assert score(runner, "a").rewards.tolist() == [[0.0]]


def test_all_arguments_arrive_by_keyword():
    seen = {}
    state = object()

    def reward(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    with RewardRunner(reward) as runner:
        runner.submit(rows("a", "b", text=["x", None], level=[1, 2]), ["image a", "image b"], trainer_state=state)
        runner.collect()
    assert callable(seen.pop("log_metric"))
    assert callable(seen.pop("log_extra"))
    assert seen == {
        "prompts": ["a", "b"],
        "completions": ["image a", "image b"],
        "text": ["x", None],
        "level": [1, 2],
        "trainer_state": state,
    }


def test_a_function_gets_only_what_its_signature_accepts():
    def narrow(completions, level):
        return [len(c) * 10 + n for c, n in zip(completions, level, strict=True)]

    with RewardRunner(narrow) as runner:
        assert score(runner, "p", "q", completions=["ab", "c"], level=[1, 2], other=[0, 0]).rewards.tolist() == [
            [21.0],
            [12.0],
        ]


def test_a_column_that_some_rows_lack_is_none_there():
    with RewardRunner(lambda text: [-1.0 if t is None else len(t) for t in text]) as runner:
        runner.submit([{"prompt": "a"}, {"prompt": "b", "text": "xyz"}], [0, 0])
        assert runner.collect().rewards.tolist() == [[-1.0], [3.0]]


def test_a_required_argument_that_is_no_column_is_reported_at_once():
    def reward(images, **kwargs):
        return []

    with (
        RewardRunner(reward) as runner,
        pytest.raises(RewardError, match=r"'reward' requires the argument 'images'.*level"),
    ):
        runner.submit(rows("a", level=[1]), ["image"])


def test_positional_only_parameters_are_refused():
    def reward(images, /):
        return []

    with pytest.raises(TypeError, match="positional-only"):
        RewardRunner(reward)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([{"prompt": "a"}], ["x", "y"]), "1 rows and 2 completions"),
        (([{"prompt": "a"}, {"text": "b"}], ["x", "y"]), "row 1 has no column 'prompt' .it has: text"),
        (([{"prompt": "a", "completions": 1}], ["x"]), "column 'completions'"),
    ],
)
def test_bad_rows_are_reported_at_once(given, message):
    with RewardRunner(length) as runner, pytest.raises(ValueError, match=message):
        runner.submit(*given)


def test_the_lists_of_the_user_are_not_changed():
    functions, weights = ["brightness", length, length], [1.0, 0.5, 0]
    with RewardRunner(functions, weights) as runner:
        assert functions == ["brightness", length, length]
        assert runner.names == ["brightness_reward", "length", "length_1"]
        assert runner.weights == [1.0, 0.5, 0.0]
        runner.weights[0] = 7.0
    assert weights == [1.0, 0.5, 0]


def test_a_reward_that_changes_its_arguments_does_not_change_them_for_another():
    def greedy(prompts, completions, **kwargs):
        prompts.clear()
        return [len(c) for c in completions]

    submitted = ["image of abc"]
    with RewardRunner([greedy, length]) as runner:
        assert score(runner, "abc", completions=submitted).rewards.tolist() == [[12.0, 3.0]]
    assert submitted == ["image of abc"]


def test_names_stay_unique_when_a_suffix_is_taken():
    def length_1(prompts):
        return [0.0]

    assert RewardRunner([length_1, length, length]).names == ["length_1", "length", "length_2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [1.0, 2.0]}, r"got 2 reward weights for 1 reward functions \(length\)"),
        ({"weights": [0.0]}, "at least one of them not 0"),
        ({"weights": [NAN]}, "finite"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"retry_wait": -0.1}, "retry_wait=-0.1"),
        ({"timeout": 0}, "timeout=0"),
        ({"max_failed_fraction": 1.5}, "max_failed_fraction=1.5"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RewardRunner(length, **arguments)


def test_no_reward_is_refused():
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        RewardRunner([])


# --- order and overlap ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_rows_come_back_in_order_though_chunks_take_different_times(kind):
    waits = {"a": 0.08, "b": 0.0, "c": 0.04, "d": 0.0}

    def sync(prompts, number):
        time.sleep(waits[prompts[0][0]])
        return number

    async def asynchronous(prompts, number):
        await asyncio.sleep(waits[prompts[0][0]])
        return number

    with RewardRunner(sync if kind == "sync" else asynchronous) as runner:
        start = 0
        for name, size in zip("abcd", (2, 3, 1, 2), strict=True):
            runner.submit(rows(*[name] * size, number=list(range(start, start + size))), [name] * size)
            start += size
        assert runner.collect().rewards[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        assert runner.collect().rewards.shape == (0, 1)


def test_rewards_run_beside_the_rollout():
    def slow(prompts):
        time.sleep(0.2)
        return [1.0] * len(prompts)

    with RewardRunner(slow) as runner:
        start = time.perf_counter()
        for _ in range(3):
            submitted = time.perf_counter()
            runner.submit(rows("a"), ["image"])
            assert time.perf_counter() - submitted < 0.1
            time.sleep(0.2)  # the next chunk's rollout
        batch = runner.collect()
        took = time.perf_counter() - start
    assert batch.rewards.tolist() == [[1.0]] * 3
    assert took < 0.95  # one after the other: 1.2 s


def test_several_rewards_run_beside_each_other_but_none_beside_itself():
    running, most = {"x": 0, "y": 0}, {"x": 0, "y": 0}
    both = threading.Barrier(2, timeout=5)

    def make(key):
        def reward(prompts):
            running[key] += 1
            most[key] = max(most[key], running[key])
            both.wait()  # passes only if the other one is running too
            running[key] -= 1
            return [1.0]

        return reward

    with RewardRunner([make("x"), make("y")], max_retries=0) as runner:
        for _ in range(3):
            runner.submit(rows("a"), ["image"])
        assert runner.collect().rewards.tolist() == [[1.0, 1.0]] * 3
    assert most == {"x": 1, "y": 1}


def test_calls_of_an_async_reward_overlap():
    async def slow(prompts):
        await asyncio.sleep(0.2)
        return [1.0]

    with RewardRunner(slow) as runner:
        start = time.perf_counter()
        for _ in range(5):
            runner.submit(rows("a"), ["image"])
        runner.collect()
        assert time.perf_counter() - start < 0.6  # one after the other: 1.0 s


def test_an_async_reward_that_blocks_its_loop_does_not_block_others():
    async def blocking(prompts):
        time.sleep(0.3)
        return [1.0]

    done = []

    def quick(prompts):
        done.append(time.perf_counter())
        return [2.0]

    with RewardRunner([blocking, quick]) as runner:
        start = time.perf_counter()
        assert score(runner, "a").rewards.tolist() == [[1.0, 2.0]]
    assert done[0] - start < 0.2


# --- failures (acceptance test A11) ---------------------------------------------------------------------------------


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
        "reward 'broken' failed for 2 of 2 rows, which are missing, not 0; the first failure: OSError: disk full"
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


# --- several rewards ------------------------------------------------------------------------------------------------


def test_total_is_the_weighted_sum_without_the_missing():
    with RewardRunner([length, length, length], weights=[1.0, 0.5, 0.0]) as runner:
        rewards = torch.tensor([[1.0, 2.0, 9.0], [NAN, 2.0, 9.0], [1.0, NAN, NAN], [NAN, NAN, 9.0]])
        total = runner.total(rewards)
        assert total[:3].tolist() == [2.0, 1.0, 1.0]
        assert total[3].isnan()  # watched rewards alone do not make a 0
        with pytest.raises(ValueError, match=r"\(N, 3\).*\(4, 2\)"):
            runner.total(rewards[:, :2])


# --- logging --------------------------------------------------------------------------------------------------------


def test_log_metric_is_averaged_without_nan_and_log_extra_is_aligned():
    def first(prompts, log_metric, log_extra):
        log_metric("words", len(prompts))
        log_metric("odd", NAN if prompts == ["a"] else 4)
        if prompts != ["a"]:
            log_extra("upper", [p.upper() for p in prompts])
        return [0.0] * len(prompts)

    async def second(prompts, log_extra):
        log_extra("length", (len(p) for p in prompts))
        return [0.0] * len(prompts)

    with RewardRunner([first, second]) as runner:
        runner.submit(rows("a"), ["image"])
        runner.submit(rows("bc", "d", "e"), ["image"] * 3)
        batch = runner.collect()
    assert batch.metrics == {"odd": 4.0, "rewards/first/failed": 0.0, "rewards/second/failed": 0.0, "words": 2.0}
    assert list(batch.metrics) == sorted(batch.metrics)  # ranks must agree on the order
    assert batch.extras == {"length": [1, 2, 1, 1], "upper": [None, "BC", "D", "E"]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda log_metric, log_extra: log_extra("note", ["a"]), r"log_extra\('note', ...\) got 1 values for 2 rows"),
        (lambda log_metric, log_extra: log_metric("m", "high"), r"log_metric\('m', ...\) needs a number, got 'high'"),
    ],
)
def test_bad_records_are_reported(record, message):
    def reward(prompts, log_metric, log_extra):
        record(log_metric, log_extra)
        return [0.0, 0.0]

    with RewardRunner(reward) as runner, pytest.raises(RewardError, match=message):
        score(runner, "a", "b")


# --- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_ctrl_c_ends_the_wait(kind):
    release = threading.Event()
    cancelled = threading.Event()

    def sync(prompts):
        if prompts == ["hang"]:
            release.wait(10)
        return [1.0]

    async def asynchronous(prompts):
        try:
            if prompts == ["hang"]:
                await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1.0]

    runner = RewardRunner(sync if kind == "sync" else asynchronous)
    runner.submit(rows("hang"), ["image"])
    runner.submit(rows("hang"), ["image"])
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            runner.collect()
        assert time.perf_counter() - start < 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert score(runner, "next").rewards.tolist() == [[1.0]]  # at once, though the sync one still hangs
    if kind == "async":
        assert cancelled.wait(2)
    start = time.perf_counter()
    runner.close()
    assert time.perf_counter() - start < 1
    release.set()


def test_a_reward_that_hangs_does_not_keep_the_process_alive():
    code = """
import _thread, threading, time
from omnitrl.rewards import RewardRunner

def hang(prompts):
    time.sleep(60)

async def hang_async(prompts):
    time.sleep(60)

runner = RewardRunner([hang, hang_async])
runner.submit([{"prompt": "a"}], ["image"])
threading.Timer(0.3, _thread.interrupt_main).start()
runner.collect()
"""
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert "KeyboardInterrupt" in ended.stderr
    assert ended.returncode != 0
    assert time.perf_counter() - start < 30


def test_close_ends_the_threads_and_may_be_repeated():
    def own_threads():
        return {t for t in threading.enumerate() if t.name.startswith("reward-")}

    before = own_threads()
    runner = RewardRunner([length, length_async])
    score(runner, "a")
    started = own_threads() - before
    assert len(started) == 3
    assert all(t.daemon for t in started)
    runner.close()
    runner.close()
    for thread in started:
        thread.join(2)
    assert not any(t.is_alive() for t in started)
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(rows("a"), ["image"])


def test_finished_images_are_not_kept_alive():
    class Image:
        alive = 0

        def __init__(self):
            Image.alive += 1

        def __del__(self):
            Image.alive -= 1

    with RewardRunner([length, length_async]) as runner:
        runner.submit(rows("a", "b"), [Image(), Image()])
        runner.collect()
        deadline = time.perf_counter() + 2
        while Image.alive and time.perf_counter() < deadline:
            time.sleep(0.01)
        assert Image.alive == 0

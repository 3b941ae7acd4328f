# SPDX-License-Identifier: Apache-2.0
import asyncio
import functools
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from omnitrl.rewards import RewardError, RewardRunner
from tests.rewards.runner_helpers import (
    NAN,
    Length,
    LengthAsync,
    LengthModule,
    length,
    length_async,
    rows,
    score,
)


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


def test_modules_within_a_partial_run_in_eval_mode_too():
    with RewardRunner(functools.partial(LengthModule(), number=1)) as runner:
        assert score(runner, *"abcdefgh", completions=[0] * 8).rewards.tolist() == [[1.0]] * 8


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
import time
from omnitrl.rewards import RewardRunner

def hang(prompts):
    time.sleep(600)

async def hang_async(prompts):
    time.sleep(600)

runner = RewardRunner([hang, hang_async])
runner.submit([{"prompt": "a"}], ["image"])
print("waits", flush=True)
runner.collect()
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        try:
            assert process.stdout.readline() == "waits\n"  # its imports take long on a busy machine
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in error
    assert process.returncode != 0


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

# SPDX-License-Identifier: Apache-2.0
"""Rewards that are away are waited for, and rollouts wait for rewards that are slow."""

import asyncio
import logging
import signal
import threading
import time

import pytest

from omnitrl.rewards import RewardError, RewardRunner, RewardUnavailable, groupwise
from omnitrl.rewards.breaker import Breaker
from tests.rewards.runner_helpers import length, rows, score


class Service:
    """A reward whose service is away from its call number `after` on, for `seconds`."""

    def __init__(self, after, seconds, error):
        self.after, self.seconds, self.error = after, seconds, error
        self.calls, self.tries, self.back, self.at_once, self.most = 0, [], None, 0, 0

    def answer(self, prompts):
        self.calls += 1
        now = time.monotonic()
        if self.calls > self.after and self.back is None:
            self.back = now + self.seconds
        if self.back is not None and now < self.back:
            self.tries.append(now)
            raise self.error
        return [float(p) for p in prompts]

    def __call__(self, prompts):
        return self.answer(prompts)


class AsyncService(Service):
    async def __call__(self, prompts):
        self.at_once += 1
        try:
            await asyncio.sleep(0.002)
            if self.back is not None and time.monotonic() < self.back:
                self.most = max(self.most, self.at_once)
            return self.answer(prompts)
        finally:
            self.at_once -= 1


AWAY = RewardUnavailable("the scorer answers 503")


@pytest.mark.parametrize("kind", [Service, AsyncService])
@pytest.mark.parametrize("error", [AWAY, ConnectionRefusedError("no")])
def test_a_reward_that_is_away_for_a_second_is_waited_for_and_nothing_is_lost(kind, error, caplog):
    service = kind(after=2, seconds=1.0, error=error)
    with RewardRunner(service, retry_wait=0.05, max_retries=0, max_wait=30) as runner:
        with caplog.at_level(logging.WARNING):
            for i in range(8):
                runner.submit(rows(str(i), str(i + 100)), ["image"] * 2)
            batch = runner.collect()
    assert batch.rewards[:, 0].tolist() == [n for i in range(8) for n in (i, i + 100)]
    assert batch.failures == {kind.__name__: 0}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith(f"reward '{kind.__name__}' is away, waiting for it for up to 30 s (")
    assert told[1].startswith(f"reward '{kind.__name__}' is back after ")
    # The waits between the questions grow, so that there are few: 0.05, 0.1, 0.2, 0.4, 0.8 s.
    asked = [t for t in service.tries if t > service.tries[0] + 0.04]
    assert len(asked) <= 5
    assert service.most <= 8  # those that were on their way; later ones ask one at a time


def test_while_it_is_away_one_call_asks_at_a_time():
    service = AsyncService(after=0, seconds=0.6, error=AWAY)
    with RewardRunner(service, retry_wait=0.05, max_wait=30) as runner:
        runner.submit(rows("0"), ["image"])
        time.sleep(0.2)  # it is known to be away
        for i in range(1, 6):
            runner.submit(rows(str(i)), ["image"])
        assert runner.collect().rewards[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert service.most == 1


def test_the_service_says_when_to_come_back():
    service = Service(after=0, seconds=0.3, error=RewardUnavailable("busy", retry_after=0.5))
    with RewardRunner(service, retry_wait=0.001, max_wait=30) as runner:
        assert score(runner, "7").rewards.tolist() == [[7.0]]
    assert service.calls == 2  # and not every millisecond
    service = Service(after=0, seconds=0.1, error=RewardUnavailable("busy", retry_after=0.2))
    with RewardRunner(service, retry_wait=0.001, max_retries=1) as runner:  # without patience: the retry comes then
        assert score(runner, "7").rewards.tolist() == [[7.0]]


def test_patience_has_an_end_and_is_not_had_again():
    service = Service(after=1, seconds=60, error=AWAY)
    with RewardRunner(service, retry_wait=0.05, max_wait=0.4, max_failed_fraction=0.8) as runner:
        began = time.monotonic()
        for i in range(4):
            runner.submit(rows(str(i)), ["image"])
        batch = runner.collect()
        waited = time.monotonic() - began
        assert batch.rewards[:, 0].isnan().tolist() == [False, True, True, True]
        assert 0.4 <= waited < 5
        began, calls = time.monotonic(), service.calls
        with pytest.raises(RewardError, match="RewardUnavailable: the scorer answers 503, for row 0"):
            score(runner, "5")
        assert service.calls == calls + 1  # it is asked once, and not waited for
        assert time.monotonic() - began < 0.3
        service.back = 0
        assert score(runner, "5").rewards.tolist() == [[5.0]]
        assert service.calls == calls + 2


def test_waiting_uses_up_no_retries():
    """One call finds the reward back; the other, which waited as long, is then tried as often as any."""
    asked = []

    async def attempt(call):
        asked.append(call)
        if len(asked) <= 5:
            raise AWAY
        if asked.count("second") == 3:
            raise ValueError("a slip")
        return call

    async def both():
        breaker = Breaker("scorer", max_retries=1, retry_wait=0.001, max_wait=30)
        return await asyncio.gather(*(breaker.run(lambda call=call: attempt(call)) for call in ("first", "second")))

    assert asyncio.run(both()) == ["first", "second"]
    assert asked == ["first", "first", "second", "first", "second", "first", "second", "second"]


def test_a_reward_that_fails_again_and_again_is_asked_less():
    calls = []

    def broken(prompts):
        calls.append(prompts[0])
        raise ValueError("no")

    with RewardRunner([broken, length], weights=[0, 1], max_retries=2, retry_wait=0.001) as runner:
        for i in range(8):
            runner.submit(rows(str(i)), ["image"])
            runner.submit(rows(str(i)), ["image"])
            assert runner.collect().failures == {"broken": 2, "length": 0}
    assert len(calls) <= 3 * 4 + 12  # three attempts for the first few, one for the others


def test_prompts_that_fail_do_not_keep_others_waiting():
    """Three bad chunks in a row look as if the reward were away; the next good one shows that it is not."""

    def picky(prompts):
        if prompts[0] == "bad":
            raise ValueError("bad prompt")
        return [1.0]

    with RewardRunner(picky, max_retries=0, retry_wait=0.01, max_wait=60) as runner:
        began = time.monotonic()
        for prompt in ("bad", "bad", "bad", "good", "good", "good", "good"):
            runner.submit(rows(prompt), ["image"])
        batch = runner.collect()
    assert time.monotonic() - began < 20
    assert batch.rewards[:, 0].isnan().tolist() == [True] * 3 + [False] * 4


def test_ctrl_c_ends_the_wait_for_a_reward_that_is_away():
    service = Service(after=0, seconds=60, error=AWAY)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with RewardRunner(service, retry_wait=0.05, max_wait=60) as runner:
            runner.submit(rows("1"), ["image"])
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                runner.collect()
            service.back = 0
            assert score(runner, "2").rewards.tolist() == [[2.0]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- room -----------------------------------------------------------------------------------------------------------


def test_submit_waits_while_too_many_samples_wait():
    release, scored = threading.Semaphore(0), []

    def slow(prompts):
        release.acquire()
        scored.extend(prompts)
        return [1.0] * len(prompts)

    with RewardRunner([slow, length], max_pending=4) as runner:
        for i in range(2):
            runner.submit(rows(f"{i}a", f"{i}b"), ["image"] * 2)
        threading.Timer(0.3, release.release).start()
        began = time.monotonic()
        runner.submit(rows("2a", "2b"), ["image"] * 2)  # there is room again when the first chunk has been scored
        assert 0.25 <= time.monotonic() - began < 5
        assert scored == ["0a", "0b"]
        release.release(5)
        assert runner.collect().rewards.tolist() == [[1.0, 2.0]] * 6


def test_a_chunk_that_is_larger_than_the_room_is_taken_when_nothing_else_waits():
    with RewardRunner(length, max_pending=1) as runner:
        for _ in range(3):
            runner.submit(rows("a", "b", "c"), ["image"] * 3)
        assert runner.collect().rewards.shape == (9, 1)


def test_members_that_wait_for_their_group_take_no_room():
    @groupwise
    def members(completions):
        return [len(completions)] * len(completions)

    with RewardRunner([members, length], max_pending=2) as runner:
        for i in range(8):
            runner.submit(rows("a"), ["image"], groups=[i % 2], group_size=4)
        assert runner.collect().rewards.tolist() == [[4.0, 1.0]] * 8


def test_a_broken_contract_ends_the_wait_for_room():
    release = threading.Event()

    def wrong(prompts):
        release.wait(5)
        return []

    with RewardRunner(wrong, max_pending=1) as runner:
        runner.submit(rows("a"), ["image"])
        threading.Timer(0.1, release.set).start()
        with pytest.raises(RewardError, match="0 values for 1 rows"):
            runner.submit(rows("b"), ["image"])


def test_ctrl_c_ends_the_wait_for_room():
    release = threading.Event()

    def hang(prompts):
        release.wait(10)
        return [1.0]

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with RewardRunner(hang, max_pending=1) as runner:
            runner.submit(rows("a"), ["image"])
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                runner.submit(rows("b"), ["image"])
            assert time.monotonic() - began < 3
            release.set()
            assert runner.collect().rewards.tolist() == [[1.0]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_wait": -1}, "max_wait=-1 must be at least 0 seconds and have an end, for example 600"),
        ({"max_wait": float("inf")}, "max_wait=inf must"),
        ({"max_pending": 0}, "max_pending=0 must be at least 1"),
        ({"cache_size": -1}, "cache_size=-1 must be at least 0"),
        ({"num_processes": 0}, "num_processes=0 must be at least 1"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RewardRunner(length, **arguments)

# SPDX-License-Identifier: Apache-2.0
"""Reward servers that misbehave, or are not there: each failure is told apart, and none is ever a score."""

import pytest

from omnitrl.errors import InputError
from omnitrl.rewards import RemoteReward, RewardError, RewardRunner, RewardUnavailable
from omnitrl.rewards.remote.wire import pack_answer
from omnitrl.rewards.results import Answer
from tests.rewards.serving import ask, mean, pictures, response, scripted


INFO = response(
    200,
    '{"protocol": 1, "version": "0", "name": "far", "traits": {"media": []}, "accepts": null, "requires": [], '
    '"max_body_bytes": 1000000}',
)
GARBAGE = response(200, b"<html>It works!</html>")
BUSY = response(429, '{"error": "slow down"}', "Retry-After: 2.5")
GATEWAY = response(502, "<html>Bad Gateway</html>")
CUT = response(200, b"half of an ans", length=1000)
MOVED = response(301, "", "Location: http://elsewhere/")


@pytest.mark.parametrize(
    ("answer", "expected", "sentence"),
    [
        (GARBAGE, RuntimeError, "sent no answer: 22 bytes are no message of the reward protocol: b'<html>It works!"),
        (BUSY, RewardUnavailable, "status 429, slow down"),
        (GATEWAY, RewardUnavailable, "status 502, '<html>Bad Gateway</html>'"),
        (CUT, RewardUnavailable, "RemoteProtocolError: peer closed connection without sending complete message body"),
        (None, RewardUnavailable, "is away ("),
        (b"HTTP/9 nonsense\r\n\r\n", RewardUnavailable, "RemoteProtocolError"),
        (MOVED, RewardError, "answers 301"),
        (response(404, "Not Found"), RewardError, "answers 404: 'Not Found'"),
        (response(500, "Internal Server Error"), RuntimeError, "answers 500: 'Internal Server Error'"),
        (5.0, TimeoutError, "gave no answer within timeout=0.3 s"),
    ],
    ids=str,
)
def test_a_server_that_misbehaves(answer, expected, sentence):
    with scripted(INFO, answer) as url:
        remote = RemoteReward(url, timeout=0.3)
        with pytest.raises(expected) as caught:
            ask(remote, prompts=["a"])
    assert type(caught.value) is expected
    assert sentence in str(caught.value)
    if answer is BUSY:
        assert caught.value.retry_after == 2.5


def test_a_connection_that_breaks_is_made_again_at_once():
    whole = response(200, pack_answer(Answer([0.25])))
    with scripted(INFO, None, CUT, whole) as url:
        assert ask(RemoteReward(url), prompts=["a"]) == [0.25]
    with scripted(INFO, None, CUT, whole) as url, pytest.raises(RewardUnavailable):
        ask(RemoteReward(url, retries=1), prompts=["a"])


def test_a_wrong_number_of_values_is_refused():
    for answer, what in ((Answer([0.25]), "1 values"), (Answer([0.1, 0.2], {}, {"note": ["a"]}), "1 note")):
        with scripted(INFO, response(200, pack_answer(answer))) as url:
            remote = RemoteReward(url)
            with pytest.raises(RewardError, match=f"returned {what} for 2 rows"):
                ask(remote, prompts=["a", "b"])


def test_failures_are_missing_and_never_0():
    """A server that fails for good: the rows are NaN, counted, and end the run past the share that may fail."""
    with scripted(INFO, response(500, '{"error": "out of memory"}')) as url:
        remote = RemoteReward(url)
        rows = [{"prompt": "a"}, {"prompt": "b"}]
        with RewardRunner([remote, mean], max_retries=1, retry_wait=0, max_failed_fraction=1.0) as runner:
            runner.submit(rows, pictures(2))
            batch = runner.collect()
        assert batch.rewards[:, 0].isnan().all()
        assert batch.failures == {"far": 2, "mean": 0}
        with RewardRunner(remote, max_retries=1, retry_wait=0) as runner:
            runner.submit(rows, pictures(2))
            with pytest.raises(RewardError, match=r"'far' failed for 2 of 2 rows.*answers 500: out of memory"):
                runner.collect()


# At the start


@pytest.mark.parametrize("url", ["http://", "ftp://host", "host:8100", "http://host:port", "", 8100])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(InputError, match=r"no URL.*'http://127\.0\.0\.1:8100'"):
        RemoteReward(url)


@pytest.mark.parametrize("option", [{"timeout": 0}, {"max_concurrency": 0}, {"retries": -1}, {"wait": -1}])
def test_numbers_out_of_range_are_refused(option):
    ((name, value),) = option.items()
    with pytest.raises(InputError, match=f"{name}={value} must be"):
        RemoteReward("http://127.0.0.1:9", **option)


def test_a_server_that_is_not_there_is_waited_for_and_then_missed():
    with scripted(None) as url, pytest.raises(RewardUnavailable) as caught:
        RemoteReward(url, wait=0.5)
    assert "is away" in str(caught.value)
    assert "omnitrl serve-reward" in str(caught.value)
    assert "wait=0.5 s" in str(caught.value)
    with scripted(None, GATEWAY, INFO) as url:
        assert RemoteReward(url, wait=10).__name__ == "far"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (response(200, "<html>"), "is no reward server"),
        (response(200, '{"status": "ok"}'), "is no reward server.*no field 'protocol'"),
        (response(200, '{"protocol": 9}'), "speaks reward protocol 9, and this side 1"),
        (response(404, "Not Found"), "answers 404"),
    ],
)
def test_what_is_no_reward_server_is_refused_at_once(answer, sentence):
    with scripted(answer) as url, pytest.raises(RewardError, match=sentence):
        RemoteReward(url)

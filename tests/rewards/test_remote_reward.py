# SPDX-License-Identifier: Apache-2.0
"""A reward behind a server says what it says without one, and whatever goes wrong there is told apart here."""

import asyncio
import inspect
import math
import threading
import time

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video
from omnitrl.rewards import (
    RemoteReward,
    RewardError,
    RewardRunner,
    RewardTraits,
    RewardUnavailable,
    get_reward,
    groupwise,
    reward_traits,
)
from tests.rewards.serving import ask, mean, noise, pictures, serving


NAN = math.nan


def sounds(count):
    return [Audio(np.random.default_rng(i).standard_normal((1, 9)).astype(np.float32), 16000) for i in range(count)]


def look(prompts, completions, level, log_metric, log_extra, trainer_state=None, source=None):
    """Uses all that a reward may be given, and all that it may return."""
    means = mean(completions)
    log_metric("mean", np.mean(means))
    log_metric("step", NAN if trainer_state is None else trainer_state.global_step)
    log_extra("note", [f"{prompt} {asked}" for prompt, asked in zip(prompts, level, strict=True)])
    log_extra("mirrored", [None if source is None else picture for picture in source or prompts])
    special = {"not mine": None, "broken": NAN}
    return [special.get(p, m * asked) for p, m, asked in zip(prompts, means, level, strict=True)]


@reward_traits(media="latents", deterministic=True)
def of_latents(completions, **kwargs):
    return [latent.double().abs().sum().item() for latent in completions]


@groupwise
def rank(completions, prompts, **kwargs):
    means = mean(completions)
    assert len(set(prompts)) == 1
    return [float(sorted(means).index(m)) for m in means]


def scored(reward, rows, media, **options):
    """What a runner makes of a reward, in two chunks."""
    half = len(rows) // 2
    with RewardRunner(reward, timeout=20) as runner:
        for part in (slice(0, half), slice(half, None)):
            given = {name: values[part] if name == "groups" else values for name, values in options.items()}
            if runner.needs_latents:
                runner.submit(rows[part], None, latents=media[part], **given)
            else:
                runner.submit(rows[part], media[part], **given)
        return runner.collect()


def same(a, b):
    """Whether two batches are equal, bit for bit."""
    assert torch.equal(a.rewards.view(torch.int64), b.rewards.view(torch.int64))
    assert torch.equal(a.failed, b.failed)
    assert a.failures == b.failures
    assert str(a.metrics) == str(b.metrics)  # NaN is equal to NaN here
    assert list(a.extras) == list(b.extras)
    for column in a.extras:
        for one, other in zip(a.extras[column], b.extras[column], strict=True):
            assert type(one) is type(other) or isinstance(one, Image.Image)
            assert np.array_equal(np.asarray(one), np.asarray(other))
    return True


VIDEOS = [Video(noise(3, 4, 5, 3, seed=i), 16.0, sounds(6)[i] if i % 2 else None) for i in range(6)]
MEDIA = {
    "pictures": pictures(6),
    "videos": VIDEOS,
    "sounds": sounds(6),
    "arrays": [noise(4, 4, 3, seed=i) for i in range(6)],
    "tensors": [torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)],
}
PROMPTS = ["a cat", "not mine", "broken", "two dogs", "„Ü“", ""]


@pytest.fixture(scope="module")
def look_url():
    with serving(look) as url:
        yield url


@pytest.mark.parametrize("kind", MEDIA)
def test_a_round_trip_equals_the_local_call(kind, look_url):
    from types import SimpleNamespace

    edited = pictures(1)[0]
    rows = [{"prompt": p, "level": np.float32(i + 0.1), "source": edited} for i, p in enumerate(PROMPTS)]
    state = {"trainer_state": SimpleNamespace(global_step=7)}
    local = scored(look, rows, MEDIA[kind], **state)
    assert local.failed[:, 0].tolist() == [False, False, True, False, False, False]
    assert local.rewards[:, 0].isnan().tolist() == [False, True, True, False, False, False]
    assert local.metrics["step"] == 7
    remote = RemoteReward(look_url)
    assert same(local, scored(remote, rows, MEDIA[kind], **state))
    assert same(local, scored(RemoteReward(look_url, png=True), rows, MEDIA[kind], **state))


def test_latents_are_scored_as_they_are():
    latents = list(torch.randn(6, 4, 3, 3))
    rows = [{"prompt": p} for p in PROMPTS]
    with serving(of_latents) as url:
        remote = RemoteReward(url)
        assert remote.traits == RewardTraits(media=("latents",), deterministic=True)
        assert same(scored(of_latents, rows, latents), scored(remote, rows, latents))


def test_a_groupwise_reward_gets_whole_groups():
    rows = [{"prompt": "ab"[i % 2]} for i in range(8)]
    given = {"groups": [i % 2 for i in range(8)], "group_size": 4}
    local = scored(rank, rows, pictures(8), **given)
    assert sorted(local.rewards[:, 0].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    with serving(rank) as url:
        assert same(local, scored(RemoteReward(url), rows, pictures(8), **given))


@pytest.mark.parametrize("kind", ["async", "module"])
def test_every_form_of_a_reward_can_be_served(kind):
    async def later(completions, **kwargs):
        await asyncio.sleep(0.001)
        return mean(completions)

    class Mean(torch.nn.Module):
        def forward(self, completions, **kwargs):
            assert not self.training
            assert not torch.is_grad_enabled()
            return torch.tensor(mean(completions))

    reward = {"async": later, "module": Mean()}[kind]
    rows = [{"prompt": p} for p in PROMPTS]
    with serving(reward) as url:
        assert same(scored(reward, rows, MEDIA["pictures"]), scored(RemoteReward(url), rows, MEDIA["pictures"]))


def test_it_is_named_and_called_as_the_reward_that_is_served(look_url):
    remote = get_reward(look_url)
    assert isinstance(remote, RemoteReward)
    with RewardRunner([look_url, look]) as runner:
        assert runner.names == ["look", "look_1"]
    accepted = inspect.signature(remote).parameters
    assert set(accepted) == set(inspect.signature(look).parameters)
    assert accepted["level"].default is inspect.Parameter.empty
    assert accepted["source"].default is None
    with RewardRunner(RemoteReward(look_url, name="judge")) as runner:
        assert runner.names == ["judge"]


def test_a_missing_column_is_missed_here(look_url):
    with RewardRunner(look_url) as runner, pytest.raises(RewardError, match="'look' requires the argument 'level'"):
        runner.submit([{"prompt": "a"}], pictures(1))


# What goes wrong


ROW = {"prompts": ["a cat"], "completions": pictures(1)}


@pytest.mark.parametrize(
    ("raised", "expected", "sentence"),
    [
        (ZeroDivisionError("by zero"), RuntimeError, "answers 500: ZeroDivisionError: by zero"),
        (InputError("odd"), RuntimeError, "answers 500: InputError: odd"),
        (RewardError("no such judge"), RewardError, "answers 422: no such judge"),
        (ImportError('pip install "x"'), RewardError, 'answers 422: pip install "x"'),
        (RewardUnavailable("judge away", retry_after=7.0), RewardUnavailable, "status 503, judge away"),
        (SystemExit(3), RuntimeError, "answers 500: RuntimeError: the reward raised SystemExit: 3"),
    ],
)
def test_errors_of_the_reward_are_told_apart(raised, expected, sentence):
    def failing(completions, **kwargs):
        raise raised

    with serving(failing) as url, pytest.raises(expected) as caught:
        ask(RemoteReward(url), **ROW)
    assert sentence in str(caught.value)
    assert type(caught.value) is expected
    if expected is RewardUnavailable:
        assert caught.value.retry_after == 7.0


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0, 2.0], "'broken' returned 2 values for 1 rows"),
        (["good"], "'broken' returned a value of type str for row 0 ('good')"),
        (None, "'broken' returned None for 1 rows"),
    ],
)
def test_a_broken_contract_ends_the_run(returned, sentence):
    def broken(completions, **kwargs):
        return returned

    with serving(broken) as url, RewardRunner(url) as runner:
        runner.submit([{"prompt": "a"}], pictures(1))
        with pytest.raises(RewardError) as caught:
            runner.collect()
    assert sentence in str(caught.value)


def test_what_cannot_be_sent_and_what_is_too_large_never_leaves():
    with serving(mean, max_body_bytes=1000) as url:
        remote = RemoteReward(url)
        with pytest.raises(RewardError, match="reward 'mean': 'date' of row 0 is of type object"):
            ask(remote, **ROW, date=[object()])
        big = [Image.new("RGB", (100, 100))]
        with pytest.raises(RewardError, match=r"1 rows are 0\.0 MB.*--max_body_mb 1"):
            ask(remote, prompts=["a"], completions=big)
        answer = httpx.post(f"{url}/score", content=bytes(10**6))
        assert answer.status_code == 413
        assert "more than the 1000 bytes" in answer.json()["error"]
        answer = httpx.post(f"{url}/score", content=(bytes(1000) for _ in range(50)))  # which says no length before
        assert answer.status_code == 413


def test_without_the_token_nothing_is_told(monkeypatch):
    monkeypatch.delenv("OMNITRL_REWARD_TOKEN", raising=False)
    with serving(mean, token="secret") as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "requests": 0}
        for token in (None, "Secret", "secret2"):
            with pytest.raises(RewardError, match="answers 401: this reward server wants a token"):
                RemoteReward(url, token=token)
        assert httpx.post(f"{url}/score", content=bytes(10**6)).status_code == 401
        assert ask(RemoteReward(url, token="secret"), **ROW) == mean(**ROW)
        monkeypatch.setenv("OMNITRL_REWARD_TOKEN", "secret")
        assert ask(RemoteReward(url), **ROW) == mean(**ROW)


@pytest.mark.parametrize("token", ["", "wörter", "two words", "a\nb", " a"])
def test_a_token_that_no_header_can_have_is_refused(token):
    with pytest.raises(InputError, match="a word of ASCII"), serving(mean, token=token):
        pass
    if token:
        with pytest.raises(InputError, match="a word of ASCII"):
            RemoteReward("http://127.0.0.1:9", token=token)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"hello", "5 bytes are no message of the reward protocol"), (b"", "0 bytes are no message")],
)
def test_a_request_that_is_none_is_answered_with_a_sentence(content, sentence, look_url):
    answer = httpx.post(f"{look_url}/score", content=content)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("GET", "/score", 405)])
def test_a_wrong_route_is_answered_with_the_right_ones(method, path, status, look_url):
    answer = httpx.request(method, look_url + path)
    assert answer.status_code == status
    assert "there are GET /health, GET /info and POST /score here" in answer.json()["error"]


# Several clients


def post(url, count, prompt="a", level=1):
    """Asks in a thread of its own."""
    answers = []

    def work():
        given = {"prompts": [prompt] * count, "completions": pictures(count), "level": [level] * count}
        try:
            answers.append(ask(RemoteReward(url), **given))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, answers


class Gate:
    """A reward that waits until it is let, and knows what it was called with."""

    traits = RewardTraits(batch_size=4)

    def __init__(self):
        self.calls, self.open, self.entered = [], threading.Event(), threading.Event()

    def __call__(self, prompts, completions, level, log_metric, **kwargs):
        self.calls.append(list(prompts))
        self.entered.set()
        assert self.open.wait(20)
        if "bad" in prompts:
            raise ValueError("bad")
        log_metric("rows", len(prompts))
        return [value * asked for value, asked in zip(mean(completions), level, strict=True)]


def wait_for(url, requests):
    """Until so many requests are inside."""
    end = time.monotonic() + 20
    with httpx.Client(verify=False) as client:
        while client.get(f"{url}/health").json()["requests"] != requests:
            assert time.monotonic() < end
            time.sleep(0.02)


def queued(url, gate, *requests):
    """Sends requests one after the other while the first is being served, then lets them be served."""
    asked = [post(url, 1, "first")]
    assert gate.entered.wait(20)
    for count, prompt, level in requests:
        asked.append(post(url, count, prompt, level))
        wait_for(url, len(asked))
    gate.open.set()
    for thread, _ in asked:
        thread.join(20)
    return [answers[0] for _, answers in asked]


def test_requests_that_wait_are_joined_up_to_the_batch_size():
    gate = Gate()
    with serving(gate) as url:
        answers = queued(url, gate, (2, "b", 2), (2, "c", 3), (1, "d", 4), (9, "e", 5))
    assert gate.calls == [["first"], ["b", "b", "c", "c"], ["d"], ["e"] * 4, ["e"] * 4, ["e"]]
    for answer, (count, level) in zip(answers, [(1, 1), (2, 2), (2, 3), (1, 4), (9, 5)], strict=True):
        assert answer == [value * level for value in mean(pictures(count))]


def test_the_fault_of_one_request_is_not_that_of_another():
    gate = Gate()
    with serving(gate) as url:
        _, good, bad = queued(url, gate, (2, "good", 1), (2, "bad", 1))
    assert gate.calls == [["first"], ["good", "good", "bad", "bad"], ["good", "good"], ["bad", "bad"]]
    assert good == mean(pictures(2))
    assert "ValueError: bad" in str(bad)


def test_a_full_server_says_when_to_ask_again():
    gate = Gate()
    with serving(gate, max_requests=1) as url:
        first = post(url, 1, "first")
        assert gate.entered.wait(20)
        with pytest.raises(RewardUnavailable, match="status 503, 1 requests are being served or wait") as caught:
            ask(RemoteReward(url, timeout=0.5), prompts=["a"], completions=pictures(1), level=[1])
        assert caught.value.retry_after == 1.0
        gate.open.set()
        first[0].join(20)
        assert first[1] == [mean(pictures(1))]
        assert ask(RemoteReward(url), prompts=["a"], completions=pictures(1), level=[1]) == mean(pictures(1))


def test_a_full_server_is_waited_for():
    """With no patience for servers that are away, and no further attempts: a full one is neither away nor broken."""
    gate = Gate()
    with serving(gate, max_requests=1) as url, RewardRunner(url, max_wait=0, max_retries=0) as runner:
        first = post(url, 1, "first")
        assert gate.entered.wait(20)
        runner.submit([{"prompt": "a", "level": 2}], pictures(1))
        time.sleep(0.2)
        gate.open.set()
        batch = runner.collect()
        first[0].join(20)
    assert batch.rewards[:, 0].tolist() == [2 * mean(pictures(1))[0]]
    assert batch.failures == {"Gate": 0}


def test_a_client_that_went_away_is_not_served():
    gate = Gate()
    with serving(gate) as url:
        first = post(url, 1, "first")
        assert gate.entered.wait(20)
        with pytest.raises(TimeoutError, match=r"gave no answer within timeout=0\.2 s"):
            ask(RemoteReward(url, timeout=0.2), prompts=["gone"], completions=pictures(1), level=[1])
        wait_for(url, 1)
        last = post(url, 1, "last")
        wait_for(url, 2)
        gate.open.set()
        for thread, _ in (first, last):
            thread.join(20)
    assert gate.calls == [["first"], ["last"]]


def test_a_call_that_hangs_is_given_up():
    hang = threading.Event()

    def hanging(prompts, **kwargs):
        if prompts[0] == "hang":
            hang.wait(20)
        return [1.0]

    with serving(hanging, timeout=0.2) as url:
        with pytest.raises(RuntimeError, match=r"500: TimeoutError: no answer within timeout=0\.2 s"):
            ask(RemoteReward(url), prompts=["hang"])
        assert ask(RemoteReward(url), prompts=["go on"]) == [1.0]
    hang.set()


def test_a_call_that_cancels_itself_is_answered_and_others_too():
    async def cancels(prompts, **kwargs):
        if prompts[0] == "cancel":
            raise asyncio.CancelledError
        return [1.0]

    with serving(cancels, max_concurrency=1) as url:
        reward = RemoteReward(url, timeout=5)
        with pytest.raises(RuntimeError, match="500: RuntimeError: the call was cancelled from within"):
            ask(reward, prompts=["cancel"])
        assert ask(reward, prompts=["go on"]) == [1.0]


def test_calls_of_an_asynchronous_reward_overlap_up_to_a_bound():
    running, most = 0, 0

    async def slow(prompts, **kwargs):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return [0.0] * len(prompts)

    with serving(slow, max_concurrency=3) as url:
        remote = RemoteReward(url)

        async def many():
            answers = await asyncio.gather(*(remote(prompts=["a"]) for _ in range(8)))
            await remote.aclose()
            return answers

        assert asyncio.run(many()) == [[0.0]] * 8
    assert most == 3


# Options of the server


@pytest.mark.parametrize("option", [{"batch_size": 0}, {"timeout": 0}, {"max_requests": 0}, {"max_concurrency": -1}])
def test_numbers_out_of_range_are_refused_by_the_server(option):
    ((name, value),) = option.items()
    with pytest.raises(InputError, match=f"{name}={value} must be more than 0"), serving(mean, **option):
        pass


def test_a_model_goes_where_it_is_told_to():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, prompts, log_extra, **kwargs):
            log_extra("device", [self.weight.device.type])
            return [1.0]

    logged = {}
    with serving(Model(), device="meta") as url:
        assert ask(RemoteReward(url), prompts=["a"], log_extra=logged.__setitem__) == [1.0]
    assert logged == {"device": ["meta"]}
    with pytest.raises(InputError, match="'Model' cannot be moved to device='gpu'"), serving(Model(), device="gpu"):
        pass


def test_a_groupwise_reward_has_no_batch_size():
    with pytest.raises(InputError, match="'rank' is called with whole groups"), serving(rank, batch_size=4):
        pass

# SPDX-License-Identifier: Apache-2.0
"""The client of rollout servers: whatever they do, no sample is lost and none comes twice."""

import json
import logging
import re
import threading
import time
from collections import Counter

import pytest

from omnitrl.errors import InputError, RunError
from omnitrl.rollout.vllm_omni import replica
from omnitrl.rollout.vllm_omni.client import BadAnswer, Jobs, RolloutClient
from omnitrl.rollout.vllm_omni.replica import WeightUpdate
from omnitrl.rollout.vllm_omni.transport import ADAPTER, HttpTransport, check_url
from tests.rollout.stub import HangUp, Stub, info, refusal, until


pytest.importorskip("httpx")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(replica, "CONFIRM_INTERVAL", 0.2)
    monkeypatch.setattr(replica, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(replica, "LONGEST_PAUSE", 0.1)


@pytest.fixture
def make():
    """Makes stubs and clients, and ends them."""
    made = []

    def stub(answer=None):
        made.append(Stub(answer))
        return made[-1]

    def client(*stubs, connect=True, **options):
        options = {"patience": 5.0, "concurrency": 2, **options}
        made.append(RolloutClient([HttpTransport(s if isinstance(s, str) else s.url) for s in stubs], **options))
        if connect:
            made[-1].connect()
        return made[-1]

    yield type("Make", (), {"stub": staticmethod(stub), "client": staticmethod(client)})
    for thing in reversed(made):
        (thing.close if isinstance(thing, RolloutClient) else thing.stop)()


def number_of(number, message):
    if not message.isdigit():
        raise BadAnswer(f"{message!r} is no sample")
    assert int(message) == number
    return number


def jobs(count=8, group=4):
    return Jobs([i // group for i in range(count)], lambda number: str(number).encode(), number_of)


def run(client, count=8, group=4):
    """All samples, each once, in the order in which they came."""
    came = [sample for _, sample in client.stream(jobs(count, group))]
    assert sorted(came) == list(range(count))
    return came


def once(first, stub=None):
    """A server that does something else at the first sample that it is asked for, or at the first `first`."""
    done = []

    def answer(path, body):
        if path.endswith("generate") and not done:
            done.append(body)
            return first(path, body)
        return answer.stub.plain(path, body)

    return answer


def one_that(make, first):
    answer = once(first)
    answer.stub = make.stub(answer)
    return answer.stub


# Order, concurrency, groups


def test_each_sample_is_asked_for_once_and_in_order(make):
    stub = make.stub()
    client = make.client(stub, concurrency=1)  # those that are on their way together may overtake each other
    assert client.alive == 1
    run(client, 8)
    assert stub.asked() == list(range(8))
    assert client.retries == 0
    assert list(client.stream(jobs(0))) == []


@pytest.mark.parametrize(("given", "bound"), [(1, 1), (3, 3), (None, 4)])
def test_no_server_is_asked_for_more_at_once_than_allowed(make, given, bound):
    """Without a number, twice what the server makes at once, which is two here."""
    stub = make.stub()
    stub.answer = lambda path, body: (time.sleep(0.02), stub.plain(path, body))[1]
    run(make.client(stub, concurrency=given), 16)
    assert stub.most == bound


def test_groups_stay_on_one_server_and_servers_share_the_work(make):
    stubs = [make.stub(), make.stub()]
    for stub in stubs:
        stub.answer = lambda path, body, stub=stub: (time.sleep(0.02), stub.plain(path, body))[1]
    run(make.client(*stubs), 24, 4)
    groups = [{number // 4 for number in stub.asked()} for stub in stubs]
    assert groups[0] | groups[1] == set(range(6))
    assert len(groups[0] & groups[1]) <= 1  # the last one, of which the server that is idle takes what is left
    assert all(8 <= len(stub.asked()) <= 16 for stub in stubs)


def test_servers_share_what_one_of_them_could_take(make):
    """Groups are kept together as long as there is one for each server."""
    stubs = [make.stub(), make.stub()]
    for stub in stubs:
        stub.answer = lambda path, body, stub=stub: (time.sleep(0.05), stub.plain(path, body))[1]
    run(make.client(*stubs, concurrency=16), 12, 3)
    assert [len(stub.asked()) for stub in stubs] == [6, 6]
    groups = [{number // 3 for number in stub.asked()} for stub in stubs]
    assert not groups[0] & groups[1]


def test_an_idle_server_takes_half_of_the_only_group(make):
    stubs = [make.stub(), make.stub()]
    for stub in stubs:
        stub.answer = lambda path, body, stub=stub: (time.sleep(0.02), stub.plain(path, body))[1]
    run(make.client(*stubs), 16, 16)
    assert all(4 <= len(stub.asked()) <= 12 for stub in stubs)


# What goes wrong with a sample


@pytest.mark.parametrize(
    "first",
    [
        lambda path, body: refusal(500, "internal", "out of memory"),
        lambda path, body: (500, b"<html>oh no</html>"),
        lambda path, body: (200, b"garbage"),
    ],
    ids=["error", "no words", "garbage"],
)
def test_a_sample_that_failed_is_asked_for_again(make, first, caplog):
    stub = one_that(make, first)
    client = make.client(stub)
    run(client)
    assert Counter(stub.asked()) == Counter([*range(8), stub.asked()[0]])
    assert client.retries == 1
    assert f"{stub.url} failed to make a sample, which is asked for again" in caplog.text


def test_another_server_is_asked_where_there_is_one(make):
    bad, good = make.stub(), make.stub()
    bad.answer = lambda path, body: (
        refusal(500, "internal", "broken card") if path.endswith("generate") else bad.plain(path, body)
    )
    client = make.client(bad, good, concurrency=1)
    run(client, 4, 1)
    assert set(good.asked()) == set(range(4))


@pytest.mark.parametrize(
    ("answer", "words", "tries"),
    [
        (lambda path, body: refusal(500, "internal", "out of memory"), "out of memory", 3),
        (lambda path, body: (200, b"garbage"), "b'garbage' is no sample", 3),
        (lambda path, body: (502, b"Bad gateway"), r"in its place \(HTTP status 502\): Bad gateway", 8),
        (lambda path, body: refusal(503, "away", "its engine has died"), "its engine has died", 8),
    ],
    ids=["error", "garbage", "gateway", "engine"],
)
def test_a_sample_that_nobody_can_make_ends_the_run_with_the_servers_words(make, answer, words, tries):
    stub = make.stub()
    stub.answer = lambda path, body: answer(path, body) if path.endswith("generate") else stub.plain(path, body)
    client = make.client(stub, concurrency=1)
    with pytest.raises(RunError, match=f"could not be made in {tries} tries; the last was of {stub.url}: .*{words}"):
        run(client, 1)
    assert len(stub.asked()) == tries


def test_a_request_that_can_never_work_is_the_callers_error_at_once(make):
    stub = make.stub()
    stub.answer = lambda path, body: (
        refusal(400, "input", "height=63 is no multiple of 16: use height=64.")
        if path.endswith("generate")
        else stub.plain(path, body)
    )
    client = make.client(stub, concurrency=1)
    with pytest.raises(InputError, match=r"refused \(HTTP status 400\): height=63 .* use height=64"):
        run(client)
    assert len(stub.asked()) == 1


def test_a_sample_that_takes_too_long_is_asked_for_again_and_counts_once(make):
    """What was late comes in the end too, to nobody."""
    released = threading.Event()
    stub = one_that(make, lambda path, body: (released.wait(5), (200, body))[1])
    client = make.client(stub, sample_timeout=0.3)
    came = []
    for _, sample in client.stream(jobs()):
        came.append(sample)
        released.set()
    assert sorted(came) == list(range(8))
    assert client.retries <= 1
    assert len(stub.asked()) == 8 + client.retries


def test_a_server_that_is_always_too_slow_ends_the_run_with_the_option(make):
    stub = make.stub()
    stub.answer = lambda path, body: (path.endswith("generate") and time.sleep(0.5), stub.plain(path, body))[1]
    with pytest.raises(RunError, match=r"did not answer within 0\.1 s \(vllm_request_timeout\)"):
        run(make.client(stub, sample_timeout=0.1, concurrency=1), 1)


# Servers that go away


def hang_up(path, body):
    raise HangUp


def test_a_broken_connection_is_another_try(make, caplog):
    stub = one_that(make, hang_up)
    client = make.client(stub, concurrency=1)
    run(client)
    assert client.retries == 1
    assert f"{stub.url} is left out: the connection broke" in caplog.text
    assert f"{stub.url} is back" in caplog.text


def test_a_server_that_dies_leaves_its_samples_to_the_other(make, caplog):
    """And when it is back it gets the weights before it gets samples."""
    dying, staying = make.stub(), make.stub()
    restarted, back = [], threading.Event()

    def slowly(path, body):
        time.sleep(0.03)
        if restarted and path.endswith("generate"):
            back.wait(10)  # so that there is something left to do when the other one is back
        return staying.plain(path, body)

    def dies(path, body):
        time.sleep(0.03)
        if restarted and path.endswith("generate"):
            back.set()
        return dying.plain(path, body)

    dying.answer, staying.answer = dies, slowly
    client = make.client(dying, staying)
    client.update(WeightUpdate(7, [(ADAPTER, b"7")]))
    assert (dying.version, staying.version) == (7, 7)
    came = []
    for _, sample in client.stream(jobs(40, 2)):
        came.append(sample)
        if len(came) == 8:
            threading.Thread(target=dying.stop).start()
            until(lambda: client.alive == 1)
            at_death = len(dying.calls)
        if len(came) == 16:
            restarted.append(len(dying.calls))
            dying.restart()
            until(lambda: client.alive == 2)
    assert sorted(came) == list(range(40))
    assert client.retries <= 2  # what it had been asked for
    paths = [path.rpartition("/")[2] for path, _ in dying.calls[restarted[0] :]]
    assert at_death > 8
    assert "generate" in paths
    assert "adapter" in paths[: paths.index("generate")]
    assert dying.version == 7
    assert f"{dying.url} is left out" in caplog.text
    assert f"{dying.url} is back" in caplog.text


def test_the_only_server_may_come_back(make):
    stub = make.stub()
    stub.answer = lambda path, body: (time.sleep(0.02), stub.plain(path, body))[1]
    client = make.client(stub)
    client.update(WeightUpdate(3, [(ADAPTER, b"3")]))
    came = []
    for _, sample in client.stream(jobs(12)):
        came.append(sample)
        if len(came) == 4:
            stub.stop()
            threading.Timer(0.5, stub.restart).start()
    assert sorted(came) == list(range(12))
    assert stub.version == 3


@pytest.mark.parametrize("gone", [(503, b"<html>no upstream</html>"), refusal(503, "away", "its engine has died")])
def test_a_gateway_without_its_server_and_a_server_without_its_engine_are_waited_for(make, gone):
    """For weights and for samples."""
    stub = make.stub()
    client = make.client(stub)
    for use in (lambda: run(client), lambda: client.update(WeightUpdate(3, [(ADAPTER, b"3")]))):
        back = time.monotonic() + 0.4
        stub.answer = lambda path, body, back=back: gone if time.monotonic() < back else stub.plain(path, body)
        use()
    assert stub.version == 3


def test_a_gateway_without_its_server_leaves_the_samples_to_another(make, caplog):
    gone, staying = make.stub(), make.stub()
    client = make.client(gone, staying)
    gone.answer = lambda path, body: (502, b"Bad gateway")
    run(client)
    assert client.update(WeightUpdate(3, [(ADAPTER, b"3")])).bound == 3
    assert set(staying.asked()) == set(range(8))
    assert caplog.text.count(f"{gone.url} is left out") == 1


def test_without_any_server_the_run_ends_with_their_last_words(make):
    stub = make.stub()
    client = make.client(stub, patience=0.4)
    stub.stop()
    started = time.monotonic()
    with pytest.raises(RunError, match=rf"for 0\.4 s \(vllm_server_timeout\)\. {stub.url}: it cannot be connected to"):
        run(client)
    assert time.monotonic() - started < 5
    assert client.alive == 0


def test_a_server_that_hangs_is_left_out(make, monkeypatch):
    """It takes connections and says nothing, not even who it is."""
    monkeypatch.setattr(replica, "INFO_TIMEOUT", 0.3)
    hanging, staying = make.stub(), make.stub()
    client = make.client(hanging, staying)
    released = threading.Event()
    hanging.answer = lambda path, body: (released.wait(20), (500, b""))[1]
    run(client, 12, 2)
    released.set()
    assert set(hanging.asked()) < set(range(12))


# Weights


def stale_until_pushed(stub):
    def answer(path, body):
        if path.endswith("generate") and stub.version != 5:
            return refusal(409, "stale", f"There are the weights {stub.version}.")
        return stub.plain(path, body)

    return answer


def test_a_server_that_lost_its_weights_gets_them_again(make, caplog):
    stub = make.stub()
    stub.answer = stale_until_pushed(stub)
    client = make.client(stub)
    assert client.update(WeightUpdate(5, [(ADAPTER, b"5")])).bound == 3
    stub.version = -1
    run(client)
    assert [body for path, body in stub.calls if path == ADAPTER] == [b"5", b"5"]
    assert "has other weights than those of this step" in caplog.text


def test_equal_weights_are_sent_once(make):
    stub = make.stub()
    client = make.client(stub)
    update = WeightUpdate(5, [(ADAPTER, b"5")])
    assert client.update(update).version == 5
    assert client.update(update) is None
    time.sleep(0.5)  # the client looks after its servers
    assert [body for path, body in stub.calls if path == ADAPTER] == [b"5"]


def test_at_other_times_a_server_is_left_to_other_trainers(make):
    """One that other processes rely on looks after their servers at all times."""
    stub = make.stub()
    client = make.client(stub)
    client.update(WeightUpdate(5, [(ADAPTER, b"5")]))
    stub.version = 6
    time.sleep(0.6)
    assert stub.version == 6
    keeper = make.client(stub, for_others=True)
    keeper.update(WeightUpdate(7, [(ADAPTER, b"7")]))
    stub.version = 6
    until(lambda: stub.version == 7)


def test_the_same_sample_of_each_server(make):
    """One that has lost its weights gets them first."""
    stubs = [make.stub(), make.stub()]
    for stub in stubs:
        stub.answer = stale_until_pushed(stub)
    client = make.client(*stubs)
    client.update(WeightUpdate(5, [(ADAPTER, b"5")]))
    stubs[1].version = -1
    assert client.of_each(b"1", int) == {stub.url: 1 for stub in stubs}


def test_the_same_sample_of_each_server_is_asked_for_again_too(make):
    failing, broken = one_that(make, lambda path, body: refusal(500, "internal", "out of memory")), make.stub()
    assert make.client(failing).of_each(b"1", int) == {failing.url: 1}
    broken.answer = lambda path, body: (200, b"garbage") if path.endswith("generate") else broken.plain(path, body)
    with pytest.raises(RunError, match=f"in 3 tries; the last was of {broken.url}: b'garbage' is no sample"):
        make.client(broken).of_each(b"1", lambda message: number_of(1, message))


def test_another_process_brings_the_weights(make):
    """A server without them waits until they are there; that is not this process's work."""
    stub = make.stub()
    stub.answer = stale_until_pushed(stub)
    client = make.client(stub)
    assert client.update(WeightUpdate(5)) is None
    threading.Timer(0.4, setattr, (stub, "version", 5)).start()
    run(client)
    assert ADAPTER not in [path for path, _ in stub.calls]


def test_weights_that_do_not_fit_are_named(make):
    stub = make.stub()
    report = {"version": 1, "bound": 1, "expected": 3, "missing": ["transformer.a", "transformer.b"]}
    stub.answer = lambda path, body: (200, json.dumps(report).encode()) if path == ADAPTER else stub.plain(path, body)
    with pytest.raises(RunError, match=r"took 1 of 3 trained modules; it has no place for transformer\.a, transfor"):
        make.client(stub).update(WeightUpdate(1, [(ADAPTER, b"1")]))


def test_weights_that_are_refused_are_the_callers_error(make):
    stub = make.stub()
    stub.answer = lambda path, body: (
        refusal(400, "input", "DoRA is not supported.") if path == ADAPTER else stub.plain(path, body)
    )
    with pytest.raises(InputError, match="DoRA is not supported"):
        make.client(stub).update(WeightUpdate(1, [(ADAPTER, b"1")]))


# The start


def test_a_server_that_is_not_up_yet_is_waited_for(make, caplog):
    stub = make.stub()
    stub.stop()
    threading.Timer(1.5, stub.restart).start()
    client = make.client(stub, connect=False)
    with caplog.at_level(logging.WARNING):
        assert client.connect()[0].pipeline_class == "StableDiffusion3Pipeline"
    assert "Waiting up to 5 s (vllm_server_timeout) for rollout servers" in caplog.text


def test_a_server_that_does_not_come_is_an_error(make):
    started = time.monotonic()
    client = make.client("http://127.0.0.1:9", connect=False, patience=0.3)
    with pytest.raises(RunError, match="Start one with `omnitrl vllm-serve MODEL`, or correct vllm_server_base_url"):
        client.connect()
    assert time.monotonic() - started < 5


def test_one_of_two_servers_is_enough_to_start(make):
    stub = make.stub()
    client = make.client(stub, "http://127.0.0.1:9", patience=2.0)
    run(client)
    assert client.alive == 1


def test_a_server_without_the_hooks_says_how_to_start_it(make):
    stub = make.stub(lambda path, body: (404, b'{"detail":"Not Found"}'))
    with pytest.raises(InputError, match=r"without omnitrl's routes .*: start it with `omnitrl vllm-serve MODEL`"):
        make.client(stub)


@pytest.mark.parametrize("answer", [b"{}", b"no json", json.dumps(info(more=1)).encode()])
def test_a_server_of_another_version_says_so(make, answer):
    stub = make.stub(lambda path, body: (200, answer))
    with pytest.raises(InputError, match="install the same version of omnitrl on both sides"):
        make.client(stub)


def test_a_wrong_server_is_refused_by_name(make):
    def check(found, name):
        if found.model == "tiny":
            raise InputError(f"{name} serves the wrong model.")

    stub = make.stub()
    with pytest.raises(InputError, match=f"{stub.url} serves the wrong model"):
        make.client(stub, check=check)


def test_a_server_that_comes_back_as_another_is_left_out_and_named_once(make, caplog):
    def check(found, name):
        if found.model == "another":
            raise InputError(f"{name} serves the wrong model.")

    changing, staying = make.stub(), make.stub()
    client = make.client(changing, staying, check=check)
    changing.stop()
    until(lambda: client.alive == 1)
    changing.answer = lambda path, body: (200, json.dumps(info(model="another")).encode())
    changing.start(changing.port)
    until(lambda: "is not taken into service" in caplog.text)
    time.sleep(0.3)
    run(client)
    assert caplog.text.count(f"{changing.url} serves the wrong model") == 1
    assert changing.asked() == []


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://a", "http://", "http://a/v1", "http://a:port", ""),
        *("http://a:8000?x", "http://a#x", "http://me:word@a:8000"),
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InputError, match=f"vllm_server_base_url='{re.escape(url)}' is no address"):
        check_url(url)


def test_addresses_lose_their_slash_and_their_capitals():
    """What is encrypted is known by its scheme."""
    assert check_url("http://a:8000/") == "http://a:8000"
    assert check_url("HTTPS://[::1]:8000") == "https://[::1]:8000"


# Interrupts


def test_an_interrupt_ends_the_wait_and_the_client_stays_usable(make):
    stub = make.stub()
    pressed, released = [], threading.Event()

    def check():
        if pressed:
            pressed.clear()
            raise KeyboardInterrupt

    client = make.client(stub, on_wait=check)
    stub.answer = lambda path, body: (path.endswith("generate") and released.wait(5), stub.plain(path, body))[1]
    threading.Timer(0.3, pressed.append, (1,)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(client)
    assert time.monotonic() - started < 2
    released.set()
    stub.answer = stub.plain
    run(client)


def test_two_streams_at_once_share_a_server(make):
    """The second one begins while all of the server is the first one's."""
    stub = make.stub()
    stub.answer = lambda path, body: (time.sleep(0.02), stub.plain(path, body))[1]
    client = make.client(stub)
    first = client.stream(jobs(12))
    came = [next(first)[1]]
    run(client, 6)
    came += [sample for _, sample in first]
    assert sorted(came) == list(range(12))
    assert client.replicas[0].running == 0


def test_the_end_may_come_from_the_clients_own_thread(make):
    """A client that is garbage is closed wherever garbage is collected."""
    client = make.client(make.stub())

    async def end():
        client.close()

    client._loop.start(end()).result(timeout=5)
    until(lambda: not client._loop._thread.is_alive())


def test_samples_that_nobody_wants_are_not_asked_for(make):
    stub = make.stub()
    stub.answer = lambda path, body: (time.sleep(0.02), stub.plain(path, body))[1]
    client = make.client(stub, concurrency=1)
    stream = client.stream(jobs(50))
    next(stream)
    stream.close()
    time.sleep(0.2)
    assert len(stub.asked()) < 10
    run(client)

# SPDX-License-Identifier: Apache-2.0
"""Whole networks that get to servers by a collective of the trainer and the server's workers."""

import asyncio
import json
import threading
import time

import pytest
import torch

from omnitrl import FlowGRPOConfig
from omnitrl.errors import InputError
from omnitrl.messages import unpack
from omnitrl.rollout.vllm_omni import collective, replica
from omnitrl.rollout.vllm_omni.client import RolloutClient
from omnitrl.rollout.vllm_omni.collective import Group, Invitation
from omnitrl.rollout.vllm_omni.replica import WeightUpdate
from omnitrl.rollout.vllm_omni.transport import ADAPTER, JOIN, WEIGHTS, HttpTransport
from tests.rollout.stub import HangUp, Stub, info, refusal, until


pytest.importorskip("httpx")


class Member(Stub):
    """A server that joins groups, with `workers` threads as its workers, and keeps the messages that came."""

    def __init__(self, workers=1):
        super().__init__(self.take)
        self.workers, self.groups, self.received, self.by_group = workers, [], [], []
        self.brought = 5  # version of the weights that come, which these messages do not say

    def take(self, path, body):
        if path.endswith("info"):
            return 200, json.dumps(info(weight_version=self.version, workers=self.workers)).encode()
        if path == JOIN:
            self.groups = self.each(lambda i: Group.join(Invitation(**json.loads(body)), 1 + i, torch.device("cpu")))
            return 200, b"{}"
        message = body
        if not body.startswith(b"part"):
            head, _ = unpack(body, "rollout")
            assert {group.name for group in self.groups} == {head["group"]}
            messages = self.each(lambda i: self.groups[i].receive(head["num_bytes"]))
            assert len(set(messages)) == 1
            message = messages[0]
        self.received.append(message)
        self.by_group.append(message is not body)
        self.version = self.brought
        return 200, json.dumps({"version": self.version, "bound": 3, "expected": 3, "missing": []}).encode()

    def each(self, work):
        results = [None] * self.workers

        def run(i):
            results[i] = work(i)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


MESSAGES = [b"part 1 " + bytes(range(256)) * 4096, b"part 2"]
UPDATE = WeightUpdate(5, [(WEIGHTS, message) for message in MESSAGES])


@pytest.fixture
def make(monkeypatch):
    """Makes servers and a client of them, and ends them."""
    monkeypatch.setattr(replica, "CONFIRM_INTERVAL", 0.2)
    monkeypatch.setattr(replica, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(replica, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(collective, "GRACE", 1.0)
    made = []

    def server(**options):
        made.append(Member(**options))
        return made[-1]

    def client(*servers, **options):
        options = {"patience": 20.0, "for_others": True, "collective_from": torch.device("cpu"), **options}
        made.append(RolloutClient([HttpTransport(server.url) for server in servers], **options))
        made[-1].connect()
        return made[-1]

    yield type("Make", (), {"server": staticmethod(server), "client": staticmethod(client)})
    for thing in reversed(made):
        (thing.close if isinstance(thing, RolloutClient) else thing.stop)()


@pytest.mark.parametrize("workers", [1, 2])
def test_all_workers_of_all_servers_get_the_messages(make, workers):
    servers = [make.server(workers=workers), make.server(workers=workers)]
    client = make.client(*servers)
    assert client.update(UPDATE).bound == 3
    for server in servers:
        assert server.received == MESSAGES
        assert server.by_group == [True, True]
        assert max(len(body) for path, body in server.calls if path == WEIGHTS) < 200  # over HTTP
    for server in servers:
        server.brought = 6
    client.update(WeightUpdate(6, UPDATE.messages))
    for server in servers:
        assert server.received == 2 * MESSAGES
        assert [path for path, _ in server.calls].count(JOIN) == 1


def test_adapters_go_over_http(make):
    server = make.server()
    make.client(server).update(WeightUpdate(5, [(ADAPTER, b"part 3")]))
    assert (server.received, server.by_group) == ([b"part 3"], [False])
    assert JOIN not in [path for path, _ in server.calls]


def test_a_server_that_cannot_join_takes_weights_over_http(make, caplog):
    server = make.server()
    take = server.take
    server.answer = lambda path, body: (
        refusal(500, "internal", "No route to the trainer.") if path == JOIN else take(path, body)
    )
    client = make.client(server)
    assert client.update(UPDATE).bound == 3
    assert (server.received, server.by_group) == (MESSAGES, [False, False])
    assert "takes whole networks over HTTP from now on" in caplog.text
    assert "(vllm_weight_transport): No route to the trainer." in caplog.text
    client.update(WeightUpdate(6, UPDATE.messages))
    assert [path for path, _ in server.calls].count(JOIN) == 1


def test_a_broadcast_that_breaks_off_begins_again_over_http(make, caplog):
    """The second message is received by nobody, and the server says why."""
    server = make.server()
    take = server.take

    def answer(path, body):
        if server.by_group == [True] and path == WEIGHTS:
            server.groups = []
            server.by_group.clear()
            server.received.clear()
            return refusal(500, "internal", "A worker has lost the group.")
        return take(path, body)

    server.answer = answer
    assert make.client(server).update(UPDATE).bound == 3
    assert (server.received, server.by_group) == (MESSAGES, [False, False])
    assert "A worker has lost the group." in caplog.text


def test_after_an_interrupt_the_weights_go_by_another_group(make):
    """A message was sent, and the call that says so was not: in that group the next one would be taken for it."""
    server, pressed = make.server(), threading.Event()

    def check():
        if pressed.is_set():
            pressed.clear()
            raise KeyboardInterrupt

    client = make.client(server, for_others=False, on_wait=check)
    client.update(UPDATE)
    member = client.replicas[0]
    call = member.call

    async def held(path, body, timeout):
        if path == WEIGHTS:
            pressed.set()
            await asyncio.sleep(10)
        return await call(path, body, timeout)

    member.call = held
    with pytest.raises(KeyboardInterrupt):
        client.update(WeightUpdate(6, UPDATE.messages))
    member.call = call
    assert member._link is None  # with it Gloo would end the process of the server
    server.brought = 7
    assert client.update(WeightUpdate(7, [(WEIGHTS, b"part 3")])).bound == 3
    assert (server.received[-1], server.by_group[-1]) == (b"part 3", True)


def test_a_server_that_does_not_take_weights_in_time_is_left_out(make, caplog):
    hanging, well = make.server(), make.server()
    take, released = hanging.take, threading.Event()
    hanging.answer = lambda path, body: (released.wait(20), (500, b""))[1] if path == WEIGHTS else take(path, body)
    client = make.client(hanging, well, patience=2.0)
    started = time.monotonic()
    assert client.update(UPDATE).bound == 3
    assert time.monotonic() - started < 10
    assert f"{hanging.url} is left out: it did not answer within 2 s" in caplog.text
    assert well.received == MESSAGES
    released.set()


def test_a_server_that_dies_is_left_out_and_joins_again_when_it_is_back(make, caplog):
    dying, well = make.server(), make.server()
    take = dying.take

    def die(path, body):
        if path == WEIGHTS:
            dying.answer = take
            dying.groups = []
            threading.Thread(target=dying.stop).start()
            raise HangUp
        return take(path, body)

    dying.answer = die
    client = make.client(dying, well)
    assert client.update(UPDATE).bound == 3
    until(lambda: client.alive == 1)
    assert f"{dying.url} is left out: " in caplog.text
    assert well.received == MESSAGES
    time.sleep(0.3)
    dying.restart()
    until(lambda: client.alive == 2)
    assert (dying.received, dying.by_group) == (MESSAGES, [True, True])
    assert [path for path, _ in dying.calls].count(JOIN) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"vllm_weight_transport": "nccl"},
            r"vllm_weight_transport='nccl' is unknown: use one of 'host', 'collective'",
        ),
        (
            {"vllm_weight_transport": "collective", "rollout_engine": "vllm_omni", "vllm_mode": "colocate"},
            r"vllm_weight_transport='collective' is for servers, and vllm_mode='colocate' has none: use 'host'\.",
        ),
    ],
)
def test_the_option_is_checked(options, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        FlowGRPOConfig(output_dir=str(tmp_path), **options)

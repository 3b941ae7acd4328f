# SPDX-License-Identifier: Apache-2.0
"""Several servers that write text: they share the prompts, have the same weights, and stand in for each other."""

import json

import pytest
import torch
from peft import LoraConfig

from omnitrl.errors import InputError, RunError
from omnitrl.messages import unpack
from omnitrl.rollout.vllm_omni.text_engine import TextEngine, TextPrompt
from omnitrl.rollout.vllm_omni.text_wire import Completion, TextSampling, pack_completions, unpack_text_request
from tests.rollout.stub import HangUp, Stub, info, refusal


SIZES = {"vocab_size": 9}
SAMPLING = TextSampling(4)
ADAPTER = {f"model.layers.0.q_proj.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}


class Writer(Stub):
    """A server whose completions are the first token of the prompt and the seed; it may end on being asked."""

    def __init__(self):
        super().__init__(self.write)
        self.ends = self.objects = False

    def write(self, path, body):
        if path.endswith("info"):
            kept = {"pipeline_class": "Thinker", "log_probs": "processed_logprobs", "sizes": SIZES}
            return 200, json.dumps(info(**kept, weight_version=self.version)).encode()
        if path.endswith("adapter"):
            head, _ = unpack(body, "rollout")
            self.version = head["version"]
            if self.objects:
                return refusal(400, "input", "It is of another rank.")
            return 200, json.dumps({"version": self.version, "bound": 1, "expected": 1, "missing": []}).encode()
        request = unpack_text_request(body)
        if self.ends:
            self.stop()
            raise HangUp
        if request.weight_version != self.version:
            return refusal(409, "stale", f"There are the weights {self.version}.")
        made = [Completion([request.token_ids[0], seed], [-1.0, -seed / 8], "stop") for seed in request.seeds]
        return 200, pack_completions(made, self.version)

    def prompts(self):
        return [unpack_text_request(body).token_ids[0] for path, body in self.calls if path.endswith("generate")]


@pytest.fixture
def servers():
    made = [Writer(), Writer()]
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def engine(servers):
    made = TextEngine([server.url for server in servers], "Thinker", SIZES, patience=1, timeout=5)
    made.update_weights(LoraConfig(r=2), ADAPTER)
    yield made
    made.client.close()


def prompts(count):
    return [TextPrompt([number, 1], {}, [2 * number, 2 * number + 1]) for number in range(count)]


def expected(count):
    return [
        [Completion([number, seed], [-1.0, -seed / 8], "stop") for seed in (2 * number, 2 * number + 1)]
        for number in range(count)
    ]


def test_servers_share_the_prompts_and_answers_come_in_order(servers, engine):
    assert servers[0].version == servers[1].version > 0
    assert engine.generate(prompts(7), SAMPLING) == expected(7)
    asked = [server.prompts() for server in servers]
    assert sorted(asked[0] + asked[1]) == list(range(7))
    assert sorted(map(len, asked)) == [3, 4]
    before = servers[0].version
    engine.update_weights(LoraConfig(r=2), ADAPTER)
    assert servers[0].version == servers[1].version == before + 1


def test_weights_that_did_not_get_there_are_not_taken_for_the_next_ones(servers, engine):
    before, servers[0].objects = servers[0].version, True
    with pytest.raises(InputError, match="It is of another rank"):
        engine.update_weights(LoraConfig(r=2), ADAPTER)
    assert servers[0].version == before + 1
    servers[0].objects = False
    engine.update_weights(LoraConfig(r=2), ADAPTER)
    assert servers[0].version == servers[1].version == before + 2


def test_what_a_server_was_asked_for_when_it_ended_is_asked_of_the_other_one(servers, engine):
    servers[0].ends = True
    assert engine.generate(prompts(6), SAMPLING) == expected(6)
    assert engine.client.alive == 1
    assert sorted(servers[1].prompts()) == list(range(6))


def test_without_a_server_the_run_ends_with_what_to_do(servers, engine):
    for server in servers:
        server.ends = True
    with pytest.raises(RunError, match=r"No rollout server has been there for 1 s .* `omnitrl vllm-serve MODEL`"):
        engine.generate(prompts(4), SAMPLING)


def test_a_number_of_prompts_at_once_may_be_given(servers):
    engine = TextEngine([servers[0].url], "Thinker", SIZES, concurrency=2, patience=5, timeout=5)
    engine.update_weights(LoraConfig(r=2), ADAPTER)
    assert engine.generate(prompts(9), SAMPLING) == expected(9)
    engine.client.close()
    assert servers[0].most <= 2

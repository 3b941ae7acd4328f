# SPDX-License-Identifier: Apache-2.0
"""The engine of servers against one that makes real samples with a copy of the model: the same as the local engine."""

import copy
import json
import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from omnitrl.errors import InputError, RunError
from omnitrl.messages import unpack
from omnitrl.models import MediaSize
from omnitrl.rollout import EngineContext, LocalEngine, RolloutEngine, SampleRequest, SamplingParams
from omnitrl.rollout.vllm_omni import replica
from omnitrl.rollout.vllm_omni import weights as weights_module
from omnitrl.rollout.vllm_omni.engine import VLLMOmniEngine
from omnitrl.rollout.vllm_omni.transport import InProcessTransport
from omnitrl.rollout.vllm_omni.weights import check_trained, weight_messages
from omnitrl.rollout.vllm_omni.wire import pack_sample, unpack_request
from omnitrl.trainer.saving import trained_weights
from tests.rollout.stub import LocalService, info, until
from tests.tiny import CHECKPOINTS
from tests.tiny_models import tiny_model


OPTIONS = {
    "vllm_max_concurrency": None,
    "vllm_server_timeout": 2.0,
    "vllm_request_timeout": 20.0,
    "vllm_check_tolerance": None,
    "vllm_weight_transport": "host",
}
SMALL = MediaSize(32, 32)
PARAMS = SamplingParams(3, size=SMALL, noise_level=0.5, sde_steps=(0, 1), keep_steps=(0, 1), keep_clean=True)


def adapted(model, scale=0.0, **options):
    """A copy of the model with adapters, of which B is `scale`."""
    other = copy.copy(model)
    other.networks = copy.deepcopy(model.networks)
    config = LoraConfig(**{"r": 2, "lora_alpha": 8, "target_modules": ["attn.to_q", "attn.to_out.0"], **options})
    for name, network in other.networks.items():
        other.networks[name] = get_peft_model(network, config).eval()
    set_b(other, scale)
    return other


def set_b(model, scale):
    for name, parameter in model.networks.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(scale)


@pytest.fixture(scope="module")
def base():
    return tiny_model()


@pytest.fixture
def made():
    """Makes engines over services, and ends them."""
    engines = []

    def engine(model, *services, sleeps=False, weights=None, **changes):
        context = EngineContext(
            model,
            SimpleNamespace(**{**OPTIONS, **{k: v for k, v in changes.items() if k in OPTIONS}}),
            weights=weights or (lambda: trained_weights(model)),
            **{k: v for k, v in changes.items() if k not in OPTIONS},
        )
        transports = [InProcessTransport(service.handle, lambda: None) for service in services]
        for number, transport in enumerate(transports):
            transport.name = f"service-{number}"
        engines.append(VLLMOmniEngine(context, transports, brings_weights=True, sleeps=sleeps))
        return engines[-1]

    yield engine
    for each in engines:
        each.close()


def requests(count=4, group=2, **row):
    return [
        SampleRequest({"prompt": f"a cat {i // group}", **row}, i // group, i % group, seed=100 + i)
        for i in range(count)
    ]


def run(engine, params=PARAMS, asked=None):
    return [t for batch in engine.generate(requests() if asked is None else asked, params) for t in batch]


def same(ours, theirs):
    assert ours.request == theirs.request
    assert ours.steps == theirs.steps
    assert torch.equal(ours.table.sigmas, theirs.table.sigmas)
    assert ours.tensors().keys() == theirs.tensors().keys()
    for name, tensor in theirs.tensors().items():
        assert torch.equal(ours.tensors()[name], tensor), name
    assert (ours.media is None) == (theirs.media is None)
    assert ours.media is None or np.array_equal(np.asarray(ours.media), np.asarray(theirs.media))


# Samples


@pytest.mark.parametrize(
    "changes",
    [
        {"guidance_scale": 3.0, "num_inference_steps": 4, "sde_steps": (0, 1, 2)},
        {"keep_steps": (), "sde_steps": (), "ode_solver": "dpmpp_2m"},
        {"keep_means": True, "keep_clean": False, "size": MediaSize(32, 64)},
        {"num_inference_steps": 6, "tail_ratio": 0.5, "decode": False},
        {
            "sde_type": "cps",
            "log_prob_reduction": "sum",
            "sde_steps": (0, 1, 2),
            "num_inference_steps": 4,
            "keep_steps": (0, 2),
        },
    ],
    ids=["all", "ode", "size", "tail", "cps"],
)
def test_samples_are_those_of_the_local_engine(base, made, changes):
    model, params = adapted(base, 0.1), replace(PARAMS, **changes)
    engine = made(model, LocalService(base))
    assert isinstance(engine, RolloutEngine)
    report = engine.update_weights(7)
    assert (report.version, report.bound) == (7, report.expected)
    local = LocalEngine(model, batch_size=1)
    local.update_weights(7)
    ours, theirs = run(engine, params), run(local, params)
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
        assert one.weight_version == 7
    assert engine.forwards == local.forwards
    engine.health()


def test_a_negative_prompt_and_a_shared_start_arrive(base, made):
    engine, asked = made(adapted(base), LocalService(base)), requests(negative_prompt="blurry")
    engine.update_weights(0)
    asked = [replace(request, start_seed=9) for request in asked]
    params = replace(PARAMS, guidance_scale=3.0)
    ours, theirs = run(engine, params, asked), run(LocalEngine(base, batch_size=1), params, asked)
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)


def test_a_shared_prefix_gives_the_same_and_counts_what_is_computed(base, made):
    """A server has no prefix to share, so each of its samples has all of the steps."""
    params = replace(PARAMS, sde_steps=(1,), keep_steps=(1,), guidance_scale=3.0, shared_prefix=True)
    asked = [replace(request, start_seed=request.group_id) for request in requests()]
    engine, local = made(adapted(base), LocalService(base)), LocalEngine(base, batch_size=1)
    engine.update_weights(0)
    for one, other in zip(run(engine, params, asked), run(local, params, asked), strict=True):
        same(one, other)
    assert engine.forwards == 4 * 3 * 2
    assert local.forwards == (2 * 1 + 4 * 2) * 2


def test_states_are_held_once(base, made):
    engine = made(adapted(base), LocalService(base))
    engine.update_weights(0)
    sample = run(engine)[0]
    assert sample.latents[1].data_ptr() == sample.next_latents[0].data_ptr()


@pytest.mark.slow
def test_condition_images_arrive(made):
    tiny = CHECKPOINTS["qwen-image-edit"]
    base = tiny.model()
    engine = made(adapted(base), LocalService(base))
    engine.update_weights(0)
    asked = [SampleRequest(tiny.row("a cat", 0), 0, 0, seed=5)]
    params = replace(PARAMS, size=base.size_of(asked[0].row, tiny.size))
    ours, theirs = run(engine, params, asked)[0], run(LocalEngine(base, batch_size=1), params, asked)[0]
    assert torch.equal(ours.latents, theirs.latents)


@pytest.mark.slow
def test_two_networks_take_their_guidance_and_their_adapters(made):
    tiny = CHECKPOINTS["wan-a14b"]
    base = tiny.model()
    model = adapted(base, 0.1, target_modules=["attn1.to_q"])
    model.guidance_scale_2 = 2.0
    engine, params = made(model, LocalService(base)), replace(PARAMS, size=tiny.size)
    report = engine.update_weights(1)
    assert report.bound == report.expected > 2
    same(run(engine, params)[0], run(LocalEngine(model, batch_size=1), params)[0])


def test_rewards_start_before_the_last_sample_is_made(base, made):
    service = LocalService(base)
    engine = made(adapted(base), service, vllm_max_concurrency=1)
    engine.update_weights(0)
    run(engine)
    service.calls.clear()
    batches = engine.generate(requests(6), PARAMS)
    first = next(batches)
    assert [sample.request.seed for sample in first] == [100]
    assert service.calls.count("generate") < 6
    assert [t.request.seed for batch in batches for t in batch] == [101, 102, 103, 104, 105]


def test_no_requests_are_no_samples(base, made):
    assert list(made(adapted(base), LocalService(base)).generate([], PARAMS)) == []


# Weights


def test_weights_follow_updates_and_averages_of_one_step(base, made):
    """Evaluation puts other weights in place at the same step, and the server must not take them for the same."""
    model = adapted(base)
    engine, local = made(model, LocalService(base)), LocalEngine(model, batch_size=1)
    for scale in (0.0, 0.2, 0.0):
        set_b(model, scale)
        assert engine.update_weights(3).version == 3
        for one, other in zip(run(engine), run(local), strict=True):
            same(one, replace(other, weight_version=3))


def test_weights_whose_way_was_broken_off_are_not_taken_for_the_next_ones(base, made):
    """The server has taken them, and the trainer was interrupted before it heard of that."""
    model, service, pressed = adapted(base), LocalService(base), threading.Event()

    def check():
        if pressed.is_set():
            pressed.clear()
            raise KeyboardInterrupt

    engine = made(model, service, on_step=check)
    engine.update_weights(0)
    take = service._took
    service._took = lambda *report: (pressed.set(), time.sleep(0.4), take(*report))[-1]
    set_b(model, 0.2)
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(0)
    service._took = take
    engine.client.replicas[0].drop("it is to be asked which weights it has")
    until(lambda: engine.client.alive)
    set_b(model, 0.1)
    engine.update_weights(0)
    same(run(engine)[0], run(LocalEngine(model, batch_size=1))[0])


def test_the_messages_of_the_last_update_are_gone_when_the_next_ones_are_made(base, made):
    held = []

    def weights():
        held.append(engine.client._wanted)
        return trained_weights(model)

    model = adapted(base)
    engine = made(model, LocalService(base), weights=weights)
    engine.update_weights(0)
    engine.update_weights(1)
    assert held == [None, None]
    assert engine.client._wanted.messages


def test_all_weights_go_over_in_bounded_parts(base, made, monkeypatch):
    monkeypatch.setattr(weights_module, "BUCKET_BYTES", 20_000)
    model = copy.copy(base)
    model.networks = copy.deepcopy(base.networks).requires_grad_(True)
    for parameter in model.networks.parameters():
        parameter.data += 0.01
    service = LocalService(base)
    engine = made(model, service)
    report = engine.update_weights(1)
    assert service.calls.count("weights") > 3
    assert report.bound == report.expected > 0
    same(run(engine)[0], run(LocalEngine(model, batch_size=1))[0])


def test_parts_hold_each_tensor_once_and_no_more_than_allowed(base, monkeypatch):
    monkeypatch.setattr(weights_module, "BUCKET_BYTES", 20_000)
    model = copy.copy(base)
    model.networks = copy.deepcopy(base.networks).requires_grad_(True)
    messages = weight_messages(model, trained_weights(model), 9, torch.bfloat16)
    seen = {}
    for index, (path, message) in enumerate(messages):
        head, tensors = unpack(message, "rollout")
        assert path == "/rollout/weights"
        assert head == {"version": 9, "index": index, "count": len(messages)}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        assert size <= 20_000 or len(tensors) == 1
        assert not seen.keys() & tensors.keys()
        seen |= tensors
    state = {f"transformer.{key}": value for key, value in model.networks["transformer"].state_dict().items()}
    assert seen.keys() == state.keys()
    assert all(torch.equal(seen[key], value.bfloat16()) for key, value in state.items() if value.is_floating_point())


def test_an_adapters_message_names_its_modules(base):
    model = adapted(base, 0.5)
    [(path, message)] = weight_messages(model, trained_weights(model), 4)
    head, tensors = unpack(message, "rollout")
    assert path == "/rollout/adapter"
    assert head["version"] == 4
    assert (head["config"]["r"], head["config"]["lora_alpha"]) == (2, 8)
    layers = len(base.networks["transformer"].transformer_blocks)
    expected = {
        f"transformer.transformer_blocks.{i}.attn.{name}" for i in range(layers) for name in ("to_q", "to_out.0")
    }
    assert set(head["expected"]) == expected
    assert tensors.keys() == {f"{name}.lora_{part}.weight" for name in expected for part in "AB"}
    assert all((tensor == 0.5).all() for name, tensor in tensors.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "has use_dora=True"),
        ({"bias": "all"}, "has bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "has init_lora_weights='olora'"),
    ],
)
def test_adapters_that_servers_cannot_take_are_refused(base, options, reason):
    with pytest.raises(InputError, match=f"plain LoRA adapters, but that of the transformer {reason}"):
        check_trained(adapted(base, **options))


def test_other_adapters_are_refused(base):
    model = copy.copy(base)
    model.networks = copy.deepcopy(base.networks)
    config = IA3Config(target_modules=["attn.to_q"], feedforward_modules=[])
    model.networks["transformer"] = get_peft_model(model.networks["transformer"], config)
    with pytest.raises(InputError, match="is a IA3Config"):
        check_trained(model)


# What comes back is looked at


class Wrong(LocalService):
    """A server that changes its samples by `change(tensors, media, table, version)` before it sends them."""

    def __init__(self, model, change):
        super().__init__(model)
        self.change = change

    def _generate(self, body):
        request = unpack_request(body)
        asked = SampleRequest(request.row, 0, 0, request.seed, request.start_seed)
        [[made]] = LocalEngine(self.model, batch_size=1).generate([asked], request.params)
        return 200, pack_sample(*self.change(made.tensors(), made.media, made.table, self.version))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, m, table, v: (t, m, table, v - 1), "a sample came from the weights"),
        (
            lambda t, m, table, v: (t, m, table._replace(sigmas=table.sigmas.nextafter(torch.zeros(()))), v),
            "3 steps of other noise levels",
        ),
        (
            lambda t, m, table, v: ({**t, "latents": t["latents"][:1]}, m, table, v),
            r"latents of shape \(1, 4, 8, 8\)",
        ),
        (lambda t, m, table, v: ({**t, "log_probs": t["log_probs"] * float("nan")}, m, table, v), "are not finite"),
        (lambda t, m, table, v: ({**t, "latents": t["latents"].half()}, m, table, v), "in torch.float16"),
        (lambda t, m, table, v: (t, m and m.resize((8, 8)), table, v), "media of height=8, width=8"),
        (lambda t, m, table, v: ({k: x for k, x in t.items() if k != "log_probs"}, m, table, v), "lacks log_probs"),
    ],
    ids=["version", "sigmas", "shape", "nan", "dtype", "media", "missing"],
)
def test_a_sample_that_is_not_what_was_asked_for_ends_the_run(base, made, change, words):
    engine = made(adapted(base), Wrong(base, change))
    engine.update_weights(0)
    with pytest.raises(RunError, match=words):
        run(engine)


def test_media_that_could_not_be_decoded_are_missing(base, made):
    engine = made(adapted(base), Wrong(base, lambda t, m, table, v: (t, None, table, v)))
    engine.update_weights(0)
    assert [sample.media for sample in run(engine)] == [None] * 4


# The comparison with the trainer's own sample


def shifted(base):
    other = copy.copy(base)
    other.networks = copy.deepcopy(base.networks)
    for parameter in other.networks.parameters():
        parameter.data += 0.02
    return other


def test_another_checkpoint_is_found_out(base, made):
    engine = made(adapted(base), LocalService(shifted(base)))
    engine.update_weights(0)
    with pytest.raises(
        RunError, match=r"differs by .* between service-0 and the trainer .*serve the checkpoint that is"
    ):
        run(engine)


def test_in_half_precision_another_checkpoint_is_a_warning_unless_there_is_a_tolerance(base, made, caplog):
    engine = made(adapted(base), LocalService(shifted(base)), half=True)
    engine.update_weights(0)
    with caplog.at_level(logging.WARNING):
        assert len(run(engine)) == 4
    assert "samples come from another policy" in caplog.text
    strict = made(adapted(base), LocalService(shifted(base)), half=True, vllm_check_tolerance=0.01)
    strict.update_weights(0)
    with pytest.raises(RunError, match=r"at most 0\.01 is expected, vllm_check_tolerance"):
        run(strict)


def test_a_server_that_takes_weights_and_does_not_use_them_is_found_out(base, made):
    """Even where the change is smaller than the tolerance."""
    model, service = adapted(base), LocalService(base)
    service.ignores_weights = True
    engine = made(model, service, vllm_check_tolerance=10.0)
    engine.update_weights(0)
    run(engine)
    set_b(model, 0.01)
    engine.update_weights(1)
    with pytest.raises(RunError, match="does not use the weights that it took"):
        run(engine)


def test_samples_are_compared_at_first_and_once_the_weights_have_changed(base, made):
    """An update of nothing says nothing, so the comparison waits for one that does, ever more rarely."""
    model, service = adapted(base), LocalService(base)
    engine = made(model, service)
    made_here = []
    ours = engine._comparison._ours.generate
    engine._comparison._ours.generate = lambda *a: made_here.append(1) or ours(*a)
    counts = []
    for version, scale in enumerate((0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.3)):
        set_b(model, scale)
        engine.update_weights(version)
        run(engine)
        counts.append(len(made_here))
    assert counts == [1, 2, 3, 3, 4, 4, 4]


def test_on_demand_the_weights_of_now_are_compared(base, made):
    """Those of an update, or averages in their place, that the servers have not heard of; asleep or not."""
    model, service = adapted(base), LocalService(base)
    engine = made(model, service, sleeps=True)
    engine.update_weights(0)
    run(engine)
    set_b(model, 0.4)
    engine.sleep()
    engine.client.replicas[0].drop("it is to be told to wake when it is back")
    assert engine.check_weights() == {"service-0": 0.0}
    assert service.asleep


def test_each_server_is_compared(base, made):
    engine = made(adapted(base), LocalService(base), LocalService(shifted(base)))
    engine.update_weights(0)
    with pytest.raises(RunError, match="between service-1 and the trainer"):
        run(engine)


def test_a_server_that_comes_later_is_compared_too(base, made, monkeypatch):
    """When all others have been compared for good."""
    monkeypatch.setattr(replica, "LONGEST_PAUSE", 0.1)
    model, later = adapted(base), LocalService(shifted(base))
    answer, here = later.handle, threading.Event()

    async def handle(path, body):
        return await answer(path, body) if here.is_set() else (503, b"not yet")

    later.handle = handle
    engine = made(model, LocalService(base), later, vllm_server_timeout=0.5)
    for version, scale in enumerate((0.0, 0.1)):
        set_b(model, scale)
        engine.update_weights(version)
        run(engine)
    assert not engine._comparison.is_due
    here.set()
    until(lambda: engine.client.alive == 2)
    engine.update_weights(2)
    with pytest.raises(RunError, match="between service-1 and the trainer"):
        run(engine)


def test_on_demand_there_must_have_been_a_rollout(base, made):
    with pytest.raises(RunError, match="check_weights is for after the first rollout"):
        made(adapted(base), LocalService(base)).check_weights()


# The right server


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 0}, r"rollout protocol 0\), the trainer"),
        ({"omnitrl_version": "0.0.1"}, 'runs omnitrl 0.0.1 .*pip install "omnitrl=='),
        (
            {"pipeline_class": "FluxPipeline", "model": "flux"},
            "serves flux with a FluxPipeline, but the trainer has a",
        ),
        ({"cache_backend": "cache_dit"}, "'cache_dit', .*start it without --cache-backend"),
    ],
)
def test_a_wrong_server_is_refused_when_the_engine_is_made(base, made, changes, words):
    service = LocalService(base)
    answer = service.handle

    async def handle(path, body):
        return (200, json.dumps(info(**changes)).encode()) if path.endswith("info") else await answer(path, body)

    service.handle = handle
    with pytest.raises(InputError, match=words):
        made(adapted(base), service)


# Sleep


def test_an_engine_in_this_process_sleeps_while_the_trainer_trains(base, made):
    service = LocalService(base)
    engine = made(adapted(base), service, sleeps=True)
    engine.update_weights(0)
    engine.sleep()
    engine.sleep()
    assert service.asleep
    engine.wake()
    assert not service.asleep
    run(engine)
    assert [call for call in service.calls if call in ("sleep", "wake")] == ["sleep", "wake"]


def test_servers_of_their_own_stay_awake(base, made):
    service = LocalService(base)
    engine = made(adapted(base), service)
    engine.sleep()
    engine.wake()
    assert not {"sleep", "wake"} & set(service.calls)


def test_what_is_counted(base, made):
    engine = made(adapted(base), LocalService(base), LocalService(base))
    engine.update_weights(0)
    run(engine)
    metrics = engine.take_metrics()
    assert metrics["rollout/servers"] == 2
    assert metrics["rollout/retries"] == 0
    assert 0 < metrics["rollout/client_share"] < 2  # of a service in this process, whose work is counted too
    assert "rollout/client_share" not in engine.take_metrics()

# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a real vLLM-Omni server, by hand over the wire: the trainer's model must agree with each of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

from omnitrl.rollout import LocalEngine
from omnitrl.rollout.vllm_omni import weights
from omnitrl.rollout.vllm_omni.client import RolloutClient
from omnitrl.rollout.vllm_omni.replica import WeightUpdate
from omnitrl.rollout.vllm_omni.transport import HttpTransport
from omnitrl.rollout.vllm_omni.weights import weight_messages
from omnitrl.rollout.vllm_omni.wire import pack_request
from tests.server.checkpoints import SERVED
from tests.server.environment import needs_server
from tests.server.rollouts import (
    STARTED_WITH,
    Client,
    move_adapters,
    params_of,
    replayed,
    trainer_model,
    weights_of,
    wire_request,
)
from tests.tiny.qwen_image import STOCK_DIMENSIONS


pytestmark = [pytest.mark.server, needs_server, pytest.mark.timeout(600)]

# Rank and alpha such that a server that forgets or confuses either is found out.
LORA = {"r": 4, "lora_alpha": 6}


def pixels(media):
    return np.asarray(getattr(media, "frames", media)).astype(int)


def check(model, sample, params):
    """The sample was scored by the policy that the trainer has, and its media are of its latents."""
    assert sample.steps == params.keep_steps
    assert torch.allclose(sample.log_probs, replayed(model, sample, params), rtol=0, atol=1e-5)
    [media] = model.decode(sample.clean_latents[None], params.size)
    assert pixels(media).shape == pixels(sample.media).shape
    assert np.abs(pixels(media) - pixels(sample.media)).max() <= 1


@pytest.mark.parametrize("family", ["sd3", "qwen-image", "flux", "wan-a14b"])
def test_replayed_log_probs_are_those_of_the_server(server_of, family):
    """With the weights that it was started with, and after each of three adapters."""
    client, params = Client(server_of(family)), params_of(family)
    model = trainer_model(family)
    version = client.info()["weight_version"]
    if version != STARTED_WITH:  # another test has been here
        model.networks.requires_grad_(True)
        client.give(model, version := version + 1)
    before = client.sample(wire_request(model, params, 7, version))
    check(model, before, params)
    [[ours]] = LocalEngine(model).generate([before.request], params)
    assert torch.allclose(ours.clean_latents, before.clean_latents, atol=1e-4)
    model = trainer_model(family, **LORA)
    for _ in range(3):
        version += 1
        move_adapters(model, seed=version)
        client.give(model, version)
        assert client.info()["weight_version"] == version
        after = client.sample(wire_request(model, params, 7, version))
        assert after.weight_version == version
        check(model, after, params)
        assert (after.clean_latents - before.clean_latents).abs().max() > 0.01
        before = after


def test_in_half_precision_they_differ_by_rounding(server_of):
    """The checkpoint's text encoder is in float32, and the server's in the precision of the network."""
    client, params = Client(server_of("qwen-image", "--dtype", "bfloat16")), params_of("qwen-image")
    assert client.info()["dtype"] == "bfloat16"
    model = trainer_model("qwen-image", **LORA)
    model.pipeline.to(torch.bfloat16)
    for parameter in model.trained_networks["transformer"].parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    move_adapters(model, seed=0, size=2.0)
    requests = [wire_request(model, params, seed) for seed in range(4)]
    with model.networks["transformer"].disable_adapter():
        before = client.samples(requests)
        differences = [sample.log_probs - replayed(model, sample, params) for sample in before]
    client.give(model, 1)
    after = client.samples([replace(request, weight_version=1) for request in requests])
    differences += [sample.log_probs - replayed(model, sample, params) for sample in after]
    assert float(torch.cat(differences).abs().mean()) < 3e-3
    assert float(torch.cat(differences).abs().max()) < 0.02
    for old, new in zip(before, after, strict=True):
        assert {tensor.dtype for tensor in new.tensors().values()} == {torch.float32}
        assert float((old.clean_latents - new.clean_latents).norm() / old.clean_latents.norm()) > 0.05


def test_condition_images_are_seen(server_of, monkeypatch):
    """Of a megapixel, as the stock pipeline has them; without and with an adapter."""
    for module, stock in zip((pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus), STOCK_DIMENSIONS, strict=True):
        monkeypatch.setattr(module, "calculate_dimensions", stock)
    client, params = Client(server_of("qwen-image-edit")), params_of("qwen-image-edit", steps=2)
    model = trainer_model("qwen-image-edit", **LORA)
    move_adapters(model, seed=0)
    first, second = (wire_request(model, params, 2, row=edit_row(model, number)) for number in (0, 1))
    samples = [client.sample(request) for request in (first, second)]
    assert not torch.equal(samples[0].next_latents, samples[1].next_latents)
    with model.networks["transformer"].disable_adapter():
        check(model, samples[0], params)
    client.give(model, 1)
    check(model, client.sample(replace(first, weight_version=1)), params)


def edit_row(model, number):
    return {**SERVED["qwen-image-edit"].row("make it blue", number), "negative_prompt": model.default_negative_prompt}


@pytest.mark.parametrize(
    "lora",
    [
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {"r": 2, "lora_alpha": 3, "rank_pattern": {"to_q": 5}, "alpha_pattern": {"to_k": 7}},
        {"r": 3, "lora_alpha": 3, "target_modules": "transformer_blocks\\.0\\..*to_(v|out\\.0)"},
    ],
    ids=["rslora", "patterns", "some"],
)
def test_adapters_of_each_kind_are_scaled_and_placed_as_peft_does(server_of, lora):
    client, params = Client(server_of("sd3")), params_of("sd3", steps=3)
    model = trainer_model("sd3", **lora)
    client.give(model, 20)
    check(model, client.sample(wire_request(model, params, 3, 20)), params)


@pytest.mark.parametrize("family", ["sd3", "qwen-image", "wan-a14b"])
def test_whole_networks_replace_the_weights_and_their_adapters(server_of, family):
    """Given back what it was started with, it makes the same samples again, bit for bit."""
    client, params = Client(server_of(family)), params_of(family, steps=3)
    adapted = trainer_model(family, **LORA)
    client.give(adapted, 30)
    model = trainer_model(family)
    model.networks.requires_grad_(True)
    client.give(model, 31)
    before = client.sample(wire_request(model, params, 5, 31))
    check(model, before, params)
    digest, generator = client.worker("rollout_digest"), torch.Generator().manual_seed(0)
    old = {net: {name: t.clone() for name, t in weights.items()} for net, weights in weights_of(model).items()}
    with torch.no_grad():
        for parameter in model.networks.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    client.give(model, 32)
    after = client.sample(wire_request(model, params, 5, 32))
    check(model, after, params)
    assert (after.clean_latents - before.clean_latents).abs().max() > 0.01
    assert client.worker("rollout_digest") != digest
    client.give(model, 33, old)
    assert client.worker("rollout_digest") == digest
    again = client.sample(wire_request(model, params, 5, 33))
    assert torch.equal(again.clean_latents, before.clean_latents)
    assert torch.equal(again.log_probs, before.log_probs)


def test_whole_networks_by_a_collective_are_those_over_http(server_of, monkeypatch, caplog):
    """In several buckets; bit for bit the same weights, and so the same sample."""
    monkeypatch.setattr(weights, "BUCKET_BYTES", 2**16)
    server, params, model = server_of("sd3"), params_of("sd3", steps=3), trainer_model("sd3")
    client, device = Client(server), torch.device("cpu")
    model.networks.requires_grad_(True)
    trainer_side = RolloutClient([HttpTransport(server.url)], patience=60, collective_from=device)
    try:
        trainer_side.connect()
        for version, size in ((35, 0.05), (37, 0.02)):
            with torch.no_grad():
                for parameter in model.networks.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * size)
            client.give(model, version)
            digest, before = client.worker("rollout_digest"), client.sample(wire_request(model, params, 5, version))
            client.give(model, 34, {name: net.state_dict() for name, net in trainer_model("sd3").networks.items()})
            assert client.worker("rollout_digest") != digest
            messages = weight_messages(model, weights_of(model), version + 1)
            assert len(messages) > 3
            report = trainer_side.update(WeightUpdate(version + 1, messages))
            assert report.bound == report.expected > 0
            assert client.worker("rollout_digest") == digest
            after = client.sample(wire_request(model, params, 5, version + 1))
            assert torch.equal(before.clean_latents, after.clean_latents)
            assert torch.equal(before.log_probs, after.log_probs)
    finally:
        trainer_side.close()
    assert "over HTTP" not in caplog.text


@pytest.mark.parametrize("family", ["sd3", "qwen-image", "wan-a14b"])
def test_samples_made_together_are_those_made_alone(server_of, family):
    """Each has its own seed, prompt, steps, noise, window and guidance, never those of the first of a batch."""
    client, model = Client(server_of(family)), trainer_model(family)
    assert client.info()["max_num_seqs"] == 8
    version = client.info()["weight_version"]
    kinds = [
        {},
        {"noise_level": 0.3},
        {"noise_level": 0.5, "sde_type": "cps", "keep_means": True},
        {"sde_steps": (1,), "keep_steps": (1,), "ode_solver": "dpmpp_2m"},
        {"sde_steps": (0, 2), "keep_steps": (2,), "log_prob_reduction": "sum"},
        {"guidance_scale": 1.0},
        {"guidance_scale": 2.5, "sde_type": "dance_sde", "noise_level": 0.2},
        {"sde_steps": (), "keep_steps": ()},
    ]
    prompts = ["a cat", "two dogs that play in the rain", "a map of the world"]
    requests = [
        wire_request(model, params_of(family, steps, **kind), 100 + i, version, prompts[i % 3])
        for steps in (4, 6)
        for i, kind in enumerate(kinds)
    ]
    alone = [client.sample(request) for request in requests]
    together = client.samples(requests)
    assert client.worker("rollout_state")["largest_batch"] > 1
    for a, b in zip(alone, together, strict=True):
        assert a.tensors().keys() == b.tensors().keys()
        for name, tensor in a.tensors().items():
            assert torch.allclose(tensor, b.tensors()[name], rtol=0, atol=1e-4), name
        assert np.abs(pixels(a.media) - pixels(b.media)).max() <= 1
    assert (
        len({sample.media.tobytes() if family != "wan-a14b" else sample.media.frames.tobytes() for sample in alone})
        == 16
    )


def test_a_server_sleeps_and_wakes(server_of):
    client, model, params = Client(server_of("sd3")), trainer_model("sd3"), params_of("sd3", steps=3)
    model.networks.requires_grad_(True)
    client.give(model, 40)
    request = wire_request(model, params, 1, 40)
    before = client.sample(request)
    assert client.post("sleep").json() == {}

    for path, body in (("generate", pack_request(request)), ("weights", b"")):
        status, kind, sentence = client.refusal(path, body)
        assert (status, kind) == (400, "input")
        assert "asleep: wake it first with POST /rollout/wake" in sentence
    assert client.post("sleep").json() == client.post("wake").json() == client.post("wake").json() == {}
    assert torch.equal(client.sample(request).clean_latents, before.clean_latents)

# SPDX-License-Identifier: Apache-2.0
"""What a real server answers to what it cannot do: a sentence, and nothing changes."""

import base64
import io
import json
import re
import threading
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.algorithms import make_sigma_table
from omnitrl.messages import pack, unpack
from omnitrl.models import MediaSize
from omnitrl.rollout.vllm_omni.weights import weight_messages
from omnitrl.rollout.vllm_omni.wire import BucketHead, pack_request
from tests.server.environment import Server, needs_server
from tests.server.rollouts import Client, move_adapters, params_of, trainer_model, weights_of, wire_request


pytestmark = [pytest.mark.server, needs_server, pytest.mark.timeout(600)]


@pytest.fixture
def client(server_of):
    return Client(server_of("sd3"))


@pytest.fixture(scope="module")
def model():
    return trainer_model("sd3")


def request_of(client, model, seed=1, steps=4, **options):
    return wire_request(model, params_of("sd3", steps, **options), seed, client.info()["weight_version"])


def _another_protocol(request):
    head, tensors = unpack(pack_request(request), "rollout")
    return pack({**head, "protocol": 99}, tensors)


def _table(*levels):
    return make_sigma_table(levels)


UNFIT = {
    "no message": (lambda r: b"?", "1 bytes are no message of the rollout protocol"),
    "protocol": (_another_protocol, "trainer speaks rollout protocol 99, this server 1: install the same version"),
    "schedule": (lambda r: replace(r, table=_table(1.0, 0.5, 0.0)), "num_steps=4 needs 5 sigmas"),
    "levels": (
        lambda r: replace(r, table=r.table._replace(sigmas=r.table.sigmas.flip(0))),
        "The last sigma must be exactly 0",
    ),
    "transition": (lambda r: replace(r, params=replace(r.params, sde_type="leap")), "sde_type='leap'"),
    "solver": (lambda r: replace(r, params=replace(r.params, ode_solver="rk4")), "ode_solver='rk4' is not known"),
    "noise": (lambda r: replace(r, params=replace(r.params, noise_level=-1.0)), "noise_level=-1.0"),
    "last step": (
        lambda r: replace(r, params=replace(r.params, sde_steps=(3,), keep_steps=(3,))),
        "the last step is an ODE step",
    ),
    "modalities": (lambda r: replace(r, params=replace(r.params, modality_weights={"audio": 1.0})), "one modality"),
    "shape": (lambda r: replace(r, latent_shape=(16, 8, 8)), r"shape \(16, 8, 8\) were asked for, but .* \(4, 8, 8\)"),
    "size": (
        lambda r: replace(r, params=replace(r.params, size=MediaSize(72, 64)), latent_shape=(4, 9, 8)),
        "take sides that are multiples of 16",
    ),
    "prompt": (lambda r: replace(r, row={"prompt": ""}), "The prompt is empty"),
    "images": (
        lambda r: replace(r, row={**r.row, "images": [Image.new("RGB", (8, 8))]}),
        "StableDiffusion3Pipeline takes 0 condition images, but a row has 1",
    ),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_what_can_never_work_is_told_in_a_sentence(client, model, unfit):
    change, expected = UNFIT[unfit]
    changed = change(request_of(client, model))
    body = changed if isinstance(changed, bytes) else pack_request(changed)
    started = time.monotonic()
    status, kind, sentence = client.refusal("generate", body)
    assert (status, kind) == (400, "input")
    assert re.search(expected, sentence), sentence
    assert time.monotonic() - started < 30


def test_a_server_goes_on_after_an_error_of_its_pipeline(client, model):
    """More positions than the network has is what the native pipeline finds out itself."""
    size = MediaSize(1024, 64)
    request = request_of(client, model)
    large = replace(request, params=replace(request.params, size=size), latent_shape=(4, 128, 8))
    status, kind, sentence = client.refusal("generate", pack_request(large))
    assert (status, kind) == (500, "internal")
    assert "greater than" in sentence
    assert client.sample(request).log_probs.isfinite().all()


def test_a_version_that_is_not_there_is_stale(client, model):
    request = request_of(client, model)
    status, kind, sentence = client.refusal("generate", pack_request(replace(request, weight_version=987654321)))
    assert (status, kind) == (409, "stale")
    assert "The weights 987654321 were asked for, but this server has" in sentence
    client.give(model_with_all(), 50)
    _, _, sentence = client.refusal("generate", pack_request(request))
    assert sentence.endswith("but this server has the weights 50.")


def model_with_all():
    model = trainer_model("sd3")
    model.networks.requires_grad_(True)
    return model


def test_an_adapter_with_unknown_modules_is_reported_and_changes_nothing(client, model):
    adapted = trainer_model("sd3", r=2, lora_alpha=2)
    client.give(adapted, 60)
    request = request_of(client, model)
    before = client.sample(request)
    move_adapters(adapted, seed=1)
    [(path, body)] = weight_messages(adapted, weights_of(adapted), 61)
    head, tensors = unpack(body, "rollout")
    names = {name: name.replace("blocks.1.attn.to_q", "blocks.9.attn.to_q") for name in tensors}
    head["expected"] = [name.replace("blocks.1.attn.to_q", "blocks.9.attn.to_q") for name in head["expected"]]
    report = client.http.post(path, content=pack(head, {names[n]: t for n, t in tensors.items()})).json()
    assert report["missing"] == ["transformer.transformer_blocks.9.attn.to_q"]
    assert report["bound"] == report["expected"] - 1 == len(head["expected"]) - 1
    half = {name: tensor for name, tensor in tensors.items() if "blocks.0.attn.to_k.lora_B" not in name}
    head["expected"] = list(dict.fromkeys(name.split(".lora_")[0] for name in tensors))
    report = client.http.post(path, content=pack(head, half)).json()
    assert report["missing"] == ["transformer.transformer_blocks.0.attn.to_k"]
    assert client.info()["weight_version"] == 60
    assert torch.equal(client.sample(request).clean_latents, before.clean_latents)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "has use_dora=True"),
        ({"bias": "all"}, "has bias='all'"),
        ({"modules_to_save": ["proj_out"]}, "has modules_to_save=['proj_out']"),
        ({"peft_type": "LOHA"}, "is a LOHA"),
    ],
    ids=["dora", "bias", "saved modules", "loha"],
)
def test_adapters_of_other_kinds_are_refused(client, config, reason):
    adapted = trainer_model("sd3", r=2, lora_alpha=2)
    [(_, body)] = weight_messages(adapted, weights_of(adapted), 62)
    head, tensors = unpack(body, "rollout")
    status, kind, sentence = client.refusal("adapter", pack({**head, "config": {**head["config"], **config}}, tensors))
    assert (status, kind) == (400, "input")
    assert sentence == f"Servers take plain LoRA adapters, but this one {reason}: leave it out."


def buckets(weights, version, parts):
    """Messages of whole networks, in that many parts."""
    named = {f"{net}.{name}": tensor for net, tensors in weights.items() for name, tensor in tensors.items()}
    names = list(named)
    for i in range(parts):
        yield pack(asdict(BucketHead(version, i, parts)), {name: named[name] for name in names[i::parts]})


def test_weights_that_come_in_part_are_never_used(client, model):
    """A lost bucket, an unknown name, a missing tensor: no sample until all of them are sent again."""
    whole = model_with_all()
    weights = weights_of(whole)
    client.give(whole, 70)
    request = request_of(client, model)
    before = client.sample(request)
    first, second, third = buckets(weights, 71, 3)
    assert client.post("weights", first).json() == client.post("weights", second).json() == {}
    status, kind, sentence = client.refusal("generate", pack_request(request))
    assert (status, kind) == (409, "stale")
    assert "this server has some that came in part only: send them again" in sentence
    assert client.post("weights", third).json()["missing"] == []
    assert torch.equal(client.sample(replace(request, weight_version=71)).clean_latents, before.clean_latents)
    assert client.post("weights", first).status_code == 200
    assert client.refusal("weights", third)[2] == "Bucket 2 of the weights 71 does not follow on what came before it."
    unknown = {"transformer": {**weights["transformer"], "no.such.weight": torch.zeros(2)}}
    assert client.refusal("weights", next(buckets(unknown, 72, 1)))[:2] == (500, "internal")
    names = list(weights["transformer"])
    fused = next(name for name in names if name.endswith("blocks.0.attn.to_k.weight"))
    for gone in (names[-1], fused):
        rest = {name: tensor for name, tensor in weights["transformer"].items() if name != gone}
        report = client.post("weights", next(buckets({"transformer": rest}, 73, 1))).json()
        assert report["missing"] == [f"transformer.{gone}"]
        assert report["bound"] == report["expected"] - 1
        assert client.refusal("generate", pack_request(replace(request, weight_version=73)))[1] == "stale"
    client.give(whole, 74)
    assert torch.equal(client.sample(replace(request, weight_version=74)).clean_latents, before.clean_latents)


def test_weights_wait_for_samples_and_samples_for_weights(client, model):
    """Each sample comes from one version, whatever comes meanwhile."""
    adapted = trainer_model("sd3", r=2, lora_alpha=2)
    client.give(adapted, 80)
    requests = [request_of(client, model, seed, steps=12) for seed in range(8)]
    expected = [client.sample(request) for request in requests]
    made = []
    thread = threading.Thread(target=lambda: made.extend(client.samples(requests)))
    thread.start()
    time.sleep(0.3)
    move_adapters(adapted, seed=2)
    client.give(adapted, 81)
    late = client.refusal("generate", pack_request(requests[0]))
    thread.join()
    assert late[:2] == (409, "stale")
    assert [sample.weight_version for sample in made] == [80] * 8
    for a, b in zip(expected, made, strict=True):
        assert torch.allclose(a.clean_latents, b.clean_latents, atol=1e-4)


def test_unknown_paths_are_refused(client):
    assert client.refusal("nothing")[:2] == (404, "hooks")
    answer = client.http.get("/rollout/generate")
    assert (answer.status_code, json.loads(answer.content)["kind"]) == (404, "hooks")


def test_ordinary_requests_are_served_as_ever(client, model):
    """The server's own route, by the native scheduler, between rollouts."""
    client.give(model_with_all(), 90)
    request = request_of(client, model)
    before = client.sample(request)
    body = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 4, "guidance_scale": 3.0, "seed": 3}
    answer = client.http.post("/v1/images/generations", json=body).json()
    image = Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
    pipeline = model.pipeline
    stock = pipeline(
        "a cat",
        height=64,
        width=64,
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    assert image.size == (64, 64)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(stock).astype(int)).max() <= 2
    assert torch.equal(client.sample(request).clean_latents, before.clean_latents)


def test_a_server_without_the_hooks_says_how_to_start_it(checkpoint_of, tmp_path):
    """The door alone, without pipeline and extension."""
    door = "omnitrl.rollout.vllm_omni.server.middleware.RolloutMiddleware"
    command = [
        "-m",
        "vllm_omni.entrypoints.cli.main",
        "serve",
        str(checkpoint_of("sd3")),
        "--omni",
        "--port",
        "{port}",
    ]
    server = Server([*command, "--dtype", "float32", "--enforce-eager", "--middleware", door], tmp_path / "log")
    try:
        client = Client(server.start())
        answer = client.http.get("/rollout/info")
        assert (answer.status_code, answer.json()["kind"]) == (404, "hooks")
        assert answer.json()["error"] == "This server has no rollouts: start it with `omnitrl vllm-serve MODEL`."
    finally:
        server.stop()

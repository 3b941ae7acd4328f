# SPDX-License-Identifier: Apache-2.0
"""The wire by hand: requests, weights and answers of a rollout server, and what the trainer's model says of them."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict

from omnitrl.algorithms import gaussian_log_prob, transition_mean, transition_std, transition_table
from omnitrl.rollout import SampleRequest, SamplingParams
from omnitrl.rollout.stepping import sampling_table
from omnitrl.rollout.vllm_omni.weights import weight_messages
from omnitrl.rollout.vllm_omni.wire import WireRequest, pack_request, unpack_sample
from omnitrl.trainer.adapters import attach_adapters
from tests.server.checkpoints import SERVED


STARTED_WITH = -1
"""Weight version of a server that has been given none."""


def trainer_model(family, **lora):
    """The model of a trainer, with LoRA on all networks where its options are given."""
    model = SERVED[family].model()
    if lora:
        attach_adapters(model, LoraConfig(init_lora_weights=False, **lora))
    return model


def params_of(family, steps=5, **options):
    """A guided rollout, all of whose stochastic steps are kept."""
    tiny, stochastic = SERVED[family], tuple(range(steps - 1))
    options = {"sde_steps": stochastic, "keep_steps": stochastic, "keep_clean": True, **options}
    return SamplingParams(steps, options.pop("guidance_scale", tiny.guidance_scale), tiny.size, **options)


def wire_request(model, params, seed, version=STARTED_WITH, prompt="a cat on a mat", **changes):
    """A request as the trainer's engine makes it, with parts of it changed."""
    row = {"prompt": prompt, "negative_prompt": model.default_negative_prompt}
    request = WireRequest(
        row,
        seed,
        None,
        params,
        sampling_table(model, params),
        tuple(model.latent_shape(params.size)),
        version,
        model.max_sequence_length,
    )
    return replace(request, **changes)


class Client:
    """Calls of one server."""

    def __init__(self, server):
        self.http = httpx.Client(base_url=server.url, timeout=120)

    def info(self):
        return self.http.get("/rollout/info").json()

    def worker(self, method):
        """What a worker answers."""
        [[result]] = self.http.post("/collective_rpc", json={"method": method}).json()["results"]
        return result

    def post(self, path, body=b""):
        return self.http.post(f"/rollout/{path}", content=body)

    def refusal(self, path, body=b""):
        """Status, kind and sentence of an answer that is an error."""
        answer = self.post(path, body)
        content = json.loads(answer.content)
        assert set(content) == {"error", "kind"}
        return answer.status_code, content["kind"], content["error"]

    def sample(self, request):
        answer = self.post("generate", pack_request(request))
        assert answer.status_code == 200, answer.text
        asked = SampleRequest(request.row, 0, 0, request.seed, request.start_seed)
        return unpack_sample(answer.content, asked, request.params)

    def samples(self, requests):
        """All at the same time, in order."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.sample, requests))

    def give(self, model, version, weights=None):
        """The trainer's weights, or others of the same names; a report."""
        answer = None
        for path, body in weight_messages(model, weights or weights_of(model), version):
            answer = self.http.post(path, content=body)
            assert answer.status_code == 200, answer.text
        report = answer.json()
        assert report["version"] == version
        assert report["bound"] == report["expected"] > 0, report
        return report


def weights_of(model):
    """Network -> name -> tensor of what is trained."""
    return {
        name: get_peft_model_state_dict(net) if isinstance(net, PeftModel) else net.state_dict()
        for name, net in model.trained_networks.items()
    }


@torch.no_grad()
def move_adapters(model, seed, size=0.3):
    """New random adapters, such that samples visibly change."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.networks.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size / parameter.shape[-1] ** 0.5)


@torch.no_grad()
def replayed(model, sample, params):
    """Log-probs (K,) that the trainer's model gives to a sample's kept steps."""
    guidance = params.guidance_scale
    conditions = model.encode([sample.request.row], model.needs_negative(guidance), params.size)
    table = transition_table(sample.table.sigmas, params.sde_type, params.noise_level, params.sde_steps)
    log_probs = []
    for step, before, after in zip(sample.steps, sample.latents, sample.next_latents, strict=True):
        timestep = sample.table.timesteps[step][None]
        velocity = model.velocity(before[None], timestep, conditions, guidance)
        mean, std = transition_mean(before[None], velocity, table, step), transition_std(before[None], table, step)
        log_probs.append(gaussian_log_prob(after[None], mean, std))
    return torch.cat(log_probs)

# SPDX-License-Identifier: Apache-2.0
"""What GSPO asks of servers that write text, as far as no server is needed: options, refusals, adapters, messages."""

import re
import shlex
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from omnitrl.errors import InputError, RunError
from omnitrl.omni.thinker import ATTENTION, TOWERS, load_thinker, published_name
from omnitrl.rollout.vllm_omni.checks import check_text_server
from omnitrl.rollout.vllm_omni.text_engine import TextEngine, TextPrompt
from omnitrl.rollout.vllm_omni.text_wire import (
    Completion,
    TextRequest,
    TextSampling,
    pack_completions,
    pack_text_request,
    unpack_completions,
    unpack_text_request,
)
from omnitrl.rollout.vllm_omni.wire import PROTOCOL, ServerInfo
from omnitrl.trainer.gspo_config import GSPOConfig
from omnitrl.trainer.text_rollouts import adapter_of, weights_of
from omnitrl.version import __version__
from tests.omni import chats, tiny
from tests.server.environment import free_port
from tests.test_documented import page


THINKER = "Qwen3OmniMoeThinkerForConditionalGeneration"
SIZES = {"hidden_size": 32, "vocab_size": 266}


def config(tmp_path, **options):
    return GSPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], **options)


def lora(**options):
    return LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION, exclude_modules=TOWERS, **options)


def info(**changed):
    given = {
        "protocol": PROTOCOL,
        "omnitrl_version": __version__,
        "vllm_omni_version": "0.30.0",
        "model": "a-thinker",
        "pipeline_class": THINKER,
        "dtype": "float32",
        "batching": "token",
        "max_num_seqs": 8,
        "log_probs": "processed_logprobs",
        "sizes": SIZES,
    }
    return ServerInfo(**{**given, **changed})


def test_addresses_are_a_list_for_vllm_omni_and_one_for_trl(tmp_path):
    servers = {"rollout_engine": "vllm_omni"}
    assert config(tmp_path, **servers).server_urls == ["http://localhost:8000"]
    assert config(tmp_path, **servers, vllm_server_base_url="http://a:1/").server_urls == ["http://a:1"]
    both = ["http://a:1", "http://b:2"]
    assert config(tmp_path, **servers, vllm_server_base_url=both).vllm_server_base_url == both
    for given in ("http://a:1", ["http://a:1"]):
        assert config(tmp_path, use_vllm=True, vllm_server_base_url=given).vllm_server_base_url == "http://a:1"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rollout_engine": "vllm"}, "rollout_engine='vllm' .* 'local', 'vllm_omni'"),
        ({"rollout_engine": "vllm_omni", "use_vllm": True}, "use_vllm=True is TRL's own engine and .* leave out one"),
        ({"vllm_server_base_url": ["http://a:1", "http://b:1"]}, "several servers, which rollout_engine='vllm_omni'"),
        ({"rollout_engine": "vllm_omni", "vllm_server_base_url": "a:1"}, "is no address of a server: use one like"),
        ({"rollout_engine": "vllm_omni", "vllm_server_base_url": ["http://a:1"] * 2}, "names a server twice"),
        ({"vllm_request_timeout": 0}, "vllm_request_timeout=0"),
        ({"rollout_engine": "vllm_omni", "temperature": 0.0}, r"temperature=0.0 must be above 0: use 1\.0"),
        ({"rollout_engine": "vllm_omni", "max_completion_length": None}, "needs max_completion_length: use for exam"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, options, sentence):
    with pytest.raises(InputError, match=sentence):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"model": tiny.language_model, "processing_class": tiny.tokenizer},
            "is a Qwen3ForCausalLM: .* use_vllm=True",
        ),
        (
            {"processing_class": tiny.tokenizer},
            "is a Qwen2Tokenizer: give the processor of the model, or use rollout_",
        ),
        ({"peft_config": lora(use_dora=True)}, "takes plain LoRA adapters, but that of the model has use_dora=True"),
        ({"peft_config": lora(), "generation_kwargs": {"num_beams": 2}}, r"does not pass on generation_kwargs \['num"),
        ({"peft_config": lora(), "vllm_structured_outputs_regex": "a|b"}, "not pass on vllm_structured_outputs_regex"),
    ],
)
def test_what_servers_cannot_do_is_refused_before_they_are_asked(tmp_path, options, sentence):
    made = {key: value() if key in ("model", "processing_class") else value for key, value in options.items()}
    with pytest.raises(InputError, match=sentence):
        chats.trainer(tmp_path, "text", rollout_engine="vllm_omni", **made)


def test_weights_have_the_names_and_values_of_the_checkpoint(tmp_path):
    tiny.save_full(tmp_path)
    model = load_thinker(str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    expected = {name: tensor for name, tensor in saved.items() if name.startswith("thinker.")}
    found = {f"thinker.{name}": tensor for name, tensor in weights_of(model).items()}
    assert found.keys() == expected.keys()
    assert any(".experts.0.gate_proj." in name for name in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.self_attn.q_proj" in name and "language_model" in name)
    assert list(weights_of(model)) == ["model.layers.0.self_attn.q_proj.weight"]


def test_a_server_that_is_down_is_said_to_be_in_seconds(tmp_path):
    url, began = f"http://127.0.0.1:{free_port()}", time.monotonic()
    servers = {"rollout_engine": "vllm_omni", "vllm_server_base_url": [url], "vllm_server_timeout": 0.5}
    sentence = (
        rf"No rollout server has been there for 0\.5 s \(vllm_server_timeout\)\. {url}: it cannot be connected to"
    )
    with pytest.raises(RunError, match=sentence):
        chats.trainer(tmp_path, "text", peft_config=lora(), **servers)
    assert time.monotonic() - began < 10


class Without(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)


def test_a_server_without_the_hooks_is_said_to_be_one(tmp_path):
    """Any server that knows nothing of `/rollout`, as `vllm serve` does not."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Without) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        servers = {"rollout_engine": "vllm_omni", "vllm_server_base_url": [url], "vllm_server_timeout": 5}
        with pytest.raises(InputError, match=r"without omnitrl's routes .*: start it with `omnitrl vllm-serve MODEL`"):
            chats.trainer(tmp_path, "text", peft_config=lora(), **servers)
        other.shutdown()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"omnitrl_version": "0.0.1"}, r"runs omnitrl 0\.0\.1 .*: use `pip install"),
        (
            {"pipeline_class": "StableDiffusion3Pipeline"},
            f"with a StableDiffusion3Pipeline, but the trainer has a {THINKER}",
        ),
        ({"sizes": {**SIZES, "vocab_size": 9}}, "serves a-thinker with vocab_size=9, but the trainer's model has 266"),
        ({"log_probs": "raw_logprobs"}, "gives raw_logprobs, which are not those .* without --logprobs-mode"),
        ({"log_probs": None}, "gives no log-probs, which .* start it with `omnitrl vllm-serve MODEL`"),
    ],
)
def test_a_server_that_is_the_wrong_one_is_refused(changed, sentence):
    check_text_server(info(), "a server", THINKER, SIZES)
    with pytest.raises(InputError, match=f"^a server .*{sentence}"):
        check_text_server(info(**changed), "a server", THINKER, SIZES)


def test_adapters_go_by_the_names_of_checkpoints_with_their_scale_in_them():
    patterns = {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"q_proj": 6}, "use_rslora": True}
    model = get_peft_model(tiny.thinker(), lora(init_lora_weights=False, **patterns))
    sent = adapter_of(model)
    modules = {f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ATTENTION}
    assert {name.rpartition(".lora_")[0] for name in sent} == modules
    layer = model.base_model.model.model.language_model.layers[1].self_attn
    for name, scale in (("q_proj", 6 / 2), ("o_proj", 8 / 2**0.5), ("v_proj", 8 / 2)):
        lora_a, lora_b = (sent[f"model.layers.1.self_attn.{name}.lora_{part}.weight"] for part in "AB")
        expected = getattr(layer, name).get_delta_weight("default")
        torch.testing.assert_close(lora_b @ lora_a, expected)
        assert getattr(layer, name).scaling["default"] == pytest.approx(scale)
    assert len(sent) == len(get_peft_model_state_dict(model))


def test_names_of_checkpoints_are_those_of_the_file(tmp_path):
    model = tiny.save_full(tmp_path)
    from safetensors import safe_open

    with safe_open(next(tmp_path.glob("*.safetensors")), "pt") as file:
        published = {name.removeprefix("thinker.") for name in file.keys() if name.startswith("thinker.")}
    plain = {published_name(name) for name, _ in model.named_parameters() if ".experts." not in name}
    assert plain <= published
    assert {name for name in published - plain if ".experts." not in name} == set()


def test_messages_carry_what_they_are_given():
    media = {"pixel_values": torch.rand(4, 6), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    sampling = TextSampling(9, 0.7, 0.9, 5, 0.01, 1.1, [1, 2], [3])
    given = TextRequest([5, 6, 7], media, [11, 2**31 - 1], sampling, 2**62 - 1)
    found = unpack_text_request(pack_text_request(given))
    assert (found.token_ids, found.seeds, found.sampling, found.weight_version) == (
        *(given.token_ids, given.seeds),
        *(given.sampling, given.weight_version),
    )
    assert found.media.keys() == media.keys()
    assert all(torch.equal(found.media[name], media[name]) for name in media)
    completions = [Completion([1, 2, 3], [-0.5, -0.25, -2.0], "length"), Completion([2], [-1e-7], "stop")]
    assert unpack_completions(pack_completions(completions, 5)) == (completions, 5)


def test_a_request_of_another_kind_is_no_request_for_text():
    with pytest.raises(ValueError, match="for no text came to a server of protocol 1 that writes text"):
        unpack_text_request(pack_completions([], 1))


def test_answers_that_are_not_those_asked_for_are_asked_for_again():
    from omnitrl.rollout.vllm_omni.client import BadAnswer

    engine, prompt = object.__new__(TextEngine), TextPrompt([1], {}, [7, 8])
    engine._version = 5
    one = Completion([1], [-1.0], "stop")
    assert engine._accept(prompt, pack_completions([one, one], 5)) == [one, one]
    for wrong in (pack_completions([one], 5), pack_completions([one, one], 4), b"nonsense"):
        with pytest.raises(BadAnswer):
            engine._accept(prompt, wrong)
    with pytest.raises(BadAnswer, match="a completion is empty"):
        engine._accept(prompt, pack_completions([one, Completion([], [], "stop")], 5))
    with pytest.raises(RunError, match="log-probs that are not finite: start it with --dtype bfloat16"):
        engine._accept(prompt, pack_completions([one, Completion([1], [float("nan")], "stop")], 5))


def test_trl_has_its_own_engine_and_its_own_words_in_seconds(tmp_path):
    url, began = f"http://127.0.0.1:{free_port()}", time.monotonic()
    servers = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 0.5}
    texts = {"model": tiny.language_model(), "processing_class": tiny.tokenizer()}
    with pytest.raises((ImportError, ConnectionError), match=r"vLLM is not available|server can't be reached"):
        chats.trainer(tmp_path, "text", **texts, **servers)
    assert time.monotonic() - began < 10


def test_the_page_has_the_flags_that_trl_starts_servers_with():
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    (line,) = re.findall(r"VLLM_SERVER_DEV_MODE=1 vllm serve (.+?)```", page("gspo_trainer"), re.DOTALL)
    model, *flags = shlex.split(line.replace("\\\n", ""))
    command = build_command(ScriptArguments(model=model))
    given = command[command.index("--weight-transfer-config") :]
    assert flags == ["--enable-scale-out", *given]  # which it adds for vLLM 0.30 and later

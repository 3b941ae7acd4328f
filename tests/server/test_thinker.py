# SPDX-License-Identifier: Apache-2.0
"""Answers from a real server with a Thinker alone: log-probs are the trainer's, before and after it has learnt."""

import copy
import time
from dataclasses import replace

import pytest
import torch
from peft import PeftModel, get_peft_model

from omnitrl.errors import InputError, RunError
from omnitrl.omni.processing import OmniProcessor, collate
from omnitrl.omni.rows import read_row
from omnitrl.omni.thinker import load_thinker, media_tokens
from omnitrl.rollout.vllm_omni.text_engine import TextEngine, TextPrompt
from omnitrl.rollout.vllm_omni.text_wire import TextSampling
from omnitrl.trainer.text_rollouts import adapter_of, weights_of
from tests.distributed.launch import Launch
from tests.omni import chats, tiny
from tests.server.environment import needs_server, rollout_server, show_logs
from tests.server.thinkers import FLAGS, VARIABLES, lora, save_thinker


pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600), needs_server]

TOLERANCE = 1e-4
ENDS = 256 + tiny.SPECIAL.index("<|im_end|>")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinker")
    save_thinker(folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint):
    server = rollout_server(checkpoint, checkpoint / "server.log", *FLAGS, variables=VARIABLES)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def url(server, request):
    """The server's address; its log is shown when a test fails."""
    yield server.url
    show_logs(request, [server])


@pytest.fixture
def model(checkpoint):
    """The trainer's model with an adapter that does nothing yet; ranks and scales differ between modules."""
    config = lora(rank_pattern={"o_proj": 2}, alpha_pattern={"model.language_model.layers.1.self_attn.q_proj": 3})
    return get_peft_model(load_thinker(str(checkpoint)), config).eval()


def engine_of(url, model, **options):
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return TextEngine([url], type(base).__name__, vars(base.config.get_text_config()), patience=60, **options)


def give(engine, model):
    report = engine.update_weights(model.peft_config["default"], adapter_of(model))
    assert report.bound == report.expected == 8  # four projections of two layers
    return report


@torch.no_grad()
def moved(model, seed):
    """Another adapter, which visibly changes what is written."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def log_probs(model, inputs, tokens, temperature=1.0):
    """What the trainer's model says of the tokens of an answer."""
    ids = torch.tensor([[*inputs.input_ids, *tokens]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **collate([inputs.media])).logits[0]
    answer = ids[0, len(inputs.input_ids) :, None]
    return (logits / temperature).log_softmax(-1)[-1 - len(tokens) : -1].gather(1, answer)[:, 0]


def media_matter(model, inputs, tokens, given):
    """Kinds of media without which the trainer's log-probs would visibly differ from these."""
    found = []
    for name in ("pixel_values", "pixel_values_videos", "input_features"):
        if name in inputs.media:
            other = replace(inputs, media={**inputs.media, name: torch.zeros_like(inputs.media[name])})
            if (log_probs(model, other, tokens) - given).abs().max() > 100 * TOLERANCE:
                found.append(name)
    return found


def sampling(model, **changed):
    given = {"max_tokens": 8, "stop_token_ids": [ENDS], "suppress_tokens": media_tokens(model.config), **changed}
    return TextSampling(**given)


def asked(rows, seeds):
    return [TextPrompt(row.input_ids, row.media, list(seeds)) for row in rows]


def test_log_probs_are_those_of_the_trainer_before_and_after_two_updates(url, model):
    process = OmniProcessor(tiny.processor())
    rows = [process(read_row(row)) for row in chats.ROWS["mixed"]]  # text, pictures, all kinds, a sound
    engine = engine_of(url, model)
    before, kinds_seen = [], []
    for update in range(3):
        if update:
            moved(model, update)
        give(engine, model)
        answers = engine.generate(asked(rows, (1, 2)), sampling(model))
        for inputs, answers_of_row in zip(rows, answers, strict=True):
            for answer in answers_of_row:
                given = torch.tensor(answer.log_probs)
                assert given.shape == (len(answer.token_ids),)
                torch.testing.assert_close(log_probs(model, inputs, answer.token_ids), given, atol=TOLERANCE, rtol=0)
                kinds_seen += media_matter(model, inputs, answer.token_ids, given)
                assert answer.finish_reason == ("stop" if answer.token_ids[-1] == ENDS else "length")
        for inputs, tokens, given in before:  # the adapter is another one now
            assert (log_probs(model, inputs, tokens) - given).abs().max() > 0.05
        assert set(kinds_seen) == {"pixel_values", "pixel_values_videos", "input_features"}
        before = [(r, a[0].token_ids, torch.tensor(a[0].log_probs)) for r, a in zip(rows, answers, strict=True)]


def test_answers_follow_their_seeds_and_the_temperature(url, model):
    rows = [OmniProcessor(tiny.processor())(read_row(chats.ROWS["image"][0]))]
    engine = engine_of(url, model)
    give(engine, model)
    answers = (engine.generate(asked(rows, (5, 6, 5)), sampling(model))[0] for _ in range(2))
    first, second = ([answer.token_ids for answer in of_a_call] for of_a_call in answers)
    assert first == second
    assert first[0] == first[2] != first[1]
    (answers,) = engine.generate(asked(rows, (1, 2)), sampling(model, temperature=0.7, max_tokens=5))
    for answer in answers:
        expected = log_probs(model, rows[0], answer.token_ids, 0.7)
        torch.testing.assert_close(expected, torch.tensor(answer.log_probs), atol=TOLERANCE, rtol=0)


@pytest.fixture
def trained(url, checkpoint, tmp_path):
    """Trainers that have made two updates, with the server and without."""

    def train(**options):
        trainer = chats.trainer(
            tmp_path, "mixed", load_thinker(str(checkpoint)), peft_config=lora(), learning_rate=0.05, **options
        )
        trainer.train()
        return trainer

    server = {"rollout_engine": "vllm_omni", "vllm_server_base_url": [url], "vllm_server_timeout": 60}
    every = {"steps_per_generation": 1, "per_device_train_batch_size": 4}  # two of the four rows in each update
    return train(**every, **server), train(**every)


def test_two_updates_with_the_server_log_what_two_without_it_do(trained):
    served, local = trained
    assert served.state.global_step == local.state.global_step == 2
    names = {name for row in served.state.log_history for name in row}
    added = names - {name for row in local.state.log_history for name in row}
    assert added == {
        *(f"sampling/sampling_logp_difference/{part}" for part in ("mean", "max")),
        *(f"sampling/importance_sampling_ratio/{part}" for part in ("min", "mean", "max")),
    }
    differences = chats.logged(served, "sampling/sampling_logp_difference/max")
    assert len(differences) == 2  # a rollout each, the second after an update
    assert max(differences) < TOLERANCE
    for part in ("min", "mean", "max"):
        assert chats.logged(served, f"sampling/importance_sampling_ratio/{part}") == pytest.approx([1, 1], abs=1e-3)
    changed = adapter_of(served.accelerator.unwrap_model(served.model))
    assert all(tensor.abs().max() > 0.01 for name, tensor in changed.items() if ".lora_B." in name)


def without_experts(checkpoint):
    """The trainer's model as a whole, but for the experts, which vLLM packs on a CPU."""
    model = load_thinker(str(checkpoint)).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    return model


@pytest.fixture
def whole(url, checkpoint):
    """A model that is trained as a whole; the server has the weights of the checkpoint again after the test."""
    yield without_experts(checkpoint)
    first = without_experts(checkpoint)
    assert engine_of(url, first).update_weights(None, weights_of(first)).bound > 0


def test_weights_arrive_without_adapters_and_adapters_on_top_of_them(url, whole):
    process = OmniProcessor(tiny.processor())
    rows = [process(read_row(row)) for row in chats.ROWS["mixed"]]
    engine = engine_of(url, whole)
    other = get_peft_model(copy.deepcopy(whole), lora()).eval()
    moved(other, 1)
    give(engine, other)  # it is in nobody's way afterwards
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(whole.named_parameters()):
            if parameter.requires_grad:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    sent = weights_of(whole)
    report = engine.update_weights(None, sent)
    assert report.bound == report.expected == len(sent)
    adapted = get_peft_model(copy.deepcopy(whole), lora()).eval()
    moved(adapted, 2)
    before = other
    for model in (whole, adapted):
        if model is adapted:
            give(engine, model)
        answers = engine.generate(asked(rows, (1,)), sampling(model))
        for inputs, (answer,) in zip(rows, answers, strict=True):
            given = torch.tensor(answer.log_probs)
            torch.testing.assert_close(log_probs(model, inputs, answer.token_ids), given, atol=TOLERANCE, rtol=0)
            assert (log_probs(before, inputs, answer.token_ids) - given).abs().max() > 0.05
        before = model


def test_weights_that_have_no_place_are_named(url, whole):
    engine = engine_of(url, whole)
    with pytest.raises(InputError, match=r"On a CPU, vLLM packs experts .*experts.0.* leave experts out of training"):
        engine.update_weights(None, weights_of(whole.requires_grad_(True)))
    with pytest.raises(RunError, match=r"took 0 of 1 trained modules; it has no place for thinker\.model\.layers\.7"):
        engine.update_weights(None, {"model.layers.7.self_attn.q_proj.weight": torch.ones(2, 2)})


def test_two_updates_of_weights_with_the_server(url, checkpoint, whole, tmp_path):
    server = {"rollout_engine": "vllm_omni", "vllm_server_base_url": [url], "vllm_server_timeout": 60}
    every = {"steps_per_generation": 1, "per_device_train_batch_size": 4}
    trainer = chats.trainer(tmp_path, "mixed", whole, learning_rate=1e-3, **every, **server)
    trainer.train()
    differences = chats.logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == 2
    assert max(differences) < TOLERANCE
    first = without_experts(checkpoint).state_dict()
    changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, first[name])}
    assert any(".self_attn." in name for name in changed)
    assert not any(".experts." in name for name in changed)


def test_two_processes_share_one_server(url, checkpoint, tmp_path):
    variables = {"CHECKPOINT": str(checkpoint), "SERVER": url}
    launch = Launch("tests.server.two_thinkers", tmp_path, "two_updates", environment=variables)
    assert launch.wait(280) == 0, launch.output()
    ours, theirs = launch.results("two_updates")
    assert ours["adapter"].keys() == theirs["adapter"].keys()
    for name, tensor in ours["adapter"].items():
        torch.testing.assert_close(tensor, theirs["adapter"][name], atol=1e-6, rtol=0)
    assert len(ours["answers"]) == len(theirs["answers"]) == 4
    assert not any(answer in theirs["answers"] for answer in ours["answers"])
    assert len(ours["differences"]) == 2
    assert max(ours["differences"]) < TOLERANCE


def test_what_a_server_cannot_do_ends_with_a_sentence(url, model):
    row = OmniProcessor(tiny.processor())(read_row(chats.ROWS["image"][0]))
    engine = engine_of(url, model)
    give(engine, model)
    began = time.monotonic()
    length = len(row.input_ids)
    with pytest.raises(InputError, match=f"{length} tokens and 600 .* takes 512: start it with --max-model-len"):
        engine.generate(asked([row], (1,)), sampling(model, max_tokens=600))
    with pytest.raises(
        InputError, match=r"vLLM does not draw answers like that: temperature must be in \[0, 2\], got 3"
    ):
        engine.generate(asked([row], (1, 2)), sampling(model, temperature=3.0))
    media = {name: torch.cat([value, value]) for name, value in row.media.items()}
    with pytest.raises(InputError, match=r"has places for 1 image\(s\), but came with 2"):
        engine.generate([TextPrompt(row.input_ids, media, [1])], sampling(model))
    weights = {f"model.layers.7.self_attn.q_proj.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    with pytest.raises(RunError, match=r"took 0 of 1 trained modules; it has no place for thinker\.model\.layers\.7"):
        engine.update_weights(model.peft_config["default"], weights)
    answers = engine_of(url, model)  # it is as well as before
    give(answers, model)
    assert answers.generate(asked([row], (1,)), sampling(model))
    sizes = {**vars(model.config.get_text_config()), "num_hidden_layers": 48}
    with pytest.raises(InputError, match=r"serves .* with num_hidden_layers=2, but the trainer's model has 48"):
        TextEngine([url], type(model.get_base_model()).__name__, sizes, patience=60)
    assert time.monotonic() - began < 60

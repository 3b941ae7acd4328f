# SPDX-License-Identifier: Apache-2.0
"""What is particular to Stable Audio 3; what every family promises is in `test_families.py`."""

import json
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig

from omnitrl.errors import InputError
from omnitrl.media import Audio
from omnitrl.models import MediaSize, family_of
from omnitrl.rollout import LocalEngine, SampleRequest, SamplingParams
from omnitrl.trainer.adapters import attach_adapters
from omnitrl.trainer.saving import load_snippet, save_networks
from tests.tiny import CHECKPOINTS
from tests.tiny.stable_audio3 import tiny_stable_audio3
from tests.trainer.helpers import logged, same, trainable, trainer


STEPS = 4


@pytest.fixture(scope="module")
def model():
    return CHECKPOINTS["stable-audio-3"].model()


@pytest.fixture(scope="module")
def distilled():
    return family_of("StableAudio3Pipeline")(tiny_stable_audio3(distilled=True))


def sounds(model, length, **options):
    params = SamplingParams(STEPS, 1.0, size=MediaSize(audio_length=length), **options)
    requests = [SampleRequest({"prompt": "a bell"}, 0, 0, seed=3)]
    return [t for batch in LocalEngine(model).generate(requests, params) for t in batch]


@pytest.mark.compat
@pytest.mark.parametrize("length", [0.05, 1.0, 1.03125, 1.3, 3.999])
def test_sounds_have_the_exact_length(model, length):
    """Also where the autoencoder's blocks of 16 samples (31 ms) do not end there."""
    (sample,) = sounds(model, length)
    stock = model.pipeline(
        "a bell", length, STEPS, generator=torch.Generator().manual_seed(3), output_type="np"
    ).audios
    assert isinstance(sample.media, Audio)
    assert sample.media.sampling_rate == 512
    assert sample.media.samples.shape == (2, int(length * 512)) == stock[0].shape
    assert np.abs(sample.media.samples - stock[0]).max() <= 1e-5


def test_the_length_is_told_to_the_network_and_counted_in_blocks(model):
    assert model.latent_shape(MediaSize(audio_length=1.0)) == (8, 32)
    assert model.latent_shape(MediaSize(audio_length=1.001)) == (8, 33)
    assert model.latent_shape() == (8, 320)  # ten seconds
    short, long = (model.encode([{"prompt": "a bell"}], size=MediaSize(audio_length=s)) for s in (1.0, 1.02))
    assert (short.positive["duration"] - long.positive["duration"]).abs().max() > 1e-3
    for conditions in (short, long):  # the last token, and the negative prompt is told the same
        assert torch.equal(conditions.positive["prompt_embeds"][:, -1], conditions.positive["duration"])
    both = model.encode([{"prompt": "a bell"}], guidance=True, size=MediaSize(audio_length=1.0))
    assert torch.equal(both.negative["duration"], short.positive["duration"])
    assert not torch.equal(both.negative["prompt_embeds"], short.positive["prompt_embeds"])


@pytest.mark.parametrize("length", [0.0, -1.0, 20.5])
def test_lengths_that_cannot_be_are_refused(model, length):
    with pytest.raises(
        InputError, match=f"audio_length={length} does not fit .* up to 20 seconds, .*audio_length=10.0"
    ):
        model.latent_shape(MediaSize(audio_length=length))


def test_padding_is_seen_and_kept(model):
    """The network attends to its own vector for padding, so that a longer `max_sequence_length` is another input."""
    inputs = model.example_inputs(1, size=MediaSize(audio_length=1.0))
    conditions = inputs["conditions"]
    assert conditions.positive["is_text"].shape == (1, 17)  # 16 of the tokenizer, and the length
    assert conditions.positive["is_text"].sum() == 1 + len("example0") + 1 + 1  # bos, the text with its space, length
    shorter = {name: conditions.positive[name][:, 1:] for name in ("prompt_embeds", "is_text")}
    with torch.no_grad():
        whole = model.velocity(**inputs)
        conditions.positive |= shorter  # one padding token fewer, on the left
        cut = model.velocity(**inputs)
    assert (whole - cut).abs().max() > 1e-4


def test_the_text_is_as_long_as_the_tokenizer_lets_it(model):
    wide = family_of("StableAudio3Pipeline")(tiny_stable_audio3())
    assert wide.max_sequence_length == 256
    rows = [{"prompt": "a very long prompt of many words"}]
    encoded = [m.encode(rows, size=MediaSize(audio_length=1.0)).positive["prompt_embeds"] for m in (wide, model)]
    assert encoded[0].shape[1] == 17
    assert torch.equal(*encoded)


def test_timesteps_are_the_levels_themselves(model):
    table = model.sigmas(8)
    assert torch.equal(table.timesteps, table.sigmas[:-1])
    assert torch.equal(model.timesteps_of(table.sigmas), table.sigmas)
    logsnr = torch.logit(1 - table.sigmas[1:-1].double())
    assert torch.allclose(logsnr.diff(), torch.full((6,), 8.2 / 8, dtype=torch.double), atol=1e-4)


def test_guidance_is_for_the_base_checkpoint(model, distilled):
    assert (model.default_guidance_scale, distilled.default_guidance_scale) == (7.0, 1.0)


def test_the_distilled_sampler_is_cps_at_noise_level_one(distilled):
    """The stock draws each step's noise from the generator that drew the start, and so do we."""
    (ours,) = sounds(distilled, 1.3, sde_type="cps", noise_level=1.0, sde_steps=(0, 1, 2), keep_clean=True)
    stock = distilled.pipeline(
        "a bell", 1.3, STEPS, generator=torch.Generator().manual_seed(3), output_type="latent"
    ).audios
    assert (ours.clean_latents - stock[0]).abs().max() <= 1e-5 * max(1.0, float(stock.abs().max()))
    (still,) = sounds(distilled, 1.3, keep_clean=True)
    assert (still.clean_latents - stock[0]).abs().max() > 0.1


def loudness(prompts, completions, **kwargs):
    return [float(np.square(sound.samples).mean()) for sound in completions]


@pytest.mark.slow
def test_two_updates_saved_and_resumed(tmp_path):
    def run(**options):
        torch.manual_seed(0)
        return trainer(
            tmp_path, model=CHECKPOINTS["stable-audio-3"].model(), rewards=loudness, audio_length=1.3, **options
        )

    whole = run(max_steps=2, save_strategy="steps", save_steps=1, save_report=True)
    whole.train()
    assert all(grad > 0 for grad in logged(whole, "grad_norm"))
    resumed = run(max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert same(trainable(whole), trainable(resumed))
    whole.save_model()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "pytorch_lora_weights.safetensors" not in names  # there is no stock loader that could read it
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_all_weights_are_those_that_are_used():
    trained = CHECKPOINTS["stable-audio-3"].model()
    attach_adapters(trained, None)
    frozen = {name.split(".")[2] for name, p in trained.transformer.named_parameters() if not p.requires_grad}
    assert frozen == {"to_local_embed"}
    inputs = trained.example_inputs(1, size=MediaSize(audio_length=1.0))
    trained.velocity(**inputs).square().mean().backward()
    assert all((p.grad is not None) == p.requires_grad for p in trained.networks.parameters())


def test_the_code_that_loads_the_adapter_runs(model, tmp_path):
    """With PEFT, as the pipeline has no loader."""
    trained = CHECKPOINTS["stable-audio-3"].model()
    trained.pipeline.save_pretrained(tmp_path / "base")
    attach_adapters(trained, LoraConfig(r=2, init_lora_weights=False))
    save_networks(trained, tmp_path / "adapter")
    code = load_snippet(trained, adapter=True, repo=str(tmp_path / "adapter"))
    assert "PeftModel.from_pretrained(pipe.transformer, " in code
    code = code.replace("path/to/the/base/model", str(tmp_path / "base")).replace("bfloat16", "float32")
    made = {}
    exec(compile(code, "snippet", "exec"), made)
    loaded = family_of("StableAudio3Pipeline")(made["pipe"], max_sequence_length=16)
    inputs = model.example_inputs(1, size=MediaSize(audio_length=1.0))
    with torch.no_grad():
        expected = trained.velocity(**inputs)
        assert (loaded.velocity(**inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (model.velocity(**inputs) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_sound_that_is_not_finite_is_none(monkeypatch, broken):
    """Infinity too, which would be as loud as can be once it is clamped."""
    model = CHECKPOINTS["stable-audio-3"].model()
    waves = torch.full((2, 2, 4000), 1.5)
    waves[1, 0, 7] = broken
    monkeypatch.setattr(model, "decode_pixels", lambda latents: waves)
    first, second = model.decode(torch.zeros(2, 1), MediaSize(audio_length=0.05))
    assert second is None
    assert (first.samples == 1).all()
    assert first.samples.shape == (2, int(0.05 * model.sampling_rate))

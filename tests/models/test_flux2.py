# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 against the stock pipelines: guidance of three kinds, condition images of all sizes, normalised patches."""

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.models import MediaSize
from omnitrl.models.flux2 import Flux2KleinModel, Flux2Model
from tests.marks import first_fast
from tests.models.calls import network_calls
from tests.tiny import CHECKPOINTS
from tests.tiny.checkpoint import picture
from tests.tiny.flux2 import tiny_flux2
from tests.trainer.helpers import logged, same, trainable, trainer


pytestmark = pytest.mark.compat

DEV, BASE, DISTILLED = (CHECKPOINTS[name] for name in ("flux2-dev", "flux2-klein-base", "flux2-klein"))
PROMPTS = ["a cat, sitting", "two dogs!"]


@pytest.fixture(scope="module")
def dev():
    return DEV.model()


@pytest.fixture(scope="module")
def base():
    return BASE.model()


# Text


@pytest.mark.parametrize(("tiny", "length"), [(DEV, 24), (BASE, 48)], ids=["dev", "klein"])
def test_prompts_are_encoded_as_the_stock_pipeline_does(tiny, length):
    model = tiny.model()
    ours = model.encode([{"prompt": prompt} for prompt in PROMPTS]).positive["prompt_embeds"]
    embeds, _ = model.pipeline.encode_prompt(PROMPTS, max_sequence_length=length)
    assert torch.allclose(ours, embeds, atol=1e-5)
    assert embeds.shape == (2, length, 48)
    assert (embeds[0] - embeds[1]).abs().max() > 0.1


def test_padding_is_attended_to_so_its_length_is_part_of_the_model():
    model = DISTILLED.model()
    inputs = model.example_inputs(1, size=DISTILLED.size)
    with torch.no_grad():
        short = model.velocity(**inputs)
        model.max_sequence_length = 64
        inputs["conditions"] = model.encode([{"prompt": "example 0"}], size=DISTILLED.size)
        assert (model.velocity(**inputs) - short).abs().max() > 1e-3


# Guidance


def test_dev_takes_its_guidance_as_an_input(dev):
    inputs = dev.example_inputs(2, size=DEV.size)
    (call,) = network_calls(dev.transformer, lambda: dev.velocity(**inputs, guidance_scale=2.5))
    assert call["guidance"].tolist() == [2.5, 2.5]
    assert len(call["hidden_states"]) == 2
    assert not dev.needs_negative(2.5)
    assert dev.evaluations(2.5) == 1


def test_klein_is_guided_by_a_second_row_unless_it_is_distilled(base):
    distilled = DISTILLED.model()
    rows = {}
    for model in (base, distilled):
        inputs = model.example_inputs(2, size=BASE.size)
        calls = network_calls(
            model.transformer, lambda m=model, i=inputs: [m.velocity(**i, guidance_scale=g) for g in (1.0, 4.0)]
        )
        assert [call["guidance"] for call in calls] == [None, None]
        rows[model] = [len(call["hidden_states"]) for call in calls]
    assert rows == {base: [2, 4], distilled: [2, 2]}
    assert [base.evaluations(4.0), distilled.evaluations(4.0)] == [2, 1]


def test_the_default_guidance_is_the_checkpoints(dev, base):
    assert dev.default_guidance_scale == base.default_guidance_scale == 4.0
    assert DISTILLED.model().default_guidance_scale == 1.0
    assert Flux2KleinModel.default_guidance_scale == Flux2Model.default_guidance_scale == 4.0


@pytest.mark.parametrize("tiny", [DEV, BASE], ids=["dev", "klein"])
def test_in_half_precision_the_network_is_told_what_the_stock_pipeline_tells_it(tiny):
    """Times are rounded to the network's precision before they are divided by 1000; positions are exact."""
    model = tiny.model()
    model.pipeline.to(torch.bfloat16)
    row = tiny.row("a cat", 1)
    stock = network_calls(model.transformer, lambda: tiny.stock(model.pipeline, row, 4, 1.0, 0, output_type="latent"))
    latents = torch.randn(1, *model.latent_shape(tiny.size))
    conditions, timesteps = model.encode([row], size=tiny.size), model.sigmas(4, tiny.size).timesteps

    def ours():
        for time in timesteps:
            model.velocity(latents, time[None], conditions, 1.0)

    names = ["timestep", "encoder_hidden_states", "txt_ids", "img_ids"] + (["guidance"] if tiny is DEV else [])
    assert len(stock) == 4
    for mine, theirs in zip(network_calls(model.transformer, ours), stock, strict=True):
        for name in names:
            assert torch.equal(mine[name].float(), theirs[name].float()), name
        assert mine["timestep"].dtype == mine["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(mine["hidden_states"][:, 48:], theirs["hidden_states"][:, 48:])  # the condition images


# Time and size


@pytest.mark.parametrize(
    ("size", "steps", "mu"),
    # mu is linear in the steps between 10 and 200 and in the positions: two lines at 10 and 200 steps.
    [((64, 64), 10, 8.73809524e-05 * 64 + 1.89833333), ((512, 256), 200, 0.00016927 * 2048 + 0.45666666)],
)
def test_the_shift_follows_the_size_and_the_steps(dev, size, steps, mu):
    grid = np.linspace(1.0, 1 / steps, steps)
    expected = np.exp(mu) / (np.exp(mu) + 1 / grid - 1)
    sigmas = dev.sigmas(steps, MediaSize(*size)).sigmas.numpy()
    assert np.abs(sigmas[:-1] - expected).max() <= 1e-6
    assert sigmas[-1] == 0


def test_large_pictures_have_a_shift_that_ignores_the_steps(dev):
    large = MediaSize(544, 576)  # 68 × 72 = 4896 positions, more than 4300
    tables = [dev.sigmas(steps, large).sigmas for steps in (4, 8)]
    assert torch.allclose(tables[0], tables[1][::2], atol=1e-6)
    assert not torch.allclose(dev.sigmas(4, DEV.size).sigmas, dev.sigmas(8, DEV.size).sigmas[::2], atol=1e-3)


def test_no_steps_are_refused(dev):
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, got 0"):
        dev.sigmas(0)


def test_the_default_size_is_the_stock_pipelines(dev):
    assert dev.default_size == MediaSize(512, 512)  # 1024 with the VAE's factor 8
    assert dev.latent_shape() == (16, 64, 64)
    assert dev.latent_shape(MediaSize(64, 96)) == (16, 8, 12)


# Condition images


class Encoded(Exception):
    pass


@pytest.mark.parametrize("sides", [(64, 64), (101, 77), (640, 480), (1500, 900), (2048, 1024), (400, 3000)])
def test_condition_images_are_those_of_the_stock_pipeline(sides):
    """Shrunk to a megapixel, cropped to whole positions: pixel by pixel what the stock pipeline encodes."""
    pipeline, pixels = tiny_flux2(), []

    def encode(self, image, generator):
        pixels.append(image)
        raise Encoded

    pipeline._encode_vae_image = encode.__get__(pipeline)
    image = Image.effect_noise(sides, 60).convert("RGB")
    with pytest.raises(Encoded):
        pipeline(prompt="a cat", image=image, height=64, width=64, num_inference_steps=1, max_sequence_length=16)
    model = DEV.model()
    model.encode_pixels = lambda given: pixels.append(given) or given.new_zeros(1, 16, 1, 1)
    model.encode([{"prompt": "a cat", "image": image}])
    stock, ours = pixels
    assert torch.equal(ours, stock)
    assert ours.shape[2] % 8 == ours.shape[3] % 8 == 0
    assert ours.shape[2] * ours.shape[3] <= 1024 * 1024


def test_rows_with_none_one_and_two_images_share_a_batch(base):
    """Each row as it is alone, each layout in a network call of its own, guided or not."""
    rows = [
        {"prompt": "a cat"},
        {"prompt": "two dogs", "image": picture(0, (64, 96))},
        {"prompt": "the sun", "images": [picture(1, (64, 64)), picture(2, (80, 64))]},
        {"prompt": "ice", "images": []},
    ]
    conditions = base.encode(rows, guidance=True, size=BASE.size)
    assert conditions.layouts == ((), ((12, 8),), ((8, 8), (8, 10)), ())
    assert conditions.positive["image_latents_mask"].sum(dim=1).tolist() == [0, 96, 144, 0]
    assert conditions[[0, 3]].positive["image_latents"].shape[1] <= 1  # no padding is carried along
    latents = torch.randn(4, *base.latent_shape(BASE.size), generator=torch.Generator().manual_seed(0))
    times, found = torch.full((4,), 700.0), []
    for guidance, twice in ((1.0, 1), (4.0, 2)):
        found.clear()
        calls = network_calls(
            base.transformer, lambda g=guidance: found.append(base.velocity(latents, times, conditions, g))
        )
        shapes = [tuple(call["hidden_states"].shape[:2]) for call in calls]
        assert shapes == [(2 * twice, 48), (twice, 48 + 96), (twice, 48 + 144)]
        for i in range(4):
            with torch.no_grad():
                alone = base.velocity(latents[i : i + 1], times[:1], base.encode([rows[i]], True, BASE.size), guidance)
            assert torch.allclose(alone[0], found[0][i], atol=1e-5)


def test_images_have_a_place_in_time_each(base):
    row = {"prompt": "a cat", "images": [picture(1, (64, 64)), picture(2, (80, 64))]}
    inputs = {**base.example_inputs(1, size=BASE.size), "conditions": base.encode([row], size=BASE.size)}
    (call,) = network_calls(base.transformer, lambda: base.velocity(**inputs))
    times, counts = call["img_ids"][0, :, 0].unique(return_counts=True)
    assert times.tolist() == [0, 10, 20]
    assert counts.tolist() == [48, 64, 80]
    assert call["img_ids"][0, -1].tolist() == [20, 7, 9, 0]
    assert call["txt_ids"][0, -1].tolist() == [0, 0, 0, 47]


@pytest.mark.parametrize(
    ("sides", "reason"), [((48, 200), "Image too small: 48×200"), ((900, 100), "Aspect ratio too extreme: 900×100")]
)
def test_images_that_the_stock_pipeline_refuses_are_named(base, sides, reason):
    with pytest.raises(InputError, match=f"image of the prompt 'a cat' does not fit this checkpoint \\({reason}"):
        base.encode([{"prompt": "a cat", "image": Image.new("RGB", sides)}])


def test_more_than_ten_images_are_refused(base):
    with pytest.raises(InputError, match=r"has 11 condition image\(s\), but Flux2KleinPipeline takes 0 to 10"):
        base.encode([{"prompt": "a cat", "images": [picture(0)] * 11}])


# Latents


def test_latents_are_normalised_by_the_statistics_of_the_vae(dev):
    """What the VAE is given is what the stock pipeline gives it, and the condition image is its own latents."""
    pipeline, latents = dev.pipeline, torch.randn(2, 16, 6, 8, generator=torch.Generator().manual_seed(0))
    mean, std = pipeline.vae.bn.running_mean, (pipeline.vae.bn.running_var + 1e-4).sqrt()
    raw = pipeline._unpatchify_latents(latents * std.view(1, -1, 1, 1) + mean.view(1, -1, 1, 1))
    with torch.no_grad():
        assert torch.allclose(dev.decode_pixels(latents), pipeline.vae.decode(raw).sample, atol=1e-6)
        pixels = torch.rand(1, 3, 48, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
        assert torch.allclose(dev.encode_pixels(pixels), pipeline._encode_vae_image(pixels, None), atol=1e-6)


def test_the_image_is_its_latents(dev):
    row = {"prompt": "a cat", "image": picture(0, (96, 64))}
    tokens = dev.encode([row]).positive["image_latents"]
    assert torch.equal(dev.pipeline._pack_latents(dev.encode_images([row["image"]], MediaSize(64, 96))), tokens)


# Training


def test_attention_of_both_kinds_of_blocks_is_adapted(dev):
    names = [name for name, _ in dev.transformer.named_modules()]
    adapted = [n for n in names if any(n.endswith("." + target) for target in dev.default_lora_targets)]
    assert sum(name.startswith("transformer_blocks.0.") for name in adapted) == 8
    assert [name for name in adapted if "single" in name] == [
        f"single_transformer_blocks.{i}.attn.to_qkv_mlp_proj" for i in range(2)
    ]


@pytest.mark.parametrize("tiny", first_fast([DEV, BASE, DISTILLED]), ids=["dev", "base", "distilled"])
def test_two_updates_and_the_adapter_in_the_stock_pipeline(tiny, tmp_path):
    data = [tiny.row(prompt, i) for i, prompt in enumerate(["a cat", "two dogs", "sun"])]
    run = trainer(
        tmp_path, model=tiny.model(), data=data, height=48, width=64, guidance_scale=None, max_steps=2, save_steps=1
    )
    before = trainable(run)
    run.train()
    assert not same(before, trainable(run))
    assert logged(run, "ratio/mean")[0] == pytest.approx(1, abs=1e-6)
    run.save_model()
    stock = tiny.model().pipeline
    before = tiny.stock(stock, data[1], 4, run.guidance_scale, 7).images[0].tobytes()
    stock.load_lora_weights(tmp_path / "out")
    pictures = [tiny.stock(p, data[1], 4, run.guidance_scale, 7).images[0] for p in (stock, run.flow_model.pipeline)]
    assert pictures[0].tobytes() == pictures[1].tobytes()
    assert pictures[0].tobytes() != before

# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 against the stock pipelines: guidance as an input, the shift by size, images as tokens."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.models import MediaSize
from omnitrl.models.flux import FluxModel
from tests.golden_cases import load_case
from tests.marks import first_fast
from tests.models.calls import network_calls
from tests.tiny import CHECKPOINTS
from tests.tiny.checkpoint import picture
from tests.tiny.flux import tiny_flux
from tests.trainer.helpers import logged, same, trainable, trainer


pytestmark = pytest.mark.compat

DEV, SCHNELL, KONTEXT = (CHECKPOINTS[name] for name in ("flux-dev", "flux-schnell", "flux-kontext"))
PROMPTS = ["a cat, sitting", "two dogs!"]


# Text


def test_prompts_are_encoded_as_the_stock_pipeline_does():
    model = DEV.model()
    conditions = model.encode([{"prompt": prompt} for prompt in PROMPTS])
    embeds, pooled, _ = model.pipeline.encode_prompt(PROMPTS, None, max_sequence_length=16)
    assert torch.allclose(conditions.positive["prompt_embeds"], embeds, atol=1e-5)
    assert torch.allclose(conditions.positive["pooled"], pooled, atol=1e-5)
    assert embeds.shape == (2, 16, 64)
    assert (pooled[0] - pooled[1]).abs().max() > 0.1


def test_padding_is_attended_to_so_its_length_is_part_of_the_model():
    """diffusers#11536: there is no mask, and another length gives another picture."""
    model = DEV.model()
    inputs = model.example_inputs(1, size=DEV.size)
    with torch.no_grad():
        short = model.velocity(**inputs, guidance_scale=3.5)
        model.max_sequence_length = 24
        inputs["conditions"] = model.encode([{"prompt": "example 0"}], size=DEV.size)
        assert (model.velocity(**inputs, guidance_scale=3.5) - short).abs().max() > 1e-3


def test_lengths_beyond_the_stock_pipelines_are_refused():
    with pytest.raises(InputError, match="max_sequence_length=513 is more than FluxPipeline takes: use max"):
        FluxModel(tiny_flux(), max_sequence_length=513)
    assert FluxModel(tiny_flux()).max_sequence_length == 512


# Guidance


def test_embedded_guidance_is_an_input_and_costs_no_second_row():
    model = DEV.model()
    inputs = model.example_inputs(2, size=DEV.size)
    (none,) = network_calls(model.transformer, lambda: model.velocity(**inputs, guidance_scale=0.0))
    assert none["guidance"].tolist() == [0.0] * len(none["guidance"])
    (call,) = network_calls(model.transformer, lambda: model.velocity(**inputs, guidance_scale=3.5))
    assert call["guidance"].tolist() == [3.5, 3.5]
    assert call["hidden_states"].shape == (2, 64, 16)
    assert not model.needs_negative(3.5)
    assert model.evaluations(3.5) == 1


def test_a_network_without_the_embedding_gets_none_and_is_guided_by_a_second_row():
    model = SCHNELL.model()
    inputs = model.example_inputs(2, size=SCHNELL.size)
    calls = network_calls(model.transformer, lambda: [model.velocity(**inputs, guidance_scale=g) for g in (1.0, 2.0)])
    assert [call["guidance"] for call in calls] == [None, None]
    assert [len(call["hidden_states"]) for call in calls] == [2, 4]


def test_the_default_guidance_is_the_checkpoints():
    assert DEV.model().default_guidance_scale == 3.5
    assert SCHNELL.model().default_guidance_scale == 1.0
    assert KONTEXT.model().default_guidance_scale == 2.5
    assert FluxModel.default_guidance_scale == 3.5


@pytest.mark.parametrize("tiny", [DEV, KONTEXT])
def test_in_half_precision_the_network_is_told_what_the_stock_pipeline_tells_it(tiny):
    """Times are rounded to the network's precision before they are divided by 1000, and multiplied in there again."""
    model = tiny.model()
    model.pipeline.to(torch.bfloat16)
    row = tiny.row("a cat", 1)
    stock = network_calls(model.transformer, lambda: tiny.stock(model.pipeline, row, 4, 2.5, 0, output_type="latent"))
    latents = torch.randn(1, *model.latent_shape(tiny.size))
    conditions, timesteps = model.encode([row], size=tiny.size), model.sigmas(4, tiny.size).timesteps

    def ours():
        for time in timesteps:
            model.velocity(latents, time[None], conditions, 2.5)

    assert len(stock) == 4
    for mine, theirs in zip(network_calls(model.transformer, ours), stock, strict=True):
        for name in ("timestep", "guidance", "pooled_projections", "encoder_hidden_states", "txt_ids", "img_ids"):
            assert torch.equal(mine[name].float(), theirs[name].float()), name
        assert mine["timestep"].dtype == mine["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(mine["hidden_states"][:, 64:], theirs["hidden_states"][:, 64:])


# Time


@pytest.mark.parametrize("steps", [10, 28])
@pytest.mark.parametrize("tokens", [32, 64])
def test_the_shift_of_dev_follows_the_number_of_tokens(tokens, steps):
    """Golden case 07, at 512 and 1024 pixels with the VAE's factor 8; here the factor is 4."""
    case, stored = load_case("07")
    model = DEV.model()
    config = case["parameters"]["flux_scheduler_config"]
    model.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(**config)
    table = model.sigmas(steps, MediaSize(8 * tokens, 8 * tokens))
    assert torch.allclose(table.sigmas, stored[f"flux_{16 * tokens}_n{steps}_sigmas"], rtol=1e-6, atol=1e-7)


def test_schnell_has_an_even_grid_at_any_size():
    model = SCHNELL.model()
    for size in (MediaSize(64, 64), MediaSize(256, 128)):
        assert model.sigmas(4, size).sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, got 0"):
        DEV.model().sigmas(0)


def test_the_default_size_is_the_stock_pipelines():
    model = DEV.model()
    assert model.default_size == MediaSize(512, 512)  # 1024 with the VAE's factor 8
    assert model.latent_shape() == (4, 128, 128)
    assert model.latent_shape(MediaSize(64, 96)) == (4, 16, 24)


# Kontext


class FoundSize(Exception):
    pass


def stock_image_size(pipeline, image, **arguments):
    """(height, width) that the stock pipeline resizes a condition image to."""

    def resize(image, height, width):
        raise FoundSize(height, width)

    pipeline.image_processor.resize = resize
    with pytest.raises(FoundSize) as found:
        pipeline(prompt="a cat", image=image, num_inference_steps=1, max_sequence_length=16, **arguments)
    return found.value.args


@pytest.mark.parametrize(
    "sides", [(1024, 1024), (300, 300), (640, 480), (481, 640), (1920, 1080), (999, 250), (30, 900), (1240, 835)]
)
def test_condition_images_have_the_sizes_of_the_stock_pipeline(sides):
    image = Image.new("RGB", sides)
    model = KONTEXT.model()
    expected = stock_image_size(tiny_flux(FluxKontextPipeline), image)
    # Of media of a megapixel whose sides are no powers of two, as the stock pipeline makes them
    for height, width in ((1024, 1024), (768, 1360), (1568, 656), (880, 1168)):
        assert model.image_size(image, MediaSize(height, width)) == expected
    assert model.image_size(image, MediaSize(1536, 1536)) == expected


@pytest.mark.parametrize(
    ("sides", "media", "expected"),
    [
        ((640, 640), (512, 512), (512, 512)),
        ((640, 480), (512, 512), (440, 592)),  # half of 880 × 1184
        ((480, 640), (512, 512), (592, 440)),
        ((100, 100), (512, 128), (256, 256)),
        ((64, 64), (720, 720), (720, 720)),
        ((8, 900), (16, 16), (24, 8)),  # no side is less than a token
    ],
)
def test_smaller_media_have_smaller_condition_images(sides, media, expected):
    assert KONTEXT.model().image_size(Image.new("RGB", sides), MediaSize(*media)) == expected


def test_images_without_a_whole_token_are_refused():
    model = KONTEXT.model()
    with pytest.raises(InputError, match="has 300 × 7 pixels, but FluxKontextPipeline takes none with a side under 8"):
        model.encode([{"prompt": "a cat", "image": Image.new("RGB", (300, 7))}], size=KONTEXT.size)
    with pytest.raises(InputError, match=r"has 2 condition image\(s\), but FluxKontextPipeline takes 1"):
        model.encode([{"prompt": "a cat", "images": [picture(0), picture(1)]}], size=KONTEXT.size)


def test_images_of_several_sizes_in_one_batch_are_seen_without_padding():
    """Each row as it is alone, and each size in a network call of its own."""
    model = KONTEXT.model()
    rows = [KONTEXT.row(prompt, i) for i, prompt in enumerate(["a cat", "two dogs", "the sun"])]
    conditions = model.encode(rows, size=KONTEXT.size)
    assert conditions.layouts == ((8, 8), (6, 10), (8, 8))
    assert conditions.positive["image_mask"].sum(dim=1).tolist() == [64, 60, 64]
    latents = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    times, found = torch.full((3,), 700.0), []
    calls = network_calls(
        model.transformer, lambda: found.append(model.velocity(latents, times, conditions, guidance_scale=2.5))
    )
    assert [tuple(call["hidden_states"].shape) for call in calls] == [(2, 128, 16), (1, 124, 16)]
    assert [call["img_ids"][64:].max(dim=0).values.tolist() for call in calls] == [[1, 7, 7], [1, 5, 9]]
    for i in range(3):
        with torch.no_grad():
            alone = model.velocity(latents[i : i + 1], times[:1], conditions[i], guidance_scale=2.5)
        assert torch.allclose(alone[0], found[0][i], atol=1e-5)


def test_the_image_is_its_latents():
    """What the network sees of it decodes to it."""
    model = KONTEXT.model()
    row = KONTEXT.row("a cat", 0)
    tokens = model.encode([row], size=KONTEXT.size).positive["image"]
    latents = model.encode_images(row["images"], KONTEXT.size)
    assert torch.equal(model.pipeline._unpack_latents(tokens, 64, 64, 4), latents)
    assert torch.equal(model.pipeline._pack_latents(latents, 1, 4, 16, 16), tokens)


# Training


@pytest.mark.parametrize("tiny", first_fast([DEV, SCHNELL, KONTEXT]), ids=["dev", "schnell", "kontext"])
def test_two_updates_and_the_adapter_in_the_stock_pipeline(tiny, tmp_path):
    data = [tiny.row(prompt, i) for i, prompt in enumerate(["a cat", "two dogs", "sun"])]
    run = trainer(
        tmp_path, model=tiny.model(), data=data, height=64, width=64, guidance_scale=None, max_steps=2, save_steps=1
    )
    before = trainable(run)
    run.train()
    assert not same(before, trainable(run))
    assert logged(run, "ratio/mean")[0] == pytest.approx(1, abs=1e-6)
    run.save_model()
    stock = tiny.model().pipeline  # a pipeline that is built in code has dropout in T5 until a model is made of it
    row, scale = data[1], run.guidance_scale
    before = tiny.stock(stock, row, 4, scale, 7).images[0].tobytes()
    stock.load_lora_weights(tmp_path / "out")
    pictures = [tiny.stock(pipeline, row, 4, scale, 7).images[0] for pipeline in (stock, run.flow_model.pipeline)]
    assert pictures[0].tobytes() == pictures[1].tobytes()
    assert pictures[0].tobytes() != before

# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image against the stock pipelines: masks, token norms, the shift by size, images of ragged sizes."""

import io

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.models import Conditions, MediaSize
from omnitrl.models.qwen_image import QwenImageModel
from tests.golden_cases import load_case
from tests.marks import first_fast
from tests.models.calls import network_calls
from tests.tiny import CHECKPOINTS
from tests.tiny.checkpoint import picture
from tests.tiny.qwen_image import STOCK_DIMENSIONS, tiny_qwen_image
from tests.trainer.helpers import logged, same, trainable, trainer


pytestmark = pytest.mark.compat

TEXT, EDIT, PLUS = (CHECKPOINTS[name] for name in ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus"))
PROMPTS = ["cat", "two dogs in the rain", "sun"]
SMALL = MediaSize(64, 64)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def velocity(model, latents, conditions, guidance=1.0):
    with torch.no_grad():
        return model.velocity(latents, torch.full((len(latents),), 700.0), conditions, guidance)


# Prompts and their masks


def test_prompts_are_encoded_as_the_stock_pipeline_does():
    model = TEXT.model()
    conditions = model.encode([{"prompt": prompt} for prompt in PROMPTS])
    embeds, mask = model.pipeline.encode_prompt(PROMPTS)
    assert torch.equal(conditions.positive["prompt_embeds_mask"], mask.bool())
    assert mask.sum(dim=1).tolist() == [16, 33, 16]  # bytes of the prompt and 13 of what follows it
    kept = mask.bool()
    assert torch.allclose(conditions.positive["prompt_embeds"][kept], embeds[kept], atol=1e-5)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_five_tokens_are_the_same_alone_and_padded_to_twelve(guidance):
    """A13 of the field reports: exact with a mask whatever the padding holds, and not without one."""
    model = TEXT.model()
    latents, embeds = noise(1, 4, 8, 8), noise(1, 5, 32, seed=1)
    padded = torch.cat([embeds, 50 * noise(1, 7, 32, seed=2)], dim=1)
    mask = torch.arange(12)[None] < 5

    def of(embeds, mask):
        tensors = {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
        negative = {"prompt_embeds": noise(1, 12, 32, seed=3), "prompt_embeds_mask": torch.ones(1, 12).bool()}
        return velocity(model, latents, Conditions(tensors, negative if guidance > 1 else {}), guidance)

    alone = of(embeds, mask[:, :5])
    assert (of(padded, mask) - alone).abs().max() <= 1e-5
    assert (of(padded, torch.ones_like(mask)) - alone).abs().max() > 1e-2


def test_the_network_gets_a_mask_only_where_there_is_padding():
    model = TEXT.model()
    rows = model.encode([{"prompt": prompt} for prompt in PROMPTS])
    latents = noise(3, 4, 8, 8)
    (padded,) = network_calls(model.transformer, lambda: velocity(model, latents, rows))
    assert padded["encoder_hidden_states_mask"].sum(dim=1).tolist() == [16, 33, 16]
    (equal,) = network_calls(model.transformer, lambda: velocity(model, latents[:2], rows[[0, 2]]))
    assert equal["encoder_hidden_states_mask"] is None
    assert equal["encoder_hidden_states"].shape == (2, 16, 32)


def test_lengths_beyond_the_stock_pipelines_are_refused():
    with pytest.raises(InputError, match="max_sequence_length=1025 is more than QwenImagePipeline takes: use max"):
        QwenImageModel(tiny_qwen_image(), max_sequence_length=1025)
    assert QwenImageModel(tiny_qwen_image()).max_sequence_length == 512


# Guidance


def test_guidance_leads_away_from_a_space_where_a_row_has_no_negative_prompt():
    model = TEXT.model()
    space, given, empty = (
        model.encode([{"prompt": "a cat", "negative_prompt": text}], guidance=True).negative["prompt_embeds"]
        for text in (None, "blurry", "")
    )
    assert torch.equal(space, model.encode([{"prompt": " "}]).positive["prompt_embeds"])
    assert torch.equal(given, model.encode([{"prompt": "blurry"}]).positive["prompt_embeds"])
    assert torch.equal(empty, space)


def test_guided_tokens_have_the_norm_of_the_positive_ones():
    """Over the channels of each patch of 2 × 2."""
    model = TEXT.model()
    negative, positive = noise(2, 4, 4, 6), noise(2, 4, 4, 6, seed=1)
    guided = model.guide(negative, positive, 4.0, torch.full((2,), 700.0))
    for b, y, x in ((0, 0, 0), (0, 2, 4), (1, 0, 2)):
        n, p, g = (t[b, :, y : y + 2, x : x + 2] for t in (negative, positive, guided))
        plain = n + 4.0 * (p - n)
        assert torch.allclose(g, plain * p.norm() / plain.norm(), atol=1e-6)
        assert g.norm().item() == pytest.approx(p.norm().item(), rel=1e-5)
        assert (g - plain).abs().max() > 0.1


# Time


@pytest.mark.parametrize(("side", "steps"), [(512, 10), (512, 50), (1024, 10), (1024, 50), (1328, 10)])
def test_the_shift_follows_the_size_and_ends_at_the_terminal_sigma(side, steps):
    """Golden case 07; the VAE's factor is 8 as in the published checkpoints."""
    _, stored = load_case("07")
    table = TEXT.model().sigmas(steps, MediaSize(side, side))
    assert torch.allclose(table.sigmas, stored[f"qwen_{side}_n{steps}_sigmas"], rtol=1e-6, atol=1e-7)
    assert torch.allclose(table.timesteps, stored[f"qwen_{side}_n{steps}_timesteps"], rtol=1e-6, atol=1e-4)
    assert table.sigmas[-2].item() == pytest.approx(0.02)


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, got 0"):
        TEXT.model().sigmas(0)


@pytest.mark.parametrize("tiny", [TEXT, EDIT, PLUS], ids=["text", "edit", "plus"])
def test_in_half_precision_the_network_is_told_what_the_stock_pipeline_tells_it(tiny):
    """Times are rounded to the network's precision before they are divided by 1000."""
    model = tiny.model()
    model.pipeline.to(torch.bfloat16)
    row = tiny.row("a cat", 1)
    stock = network_calls(model.transformer, lambda: tiny.stock(model.pipeline, row, 4, 1.0, 0, output_type="latent"))
    conditions, timesteps = model.encode([row], size=SMALL), model.sigmas(4, SMALL).timesteps
    latents = noise(1, 4, 8, 8)
    ours = network_calls(
        model.transformer, lambda: [model.velocity(latents, time[None], conditions) for time in timesteps]
    )
    assert len(stock) == 4
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["timestep"].dtype == mine["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(mine["timestep"], theirs["timestep"])
        assert torch.equal(mine["encoder_hidden_states"], theirs["encoder_hidden_states"])
        assert torch.equal(mine["hidden_states"][:, 16:], theirs["hidden_states"][:, 16:])
        assert mine["img_shapes"] == theirs["img_shapes"]


# Sizes


def test_the_default_size_is_the_stock_pipelines():
    for tiny in (TEXT, EDIT, PLUS):
        model = tiny.model()
        assert model.default_size == MediaSize(1024, 1024)
        assert model.latent_shape() == (4, 128, 128)
        assert model.size_of({}, MediaSize(512, 768)) == MediaSize(512, 768)  # what trainers ask before any row
    assert TEXT.model().latent_shape(MediaSize(64, 96)) == (4, 8, 12)


class Reached(Exception):
    pass


@pytest.fixture
def stock_areas(monkeypatch):
    """Condition images of a megapixel, as published."""
    for module, function in zip(
        (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus), STOCK_DIMENSIONS, strict=True
    ):
        monkeypatch.setattr(module, "calculate_dimensions", function)


def read_by_the_vae(model, function):
    """Pixels of the first image that the VAE encodes when `function` runs."""
    found = []

    def encode(pixels):
        found.append(pixels)
        raise Reached

    model.pipeline.vae.encode = encode
    with pytest.raises(Reached):
        function()
    return found[0]


@pytest.mark.parametrize("sides", [(1024, 1024), (300, 300), (640, 480), (481, 640), (1920, 1080), (999, 250)])
@pytest.mark.parametrize("tiny", [EDIT, PLUS], ids=["edit", "plus"])
def test_media_have_the_size_that_the_stock_pipeline_makes_of_the_image(stock_areas, tiny, sides):
    model = tiny.model()
    images = [Image.new("RGB", (64, 128)), Image.new("RGB", sides)][-2 if tiny is PLUS else -1 :]
    found = []

    def prepare_latents(images, batch_size, channels, height, width, *args):
        found.append(MediaSize(height, width))
        raise Reached

    model.pipeline.prepare_latents = prepare_latents
    with pytest.raises(Reached):
        model.pipeline(prompt="a cat", image=images, num_inference_steps=2, true_cfg_scale=1.0)
    row = {"prompt": "a cat", "images": images}
    assert [model.size_of(row)] == found
    model.latent_shape(model.size_of(row))
    assert model.size_of({**row, "height": 512}) == MediaSize(512, found[0].width)
    assert model.size_of(row, MediaSize(256, 128)) == MediaSize(256, 128)


def test_the_size_of_the_media_takes_the_header_of_the_image(stock_areas):
    file = io.BytesIO()
    picture(0, (640, 480)).save(file, "PNG")
    row = {"prompt": "a cat", "image": file.getvalue()[:1000]}
    model = EDIT.model()
    assert model.size_of(row) == MediaSize(896, 1184)
    with pytest.raises(InputError, match="is no picture that can be read"):
        model.encode([row], size=SMALL)


@pytest.mark.parametrize("tiny", [EDIT, PLUS], ids=["edit", "plus"])
def test_condition_images_are_resized_as_the_stock_pipeline_does(stock_areas, tiny):
    row = {"prompt": "a cat", "images": [picture(0, (300, 200))]}
    ours, theirs = tiny.model(), tiny.model()
    given = row["images"][0] if tiny is EDIT else row["images"]
    mine = read_by_the_vae(ours, lambda: ours.encode([row], size=SMALL))
    stock = read_by_the_vae(theirs, lambda: theirs.pipeline(prompt="a cat", image=given, true_cfg_scale=1.0))
    assert mine.shape == (1, 3, 1, 832, 1248)
    assert torch.equal(mine, stock)


# Condition images


@pytest.mark.parametrize("tiny", [EDIT, PLUS], ids=["edit", "plus"])
def test_the_text_encoder_reads_prompt_and_images_as_in_the_stock_pipeline(tiny):
    model, row = tiny.model(), tiny.row("a cat", 1)
    stock = network_calls(model.transformer, lambda: tiny.stock(model.pipeline, row, 2, 4.0, 0, output_type="latent"))
    conditions = model.encode([row], guidance=True, size=SMALL)
    for tensors, call in zip((conditions.positive, conditions.negative), stock[:2], strict=True):
        assert torch.equal(tensors["prompt_embeds"], call["encoder_hidden_states"])
        assert torch.equal(tensors["images"], call["hidden_states"][:, 16:])
    assert conditions.layouts == (tuple(shape[1:] for shape in stock[0]["img_shapes"][0][1:]),)


def test_prompts_of_edits_are_not_cut():
    """The stock pipelines take a `max_sequence_length` and do not look at it."""
    model = EDIT.model()
    row = EDIT.row("a cat " * 40, 0)
    assert model.encode([row], size=SMALL).positive["prompt_embeds"].shape[1] > 240
    assert model.max_sequence_length == 64


def test_rows_of_one_to_three_images_of_any_sizes_are_one_batch():
    """Each as it is alone, with guidance too, and those of one layout in one call."""
    model = PLUS.model()
    sizes = [[(64, 64)], [(96, 64), (64, 96), (64, 64)], [(64, 64), (200, 64)], [(32, 32)]]
    rows = [
        {"prompt": prompt, "images": [picture(10 * i + j, size) for j, size in enumerate(sizes[i])]}
        for i, prompt in enumerate([*PROMPTS, "a long prompt about a picture"])
    ]
    conditions = model.encode(rows, guidance=True, size=SMALL)
    assert conditions.layouts == (((8, 8),), ((6, 10), (10, 6), (8, 8)), ((8, 8), (4, 14)), ((8, 8),))
    assert conditions.positive["images_mask"].sum(dim=1).tolist() == [64, 184, 120, 64]
    latents = noise(4, 4, 8, 8)
    for guidance in (1.0, 4.0):
        found = []
        calls = network_calls(
            model.transformer,
            lambda: found.append(velocity(model, latents, conditions, guidance)),  # noqa: B023
        )
        count = 2 if guidance > 1 else 1
        assert [call["hidden_states"].shape[:2] for call in calls] == [
            (2 * count, 16 + 64),
            (count, 16 + 184),
            (count, 16 + 120),
        ]
        for i in range(4):
            alone = velocity(model, latents[i : i + 1], model.encode([rows[i]], True, SMALL), guidance)
            assert (alone[0] - found[0][i]).abs().max() <= 1e-5 * max(1.0, float(alone.abs().max()))


def test_the_order_of_images_matters():
    model = PLUS.model()
    images = [picture(0), picture(1)]
    one, other = (model.encode([{"prompt": "a cat", "images": given}], size=SMALL) for given in (images, images[::-1]))
    latents = noise(1, 4, 8, 8)
    assert (velocity(model, latents, one) - velocity(model, latents, other)).abs().max() > 1e-3


def test_images_that_the_pipelines_cannot_take_are_refused():
    edit, plus = EDIT.model(), PLUS.model()
    with pytest.raises(InputError, match=r"has 2 condition image\(s\), but QwenImageEditPipeline takes 1"):
        edit.encode([{"prompt": "a cat", "images": [picture(0), picture(1)]}], size=SMALL)
    with pytest.raises(InputError, match=r"has 4 condition image\(s\), but QwenImageEditPlusPipeline takes 1 to 3"):
        plus.encode([{"prompt": "a cat", "images": [picture(i) for i in range(4)]}], size=SMALL)
    thin = {"prompt": "a cat", "image": Image.new("RGB", (4, 401))}
    for act in (edit.size_of, lambda row: edit.encode([row], size=SMALL)):
        with pytest.raises(InputError, match="has 4 × 401 pixels, but QwenImageEditPipeline takes none with one side"):
            act(thin)


def test_the_image_is_its_latents():
    """What the network sees of it decodes to it."""
    model = EDIT.model()
    row = EDIT.row("a cat", 0)
    tokens = model.encode([row], size=SMALL).positive["images"]
    latents = model.encode_images(row["images"], MediaSize(128, 128))
    assert torch.equal(model.pipeline._pack_latents(latents[:, :, None], 1, 4, 16, 16), tokens)


# Training


@pytest.mark.parametrize("tiny", first_fast([TEXT, EDIT, PLUS]), ids=["text", "edit", "plus"])
def test_two_updates_and_the_adapter_in_the_stock_pipeline(tiny, tmp_path):
    data = [tiny.row(prompt, i) for i, prompt in enumerate(PROMPTS)]
    run = trainer(tmp_path, model=tiny.model(), data=data, height=64, width=64, guidance_scale=None, max_steps=2)
    before = trainable(run)
    run.train()
    assert run.guidance_scale == 4.0
    assert not same(before, trainable(run))
    assert logged(run, "ratio/mean")[0] == pytest.approx(1, abs=1e-6)
    run.save_model()
    stock, row = tiny.model().pipeline, data[1]
    before = tiny.stock(stock, row, 4, 4.0, 7).images[0].tobytes()
    stock.load_lora_weights(tmp_path / "out")
    pictures = [tiny.stock(pipeline, row, 4, 4.0, 7).images[0] for pipeline in (stock, run.flow_model.pipeline)]
    assert pictures[0].tobytes() == pictures[1].tobytes()
    assert pictures[0].tobytes() != before

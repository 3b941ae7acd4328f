# SPDX-License-Identifier: Apache-2.0
"""Z-Image against the stock pipeline: captions of any length, its time and sign, and how it counts guidance."""

import pytest
import torch

from omnitrl.errors import InputError
from omnitrl.models import MediaSize
from omnitrl.models.z_image import ZImageModel
from tests.tiny import CHECKPOINTS
from tests.tiny.z_image import tiny_z_image
from tests.trainer.helpers import logged, same, trainable, trainer


pytestmark = pytest.mark.compat

TINY = CHECKPOINTS["z-image"]
PROMPTS = ["sun", "a very long prompt of many words", "a cat"]


@pytest.fixture(scope="module")
def model():
    return TINY.model()


# Text


def test_captions_have_their_own_length_and_the_stock_embeddings(model):
    conditions = model.encode([{"prompt": prompt, "negative_prompt": "blurry"} for prompt in PROMPTS], guidance=True)
    stock, stock_negative = model.pipeline.encode_prompt(
        list(PROMPTS), negative_prompt=["blurry"] * 3, max_sequence_length=64
    )
    for ours, theirs in ((conditions.positive, stock), (conditions.negative, stock_negative)):
        for embeds, mask, expected in zip(ours["prompt_embeds"], ours["prompt_embeds_mask"], theirs, strict=True):
            assert torch.allclose(embeds[mask], expected, atol=1e-5)
    lengths = conditions.positive["prompt_embeds_mask"].sum(dim=1).tolist()
    assert lengths == [len(embeds) for embeds in stock]
    assert lengths[0] < lengths[2] < 32 < lengths[1]  # so that the network pads them to 32 and to 64


def test_captions_are_padded_in_the_network_to_32_with_a_token_that_is_attended_to(model):
    """What a caption's picture is does not depend on its batch, but on the network's own padding of the caption."""
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    conditions = model.encode(rows, size=TINY.size)
    latents = torch.randn(3, *model.latent_shape(TINY.size), generator=torch.Generator().manual_seed(0))
    times = torch.full((3,), 700.0)
    with torch.no_grad():
        together = model.velocity(latents, times, conditions)
        for i in range(3):
            alone = model.velocity(latents[i : i + 1], times[:1], conditions[i])
            assert torch.allclose(alone[0], together[i], atol=1e-5)
        token = model.transformer.cap_pad_token
        kept = token.clone()
        token.copy_(2 * kept)
        assert (model.velocity(latents, times, conditions) - together).abs().max() > 1e-4
        token.copy_(kept)


def test_prompts_that_the_positions_cannot_hold_are_refused():
    """256 positions: captions up to 224 tokens and their padding, and one for the picture behind them."""
    model = ZImageModel(tiny_z_image())
    prompt = "x" * 300
    with pytest.raises(
        InputError, match=r"'xxx.*has 3\d\d tokens, but .* positions for 224: use max_sequence_length=224"
    ):
        model.encode([{"prompt": prompt}])
    model.max_sequence_length = 224
    with torch.no_grad():
        velocity = model.velocity(
            torch.zeros(1, *model.latent_shape(TINY.size)), torch.tensor([500.0]), model.encode([{"prompt": prompt}])
        )
    assert velocity.isfinite().all()


# Time, sign and guidance


def test_time_runs_backwards_and_the_output_is_negated(model):
    inputs = model.example_inputs(1, size=TINY.size)
    embeds = inputs["conditions"].positive["prompt_embeds"]
    with torch.no_grad():
        velocity = model.velocity(inputs["latents"], torch.tensor([250.0]), inputs["conditions"])
        raw = model.transformer(
            [inputs["latents"][0][:, None]], torch.tensor([0.75]), list(embeds), return_dict=False
        )[0]
    assert torch.equal(velocity, -raw[0][None, :, 0])


def test_a_guidance_of_one_is_none_and_the_stock_scale_is_one_less(model):
    """Their 4 (their formula: positive + scale (positive - negative)) is 5 here, and their 0 is 1."""
    row, seed = {"prompt": "a cat", "negative_prompt": "blurry"}, 3
    latents = {}
    for scale in (1.0, 5.0):
        assert TINY.guidance(scale) == {"guidance_scale": scale - 1}
        latents[scale] = TINY.stock(model.pipeline, row, 2, scale, seed, output_type="latent").images
    start = torch.randn(1, *model.latent_shape(TINY.size), generator=torch.Generator().manual_seed(seed))
    table, conditions = model.sigmas(2, TINY.size), model.encode([row], True, TINY.size)
    for scale, expected in latents.items():
        x = start
        for step in range(2):
            with torch.no_grad():
                velocity = model.velocity(x, table.timesteps[step : step + 1], conditions, scale)
            x = x + (table.sigmas[step + 1] - table.sigmas[step]) * velocity
        assert torch.allclose(x, expected, atol=2e-5)
    assert (latents[1.0] - latents[5.0]).abs().max() > 1e-2


def test_turbo_is_not_guided_by_default():
    assert ZImageModel(tiny_z_image(shift=6.0)).default_guidance_scale == 5.0
    turbo = ZImageModel(tiny_z_image(shift=3.0))
    assert turbo.default_guidance_scale == 1.0
    assert not turbo.needs_negative(turbo.default_guidance_scale)


# Size and sigmas


@pytest.mark.parametrize("shift", [3.0, 6.0])
def test_the_static_shift_is_applied_once(shift):
    """Since the pipeline gives the grid: 1 to 1 / T at any size, not the scheduler's own, which is shifted twice."""
    model = ZImageModel(tiny_z_image(shift=shift))
    grid = torch.linspace(1, 1 / 8, 8)
    expected = shift * grid / (1 + (shift - 1) * grid)
    for size in (TINY.size, MediaSize(128, 128)):
        assert torch.allclose(model.sigmas(8, size).sigmas, torch.cat([expected, torch.zeros(1)]), atol=1e-6)


def test_a_dynamic_shift_follows_the_size():
    tiny = tiny_z_image(shift=1.0, dynamic=True)
    model = ZImageModel(tiny)
    tables = []
    for size in (MediaSize(64, 64), MediaSize(128, 256)):
        tiny(prompt="a cat", height=size.height, width=size.width, num_inference_steps=4, max_sequence_length=32)
        table = model.sigmas(4, size)
        assert torch.equal(table.sigmas, tiny.scheduler.sigmas)
        tables.append(table.sigmas)
    assert (tables[0] - tables[1]).abs().max() > 0.01


def test_no_steps_are_refused(model):
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, got 0"):
        model.sigmas(0, TINY.size)


def test_sizes_end_where_the_positions_do(model):
    assert model.default_size == MediaSize(1024, 1024)
    assert model.latent_shape() == (4, 256, 256)
    with pytest.raises(
        InputError, match=r"height=1032 does not fit .* multiples of 8 up to 1024, for example height=1024"
    ):
        model.latent_shape(MediaSize(1032, 64))


# Training


def test_the_attention_of_all_blocks_is_adapted(model):
    names = [name for name, _ in model.transformer.named_modules()]
    adapted = [n for n in names if any(n.endswith("." + target) for target in model.default_lora_targets)]
    assert len(adapted) == 4 * 4  # two blocks, and a refiner each for the picture and the caption


def test_two_updates_and_the_adapter_in_the_stock_pipeline(tmp_path):
    options = {"height": 48, "width": 64, "guidance_scale": None, "max_steps": 2, "save_steps": 1}
    run = trainer(tmp_path, model=TINY.model(), **options)
    before = trainable(run)
    run.train()
    assert not same(before, trainable(run))
    assert run.guidance_scale == 5.0
    assert logged(run, "ratio/mean")[0] == pytest.approx(1, abs=1e-6)
    run.save_model()
    stock, row = TINY.model().pipeline, {"prompt": "a cat"}
    before = TINY.stock(stock, row, 4, 5.0, 7).images[0].tobytes()
    stock.load_lora_weights(tmp_path / "out")
    pictures = [TINY.stock(pipeline, row, 4, 5.0, 7).images[0] for pipeline in (stock, run.flow_model.pipeline)]
    assert pictures[0].tobytes() == pictures[1].tobytes()
    assert pictures[0].tobytes() != before

# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo-1.5 against the stock pipelines."""

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.media import Video
from omnitrl.models import MediaSize, load_flow_model
from tests.marks import first_fast
from tests.tiny import CHECKPOINTS
from tests.tiny.checkpoint import picture
from tests.tiny.hunyuan import tiny_hunyuan_video15
from tests.trainer.helpers import family_run, trainable


TEXT, IMAGE = CHECKPOINTS["hunyuan-video15"], CHECKPOINTS["hunyuan-video15-image"]
SIGN = 'a sign that says "HELLO"'


@pytest.fixture(scope="module")
def model():
    return TEXT.model()


@pytest.fixture(scope="module")
def image_model():
    return IMAGE.model()


@pytest.mark.compat
@pytest.mark.parametrize("prompt", ["a cat", SIGN, "“ein” \"ein\" 'zwei'", ""])
def test_prompts_are_encoded_as_the_stock_pipeline_does(model, prompt):
    ours = model.encode([{"prompt": prompt}]).positive
    model.pipeline.tokenizer_max_length = 60  # more padding
    embeds, mask, glyphs, glyphs_mask = model.pipeline.encode_prompt([prompt])
    mask, glyphs_mask = mask[0].bool(), glyphs_mask[0].bool()
    assert ours["prompt_embeds"].shape[1] == mask.sum() < 60
    assert torch.allclose(ours["prompt_embeds"][0], embeds[0][mask], atol=1e-5)
    assert int(ours["glyph_embeds_mask"].sum()) == int(glyphs_mask.sum())
    assert bool(glyphs_mask.any()) == (len(prompt) > 5)
    if glyphs_mask.any():
        assert torch.allclose(ours["glyph_embeds"][0], glyphs[0][glyphs_mask], atol=1e-5)


@torch.no_grad()
def test_no_picture_takes_no_tokens(model):
    """The stock pipeline's 729 tokens of zeros are masked: none at all gives the same velocity."""
    seen = {}
    hook = model.transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    inputs = model.example_inputs(1, size=TEXT.size)
    ours = model.velocity(**inputs)
    hook.remove()
    assert seen["image_embeds"].shape == (1, 0, 16)
    assert not seen["hidden_states"][:, 4:].any()  # neither a first frame nor its mask
    theirs = model.transformer(**{**seen, "image_embeds": torch.zeros(1, 729, 16)})[0]
    assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()


@torch.no_grad()
def test_a_picture_is_the_first_frame_and_its_tokens(image_model):
    """Its latents in the first frame, 1 in the mask there, and what the vision encoder makes of the cut picture."""
    seen = {}
    hook = image_model.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    inputs = image_model.example_inputs(2, size=IMAGE.size)
    rows = [IMAGE.row("a cat", 0), IMAGE.row("two dogs", 1)]
    image_model.velocity(inputs["latents"], inputs["timesteps"], image_model.encode(rows, size=IMAGE.size))
    hook.remove()
    pipe = image_model.pipeline
    for i, row in enumerate(rows):
        cut = pipe.video_processor.resize(row["images"][0], height=24, width=36, resize_mode="crop")
        condition, mask = pipe.prepare_cond_latents_and_mask(
            inputs["latents"][i : i + 1], cut, 1, 24, 36, torch.float32, "cpu"
        )
        assert torch.allclose(
            seen["hidden_states"][i : i + 1], torch.cat([inputs["latents"][i : i + 1], condition, mask], 1)
        )
        assert condition[:, :, 0].abs().max() > 0.1
        tokens = pipe.encode_image(cut, 1, "cpu", torch.float32)
        assert torch.allclose(seen["image_embeds"][i], tokens[0], atol=1e-6)
        assert tokens.shape == (1, 16, 16)


@torch.no_grad()
def test_pictures_are_cut_to_the_media_size_not_squeezed(image_model):
    """A wide picture with a red middle and black sides is all red."""
    pixels = np.zeros((24, 108, 3), dtype=np.uint8)
    pixels[:, 30:78, 0] = 255
    red = np.zeros((24, 36, 3), dtype=np.uint8)
    red[..., 0] = 255
    wide, plain = (
        image_model.encode([{"prompt": "a", "image": Image.fromarray(array)}], size=IMAGE.size).positive
        for array in (pixels, red)
    )
    for name in ("first_frame", "image_embeds"):
        assert torch.allclose(wide[name], plain[name], atol=1e-5)


def test_the_same_prompt_with_another_picture_or_size_is_encoded_anew(image_model):
    def frame(picture, size):
        return image_model.encode([{"prompt": "a", "image": picture}], size=size).positive["first_frame"]

    first = frame(picture(0, (36, 24)), IMAGE.size)
    assert first.shape == (1, 4, 1, 6, 9)
    assert (first - frame(picture(1, (36, 24)), IMAGE.size)).abs().max() > 0.1
    assert frame(picture(0, (36, 24)), MediaSize(32, 16, 5)).shape == (1, 4, 1, 8, 4)
    assert torch.equal(first, frame(picture(0, (36, 24)), IMAGE.size))


@pytest.mark.parametrize("tiny", [TEXT, IMAGE])
def test_a_ragged_batch_has_the_gradient_of_its_rows(tiny):
    """Padded tokens are masked as queries too, and a softmax over nothing must not reach the gradient."""
    model = tiny.model()
    model.networks.requires_grad_(True)
    inputs = model.example_inputs(2, size=tiny.size)
    rows = [tiny.row("a cat", 0), tiny.row(SIGN, 1)]

    def gradient(chosen):
        model.networks.zero_grad()
        conditions = model.encode([rows[i] for i in chosen], size=tiny.size)
        model.velocity(inputs["latents"][chosen], inputs["timesteps"][chosen], conditions).square().sum().backward()
        return torch.cat([p.grad.flatten() for _, p in model.networks.named_parameters() if p.grad is not None])

    together, alone = gradient([0, 1]), gradient([0]) + gradient([1])
    assert (together - alone).norm() <= 1e-5 * alone.norm()


def test_the_guidance_scale_is_that_of_the_checkpoints_guider():
    assert TEXT.model().default_guidance_scale == 6.0
    distilled = load_flow_model(tiny_hunyuan_video15(guidance_scale=1.0))
    assert distilled.default_guidance_scale == 1.0
    assert not distilled.needs_negative(distilled.default_guidance_scale)


@pytest.mark.compat
def test_default_sizes_are_the_stock_pipelines(model):
    """Those of 16 : 9: of 32² pixels in the tiny checkpoint, of 640² and 960² in the real ones."""
    assert model.default_size == MediaSize(24, 40, num_frames=121)
    processor = type(model.pipeline.video_processor)(vae_scale_factor=16)
    assert processor.calculate_default_height_width(9, 16, 640) == (480, 848)
    assert processor.calculate_default_height_width(9, 16, 960) == (720, 1280)
    assert model.latent_shape() == (4, 31, 6, 10)
    assert model.latent_shape(MediaSize(24, 36, num_frames=1)) == (4, 1, 6, 9)


def test_several_videos_are_decoded_and_encoded_one_by_one(model):
    """The VAE of diffusers fails on two at once; a gradient may ask for that."""
    shape = model.latent_shape(TEXT.size)
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    together = model.decode_pixels(latents)
    alone = [model.decode_pixels(row) for row in latents.split(1)]
    assert together.shape == (2, 3, 5, 24, 36)
    assert torch.equal(together, torch.cat(alone))
    encoded = model.encode_pixels(together)
    assert torch.equal(encoded, torch.cat([model.encode_pixels(row) for row in alone]))
    assert encoded.shape == latents.shape


def test_videos_have_the_frames_that_were_asked_for(model):
    shape = model.latent_shape(TEXT.size)
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    videos = model.decode(latents)
    assert all(isinstance(video, Video) and video.frames.shape == (5, 24, 36, 3) for video in videos)
    assert videos[0].frame_rate == 24
    latents[1, 0, 0, 0, 0] = torch.nan
    assert model.decode(latents)[1] is None


def test_a_checkpoint_of_mean_velocities_is_refused():
    with pytest.raises(InputError, match=r"distilled with MeanFlow .*HunyuanVideo-1.5-Diffusers-480p_i2v"):
        load_flow_model(tiny_hunyuan_video15(HunyuanVideo15ImageToVideoPipeline, use_meanflow=True))


def test_two_pictures_are_one_too_many(image_model):
    with pytest.raises(InputError, match=r"has 2 condition image.*takes 1"):
        image_model.encode([{"prompt": "a cat", "images": [picture(0), picture(1)]}])


@pytest.mark.parametrize("pipeline", first_fast(["HunyuanVideo15ImageToVideoPipeline", "HunyuanVideo15Pipeline"]))
def test_training_moves_the_adapter(tmp_path, pipeline):
    trained = family_run(tmp_path, "flow_grpo", pipeline, max_steps=2)
    before = trainable(trained)
    trained.train()
    after = trainable(trained)
    assert len([name for name in before if not torch.equal(before[name], after[name])]) > len(before) / 2

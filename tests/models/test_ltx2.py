# SPDX-License-Identifier: Apache-2.0
"""What is particular to LTX-2; what it shares with other families is in test_families.py."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video
from omnitrl.models import Conditions, MediaSize, load_flow_model
from omnitrl.models.ltx2 import LTX2Model
from omnitrl.rollout import LocalEngine, SampleNoise, SampleRequest, SamplingParams
from tests.tiny import CHECKPOINTS
from tests.tiny.ltx2 import flat_latents, guidance, media, tiny_ltx2, video_vae
from tests.trainer.helpers import family_run, same, trainable


pytestmark = pytest.mark.compat

SIZE = MediaSize(32, 64, 9)
ROW = {"prompt": "a dog barks"}
NAMES = ["ltx2", "ltx2.3"]


@pytest.fixture(scope="module")
def model():
    return CHECKPOINTS["ltx2"].model()


def sample(model, params, row=ROW, seed=3):
    [[trajectory]] = list(LocalEngine(model, batch_size=1).generate([SampleRequest(row, 0, 0, seed)], params))
    return trajectory


def clean(model, steps=4, scale=1.0, size=SIZE):
    return sample(model, SamplingParams(steps, scale, size=size, keep_clean=True, decode=False)).clean_latents[None]


def told(model, call):
    """What the network is told in a call, by name."""
    seen = []
    handle = model.transformer.register_forward_pre_hook(lambda *args: seen.append(args[2]), with_kwargs=True)
    call()
    handle.remove()
    return seen


# The stock pipeline


@pytest.mark.parametrize("options", [{}, {"modern": True}, {"registers": None}])
def test_the_network_is_told_what_the_stock_pipeline_tells_it(options):
    tiny = CHECKPOINTS["ltx2"]
    model = LTX2Model(tiny_ltx2(**options), max_sequence_length=16)
    stock = told(model, lambda: tiny.stock(model.pipeline, ROW, 2, 1.0, 3, output_type="latent"))
    ours = told(model, lambda: clean(model, steps=2))
    assert len(stock) == len(ours) == 2
    for mine, theirs in zip(ours, stock, strict=True):
        for key in ("encoder_attention_mask", "audio_encoder_attention_mask"):
            assert torch.equal(mine[key], theirs[key].bool())
        for key in ("encoder_hidden_states", "audio_encoder_hidden_states"):
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-5, atol=1e-6)
            assert mine[key].std() > 0.1
        for key in ("hidden_states", "audio_hidden_states"):
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-4, atol=1e-5)
        for key in ("timestep", "sigma"):
            assert torch.equal(mine[key], theirs[key])
        for key in ("num_frames", "height", "width", "fps", "audio_num_frames"):
            assert mine[key] == theirs[key]


def test_both_modalities_at_one_noise_level_make_cross_timesteps_the_same():
    """`use_cross_timestep`, in which LTX-2 and 2.3 differ, says whose level a modality is told of in attention."""
    tiny = CHECKPOINTS["ltx2.3"]
    pipeline = tiny.build()
    outputs = []
    for cross in (True, False):
        generator = torch.Generator().manual_seed(0)
        outputs.append(
            pipeline(
                "a cat",
                height=32,
                width=64,
                num_frames=9,
                num_inference_steps=2,
                max_sequence_length=16,
                generator=generator,
                output_type="latent",
                use_cross_timestep=cross,
                **guidance(4.0),
            )
        )
    assert torch.equal(outputs[0].frames, outputs[1].frames)
    assert torch.equal(outputs[0].audio, outputs[1].audio)


def test_guidance_is_that_of_clean_samples(model):
    """`x0 = x0_c + (w - 1) (x0_c - x0_u)` of both modalities, which is the same as guiding velocities."""
    inputs = model.example_inputs(2, size=SIZE)
    latents, timesteps, conditions = inputs["latents"], inputs["timesteps"], inputs["conditions"]
    sigma = float(model.sigmas(4, SIZE).sigmas[1])
    with torch.no_grad():
        guided = model.velocity(latents, timesteps, conditions, 4.0)
        positive = latents - sigma * model.velocity(latents, timesteps, conditions, 1.0)
        other = Conditions(conditions.negative, {}, conditions.layouts)
        negative = latents - sigma * model.velocity(latents, timesteps, other, 1.0)
    expected = (latents - (positive + 3.0 * (positive - negative))) / sigma
    torch.testing.assert_close(guided, expected, rtol=1e-4, atol=1e-4)
    assert (positive - negative).abs().max() > 1e-3


def test_bfloat16_checkpoints_sample_as_the_stock_pipeline(tmp_path):
    tiny = CHECKPOINTS["ltx2.3"]
    tiny.build().save_pretrained(tmp_path)
    model = load_flow_model(tmp_path, 16, dtype=torch.bfloat16)
    model.pipeline.set_progress_bar_config(disable=True)
    # A grid that ends at a level of its own has no single step.
    config = {**model.pipeline.scheduler.config, "shift_terminal": None}
    model.pipeline.scheduler = type(model.pipeline.scheduler).from_config(config)
    assert model.dtype == torch.bfloat16
    stock = media(tiny.stock(model.pipeline, ROW, 1, 1.0, 3, output_type="latent"))
    theirs = flat_latents(model, stock, SIZE)
    assert (clean(model, steps=1) - theirs).abs().max() <= 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("video", [(128, 11, 8, 12), (128, 16, 16, 24), (16, 3, 2, 4)])
def test_one_draw_of_noise_is_the_stock_pipelines_two(video):
    """PyTorch fills whole blocks of 16 numbers, and video latents have a multiple of that."""
    audio = (8, 84, 16)
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(shape, generator=generator).flatten() for shape in (video, audio))
    ours = SampleNoise(3).start((math.prod(video) + math.prod(audio),))
    assert torch.equal(ours, torch.cat([first, second]))


# Latents of two modalities


def test_where_each_modality_is(model):
    assert model.latent_shape(SIZE) == (16 * 3 * 2 * 4 + 2 * 4 * 8,)
    assert model.modalities(SIZE) == {"video": slice(0, 384), "audio": slice(384, 448)}
    assert model.default_size == MediaSize(512, 768, 121)
    assert model.modalities() == {"video": slice(0, 16 * 31 * 32 * 48), "audio": slice(761856, 761856 + 2 * 50 * 8)}


def test_a_sound_is_as_long_as_its_video_at_24_frames_a_second(model):
    """Ten latent frames of sound a second, rounded as the stock pipeline rounds."""
    for frames, length in ((1, 0), (5, 2), (25, 10), (121, 50)):
        part = model.modalities(MediaSize(32, 32, frames))["audio"]
        assert part.stop - part.start == length * 16


@pytest.mark.parametrize("name", NAMES)
def test_velocities_of_video_and_sound_are_in_their_places(name):
    """The network's own answer, each modality laid out as the stock's latents."""
    model = CHECKPOINTS[name].model()
    inputs = model.example_inputs(1, size=SIZE)
    answers = []
    handle = model.transformer.register_forward_hook(lambda *args: answers.append(args[2]))
    with torch.no_grad():
        velocity = model.velocity(inputs["latents"], inputs["timesteps"], inputs["conditions"])
    handle.remove()
    [(video, audio)] = answers
    parts = model.modalities(SIZE)
    unpacked = model.pipeline._unpack_latents(video, 3, 2, 4)
    assert torch.equal(velocity[:, parts["video"]], unpacked.flatten(1))
    unpacked = model.pipeline._unpack_audio_latents(audio, 4, num_mel_bins=8)
    assert torch.equal(velocity[:, parts["audio"]], unpacked.flatten(1))


def test_video_and_sound_hear_of_each_other(model):
    inputs = model.example_inputs(1, size=SIZE)
    parts = model.modalities(SIZE)

    def velocity(latents):
        with torch.no_grad():
            return model.velocity(latents, inputs["timesteps"], inputs["conditions"])

    base = velocity(inputs["latents"])
    for changed, other in (("video", "audio"), ("audio", "video")):
        latents = inputs["latents"].clone()
        latents[:, parts[changed]] += 1.0
        assert (velocity(latents) - base)[:, parts[other]].abs().max() > 1e-4


def test_rows_of_one_length_and_two_shapes_are_told_apart(model):
    """Upright and wide videos have as many latents: what differs is the layout, which is not that of a cache."""
    wide, upright = MediaSize(32, 64, 9), MediaSize(64, 32, 9)
    assert model.latent_shape(wide) == model.latent_shape(upright)
    conditions = [model.encode([ROW], size=size) for size in (wide, upright, wide)]
    assert [c.layouts for c in conditions] == [((3, 2, 4, 4),), ((3, 4, 2, 4),), ((3, 2, 4, 4),)]
    latents = torch.randn(2, *model.latent_shape(wide), generator=torch.Generator().manual_seed(0))
    timesteps = torch.full((2,), 700.0)
    with torch.no_grad():
        together = model.velocity(latents, timesteps, Conditions.cat(conditions[:2]))
        alone = [model.velocity(latents[i : i + 1], timesteps[:1], conditions[i]) for i in (0, 1)]
        mistaken = model.velocity(latents[1:], timesteps[:1], conditions[0])
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert (together[1:] - mistaken).abs().max() > 1e-3
    frames = model.decode(latents, wide)[0].frames, model.decode(latents, upright)[0].frames
    assert [f.shape for f in frames] == [(9, 32, 64, 3), (9, 64, 32, 3)]


# Decoding


@pytest.mark.parametrize(("name", "rate"), [("ltx2", 2400), ("ltx2.3", 4800)])
def test_media_are_videos_with_sound(name, rate):
    video = sample(CHECKPOINTS[name].model(), SamplingParams(2, size=SIZE)).media
    assert video.frames.shape == (9, 32, 64, 3)
    assert video.frame_rate == 24.0
    assert video.audio.sampling_rate == rate
    # The audio VAE is causal: 4 latent frames are 13 frames of the spectrogram, of 1/40 s each.
    assert video.audio.samples.shape == (2, 13 * rate // 40)


def test_what_is_not_finite_is_no_medium(model):
    parts = model.modalities(SIZE)
    latents = torch.randn(3, *model.latent_shape(SIZE), generator=torch.Generator().manual_seed(0))
    latents[0, parts["audio"]] = math.nan
    latents[2, parts["video"].start] = math.inf
    first, second, third = model.decode(latents, SIZE)
    assert first is None
    assert third is None
    assert second.frames.std() > 1
    assert np.abs(second.audio.samples).max() > 0


def test_the_switches_of_the_vae_bound_the_memory_of_decoding(model):
    """Tiles and runs of frames, as the stock pipeline decodes with them; the decoder is not causal, so pixels move."""
    tiled, latents = (
        CHECKPOINTS["ltx2"].model(),
        torch.randn(1, 16, 5, 4, 4, generator=torch.Generator().manual_seed(0)),
    )
    vae = tiled.pipeline.vae
    vae.enable_tiling(
        tile_sample_min_height=48,
        tile_sample_min_width=48,
        tile_sample_min_num_frames=8,
        tile_sample_stride_height=32,
        tile_sample_stride_width=32,
        tile_sample_stride_num_frames=4,
    )
    vae.use_framewise_decoding = True
    shapes = []
    vae.decoder.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape[2:])))
    size = MediaSize(64, 64, 17)
    flat = torch.cat([latents.flatten(1), torch.zeros(1, tiled.latent_shape(size)[0] - latents.numel())], dim=1)
    ours = tiled.decode(flat, size)[0].frames.astype(int)
    assert len(shapes) > 4
    assert max(math.prod(shape) for shape in shapes) <= 3 * 3 * 3
    raw = tiled.pipeline._denormalize_latents(latents, vae.latents_mean, vae.latents_std, 1.2)
    with torch.no_grad():
        stock = tiled.pipeline.video_processor.postprocess_video(vae.decode(raw, return_dict=False)[0], "np")[0]
    assert np.abs(ours - stock * 255).max() <= 1
    whole = model.decode(flat, size)[0].frames
    assert np.abs(whole - ours).max() > 1


def test_decoders_that_are_told_a_timestep_are_told_the_stock_calls():
    tiny = CHECKPOINTS["ltx2"]
    torch.manual_seed(0)
    pipeline = tiny.build()
    pipeline.vae = video_vae(timestep_conditioning=True)
    model = LTX2Model(pipeline, max_sequence_length=16)
    ours = sample(model, SamplingParams(2, size=SIZE)).media.frames
    stock = media(tiny.stock(pipeline, ROW, 2, 1.0, 3))[0].frames
    assert np.abs(ours.astype(int) - stock).max() <= 1
    assert ours.std() > 1


def test_pixels_are_encoded_to_the_latents_of_the_video_alone(model):
    """With statistics that are not those of no normalisation: decoding undoes what encoding does."""
    vae = model.pipeline.vae
    raw = torch.randn(1, 16, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    decode, encode = vae.decode, vae.encode
    try:
        vae.decode = lambda latents, *_, **__: (latents,)
        vae.encode = lambda latents: type("Output", (), {"latent_dist": type("D", (), {"mode": lambda _: latents})()})
        denormalised = model.decode_pixels(raw)
        torch.testing.assert_close(model.encode_pixels(denormalised), raw, rtol=1e-5, atol=1e-5)
    finally:
        vae.decode, vae.encode = decode, encode
    assert torch.equal(denormalised, model.pipeline._denormalize_latents(raw, vae.latents_mean, vae.latents_std, 1.2))
    with pytest.raises(InputError, match="makes videos, and pictures cannot take their place"):
        model.encode_images([])


# The table


def test_the_shift_follows_the_video_tokens_and_the_table_ends_where_the_scheduler_says(model):
    """`mu` is 0.95 at 16 tokens and 2.05 at 64 here; the exponential shift is `e^mu / (e^mu + 1 / t - 1)`."""
    for size, tokens in ((MediaSize(32, 64, 5), 16), (MediaSize(64, 128, 5), 64)):
        mu = 0.95 + (2.05 - 0.95) * (tokens - 16) / 48
        shifted = [math.exp(mu) / (math.exp(mu) + 1 / t - 1) for t in (1.0, 0.75, 0.5, 0.25)]
        stretch = (1 - shifted[-1]) / (1 - 0.1)
        expected = [1 - (1 - level) / stretch for level in shifted] + [0.0]
        assert model.sigmas(4, size).sigmas.tolist() == pytest.approx(expected, abs=1e-6)


# Input


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (MediaSize(48, 64, 9), r"height=48 .* multiples of 32, for example height=\d+"),
        (MediaSize(32, 72, 9), r"width=72 .* multiples of 32, for example width=64"),
        (MediaSize(32, 64, 8), r"num_frames=8 .* multiples of 4 plus 1, for example num_frames=9"),
    ],
)
def test_sizes_that_do_not_fit(model, size, message):
    for call in (model.latent_shape, model.modalities, lambda s: model.encode([ROW], size=s)):
        with pytest.raises(InputError, match=message):
            call(size)


def test_text_is_a_multiple_of_the_registers():
    model = LTX2Model(tiny_ltx2(), max_sequence_length=20)
    with pytest.raises(InputError, match=r"max_sequence_length=20 .* its 8 text registers, for example 16"):
        model.encode([ROW], size=SIZE)
    assert LTX2Model(tiny_ltx2(), max_sequence_length=24).encode([ROW]).positive["prompt_embeds"].shape[1] == 24
    free = LTX2Model(tiny_ltx2(registers=None), max_sequence_length=20).encode([ROW])
    assert free.positive["prompt_embeds"].shape[1] == 20


# Training


def test_the_default_targets_are_the_28_layers_of_a_block_that_the_recipe_names(tmp_path):
    run = family_run(tmp_path, "flow_grpo", "LTX2Pipeline", peft_config=None)
    names = [name for name, _ in run.flow_model.transformer.named_modules() if "transformer_blocks.0." in name]
    targets = LTX2Model.default_lora_targets
    assert len([name for name in names if any(name.endswith("." + target) for target in targets)]) == 28


def test_the_reward_of_the_page_hears_what_moves():
    page = (Path(__file__).parents[2] / "docs" / "source" / "models" / "ltx2.md").read_text("utf-8")
    code = re.search(r"def sound_follows_motion.*?\n\n", page, re.DOTALL)[0]
    names = {"np": np}
    exec(code, names)
    frames = np.zeros((5, 2, 2, 3), dtype=np.uint8)
    frames[3:] = 200  # it moves in the third of four intervals
    loud = {i: np.repeat((np.arange(4) == i).astype(np.float32), 10)[None] for i in (0, 2)}
    videos = [Video(frames, 24.0, Audio(loud[i], 240)) for i in (2, 0)]
    videos.append(Video(frames * 0, 24.0, Audio(loud[0], 240)))
    scores = names["sound_follows_motion"](completions=videos, seed=[1])
    assert scores == pytest.approx([1.0, -1 / 3, 0.0])


def loudness(prompts, completions, **kwargs):
    return [float(np.abs(video.audio.samples).mean() - video.frames.mean() / 255) for video in completions]


@pytest.mark.slow
def test_a_reward_hears_the_sound_and_the_run_goes_on_where_it_stopped(tmp_path):
    def run(folder, **options):
        return family_run(tmp_path / folder, "flow_grpo", "LTX2Pipeline", rewards=loudness, **options)

    whole = run("whole", max_steps=2)
    start = trainable(whole)
    whole.train()
    assert not same(start, trainable(whole))
    run("parts", max_steps=1, save_strategy="steps", save_steps=1).train()
    rest = run("parts", max_steps=2)
    rest.train(resume_from_checkpoint=True)
    assert same(trainable(whole), trainable(rest))

    whole.save_model(str(tmp_path / "saved"))
    stock = CHECKPOINTS["ltx2"].model()
    stock.pipeline.load_lora_weights(tmp_path / "saved")
    inputs = stock.example_inputs(1, size=SIZE)
    whole.flow_model.networks.eval()
    with torch.no_grad():
        theirs = stock.velocity(inputs["latents"], inputs["timesteps"], inputs["conditions"])
        ours = whole.flow_model.velocity(inputs["latents"], inputs["timesteps"], inputs["conditions"])
    assert torch.equal(theirs, ours)

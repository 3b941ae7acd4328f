# SPDX-License-Identifier: Apache-2.0
"""What is particular to Wan; what it shares with other families is in test_families.py."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from peft import LoraConfig

from omnitrl.errors import InputError
from omnitrl.media import Video
from omnitrl.models import MediaSize, load_flow_model
from omnitrl.models.wan import WanModel
from omnitrl.models.wan_i2v import WanImageToVideoModel
from omnitrl.rollout import LocalEngine, SampleRequest, SamplingParams
from omnitrl.trainer.adapters import attach_adapters
from omnitrl.trainer.networks import check_networks
from omnitrl.trainer.saving import load_networks, load_snippet, save_networks
from tests.tiny import CHECKPOINTS
from tests.tiny.checkpoint import picture
from tests.tiny.wan import BOUNDARY, tiny_wan, tiny_wan_i2v
from tests.trainer.helpers import LORA, logged, same, trainable, trainer


pytestmark = pytest.mark.compat

SIZE = MediaSize(64, 64, 5)
ROW = {"prompt": "a cat on a hill"}


def clean(model, row, params, seed=3):
    engine = LocalEngine(model, batch_size=1)
    [[trajectory]] = list(engine.generate([SampleRequest(row, 0, 0, seed)], params))
    return trajectory.clean_latents[None]


def unipc(steps, **options):
    return UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", num_train_timesteps=1000, flow_shift=3.0, **options
    )


# The stock pipeline


def test_the_table_of_unipc_is_the_schedulers_own_and_euler_steps_on_it_are_its_first_order():
    """The stock checkpoints' scheduler. Of the first order and without its corrector it is Euler's method."""
    first_order = unipc(4, solver_order=1, disable_corrector=list(range(4)))
    model = WanModel(tiny_wan(scheduler=first_order), max_sequence_length=16)
    table = model.sigmas(4, SIZE)
    ours = clean(model, ROW, SamplingParams(4, 4.0, size=SIZE, keep_clean=True, decode=False))
    stock = CHECKPOINTS["wan"].stock(model.pipeline, ROW, 4, 4.0, 3, output_type="latent").frames
    assert torch.equal(table.sigmas, model.pipeline.scheduler.sigmas)
    assert torch.equal(table.timesteps, model.pipeline.scheduler.timesteps.float())
    assert torch.equal(table.timesteps, table.timesteps.floor())  # it rounds what the network is told
    assert (ours - stock).abs().max() <= 2e-5


def test_bfloat16_checkpoints_keep_some_weights_in_float32_and_sample_as_the_stock_pipeline(tmp_path):
    tiny_wan().save_pretrained(tmp_path)
    model = load_flow_model(tmp_path, 16, dtype=torch.bfloat16)
    model.pipeline.set_progress_bar_config(disable=True)
    assert {p.dtype for p in model.transformer.parameters()} == {torch.bfloat16, torch.float32}
    assert model.dtype == model.pipeline.transformer.dtype == torch.bfloat16
    ours = clean(model, ROW, SamplingParams(1, 1.0, size=SIZE, keep_clean=True, decode=False))
    stock = CHECKPOINTS["wan"].stock(model.pipeline, ROW, 1, 1.0, 3, output_type="latent").frames
    assert torch.equal(ours.bfloat16(), stock)  # whose scheduler rounds the latents after each step


def test_prompts_are_kept_without_padding_and_padded_for_the_network():
    model = CHECKPOINTS["wan"].model()
    conditions = model.encode([{"prompt": "sun"}, {"prompt": "two dogs"}])
    stock, _ = model.pipeline.encode_prompt(["sun", "two dogs"], "", False, max_sequence_length=16, device="cpu")
    lengths = stock.ne(0).any(-1).sum(1).tolist()
    assert conditions.positive["prompt_embeds"].shape[1] == max(lengths) < 16
    assert conditions.positive["prompt_embeds_mask"].sum(1).tolist() == lengths
    seen = []
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["encoder_hidden_states"]), with_kwargs=True
    )
    latents = torch.zeros(2, *model.latent_shape(SIZE))
    model.velocity(latents, torch.full((2,), 500.0), conditions)
    assert (seen[0] - stock).abs().max() <= 1e-6  # encoded one by one here
    assert torch.equal(seen[0] == 0, stock == 0)


def test_sizes_and_frame_rates():
    small, large = CHECKPOINTS["wan"].model(), CHECKPOINTS["wan-ti2v"].model()
    assert small.latent_shape() == (4, 21, 60, 104)
    assert large.latent_shape() == (4, 31, 44, 80)
    assert (small.frame_rate, large.frame_rate) == (16.0, 24.0)
    assert small.latent_shape(MediaSize(64, 64, 1)) == (4, 1, 8, 8)
    with pytest.raises(InputError, match=r"num_frames=6 .* multiples of 4 plus 1 up to 253, for example num_frames=5"):
        small.latent_shape(MediaSize(64, 64, 6))
    with pytest.raises(InputError, match=r"height=80 .* multiples of 32 up to 2048, for example height=\d+"):
        large.latent_shape(MediaSize(80, 64, 5))


def test_one_float_video_is_there_at_a_time(monkeypatch):
    """Large videos are decoded one by one, and one is 8-bit before the next is decoded."""
    model = CHECKPOINTS["wan"].model()
    monkeypatch.setattr("omnitrl.models.video.PIXELS_AT_ONCE", 1.9 * 64 * 64 * 5)
    latents = torch.randn(2, *model.latent_shape(SIZE), generator=torch.Generator().manual_seed(0))
    alive, largest, decode = [], [], model.decode_pixels

    def decode_and_count(row):
        import gc
        import weakref

        gc.collect()
        largest.append(1 + sum(reference() is not None for reference in alive))
        pixels = decode(row)
        assert pixels.shape == (1, 3, 5, 64, 64)
        alive.append(weakref.ref(pixels))
        return pixels

    model.decode_pixels = decode_and_count
    videos = model.decode(latents, SIZE)
    assert largest == [1, 1]
    assert [v.frames.dtype for v in videos] == [np.uint8, np.uint8]


def test_the_decoder_sees_one_latent_frame_at_a_time():
    model = CHECKPOINTS["wan"].model()
    frames = []
    model.pipeline.vae.decoder.register_forward_pre_hook(lambda module, args: frames.append(args[0].shape[2]))
    model.decode(torch.zeros(1, *model.latent_shape(MediaSize(64, 64, 13))))
    assert frames == [1, 1, 1, 1]


# Two networks


@pytest.fixture(scope="module")
def a14b():
    return CHECKPOINTS["wan-a14b"].model()


def calls(model):
    """Batch sizes of the calls of each network."""
    made = {name: [] for name in model.networks}
    for name, network in model.networks.items():
        network.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: made[name].append(len(kwargs["timestep"])), with_kwargs=True
        )
    return made


def test_rows_on_both_sides_of_the_boundary_go_to_their_own_network():
    model = CHECKPOINTS["wan-a14b"].model()
    inputs = model.example_inputs(4, size=SIZE)
    timesteps = torch.tensor([100.0, 1000 * BOUNDARY, 874.0, 950.0])
    made = calls(model)
    with torch.no_grad():
        together = model.velocity(inputs["latents"], timesteps, inputs["conditions"])
        assert made == {"transformer": [2], "transformer_2": [2]}
        for i, name in enumerate(("transformer_2", "transformer", "transformer_2", "transformer")):
            before = len(made[name])
            alone = model.velocity(inputs["latents"][[i]], timesteps[[i]], inputs["conditions"][i])
            assert len(made[name]) == before + 1
            assert (alone - together[i]).abs().max() <= 1e-6
    assert model.networks_at(timesteps) == ["transformer_2", "transformer", "transformer_2", "transformer"]


def test_the_second_guidance_is_that_of_the_stock_pipeline(a14b):
    a14b.guidance_scale_2 = 2.0
    try:
        ours = clean(a14b, ROW, SamplingParams(4, 4.0, size=SIZE, keep_clean=True, decode=False))
    finally:
        a14b.guidance_scale_2 = None
    tiny = CHECKPOINTS["wan-a14b"]
    given = {"prompt": ROW["prompt"], "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 4}
    given |= {"negative_prompt": "", "guidance_scale": 4.0, "max_sequence_length": 16, "output_type": "latent"}
    stock = a14b.pipeline(**given, guidance_scale_2=2.0, generator=torch.Generator().manual_seed(3)).frames
    assert (ours - stock).abs().max() <= 1e-5 * max(1.0, float(stock.abs().max()))
    same_scale = tiny.stock(a14b.pipeline, ROW, 4, 4.0, 3, output_type="latent").frames
    assert (ours - same_scale).abs().max() > 1e-3


def test_a_model_of_one_network_has_no_second_guidance(tmp_path):
    with pytest.raises(InputError, match=r"guidance_scale_2=2.0 is for models of two networks, and this WanPipeline"):
        video_run(tmp_path, CHECKPOINTS["wan"].model(), guidance_scale_2=2.0)


@pytest.mark.parametrize("name", ["transformer", "transformer_2"])
def test_the_adapter_of_one_network_alone_is_saved_and_loads_with_the_stock_loader(tmp_path, name):
    model = CHECKPOINTS["wan-a14b"].model()
    attach_adapters(model, LoraConfig(r=4, lora_alpha=16, init_lora_weights=False), [name])
    assert list(model.trained_networks) == [name]
    save_networks(model, tmp_path)
    lora = f"pytorch_lora_weights{'' if name == 'transformer' else '_transformer_2'}.safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([lora, name])
    stock = CHECKPOINTS["wan-a14b"].model()
    other = {"weight_name": lora} | ({"load_into_transformer_2": True} if name == "transformer_2" else {})
    assert stock.lora_loading(tmp_path) == [other]
    stock.pipeline.load_lora_weights(tmp_path, **other)
    inputs, base = model.example_inputs(1, size=SIZE), CHECKPOINTS["wan-a14b"].model()
    for timestep, own in ((900.0, "transformer"), (300.0, "transformer_2")):
        call = (inputs["latents"], torch.tensor([timestep]), inputs["conditions"])
        with torch.no_grad():
            ours, theirs, without = (m.velocity(*call) for m in (model, stock, base))
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, without) == (own != name)
    again = CHECKPOINTS["wan-a14b"].model()
    attach_adapters(again, LoraConfig(r=4, lora_alpha=16), [name])
    load_networks(again, tmp_path)
    assert same(weights_of(again), weights_of(model))


def weights_of(model):
    return {key: p.detach() for key, p in model.networks.named_parameters() if p.requires_grad}


def test_saved_adapters_of_two_networks_are_gone_on_with(tmp_path):
    model = CHECKPOINTS["wan-a14b"].model()
    attach_adapters(model, LoraConfig(r=4, lora_alpha=16, init_lora_weights=False))
    save_networks(model, tmp_path)
    again = CHECKPOINTS["wan-a14b"].model()
    attach_adapters(again, str(tmp_path))
    assert same(weights_of(again), weights_of(model))
    with pytest.raises(InputError, match="No adapter can be loaded from peft_config="):
        attach_adapters(CHECKPOINTS["wan-a14b"].model(), str(tmp_path / "transformer"))


def test_the_snippet_loads_what_was_trained(tmp_path):
    pipeline = tiny_wan(networks=2)
    pipeline.save_pretrained(tmp_path / "base")
    model = load_flow_model(tmp_path / "base", 16)
    attach_adapters(model, LoraConfig(r=2, init_lora_weights=False))
    save_networks(model, tmp_path / "out")
    code = load_snippet(model, True, str(tmp_path / "out"))
    assert code.count("load_lora_weights") == 2
    names = {}
    exec(code.replace("torch.bfloat16", "torch.float32"), names)
    pipe = names["pipe"]
    assert isinstance(pipe, WanPipeline)
    stock, ours = pipe.transformer_2.state_dict(), model.networks["transformer_2"].state_dict()
    key = "blocks.0.attn1.to_q.lora_B"
    assert torch.equal(stock[f"{key}.default_0.weight"], ours[f"base_model.model.{key}.default.weight"])
    whole = CHECKPOINTS["wan-a14b"].model()
    attach_adapters(whole, None, ["transformer_2"])
    assert "transformer_2=transformer_2)" in load_snippet(whole, False, "somewhere")


@pytest.mark.parametrize("names", [[], ["transformer_3"], ["transformer", "vae"]])
def test_networks_that_are_not_there_are_refused(names):
    with pytest.raises(InputError, match=r"trainable_networks=.* which are \['transformer', 'transformer_2'\]: use"):
        attach_adapters(CHECKPOINTS["wan-a14b"].model(), LORA, names)


def test_a_process_must_not_skip_a_sharded_network(a14b):
    single = CHECKPOINTS["wan"].model()
    attach_adapters(single, LORA)
    check_networks(single, "DiffusionNFT", draws_noise_levels=True, sharded=True)
    model = CHECKPOINTS["wan-a14b"].model()
    attach_adapters(model, LORA)
    check_networks(model, "FlowGRPO", draws_noise_levels=False, sharded=True)
    check_networks(model, "DiffusionNFT", draws_noise_levels=True, sharded=False)
    with pytest.raises(InputError, match=r"DiffusionNFT draws the noise levels .* use DDP in place of FSDP"):
        check_networks(model, "DiffusionNFT", draws_noise_levels=True, sharded=True)


@pytest.mark.parametrize("algorithm", ["diffusion_nft", "diffusion_dpo", "srpo", "awm", "online_diffusion_dpo"])
def test_algorithms_that_draw_noise_levels_train_all_networks(tmp_path, algorithm):
    with pytest.raises(InputError, match=r"draws noise levels of all the networks .* use trainable_networks=None"):
        video_run(tmp_path, algorithm=algorithm, trainable_networks=["transformer"])


def test_steps_of_another_network_are_not_trained(tmp_path):
    with pytest.raises(InputError, match=r"\['transformer_2'\] are not called in the steps \[0, 1\].*range=\[2, 3\]"):
        video_run(tmp_path, trainable_networks=["transformer_2"])
    with pytest.raises(InputError, match=r"in the steps \[2\] of num_inference_steps=4.*range=\[0, 2\]"):
        video_run(tmp_path, trainable_networks=["transformer"], sde_window_strategy="random", sde_window_size=1)


# Training


def mean_of_frames(prompts, completions, **kwargs):
    return [float(video.frames.mean() / 255) for video in completions]


def video_run(tmp_path, model=None, **options):
    given = {"height": 64, "width": 64, "num_frames": 5, "num_generations": 2, "generation_batch_size": 4}
    given |= {"per_device_train_batch_size": 2, "guidance_scale": 3.0, "max_steps": 2, "rewards": mean_of_frames}
    model = CHECKPOINTS["wan-a14b"].model() if model is None else model
    if options.get("algorithm") in ("diffusion_dpo", "online_diffusion_dpo", "srpo"):
        for name in ("num_generations", "generation_batch_size", "per_device_train_batch_size", "rewards"):
            del given[name]
        if options["algorithm"] == "diffusion_dpo":
            latents = torch.zeros(model.latent_shape(SIZE))
            given["data"] = [{**ROW, "chosen": latents, "rejected": latents + 1}]
    return trainer(tmp_path, model=model, **{**given, **options})


def test_two_networks_are_trained_saved_and_resumed(tmp_path):
    straight = video_run(tmp_path / "a", save_strategy="steps", save_steps=1, guidance_scale_2=2.0, ema_decay=0.9)
    before = trainable(straight)
    straight.train()
    after = trainable(straight)
    for name in ("transformer", "transformer_2"):
        moved = [key for key in after if key.startswith(f"{name}.") and not torch.equal(before[key], after[key])]
        assert len(moved) > 8
    again = video_run(tmp_path / "a", save_strategy="steps", save_steps=1, guidance_scale_2=2.0, ema_decay=0.9)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "out" / "checkpoint-1"))
    assert same(trainable(again), after)
    assert logged(straight, "rollout/logp_abs_diff_max")[0] <= 1e-6
    straight.save_model(str(tmp_path / "saved"))
    files = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert {"pytorch_lora_weights.safetensors", "pytorch_lora_weights_transformer_2.safetensors"} <= set(files)
    averaged = sorted(path.name for path in (tmp_path / "saved" / "ema").glob("*.safetensors"))
    assert averaged == ["pytorch_lora_weights_ema.safetensors", "pytorch_lora_weights_ema_transformer_2.safetensors"]


def test_one_of_two_networks_is_trained_and_resumed(tmp_path):
    options = {"trainable_networks": ["transformer_2"], "sde_window_range": [2, 3], "beta": 0.1}
    options |= {"save_strategy": "steps", "save_steps": 1}
    run = video_run(tmp_path, **options)
    before = {key: p.detach().clone() for key, p in run.flow_model.networks["transformer"].named_parameters()}
    first = trainable(run)
    assert all(key.startswith("transformer_2.") for key in first)
    run.train()
    assert not same(trainable(run), first)
    assert all(torch.equal(p, before[key]) for key, p in run.flow_model.networks["transformer"].named_parameters())
    again = video_run(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert same(trainable(again), trainable(run))


def test_whole_networks_are_trained_one_at_a_time(tmp_path):
    run = video_run(
        tmp_path,
        peft_config=None,
        learning_rate=1e-4,
        trainable_networks=["transformer"],
        sde_window_range=[0, 2],
        save_strategy="steps",
        save_steps=1,
    )
    run.train()
    assert {path.name for path in (tmp_path / "out" / "checkpoint-2").iterdir() if path.is_dir()} == {"transformer"}


def test_the_reward_of_the_page_reads_every_fourth_frame():
    page = (Path(__file__).parents[2] / "docs" / "source" / "models" / "wan.md").read_text("utf-8")
    code = re.search(r"def text_in_frames.*?\n\n", page, re.DOTALL)[0]
    asked = []

    def ocr_reward(prompts, completions):
        asked.append((prompts, [image.getpixel((0, 0))[0] for image in completions]))
        return [image.getpixel((0, 0))[0] / 8 for image in completions]

    names = {"ocr_reward": ocr_reward}
    exec(code, names)
    frames = np.arange(9, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), dtype=np.uint8)
    assert names["text_in_frames"](["a"], [Video(frames, 16.0)], seed=[1]) == [0.5]
    assert asked == [(["a"] * 3, [0, 4, 8])]


# Images


def image_row(number=1):
    return {**ROW, "image": picture(number, (96, 64))}


def test_the_first_latent_frame_of_ti2v_stays_what_was_given_under_any_noise():
    model = CHECKPOINTS["wan-i2v-ti2v"].model()
    params = SamplingParams(
        4, 4.0, size=SIZE, noise_level=0.7, sde_steps=(0, 1, 2), keep_steps=(0,), keep_clean=True, decode=False
    )
    pixels = model.pipeline.video_processor.preprocess(image_row()["image"], height=64, width=64)
    with torch.no_grad():
        wanted = model.encode_pixels(pixels[:, :, None])
    first, second = (clean(model, image_row(), params, seed) for seed in (3, 4))
    assert (first[:, :, :1] - wanted).abs().max() <= 1e-6
    assert torch.equal(first[:, :, :1], second[:, :, :1])
    assert (first[:, :, 1:] - second[:, :, 1:]).abs().max() > 1e-2


def test_the_velocity_of_a_given_frame_leads_to_it_and_has_no_gradient():
    model = CHECKPOINTS["wan-i2v-ti2v"].model()
    attach_adapters(model, LORA)
    conditions = model.encode([image_row()], size=SIZE)
    latents = torch.randn(1, *model.latent_shape(SIZE), generator=torch.Generator().manual_seed(0))
    velocity = model.velocity(latents, torch.tensor([600.0]), conditions)
    data = latents - 0.6 * velocity
    assert (data[:, :, :1] - conditions.positive["condition"]).abs().max() <= 1e-6
    velocity[:, :, :1].sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.networks.parameters())


def test_a_last_image_is_the_stock_pipelines():
    for build, length in (
        (lambda: tiny_wan_i2v(networks=2), 16),
        (lambda: tiny_wan_i2v(clip=True, last_image=True), 512),
    ):
        model = WanImageToVideoModel(build(), max_sequence_length=length)
        row = {**ROW, "images": [picture(1), picture(2)]}
        ours = clean(model, row, SamplingParams(4, 3.0, size=SIZE, keep_clean=True, decode=False))
        given = {"prompt": ROW["prompt"], "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 4}
        given |= {"guidance_scale": 3.0, "max_sequence_length": length, "output_type": "latent"}
        given |= {"image": picture(1), "last_image": picture(2), "generator": torch.Generator().manual_seed(3)}
        stock = model.pipeline(**given).frames
        assert (ours - stock).abs().max() <= 1e-5 * max(1.0, float(stock.abs().max()))


def test_how_many_images_a_checkpoint_takes():
    assert CHECKPOINTS["wan-i2v"].model().num_images == (1, 1)
    assert CHECKPOINTS["wan-i2v-a14b"].model().num_images == (1, 2)
    assert CHECKPOINTS["wan-i2v-ti2v"].model().num_images == (1, 1)
    assert WanImageToVideoModel(tiny_wan_i2v(clip=True, last_image=True)).num_images == (2, 2)
    with pytest.raises(InputError, match="has 2 condition image"):
        CHECKPOINTS["wan-i2v"].model().encode([{**ROW, "images": [picture(1), picture(2)]}], size=SIZE)


def test_a_negative_prompt_has_its_images_encoded_once():
    model = CHECKPOINTS["wan-i2v-a14b"].model()
    encoded = []
    encode = model.pipeline.vae.encode
    model.pipeline.vae.encode = lambda *args, **kwargs: encoded.append(1) or encode(*args, **kwargs)
    conditions = model.encode([image_row(), {**image_row(), "negative_prompt": "blurry"}], True, SIZE)
    assert len(encoded) == 1
    assert torch.equal(conditions.positive["condition"], conditions.negative["condition"])
    model.encode([image_row(2)], True, SIZE)
    assert len(encoded) == 2
    assert model.encode([image_row()], size=MediaSize(32, 64, 9)).positive["condition"].shape == (1, 8, 3, 4, 8)


def test_networks_that_look_at_images_count_512_tokens():
    assert CHECKPOINTS["wan-i2v"].model().default_lora_targets[-2:] == ("add_k_proj", "add_v_proj")
    model = WanImageToVideoModel(tiny_wan_i2v(clip=True), max_sequence_length=226)
    with pytest.raises(InputError, match=re.escape("max_sequence_length=226 does not fit this checkpoint")):
        model.encode([image_row()], size=SIZE)


def test_videos_of_images_are_trained(tmp_path):
    model = CHECKPOINTS["wan-i2v-ti2v"].model()
    run = video_run(tmp_path, model, data=[image_row(i) for i in range(3)])
    before = trainable(run)
    run.train()
    assert not same(trainable(run), before)
    assert logged(run, "rollout/logp_abs_diff_max")[0] <= 1e-6

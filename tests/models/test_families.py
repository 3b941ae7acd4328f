# SPDX-License-Identifier: Apache-2.0
"""
What every model family promises, on tiny checkpoints of all of them.

A family is tested here by having a checkpoint in `tests/tiny`. The reference is always the stock pipeline: its
latents, its media, its sigmas, its LoRA loader.
"""

import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel
from PIL import Image
from safetensors import safe_open

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video, read_picture
from omnitrl.models import FAMILIES, Conditions, MediaSize, Policy, load_flow_model
from omnitrl.rollout import LocalEngine, SampleRequest, SamplingParams
from omnitrl.trainer.adapters import attach_adapters
from omnitrl.trainer.saving import save_networks
from tests.marks import first_fast
from tests.tiny import CHECKPOINTS, FIRST


pytestmark = pytest.mark.compat

# Of three lengths, so that conditions in one batch have padding where a family has masks.
PROMPTS = ["a cat", "two dogs in the rain", "sun"]
STEPS, SEEDS = 4, (11, 12, 13)


@pytest.fixture(
    params=[pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in CHECKPOINTS],
    scope="module",
)
def tiny(request):
    return CHECKPOINTS[request.param]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.model()


def rows_of(tiny):
    return [tiny.row(prompt, i) for i, prompt in enumerate(PROMPTS)]


def sample(tiny, model, params, batch_size=2):
    requests = [SampleRequest(row, i, 0, seed) for i, (row, seed) in enumerate(zip(rows_of(tiny), SEEDS, strict=True))]
    return [t for batch in LocalEngine(model, batch_size=batch_size).generate(requests, params) for t in batch]


def as_arrays(media):
    """Arrays of a medium: pixels in 8 bit, samples of sounds."""
    if isinstance(media, Video):
        return [media.frames.astype(float) / 255, *([] if media.audio is None else [media.audio.samples])]
    if isinstance(media, Audio):
        return [media.samples]
    if isinstance(media, Image.Image):
        return [np.asarray(media, dtype=float) / 255]
    if isinstance(media, list):
        return [np.stack([as_arrays(frame)[0] for frame in media])]
    return [np.asarray(media, dtype=float)]


# Sampling


@pytest.mark.parametrize("guided", first_fast([True, False]))
def test_without_noise_the_latents_are_the_stock_pipelines(tiny, model, guided):
    """Law 2, and the table is the one that the stock run leaves in its scheduler."""
    guidance = tiny.guidance_scale if guided else 1.0
    params = SamplingParams(
        STEPS,
        guidance,
        size=tiny.size,
        noise_level=0.0,
        sde_steps=tuple(range(STEPS - 1)),
        keep_clean=True,
        decode=False,
    )
    ours = sample(tiny, model, params)
    table = model.sigmas(STEPS, tiny.size)
    for row, seed, trajectory in zip(rows_of(tiny), SEEDS, ours, strict=True):
        output = tiny.stock(model.pipeline, row, STEPS, guidance, seed, output_type="latent")
        stock = tiny.latents(model, tiny.media(output), tiny.size)
        assert trajectory.clean_latents.shape == model.latent_shape(tiny.size)
        scale = max(float(stock.abs().max()), 1.0)
        assert (trajectory.clean_latents - stock[0]).abs().max() <= 1e-5 * scale
        assert torch.equal(trajectory.table.sigmas, table.sigmas)
        assert table.sigmas[-1] == 0
        assert torch.equal(table.sigmas, model.pipeline.scheduler.sigmas.float())
        assert torch.equal(table.timesteps, model.pipeline.scheduler.timesteps.float())


def test_media_are_the_stock_pipelines(tiny, model):
    ours = sample(tiny, model, SamplingParams(STEPS, tiny.guidance_scale, size=tiny.size))
    for row, seed, trajectory in zip(rows_of(tiny), SEEDS, ours, strict=True):
        stock = tiny.media(tiny.stock(model.pipeline, row, STEPS, tiny.guidance_scale, seed))[0]
        for mine, theirs in zip(as_arrays(trajectory.media), as_arrays(stock), strict=True):
            assert mine.shape == theirs.shape
            assert mine.ndim < 3 or mine.shape[-3:-1] == (tiny.size.height, tiny.size.width)
            assert np.abs(mine - theirs).max() <= 1.01 / 255  # rounding at .5
            assert mine.std() > 1e-3


@pytest.mark.parametrize("guided", first_fast([True, False]))
def test_a_replay_in_other_batches_has_ratio_one(tiny, model, guided):
    """Law 1: the rollout has batches of 2 and 1, the replay every pair of samples and all three together."""
    guidance = tiny.guidance_scale if guided else 1.0
    params = SamplingParams(
        STEPS, guidance, size=tiny.size, noise_level=0.7, sde_steps=(0, 1, 2), keep_steps=(1, 2), decode=False
    )
    trajectories = sample(tiny, model, params)
    conditions = model.encode(rows_of(tiny), model.needs_negative(guidance), tiny.size)
    table = model.sigmas(STEPS, tiny.size)
    groups = [(0,), (1,), (2,), (0, 1), (2, 0), (1, 2), (2, 1, 0)]
    for rows, step in itertools.product(groups, (1, 2)):
        log_probs = replay([trajectories[i] for i in rows], conditions[list(rows)], model, table, step, guidance)
        old = torch.stack([trajectories[i].log_probs[step - 1] for i in rows])
        assert ((log_probs - old).exp() - 1).abs().max() <= 1e-6


def replay(trajectories, conditions, model, table, step, guidance):
    from omnitrl.algorithms import gaussian_log_prob, transition_mean, transition_std, transition_table

    latents = torch.stack([t.latents[step - 1] for t in trajectories])
    following = torch.stack([t.next_latents[step - 1] for t in trajectories])
    with torch.no_grad():
        velocity = model.velocity(latents, table.timesteps[step].expand(len(latents)), conditions, guidance)
    transitions = transition_table(table.sigmas, "flow_sde", 0.7, (0, 1, 2))
    mean, std = transition_mean(latents, velocity, transitions, step), transition_std(latents, transitions, step)
    return gaussian_log_prob(following, mean, std)


def test_padding_changes_nothing(tiny, model):
    """A short prompt alone, and beside one that is longer (A13 of the field reports)."""
    rows = [tiny.row("cat", 0), tiny.row("a very long prompt", 0)]
    short, long = (model.encode([row], True, tiny.size) for row in rows)
    both = Conditions.cat([short, long])
    inputs = model.example_inputs(2, size=tiny.size)
    latents, timesteps = inputs["latents"], inputs["timesteps"]
    for guidance in (1.0, tiny.guidance_scale):
        with torch.no_grad():
            alone = model.velocity(latents[:1], timesteps[:1], short, guidance)
            padded = model.velocity(latents, timesteps, both, guidance)[:1]
        assert (alone - padded).abs().max() <= 1e-5 * max(1.0, float(alone.abs().max()))


def test_prompts_images_and_guidance_matter(tiny, model):
    inputs = model.example_inputs(1, size=tiny.size)
    latents, timesteps = inputs["latents"], inputs["timesteps"]

    def velocity(row, guidance=1.0):
        with torch.no_grad():
            return model.velocity(latents, timesteps, model.encode([row], True, tiny.size), guidance)

    base = velocity(tiny.row("a cat", 0))
    assert (base - velocity(tiny.row("two dogs", 0))).abs().max() > 1e-4
    guided = velocity(tiny.row("a cat", 0), tiny.guidance_scale)
    if tiny.guidance(4.0) != tiny.guidance(1.0):
        assert (base - guided).abs().max() > 1e-4
    if model.needs_negative(tiny.guidance_scale):
        blurry = velocity({**tiny.row("a cat", 0), "negative_prompt": "blurry"}, tiny.guidance_scale)
        assert (blurry - guided).abs().max() > 1e-5
    if tiny.num_images:
        assert (base - velocity({**tiny.row("a cat", 0), "images": tiny.row("a cat", 1)["images"]})).abs().max() > 1e-5


# Training


def test_every_trained_weight_has_a_gradient(tiny):
    """Of the loss over all steps: a checkpoint may have a network for each part of them."""
    model = tiny.model()
    attach_adapters(model, LoraConfig(r=2, init_lora_weights=False))
    model.networks.train()
    inputs, table = model.example_inputs(1, size=tiny.size), model.sigmas(STEPS, tiny.size)
    for timestep in table.timesteps:
        model.velocity(inputs["latents"], timestep[None], inputs["conditions"]).square().mean().backward()
    trained = {name: p for name, p in model.networks.named_parameters() if p.requires_grad}
    dead = [name for name, p in trained.items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert {name.split(".")[0] for name in trained} == set(model.network_names)
    assert len(dead) <= 0.34 * len(trained), dead  # the text stream of the last block has no way to the output
    assert not any(p.requires_grad for module in model.frozen_modules for p in module.parameters())


def test_default_targets_exist_in_every_network(tiny):
    model = tiny.model()
    for network in model.networks.values():
        names = [name for name, _ in network.named_modules()]
        for target in model.default_lora_targets:
            assert any(name == target or name.endswith("." + target) for name in names), target


def gradients(tiny, prepare):
    model = tiny.model()
    attach_adapters(model, LoraConfig(r=2, init_lora_weights=False))
    policy = Policy(model)
    inputs = model.example_inputs(2, size=tiny.size)
    policy = prepare(policy, model) or policy
    policy(**inputs, guidance_scale=tiny.guidance_scale).square().mean().backward()
    # A weight that has no way to the output has no gradient, or one of zeros where its block is compiled.
    named = model.networks.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None and p.grad.any()}


def relative(a, b):
    assert a.keys() == b.keys()
    difference = sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5
    return difference / sum(float(tensor.square().sum()) for tensor in a.values()) ** 0.5


def test_checkpointed_gradients_are_equal(tiny):
    calls = Counter()

    def checkpointed(policy, model):
        policy.gradient_checkpointing_enable()
        model.networks.train()
        classes = set(policy._no_split_modules)
        for block in (m for m in model.networks.modules() if type(m).__name__ in classes):
            block.register_forward_pre_hook(lambda module, _: calls.update([module]))

    assert relative(gradients(tiny, lambda *_: None), gradients(tiny, checkpointed)) <= 1e-5
    # In the forward, and again in the backward: blocks, but no embeddings, which may be wrapped too.
    assert 2 * len([block for block, count in calls.items() if count == 2]) >= len(calls)


def test_wrap_classes_are_there_and_hold_most_weights(tiny, model):
    classes = set(Policy(model)._no_split_modules)
    for network in model.networks.values():
        blocks = [m for m in network.modules() if type(m).__name__ in classes]
        wrapped = {id(p) for block in blocks for p in block.parameters()}
        share = sum(p.numel() for p in network.parameters() if id(p) in wrapped)
        assert share > tiny.wrapped_share * sum(p.numel() for p in network.parameters())


def test_the_plan_for_sequence_parallelism_is_that_of_diffusers(model):
    for name, network in model.networks.items():
        assert model.sequence_parallel_plan(name) == (type(network)._cp_plan or {})


# Saving


def test_adapters_load_in_stock_loaders_and_give_the_same_output(tiny, tmp_path):
    """With alpha unequal to the rank, which is what gets lost."""
    model = tiny.model()
    attach_adapters(model, LoraConfig(r=4, lora_alpha=16, init_lora_weights=False))
    files = save_networks(model, tmp_path)
    for path in files:
        with safe_open(path, "pt") as file:
            keys = list(file.keys())
        assert keys
        assert not [key for key in keys if re.search(r"\.default|module\.|_orig_mod", key)]
    inputs, table = model.example_inputs(1, size=tiny.size), model.sigmas(STEPS, tiny.size)

    def velocities(other):
        with torch.no_grad():
            return torch.cat(
                [other.velocity(inputs["latents"], t[None], inputs["conditions"]) for t in table.timesteps]
            )

    ours, base = velocities(model), velocities(tiny.model())
    assert (ours - base).abs().max() > 1e-3
    if tiny.loads_lora:
        stock = tiny.model()
        for arguments in stock.lora_loading(tmp_path):
            stock.pipeline.load_lora_weights(tmp_path, **arguments)
        assert torch.equal(velocities(stock), ours)
    peft = tiny.model()
    several = len(peft.networks) > 1
    for name, network in list(peft.networks.items()):
        peft.networks[name] = PeftModel.from_pretrained(network, tmp_path / name if several else tmp_path)
    assert torch.equal(velocities(peft), ours)


# Input


def test_the_family_is_found_from_the_checkpoint(tiny, tmp_path):
    pipeline = tiny.build()
    pipeline.save_pretrained(tmp_path)
    name = json.loads((tmp_path / "model_index.json").read_text())["_class_name"]
    assert name in FAMILIES
    model = load_flow_model(tmp_path, dtype=torch.float32)
    assert name in model.pipeline_classes
    assert isinstance(model.pipeline, DiffusionPipeline)


def test_sizes_that_do_not_fit_name_the_nearest_that_do(tiny, model):
    given = {name: value for name, value in vars(tiny.size).items() if value is not None}
    for name, value in given.items():
        if name == "audio_length":
            continue  # any length can be made
        wrong = MediaSize(**{**given, name: value + 1})
        with pytest.raises(InputError, match=f"{name}={value + 1} does not fit this checkpoint: .* {name}=") as error:
            model.latent_shape(wrong)
        nearest = int(re.search(rf"for example {name}=(\d+)", str(error.value)).group(1))
        assert abs(nearest - value - 1) <= 64
        model.latent_shape(MediaSize(**{**given, name: nearest}))


def test_images_of_a_group_are_read_once(tiny, model, tmp_path, monkeypatch):
    """From their files: the members of a group have one row, which comes with a negative prompt too."""
    row, reads = tiny.row("a cat"), []
    for i, image in enumerate(row.get("images", [])):
        image.save(tmp_path / f"{i}.png")
    paths = [str(tmp_path / f"{i}.png") for i in range(tiny.num_images)]
    group = [{**row, "images": paths} if paths else row] * 4

    def counted(value, *args):
        reads.extend([value] if isinstance(value, str) else [])
        return read_picture(value, *args)

    monkeypatch.setattr("omnitrl.models.base.read_picture", counted)
    conditions = model.encode(group, guidance=True, size=tiny.size)
    assert reads == paths
    alone = model.encode([row], guidance=True, size=tiny.size)
    for part, other in ((conditions.positive, alone.positive), (conditions.negative, alone.negative)):
        for key, tensor in part.items():
            assert torch.equal(tensor, other[key].expand_as(tensor))


def test_missing_condition_images_are_named(tiny, model):
    if not model.num_images[0]:
        assert model.images({"prompt": "a cat"}) == []
        return
    with pytest.raises(InputError, match="'a cat' has 0 condition image"):
        model.encode([{"prompt": "a cat"}], size=tiny.size)


def test_latents_decode_and_encode(tiny, model):
    """Shapes of a round trip, and the gradient of the decoder, which some algorithms follow."""
    shape = model.latent_shape(tiny.size)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    seen = model.visual_latents(latents, tiny.size)
    pixels = model.decode_pixels(seen)
    pixels.square().mean().backward()
    assert latents.grad.isfinite().all()
    assert latents.grad.abs().max() > 0
    with torch.no_grad():
        encoded = model.encode_pixels(pixels.detach().clamp(-1, 1))
    assert encoded.shape == seen.shape
    assert encoded.isfinite().all()
    assert torch.equal(encoded, model.encode_pixels(pixels.detach().clamp(-1, 1)))

# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5 against the stock pipeline."""

import pytest
import torch

from omnitrl.errors import InputError
from omnitrl.models import MediaSize, Policy
from tests.tiny_models import WIDTH, tiny_model


ROWS = [{"prompt": "a cat, sitting"}, {"prompt": "two dogs!"}, {"prompt": "a cat, sitting"}]
PROMPTS = [row["prompt"] for row in ROWS]


def stock_embeddings(model, prompts, negative=None):
    """Prompt embeddings, negative ones, pooled ones and negative pooled ones of the stock pipeline."""
    return model.pipeline.encode_prompt(
        prompts, None, None, negative_prompt=negative, max_sequence_length=model.max_sequence_length
    )


@pytest.mark.compat
@pytest.mark.parametrize("without", [(), (3,)])
def test_prompts_are_encoded_as_the_stock_pipeline_does(without):
    model = tiny_model(without=without)
    conditions = model.encode(ROWS, guidance=True)
    embeds, negative, pooled, negative_pooled = stock_embeddings(model, PROMPTS)
    assert conditions.positive["prompt_embeds"].shape == (3, 16 + 12, 2 * WIDTH)
    for ours, theirs in (
        (conditions.positive["prompt_embeds"], embeds),
        (conditions.positive["pooled"], pooled),
        (conditions.negative["prompt_embeds"], negative),
        (conditions.negative["pooled"], negative_pooled),
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.equal(conditions.positive["prompt_embeds"][0], conditions.positive["prompt_embeds"][2])
    assert (conditions.positive["prompt_embeds"][0] - conditions.positive["prompt_embeds"][1]).abs().max() > 0.1


@pytest.mark.parametrize("without", [(1,), (2,), (1, 2), (1, 3), (2, 3), (1, 2, 3)])
def test_an_absent_encoder_contributes_zeros_in_its_place(without):
    """The stock pipeline takes an absent T5 only; a checkpoint without a CLIP keeps the widths of both."""
    whole = tiny_model().encode(ROWS).positive
    model = tiny_model(without=without)
    part = model.encode(ROWS, guidance=True).positive
    expected = {key: tensor.clone() for key, tensor in whole.items()}
    for number, place in {1: slice(0, WIDTH), 2: slice(WIDTH, 2 * WIDTH)}.items():
        if number in without:
            expected["prompt_embeds"][:, :16, place] = 0
            expected["pooled"][:, place] = 0
    if 3 in without:
        expected["prompt_embeds"][:, 16:] = 0
    if {1, 2} <= set(without):
        expected["prompt_embeds"] = expected["prompt_embeds"][:, 16:]  # no tokens of a CLIP at all
    assert part["pooled"].shape == (3, 2 * WIDTH)
    assert torch.allclose(part["prompt_embeds"], expected["prompt_embeds"], atol=1e-6)
    assert torch.allclose(part["pooled"], expected["pooled"], atol=1e-6)
    velocity = model.velocity(**model.example_inputs(), guidance_scale=2.0)
    assert velocity.isfinite().all()


def test_negative_prompts_are_those_of_the_row():
    model = tiny_model()
    rows = [{"prompt": "a cat", "negative_prompt": "blurry"}, {"prompt": "a dog", "negative_prompt": None}]
    conditions = model.encode(rows, guidance=True)
    expected = model.encode([{"prompt": "blurry"}, {"prompt": ""}])
    assert torch.equal(conditions.negative["prompt_embeds"], expected.positive["prompt_embeds"])
    assert torch.equal(conditions.negative["pooled"], expected.positive["pooled"])
    assert model.encode(rows).negative == {}


def test_rows_of_one_prompt_may_have_different_negative_prompts():
    model = tiny_model()
    rows = [{"prompt": "a cat", "negative_prompt": "blurry"}, {"prompt": "a cat", "negative_prompt": "dark"}]
    conditions = model.encode(rows, guidance=True)
    expected = model.encode([{"prompt": "blurry"}, {"prompt": "dark"}])
    assert torch.equal(conditions.negative["pooled"], expected.positive["pooled"])


def test_a_prompt_is_encoded_once_and_alone():
    model = tiny_model()
    calls, encode_row = [], model.encode_row

    def counting(row, size):
        calls.append(row["prompt"])
        return encode_row(row, size)

    model.encode_row = counting
    model.encode(ROWS, guidance=True)
    model.encode(ROWS[:1], guidance=True)
    assert sorted(calls) == ["", "a cat, sitting", "two dogs!"]


def test_what_was_encoded_is_forgotten_when_there_is_much_of_it(monkeypatch):
    model = tiny_model()
    one = model.encode(ROWS[:1]).num_bytes
    model._cache.clear()
    model._cache_bytes = 0
    monkeypatch.setattr("omnitrl.models.base.PROMPT_CACHE_BYTES", 2 * one)
    first = [model.encode([{"prompt": p}]).positive["pooled"].clone() for p in ("a", "b", "c", "d")]
    assert len(model._cache) == 2
    assert model._cache_bytes == 2 * one
    again = [model.encode([{"prompt": p}]).positive["pooled"] for p in ("a", "b", "c", "d")]
    assert all(map(torch.equal, first, again))
    monkeypatch.setattr("omnitrl.models.base.PROMPT_CACHE_BYTES", one - 1)
    model._cache.clear()
    model._cache_bytes = 0
    assert torch.equal(model.encode([{"prompt": "a"}]).positive["pooled"], first[0])
    assert not model._cache


def test_another_length_of_prompts_is_encoded_anew():
    model = tiny_model()
    short = model.encode(ROWS[:1]).positive["prompt_embeds"]
    model.max_sequence_length = 20
    assert model.encode(ROWS[:1]).positive["prompt_embeds"].shape[1] == short.shape[1] + 8


def test_precision_of_the_network_decides_that_of_absent_encoders():
    model = tiny_model(without=(1, 2, 3))
    model.pipeline.to(torch.bfloat16)
    assert model.encode(ROWS).positive["prompt_embeds"].dtype == torch.bfloat16


# Velocity


def test_guidance_extrapolates_from_the_negative_to_the_positive():
    model = tiny_model()
    inputs = model.example_inputs()
    conditions = inputs.pop("conditions")
    positive = model.predict(inputs["latents"], inputs["timesteps"], conditions.positive)
    negative = model.predict(inputs["latents"], inputs["timesteps"], conditions.negative)
    assert (positive - negative).abs().max() > 0.05
    for scale, expected in ((1.0, positive), (0.0, positive), (3.0, negative + 3.0 * (positive - negative))):
        ours = model.velocity(**inputs, conditions=conditions, guidance_scale=scale)
        assert torch.allclose(ours, expected, atol=1e-5)


def test_time_is_the_schedulers_own():
    """The network sees 1000 σ; a row of another step gets another velocity."""
    model = tiny_model()
    inputs = model.example_inputs()
    table = model.sigmas(4)
    seen = []
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["timestep"].tolist()), with_kwargs=True
    )
    model.velocity(inputs["latents"], table.timesteps[torch.tensor([0, 2])], inputs["conditions"])
    assert seen == [[1000.0, pytest.approx(1000 * float(table.sigmas[2]))]]


def test_rows_do_not_see_each_other():
    model = tiny_model()
    inputs = model.example_inputs(batch_size=3)
    together = model.velocity(**inputs, guidance_scale=2.0)
    for i in range(3):
        alone = model.velocity(
            inputs["latents"][i : i + 1], inputs["timesteps"][i : i + 1], inputs["conditions"][i], guidance_scale=2.0
        )
        assert torch.allclose(alone[0], together[i], atol=1e-5)


def test_dual_attention_is_used_and_is_left_out_of_the_default_adapters():
    dual, single = tiny_model(), tiny_model(dual_attention=False)
    assert dual.transformer.transformer_blocks[0].attn2 is not None
    inputs = dual.example_inputs()
    before = dual.velocity(**inputs)
    with torch.no_grad():
        dual.transformer.transformer_blocks[0].attn2.to_out[0].weight.mul_(2.0)
    assert (dual.velocity(**inputs) - before).abs().max() > 1e-3
    assert single.velocity(**single.example_inputs()).isfinite().all()
    names = [name for name, _ in dual.transformer.named_modules()]
    assert not [n for n in names if "attn2" in n and any(n.endswith("." + t) for t in dual.default_lora_targets)]


def test_example_inputs_are_the_same_every_time_and_fit():
    model = tiny_model()
    first, second = model.example_inputs(batch_size=3), model.example_inputs(batch_size=3)
    assert torch.equal(first["latents"], second["latents"])
    assert first["latents"].shape == (3, 4, 16, 16)
    assert len(first["conditions"]) == 3
    assert model.velocity(**first, guidance_scale=2.0).shape == first["latents"].shape
    assert not torch.equal(first["latents"], model.example_inputs(batch_size=3, seed=1)["latents"])


def test_the_policy_is_the_velocity_and_knows_what_to_wrap():
    model = tiny_model()
    policy = Policy(model)
    inputs = model.example_inputs()
    assert torch.equal(policy(**inputs, guidance_scale=2.0), model.velocity(**inputs, guidance_scale=2.0))
    assert policy._no_split_modules == ["JointTransformerBlock"]
    assert {id(p) for p in policy.parameters()} == {id(p) for p in model.networks.parameters()}


@pytest.mark.compat
@pytest.mark.parametrize("switch", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_checkpointing_saves_activations_and_changes_no_gradient(switch):
    def gradients(checkpointed):
        model = tiny_model()
        model.networks.requires_grad_(True)
        policy = Policy(model)
        if checkpointed:
            getattr(policy, switch)()
        model.networks.train()
        calls = []
        block = model.transformer.transformer_blocks[0]
        block.register_forward_pre_hook(lambda *_: calls.append(1))
        policy(**model.example_inputs()).pow(2).mean().backward()
        return [p.grad.clone() for p in model.networks.parameters() if p.grad is not None], len(calls)

    (plain, once), (recomputed, twice) = gradients(False), gradients(True)
    assert (once, twice) == (1, 2)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, recomputed, strict=True))


# Sizes, sigmas and pictures


@pytest.mark.parametrize(
    ("size", "expected"), [((None, None), (4, 16, 16)), ((64, 96), (4, 16, 24)), ((None, 32), (4, 16, 8))]
)
def test_latents_have_the_size_of_the_picture(size, expected):
    assert tiny_model().latent_shape(MediaSize(*size)) == expected


@pytest.mark.parametrize(("height", "nearest"), [(63, 64), (67, 64), (69, 72), (1, 8), (0, 8), (-5, 8), (500, 128)])
def test_a_size_that_does_not_fit_names_the_nearest_that_does(height, nearest):
    model = tiny_model()
    with pytest.raises(
        InputError, match=f"height={height} does not fit .* multiples of 8 up to 128.* height={nearest}"
    ):
        model.latent_shape(MediaSize(height))
    assert model.latent_shape(MediaSize(nearest))[1] == nearest // 4


@pytest.mark.compat
@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 32), (128, 128)])
def test_a_dynamic_shift_is_the_stock_pipelines(height, width):
    """It depends on the number of image tokens; the sampler with it is the stock one."""
    model = tiny_model(dynamic=True)
    table = model.sigmas(5, MediaSize(height, width))
    model.pipeline(
        "a cat", height=height, width=width, num_inference_steps=5, guidance_scale=1.0, output_type="latent"
    )
    assert torch.equal(table.sigmas, model.pipeline.scheduler.sigmas)
    assert torch.equal(table.timesteps, model.pipeline.scheduler.timesteps)
    other = model.sigmas(5, MediaSize(32, 32))
    assert not torch.equal(table.sigmas, other.sigmas)


@pytest.mark.compat
def test_pictures_are_decoded_as_the_stock_pipeline_does():
    model = tiny_model()
    generator = torch.Generator().manual_seed(3)
    latents = model.pipeline(
        "a cat", num_inference_steps=3, guidance_scale=1.0, generator=generator, output_type="latent"
    ).images
    expected = model.pipeline(
        "a cat", num_inference_steps=3, guidance_scale=1.0, generator=torch.Generator().manual_seed(3)
    ).images
    (ours,) = model.decode(latents)
    assert ours.size == (64, 64)
    assert ours.tobytes() == expected[0].tobytes()


def test_pixels_that_are_not_finite_are_no_picture():
    model = tiny_model()
    latents = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    latents[1, 0, 0, 0] = float("nan")
    first, second, third = model.decode(latents)
    assert second is None
    assert first.tobytes() != third.tobytes()

# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-2.1 against the stock pipeline."""

import pytest
import torch
from diffusers import AdaptiveProjectedMixGuidance, ClassifierFreeGuidance
from peft import PeftModel

from omnitrl.errors import InputError
from omnitrl.models import MediaSize, load_flow_model
from omnitrl.models.hunyuan import is_plain, warn_of_guider
from omnitrl.rollout import LocalEngine, SampleRequest, SamplingParams
from omnitrl.trainer.saving import load_snippet
from tests.tiny import CHECKPOINTS
from tests.tiny.hunyuan import tiny_hunyuan_image
from tests.trainer.helpers import family_run, trainable


TINY = CHECKPOINTS["hunyuan-image"]
SIGN = 'a sign that says "HELLO"'


@pytest.fixture(scope="module")
def model():
    return TINY.model()


@pytest.mark.compat
@pytest.mark.parametrize("prompt", ["a cat", SIGN, "‘ein’ 'zwei' \"drei\"", ""])
def test_prompts_are_encoded_as_the_stock_pipeline_does(model, prompt):
    """Without its padding, and quoted text by the second encoder."""
    ours = model.encode([{"prompt": prompt}]).positive
    model.pipeline.tokenizer_max_length = 60  # more padding
    embeds, mask, glyphs, glyphs_mask = model.pipeline.encode_prompt([prompt])
    assert ours["prompt_embeds"].shape[1] == mask.sum() < 60
    assert torch.allclose(ours["prompt_embeds"][0], embeds[0][mask[0].bool()], atol=1e-5)
    assert ours["prompt_embeds_mask"].all()
    assert int(ours["glyph_embeds_mask"].sum()) == int(glyphs_mask.sum())
    assert (glyphs_mask.sum() > 0) == (len(prompt) > 5)
    for theirs, mine in zip(glyphs[0][glyphs_mask[0].bool()], ours["glyph_embeds"][0], strict=False):
        assert torch.allclose(mine, theirs, atol=1e-5)
        assert theirs.abs().max() > 0.01


def test_what_is_kept_of_a_prompt_has_no_padding_in_memory(model):
    for tensor in model.encode([{"prompt": SIGN}]).positive.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_long_prompts_are_cut_to_max_sequence_length():
    model = TINY.model()
    assert model.encode([{"prompt": "x" * 100}]).positive["prompt_embeds"].shape[1] == 40
    model.max_sequence_length = 12
    assert model.encode([{"prompt": "x" * 100}]).positive["prompt_embeds"].shape[1] == 12


def test_quoted_text_changes_the_velocity_and_pads_exactly(model):
    """A prompt without quotes has no token of the second encoder, also beside one that has some."""
    inputs = model.example_inputs(2, size=TINY.size)
    latents, timesteps = inputs["latents"], inputs["timesteps"]

    @torch.no_grad()
    def velocity(prompts, count):
        conditions = model.encode([{"prompt": prompt} for prompt in prompts])
        return model.velocity(latents[:count], timesteps[:count], conditions)

    both = velocity(["a cat", SIGN], 2)
    assert (both[:1] - velocity(["a cat"], 1)).abs().max() <= 1e-5
    unquoted = model.encode([{"prompt": SIGN}])
    unquoted.positive["glyph_embeds_mask"] = torch.zeros_like(unquoted.positive["glyph_embeds_mask"])
    with torch.no_grad():
        without = model.velocity(latents[1:], timesteps[1:], unquoted)
    assert (both[1:] - without).abs().max() > 1e-3


def test_a_ragged_batch_has_the_gradient_of_its_rows():
    model = TINY.model()
    model.networks.requires_grad_(True)
    inputs = model.example_inputs(2, size=TINY.size)
    rows = [{"prompt": "a cat"}, {"prompt": SIGN}]

    def gradient(chosen):
        model.networks.zero_grad()
        conditions = model.encode([rows[i] for i in chosen])
        model.velocity(inputs["latents"][chosen], inputs["timesteps"][chosen], conditions).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.networks.parameters() if p.grad is not None])

    together, alone = gradient([0, 1]), gradient([0]) + gradient([1])
    assert (together - alone).norm() <= 1e-5 * alone.norm()


def test_guidance_is_that_of_a_stock_guider(model):
    inputs = model.example_inputs(1, size=TINY.size)
    conditions = inputs.pop("conditions")
    with torch.no_grad():
        positive = model.predict(**inputs, inputs=conditions.positive)
        negative = model.predict(**inputs, inputs=conditions.negative)
        ours = model.velocity(**inputs, conditions=conditions, guidance_scale=3.5)
    theirs = ClassifierFreeGuidance(guidance_scale=3.5).forward(positive, negative).pred
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert model.default_guidance_scale == 3.5


def test_the_guider_of_the_real_checkpoint_is_plain_in_its_first_steps_only(model):
    """What the docs say of `AdaptiveProjectedMixGuidance`, which cannot be replayed after step 5."""
    row, differences = {"prompt": "a cat"}, []
    for steps in (6, 8):
        latents = []
        for guider in (ClassifierFreeGuidance(guidance_scale=3.5), AdaptiveProjectedMixGuidance()):
            model.pipeline.guider = guider
            generator = torch.Generator().manual_seed(0)
            output = model.pipeline(
                prompt=row["prompt"],
                height=64,
                width=64,
                num_inference_steps=steps,
                generator=generator,
                output_type="latent",
            )
            latents.append(output.images)
        differences.append(float((latents[0] - latents[1]).abs().max()))
    assert differences[0] == 0
    assert differences[1] > 0.01


def test_another_guider_is_warned_of_once(caplog):
    def warnings():
        return [record for record in caplog.records if record.name == "omnitrl.models.hunyuan"]

    warn_of_guider.cache_clear()
    load_flow_model(tiny_hunyuan_image())
    assert not warnings()
    for _ in range(2):
        load_flow_model(tiny_hunyuan_image(guider=AdaptiveProjectedMixGuidance()))
    (record,) = warnings()
    assert "AdaptiveProjectedMixGuidance" in record.getMessage()
    assert "pipe.guider = ClassifierFreeGuidance(guidance_scale=" in record.getMessage()


@pytest.mark.parametrize(
    "options",
    [{"guidance_rescale": 0.5}, {"use_original_formulation": True}, {"start": 0.1}, {"stop": 0.9}],
)
def test_guidance_with_options_is_not_plain(options):
    assert is_plain(ClassifierFreeGuidance(guidance_scale=2.0))
    assert not is_plain(ClassifierFreeGuidance(**options))


def test_embedded_guidance_is_a_thousand_times_the_scale():
    """In one evaluation, with the scale rounded as the network's dtype has it."""
    model = CHECKPOINTS["hunyuan-image-embedded"].model()
    model.networks.to(torch.bfloat16)
    seen = {}
    model.transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    inputs = model.example_inputs(2, size=TINY.size)
    model.velocity(**inputs, guidance_scale=3.3)
    assert seen["guidance"].tolist() == [(torch.tensor(3.3).bfloat16() * 1000).item()] * 2 == [3296.0] * 2
    assert seen["timestep"].dtype == torch.bfloat16
    assert seen["timestep"].tolist() == inputs["timesteps"].bfloat16().tolist()
    assert len(seen["hidden_states"]) == 2
    assert not model.needs_negative(3.3)


@pytest.mark.compat
def test_sigmas_are_an_even_grid_shifted_once(model):
    """1, .75, .5, .25 with shift 5: s u / (1 + (s - 1) u); the scheduler's own grid would end elsewhere."""
    table = model.sigmas(4)
    expected = [1.0, 15 / 16, 5 / 6, 5 / 8, 0.0]
    assert table.sigmas.tolist() == pytest.approx(expected, abs=1e-6)
    assert table.timesteps.tolist() == pytest.approx([1000 * sigma for sigma in expected[:-1]], abs=1e-3)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        model.sigmas(0)


def test_default_size_is_the_stock_pipelines(model):
    assert model.default_size == MediaSize(512, 512)  # 64 latents of the tiny VAE's 8 pixels
    assert model.latent_shape(MediaSize(64, 96)) == (4, 8, 12)


def test_a_checkpoint_of_mean_velocities_is_refused():
    with pytest.raises(InputError, match=r"distilled with MeanFlow .*HunyuanImage-2.1-Diffusers"):
        load_flow_model(tiny_hunyuan_image(guidance_embeds=True, use_meanflow=True))


@pytest.mark.slow
def test_a_trained_adapter_gives_the_stock_pipeline_the_same_pictures(tmp_path):
    """Loaded as the report says, with the guider that the warning says."""
    trained = family_run(tmp_path, "flow_grpo", "HunyuanImagePipeline", max_steps=2)
    before = trainable(trained)
    trained.train()
    after = trainable(trained)
    assert len([name for name in before if not torch.equal(before[name], after[name])]) > len(before) / 2
    trained.save_model(tmp_path / "saved")
    snippet = load_snippet(trained.flow_model, True, "saved")
    assert snippet.endswith('pipe.transformer = PeftModel.from_pretrained(pipe.transformer, "saved")\n')

    pipe = TINY.model(guider=AdaptiveProjectedMixGuidance()).pipeline
    plain = TINY.stock(pipe, {"prompt": SIGN}, 4, 3.5, seed=7, output_type="latent").images
    pipe.transformer = PeftModel.from_pretrained(pipe.transformer, tmp_path / "saved")
    theirs = TINY.stock(pipe, {"prompt": SIGN}, 4, 3.5, seed=7, output_type="latent").images
    assert isinstance(pipe.guider, ClassifierFreeGuidance)
    params = SamplingParams(4, 3.5, size=TINY.size, keep_clean=True)
    [[ours]] = LocalEngine(trained.flow_model).generate([SampleRequest({"prompt": SIGN}, 0, 0, 7)], params)
    assert (ours.clean_latents - theirs[0]).abs().max() <= 1e-5 * theirs.abs().max()
    assert (plain - theirs).abs().max() > 0.1

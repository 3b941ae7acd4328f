# SPDX-License-Identifier: Apache-2.0
"""What is particular to Lumina-Image 2.0; what every family promises is in `test_families.py`."""

import pytest
import torch

from tests.tiny import CHECKPOINTS
from tests.trainer.helpers import brightness, logged, same, trainable, trainer


@pytest.fixture(scope="module")
def model():
    return CHECKPOINTS["lumina2"].model()


@pytest.mark.compat
def test_prompts_are_encoded_as_in_the_pipeline_and_negative_ones_without_the_system_prompt(model):
    row = {"prompt": "a cat", "negative_prompt": "fog"}
    ours = model.encode([row], guidance=True)
    prompt, mask, negative, negative_mask = model.pipeline.encode_prompt("a cat", True, "fog", max_sequence_length=48)
    for part, embeds, stock_mask in ((ours.positive, prompt, mask), (ours.negative, negative, negative_mask)):
        length = int(stock_mask.sum())
        assert part["prompt_embeds_mask"].tolist() == [[True] * length]
        assert (part["prompt_embeds"] - embeds[:, :length]).abs().max() <= 1e-5
    assert ours.positive["prompt_embeds"].shape[1] == 1 + len("draw <Prompt Start> a cat")
    assert ours.negative["prompt_embeds"].shape[1] == 1 + len("fog")


def test_a_prompt_and_the_same_negative_prompt_are_two(model):
    """Also in the cache."""
    both = model.encode([{"prompt": "fog", "negative_prompt": "fog"}], guidance=True)
    again = model.encode([{"prompt": "fog"}])
    assert torch.equal(again.positive["prompt_embeds"], both.positive["prompt_embeds"])
    assert both.negative["prompt_embeds"].shape[1] == 4


def test_guidance_keeps_the_norm_of_each_row_of_pixels(model):
    generator = torch.Generator().manual_seed(0)
    negative, positive = torch.randn(2, 3, 4, 8, 8, generator=generator)
    guided = model.guide(negative, positive, 4.0, torch.zeros(3))
    assert torch.allclose(guided.norm(dim=-1), positive.norm(dim=-1), rtol=1e-5)
    plain = negative + 4.0 * (positive - negative)
    directions = [velocity / velocity.norm(dim=-1, keepdim=True) for velocity in (guided, plain)]
    assert torch.allclose(*directions, atol=1e-5)


def test_the_velocity_leads_from_the_image_to_the_noise(model):
    """The network's own leads the other way, at a time that is 0 for noise."""
    inputs = model.example_inputs(1)
    conditions = inputs["conditions"].positive
    with torch.no_grad():
        ours = model.velocity(**inputs)
        stock = model.transformer(
            inputs["latents"],
            1 - inputs["timesteps"] / 1000,
            conditions["prompt_embeds"],
            conditions["prompt_embeds_mask"],
            return_dict=False,
        )[0]
    assert torch.equal(ours, -stock)


def test_two_updates_and_a_resumed_one(tmp_path):
    def run(**options):
        torch.manual_seed(0)
        model = CHECKPOINTS["lumina2"].model()
        return trainer(tmp_path, model=model, rewards=brightness, guidance_scale=4.0, max_steps=2, **options)

    whole = run(save_strategy="steps", save_steps=1)
    whole.train()
    assert all(grad > 0 for grad in logged(whole, "grad_norm"))
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert same(trainable(whole), trainable(resumed))

# SPDX-License-Identifier: Apache-2.0
"""What a run takes from the family where its config says nothing."""

import pytest

from omnitrl.algorithms import DEFAULT_NOISE_LEVEL
from omnitrl.models import FAMILIES, family_of
from tests.trainer.helpers import family_run


@pytest.mark.parametrize(
    ("pipeline", "sde_type", "level"),
    [
        ("StableDiffusion3Pipeline", "flow_sde", 0.7),
        ("QwenImagePipeline", "flow_sde", 1.2),
        ("QwenImagePipeline", "cps", 0.7),
        ("FluxPipeline", "flow_sde", 0.9),
        ("LTX2Pipeline", "cps", 0.8),
    ],
)
def test_the_noise_is_that_of_the_familys_recipes(tmp_path, pipeline, sde_type, level):
    run = family_run(tmp_path, "flow_grpo", pipeline, sde_type=sde_type)
    assert run.noise_level == run.sampling_params(0).noise_level == level
    given = family_run(tmp_path, "flow_grpo", pipeline, sde_type=sde_type, noise_level=0.5)
    assert given.sampling_params(0).noise_level == 0.5


def test_an_algorithm_with_a_noise_of_its_own_keeps_it(tmp_path):
    assert family_run(tmp_path, "dance_grpo", "QwenImagePipeline").noise_level == 0.3


@pytest.mark.parametrize("pipeline", FAMILIES)
def test_guidance_targets_and_noise_are_those_of_the_model(tmp_path, pipeline):
    run = family_run(tmp_path, "flow_grpo", pipeline, guidance_scale=None)
    model = run.flow_model
    assert isinstance(model, family_of(pipeline))
    assert run.guidance_scale == model.default_guidance_scale
    assert run.noise_level == model.noise_levels.get("flow_sde", DEFAULT_NOISE_LEVEL)
    for network in model.networks.values():
        assert set(network.peft_config["default"].target_modules) == set(model.default_lora_targets)
    assert run.size == model.size_of({}, run.args.media_size)

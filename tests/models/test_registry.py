# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from omnitrl.errors import InputError
from omnitrl.models import FAMILIES, FlowModel, family_of, load_flow_model
from tests.tiny_models import PIPELINES, tiny_model


@pytest.mark.compat
@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_a_folder_is_loaded_by_its_index(tmp_path, pipeline_class):
    original = PIPELINES[pipeline_class]()
    original.save_pretrained(tmp_path)
    model = load_flow_model(tmp_path, max_sequence_length=12, dtype=torch.float32)
    assert type(model) is family_of(pipeline_class)
    assert type(model.pipeline).__name__ == pipeline_class
    assert model.name == str(tmp_path)
    assert model.max_sequence_length == 12
    inputs = model.example_inputs()
    expected = tiny_model(pipeline_class).velocity(**inputs, guidance_scale=2.0)
    assert torch.equal(model.velocity(**inputs, guidance_scale=2.0), expected)


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_a_pipeline_and_a_model_are_taken_as_they_are(pipeline_class):
    pipeline = PIPELINES[pipeline_class]()
    model = load_flow_model(pipeline)
    assert model.pipeline is pipeline
    assert model.max_sequence_length == type(model).default_max_sequence_length
    assert load_flow_model(model, max_sequence_length=8) is model
    assert model.max_sequence_length == 8
    assert load_flow_model(model).max_sequence_length == 8


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_everything_is_frozen_until_something_is_trained(pipeline_class):
    model = tiny_model(pipeline_class)
    parameters = [p for m in (model.networks, *model.frozen_modules) for p in m.parameters()]
    assert not any(p.requires_grad for p in parameters)
    assert not any(m.training for m in (model.networks, *model.frozen_modules))
    assert set(model.networks) == set(type(model).network_names)
    trained = {id(p) for p in model.networks.parameters()}
    assert not any(id(p) in trained for m in model.frozen_modules for p in m.parameters())


def test_arguments_of_loading_for_what_is_loaded():
    with pytest.raises(InputError, match=r"\['dtype'\] apply when a checkpoint is loaded, but model is a SD3Model"):
        load_flow_model(tiny_model(), dtype=torch.float16)


def test_families_are_flow_models_that_name_their_pipeline():
    for name in FAMILIES:
        family = family_of(name)
        assert issubclass(family, FlowModel)
        assert name in family.pipeline_classes
        assert family.default_lora_targets
        assert family.default_guidance_scale >= 1
    with pytest.raises(InputError, match="the pipeline is a 'NoPipeline', a family that omnitrl does not know"):
        family_of("NoPipeline")

# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from omnitrl.errors import InputError
from omnitrl.models import FAMILIES, FlowModel, family_of, load_flow_model, register_family, registry
from omnitrl.models.sd3 import SD3Model
from tests.marks import first_fast
from tests.tiny_models import tiny_model, tiny_of


ROOT = Path(__file__).parents[2]


@pytest.mark.compat
@pytest.mark.parametrize("pipeline_class", first_fast(FAMILIES, 3))
def test_a_folder_is_loaded_by_its_index(tmp_path, pipeline_class):
    tiny = tiny_of(pipeline_class)
    length = tiny.max_sequence_length
    tiny.build().save_pretrained(tmp_path)
    model = load_flow_model(tmp_path, max_sequence_length=length, dtype=torch.float32)
    assert type(model) is family_of(pipeline_class)
    assert type(model.pipeline).__name__ == pipeline_class
    assert model.name == str(tmp_path)
    assert model.max_sequence_length == length
    inputs = model.example_inputs(size=tiny.size)
    expected = tiny_model(pipeline_class, length).velocity(**inputs, guidance_scale=2.0)
    difference = model.velocity(**inputs, guidance_scale=2.0) - expected
    assert difference.abs().max() <= 1e-5 * expected.abs().max()  # weights that are mapped from a file lie elsewhere


def test_prompts_that_the_pipeline_does_not_take_are_refused_of_a_model_too():
    model = tiny_of("FluxPipeline").model()
    with pytest.raises(InputError, match=r"max_sequence_length=600 is more than FluxPipeline takes: .*=512 or less"):
        load_flow_model(model, max_sequence_length=600)
    assert model.max_sequence_length == 16


@pytest.mark.parametrize("pipeline_class", FAMILIES)
def test_a_pipeline_and_a_model_are_taken_as_they_are(pipeline_class):
    pipeline = tiny_of(pipeline_class).build()
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
    with pytest.raises(InputError, match="a 'NoPipeline', a family that omnitrl does not know") as error:
        family_of("NoPipeline")
    for known in FAMILIES:
        assert known in str(error.value)
    (guide,) = re.findall(r"\S+\.md", str(error.value))
    assert (ROOT / guide).is_file()


class MyPipeline(StableDiffusion3Pipeline):
    pass


class MyModel(SD3Model):
    default_guidance_scale = 2.0


@pytest.fixture
def nothing_registered(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_PIPELINES", {})


def test_a_registered_family_serves_its_pipelines(nothing_registered, tmp_path):
    with pytest.raises(InputError, match="'MyPipeline', a family that omnitrl does not know"):
        family_of("MyPipeline")
    register_family(MyPipeline, MyModel)
    pipeline = MyPipeline(**tiny_model().pipeline.components)
    assert type(load_flow_model(pipeline)) is MyModel
    pipeline.save_pretrained(tmp_path)
    loaded = load_flow_model(tmp_path, dtype=torch.float32)
    assert (type(loaded), type(loaded.pipeline)) == (MyModel, MyPipeline)
    inputs = loaded.example_inputs(1)
    expected = load_flow_model(pipeline).velocity(**inputs)
    assert (loaded.velocity(**inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
    register_family("StableDiffusion3Pipeline", MyModel)  # in the place of ours
    assert type(load_flow_model(tiny_model().pipeline)) is MyModel


def test_what_is_no_family_is_not_registered(nothing_registered):
    with pytest.raises(InputError, match="family=<class 'int'> is no subclass of `FlowModel`"):
        register_family("MyPipeline", int)
    with pytest.raises(InputError, match=r"FlowModel does not implement decode_pixels, .*, sigmas: see docs"):
        register_family("MyPipeline", FlowModel)


def test_a_pipeline_that_diffusers_lacks_is_named_with_its_version(nothing_registered, tmp_path):
    tiny_model().pipeline.save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusion3Pipeline", "NewPipeline"))
    register_family("NewPipeline", MyModel)
    with pytest.raises(
        InputError, match=r"is a 'NewPipeline', which diffusers \d\S+ does not have: .*--upgrade diffusers"
    ):
        load_flow_model(tmp_path)

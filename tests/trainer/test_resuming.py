# SPDX-License-Identifier: Apache-2.0
"""A run goes on with its own checkpoints and refuses those of another one."""

import shutil

import pytest
from peft import LoraConfig

from omnitrl.errors import RunError
from omnitrl.trainer.checkpoints import STAGING, load_tensors
from tests.trainer.helpers import same, trainable, trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints in the midst of a rollout and at its end."""
    place = tmp_path_factory.mktemp("saved")
    trainer(place, max_steps=2, save_strategy="steps", save_steps=1).train()
    return place / "out"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_generations": 2},
            "written with num_generations=4, which decides which samples.* has num_generations=2",
        ),
        ({"seed": 7}, "with seed=42, .*resume with seed=42, or start a new run from its weights"),
        ({"generation_batch_size": 16}, "with generation_batch_size=8"),
        ({"gradient_accumulation_steps": 2}, "with gradient_accumulation_steps=1"),
        ({"noise_level": 0.5}, "with noise_level=0.7, which decides how the rest of its rollout was sampled"),
        ({"num_inference_steps": 6}, "with num_inference_steps=4"),
        ({"guidance_scale_train": 3.0}, "with guidance_scale_train=1.0"),
        ({"ema_decay": 0.9}, "has no averaged weights: resume with ema_decay=None"),
        (
            {"data": ["others", "than", "before", "altogether", "here"]},
            "in the midst of a rollout of '.*dataset as it was",
        ),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(tmp_path, saved, options, message):
    run = trainer(tmp_path / "new", **options)
    with pytest.raises(RunError, match=message) as error:
        run.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "new").rglob("*checkpoint*"))
    assert not (tmp_path / "new" / "out" / "metrics.jsonl").exists()


def test_at_the_end_of_a_rollout_sampling_may_be_changed(tmp_path, saved):
    run = trainer(tmp_path / "new", noise_level=0.5)
    run.train(resume_from_checkpoint=str(saved / "checkpoint-2"))
    assert run.state.global_step == 4


@pytest.mark.parametrize(
    ("peft_config", "message"),
    [
        (
            LoraConfig(r=4, target_modules=["to_q"]),
            "do not fit what is trained: 28 tensors differ, such as 'base_model",
        ),
        (None, r"has no .*diffusion_pytorch_model\*\.safetensors: was it written by a run with adapters\?"),
    ],
)
def test_a_checkpoint_of_other_weights_is_refused(tmp_path, saved, peft_config, message):
    run = trainer(tmp_path / "new", peft_config=peft_config)
    before = trainable(run)
    with pytest.raises(RunError, match=message):
        run.train(resume_from_checkpoint=str(saved / "checkpoint-1"))
    assert same(before, trainable(run))


def test_a_checkpoint_of_several_processes_is_refused(tmp_path, saved):
    folder = shutil.copytree(saved / "checkpoint-1", tmp_path / "checkpoint-1")
    (folder / "omnitrl_state_0_of_1.pt").rename(folder / "omnitrl_state_0_of_2.pt")
    with pytest.raises(RunError, match="another number of processes than 1, and cannot be continued exactly"):
        trainer(tmp_path / "new").train(resume_from_checkpoint=str(folder))


def test_a_checkpoint_whose_replacement_was_cut_off_is_found(tmp_path, saved):
    """A process was killed after it had put the old folder away and before the new one had its name."""
    out = tmp_path / "out"
    shutil.copytree(saved / "checkpoint-1", out / "_replaced-checkpoint-1")
    (out / STAGING / "checkpoint-1").mkdir(parents=True)
    run = trainer(tmp_path, max_steps=2)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2
    assert sorted(path.name for path in out.glob("*checkpoint*")) == ["checkpoint-1"]


def test_a_second_run_gives_the_engine_the_weights_that_it_begins_with(tmp_path):
    """At step 0, where the first run gave it others, of which all of its updates came."""
    run = trainer(tmp_path, max_steps=2, save_report=False)
    versions, update = [], run.engine.update_weights
    run.engine.update_weights = lambda version: versions.append(version) or update(version)
    run.train()
    run.train()
    assert versions == [0, 0]


def test_resuming_from_nothing_is_refused(tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(ValueError, match="has no checkpoint to resume from: start without"):
        run.train(resume_from_checkpoint=True)
    with pytest.raises(
        ValueError, match=r"is no checkpoint folder of a trainer: pass one like '.*checkpoint-100', or True"
    ):
        run.train(resume_from_checkpoint=str(tmp_path))


def test_a_checkpoint_can_be_read_without_running_code(saved):
    state = load_tensors(saved / "checkpoint-1" / "omnitrl_state_0_of_1.pt")
    assert state["rollout"]["sampling"]["noise_level"] == 0.7
    assert load_tensors(saved / "checkpoint-1" / "training_args.bin")["num_generations"] == 4

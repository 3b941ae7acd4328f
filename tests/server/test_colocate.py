# SPDX-License-Identifier: Apache-2.0
"""A vLLM-Omni engine in the trainer's process: awake for rollouts, asleep in training, and the same run."""

import json
import os
import subprocess

import pytest

from omnitrl.errors import InputError
from omnitrl.rollout import EngineContext
from omnitrl.rollout.vllm_omni.colocate import colocated, engine_arguments
from tests.server.environment import ENVIRONMENT, ROOT, needs_server, server_python
from tests.tiny_models import tiny_model


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_server
def test_an_engine_in_the_trainers_process_makes_the_same_run(checkpoint_of, tmp_path):
    done = subprocess.run(
        [str(server_python()), "-m", "tests.server.colocated", str(checkpoint_of("sd3")), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (tmp_path / "result.json").is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    ours, theirs = result["rewards"]
    assert len(ours) == 2
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert result["difference"] <= 1e-4
    assert max(result["log_probs"]) <= 1e-5
    assert result["asleep"] == [True, True, True]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("step ")]
    assert len(lines) == 6  # of both runs, without the name of a worker before them


def test_without_vllm_omni_it_is_named():
    pytest.importorskip("httpx")
    model = tiny_model()
    model.pipeline.register_to_config(_name_or_path="a-model")
    with pytest.raises(InputError, match=r"needs vLLM-Omni in the trainer's environment .*omnitrl\[vllm\]"):
        colocated(EngineContext(model))


def test_a_model_that_was_built_in_code_cannot_be_loaded_again():
    with pytest.raises(InputError, match="was built in code: save it with"):
        colocated(EngineContext(tiny_model()))


def test_several_processes_want_servers():
    with pytest.raises(InputError, match="is for one process, and there are 2: use vllm_mode='server'"):
        colocated(EngineContext(tiny_model(), world_size=2))


@pytest.mark.parametrize(("pipeline_class", "step"), [("QwenImagePipeline", True), ("FluxPipeline", False)])
def test_it_is_made_as_a_server_is(pipeline_class, step):
    given = engine_arguments("m", pipeline_class, "bfloat16")
    assert (given["model"], given["dtype"], given["step_execution"], given["max_num_seqs"]) == (
        "m",
        "bfloat16",
        step,
        8,
    )
    assert given["custom_pipeline_args"]["pipeline_class"].endswith(f"vllm_omni.server.pipelines.{pipeline_class}")
    assert given["worker_extension_cls"].endswith("server.extension.RolloutExtension")
    assert given["enable_sleep_mode"] is True


def test_a_family_that_has_no_server_is_named():
    with pytest.raises(
        InputError, match="make no rollouts with ZImagePipeline; they do with StableDiffusion3Pipeline"
    ):
        engine_arguments("m", "ZImagePipeline", "float32")

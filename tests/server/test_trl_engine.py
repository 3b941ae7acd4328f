# SPDX-License-Identifier: Apache-2.0
"""`use_vllm=True` of GSPO is TRL's engine, with a real vLLM in the trainer's process."""

import json
import os
import subprocess

import pytest

from tests.server.environment import ENVIRONMENT, ROOT, needs_server, server_python


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_server
def test_the_engine_of_trl_has_the_weights_of_each_update(tmp_path):
    variables = {"PYTHONPATH": str(ROOT), "VLLM_PLUGINS": "none", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [str(server_python()), "-m", "tests.server.trl_engine", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert (tmp_path / "result.json").is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["differences"]) == 3  # a rollout for each update
    assert max(result["differences"]) < 0.03  # vLLM computes in bfloat16 on a CPU
    assert result["ratios"] == pytest.approx([1] * 3, abs=0.1)
    assert result["moved"] > 0.3  # so far would an engine with the first weights be off

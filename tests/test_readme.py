# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as it stands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def first_example():
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if "FlowGRPOTrainer" in block)


@pytest.mark.slow
def test_the_example_trains_the_shipped_model(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", first_example()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "glyphs-ocr" / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "grad_norm" in row]
    assert [row["step"] for row in updates] == list(range(1, 17))
    rewards = [row["reward"] for row in updates if "reward" in row]
    assert len(rewards) == 4  # a rollout of 128 samples for each four updates of 32
    assert all(0.2 < reward < 0.9 for reward in rewards)  # a base that can be improved
    assert all(row["rollout/logp_abs_diff_max"] == 0 for row in updates if "reward" in row)
    weights = load_file(tmp_path / "glyphs-ocr" / "adapter_model.safetensors")
    # B of LoRA starts at 0. In the last block nothing asks for the text stream's queries, so that one stays there.
    still = [name for name, weight in weights.items() if "lora_B" in name and not weight.any()]
    assert [name.split("transformer_blocks.")[1] for name in still] == ["3.attn.add_q_proj.lora_B.weight"]


def test_the_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README)
    local = {link for link in links if not link.startswith("http")}
    assert "docs/source/flow_grpo_trainer.md" in local
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_readme_names_what_there_is():
    from omnitrl.algorithms import SDE_TYPES
    from omnitrl.rewards import BUILTIN_REWARDS
    from omnitrl.rollout import ENGINES
    from omnitrl.trainer import ALL_TRAINERS

    there = README.split("## What there is")[1].split("\n## ")[0]
    row = {line.split("|")[1].strip(): line for line in there.splitlines() if line.startswith("|")}
    named = {kind: set(re.findall(r"`([\w ]+)`", text)) for kind, text in row.items()}
    assert named["rewards"] == set(BUILTIN_REWARDS)
    assert named["rollouts"] == set(ENGINES)
    assert named["transitions"] == set(SDE_TYPES) - {"ode"}
    assert named["trainers"] == set(ALL_TRAINERS.values())

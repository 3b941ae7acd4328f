# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, measure the same work on both sides, and write finite numbers; their figures are in the docs."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnitrl.trainer import TRAINERS
from tests.server.environment import needs_server


ROOT = Path(__file__).parent.parent.parent
NAMES = ("learning", "rollout_overhead", "train_overhead", "whole_step", "memory", "saved_work", "reward_overlap")
NAMES += ("server_rollout",)
FAMILIES = ("sd3", "qwen_image", "wan")
PAIR = ("without", "with")


def run(name, tmp_path):
    """The JSON that `python benchmarks/NAME.py --quick` writes."""
    output = tmp_path / f"{name}.json"
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text("utf-8"))


def numbers(content):
    """All numbers in nested dicts and lists."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return [number for item in content for number in numbers(item)]
    return [content] if isinstance(content, int | float) and not isinstance(content, bool) else []


def strings(content):
    """All strings in nested dicts and lists, keys too."""
    if isinstance(content, dict):
        return strings([*content, *content.values()])
    if isinstance(content, list):
        return [text for item in content for text in strings(item)]
    return [content] if isinstance(content, str) else []


def check_numbers(content):
    found = numbers(content)
    assert len(found) > 10
    assert all(math.isfinite(number) for number in found)


@pytest.mark.slow
def test_rollout_overhead_times_the_same_work(tmp_path):
    content = run("rollout_overhead", tmp_path)
    check_numbers(content)
    settings = [(1, 1, False), (2, 1, False), (2, 4, False), (2, 1, True)]
    expected = [(family, *setting) for family in FAMILIES for setting in settings]
    keys = ("family", "batch_size", "guidance_scale", "group")
    assert [tuple(result[key] for key in keys) for result in content["results"]] == expected
    for result in content["results"]:
        assert 0 < result["share_outside_network"] < 1
        assert result["largest_pixel_difference_of_ode"] <= 1  # a last bit, rounded to a pixel
        assert all(ratio > 0 for ratios in result["ratios"].values() for ratio in ratios.values())
        assert result["parts"]["engine, SDE + log-probs"]["log_prob"] > 0
        assert "log_prob" not in result["parts"]["engine, ODE"]
        assert all(parts["network"] > 0 for parts in result["parts"].values())


@pytest.mark.slow
def test_train_overhead_times_the_same_network(tmp_path):
    content = run("train_overhead", tmp_path)
    check_numbers(content)
    trained = [(result["family"], result["weights"]) for result in content["results"]]
    assert trained == [("qwen_image", "LoRA r=32"), ("sd3", "all"), ("sd3", "LoRA r=32"), ("wan", "LoRA r=32")]
    for result in content["results"]:
        whole = result["trainable_parameters"] == result["network_parameters"]
        assert whole is (result["weights"] == "all")
        assert 0 < result["share_outside_network"] < 1
        assert all(parts["network"] > 0 and parts["backward"] > 0 for parts in result["parts"].values())
        assert result["ratios"]["cpu"] > 0


@pytest.mark.slow
def test_a_whole_step_and_the_bare_loop_learn_from_equal_work(tmp_path):
    content = run("whole_step", tmp_path)
    check_numbers(content)
    assert [result["family"] for result in content["results"]] == list(FAMILIES)
    for result in content["results"]:
        assert result["largest_log_ratio"] <= 1e-6  # adapters merged or not
        assert result["ratio"] == pytest.approx(result["seconds"]["omnitrl"] / result["seconds"]["bare"])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="elsewhere the peak is not that of one process")
def test_memory_grows_by_what_is_kept(tmp_path):
    content = run("memory", tmp_path)
    check_numbers(content)
    (result,) = content["results"]
    state = 4 * math.prod(content["latent_shape"])
    assert result["kept_latent_bytes_growth"] == (32 * 5 - 8 * 2) * state  # one state more than trained steps
    assert result["state_tensor_bytes_growth"] == result["kept_latent_bytes_growth"]
    assert result["within"] is content["within"] is True
    # Less than half of it would mean that something else made the peak.
    assert result["measured_growth_bytes"] > 0.5 * result["expected_growth_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_committed_results_are_of_full_runs_and_name_no_machine(name):
    content = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    check_numbers(content)
    assert content["benchmark"] == name
    assert content["quick"] is False
    assert {"torch", "diffusers", "cpu", "threads"} <= set(content["environment"])
    assert not [text for text in strings(content) if text.startswith(("/", "~", "\\"))]


@pytest.mark.slow
def test_learning_measures_at_both_budgets(tmp_path):
    content = run("learning", tmp_path)
    check_numbers(content)
    assert [(r["algorithm"], r["seed"], r["control"]) for r in content["results"]] == [
        ("flow_grpo", 1, False),
        ("flow_grpo", 1, True),
    ]
    for result in content["results"]:
        assert result["before"]["forwards"] == result["before"]["updates"] == 0
        # A rollout of 128 samples in 6 steps; an update has 32 samples of it, and their 2 trained steps.
        for point in (result["at_forwards"], result["at_seconds"]):
            assert point["forwards"] == 768 * -(-point["updates"] // 4) + 64 * point["updates"]
        assert result["at_forwards"]["forwards"] >= result["forwards"] == 40
        assert result["at_seconds"]["seconds"] >= result["seconds"] == 1.0
    learnt, control = content["results"]
    assert learnt["before"]["reward"] == control["before"]["reward"]
    assert learnt["at_seconds"]["reward"] != control["at_seconds"]["reward"]


@pytest.mark.slow
def test_saved_work_counts_what_reaches_the_network(tmp_path):
    content = run("saved_work", tmp_path)
    check_numbers(content)
    # 10 guided steps, of which 4 come before the window of 2 and 4 after it; groups of 8.
    forwards = {name: result["forwards_per_sample"] for name, result in content["steps"].items()}
    assert forwards == {
        "all steps trained, KL": 2 * (10 + 9 + 9),
        "no KL": 2 * (10 + 9),
        "a window of 2 steps": 2 * (10 + 2),
        "shared prefix": 2 * (4 / 8 + 6 + 2),
        "Flash tail": 2 * (4 / 8 + 2 + 1 + 2),
        "no guidance in training": 2 * (4 / 8 + 2 + 1) + 2 + 2,  # the old log-probs anew
        "no guidance at all": 4 / 8 + 2 + 1 + 2,
    }
    pairs = {
        name: [pair[which]["forwards_per_sample"] for which in ("without", "with")]
        for name, pair in content["pairs"].items()
    }
    assert pairs == {
        "old log-probs of the engine": [15, 11],
        "prompts encoded once": [11, 11],
        "timesteps_per_forward=2": [11, 11],
        "no guidance in training, rollouts used twice": [15, 13],
    }
    everything = [*content["steps"].values(), *content["cycle"].values()]
    for result in everything + [pair[which] for pair in content["pairs"].values() for which in ("without", "with")]:
        assert result["forwards_per_sample"] == pytest.approx(result["forwards_seen_by_the_network"])
    encoded = [content["pairs"]["prompts encoded once"][which]["text_encoder_rows_per_sample"] for which in PAIR]
    assert encoded == [2 * 2 / 8 + 2 + 2, 3 / 16]  # with the prefix; each prompt and the empty one once
    assert [result["gradient_exchanges"] for result in content["exchanges"].values()] == [8, 1]
    assert {result["backward_passes"] for result in content["exchanges"].values()} == {8}


@pytest.mark.server
@pytest.mark.slow
@needs_server
def test_server_rollouts_are_made_and_timed(tmp_path):
    content = run("server_rollout", tmp_path)
    check_numbers(content)
    assert [(r["batching"], r["concurrency"]) for r in content["rates"]] == [("request", 1), ("request", 4)]
    assert [r["servers"] for r in content["servers"]] == [1, 2]
    for result in content["rates"] + content["servers"]:
        assert result["images_per_second"] > 0
        assert 0 < result["client_share"] < 1
    adapter, whole = content["updates"]
    assert 0 < adapter["bytes"] < whole["bytes"]


@pytest.mark.parametrize(("name", "page"), [("saved_work", "saving_work"), ("server_rollout", "benchmarks")])
def test_pages_have_the_tables_that_are_printed(name, page, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module(name)
    content = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    page = (ROOT / "docs" / "source" / f"{page}.md").read_text("utf-8")
    for _, header, rows in script.tables(content):
        lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
        table = "\n".join([lines[0].replace("|  |", "| |"), "|" + "---|" * len(header), *lines[1:]])
        assert table in page, table


def test_the_page_on_learning_has_the_table_that_is_printed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("learning")
    content = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text("utf-8"))
    page = (ROOT / "docs" / "source" / "learning.md").read_text("utf-8")
    _, header, rows = script.table(content["results"])
    assert [row[0] for row in rows] == list(TRAINERS)
    for name in TRAINERS:
        runs = [r for r in content["results"] if r["algorithm"] == name]
        assert [(r["control"], r["seed"]) for r in runs] == [(False, 1), (False, 2), (False, 3), (True, 1)]
    for row in (header, *rows):
        assert ("| " + " | ".join(row) + " |").replace("|  |", "| |") in page, row


@pytest.mark.slow
def test_a_slow_reward_is_added_in_the_loop_and_hidden_beside_it(tmp_path):
    content = run("reward_overlap", tmp_path)
    check_numbers(content)
    assert [result["kind"] for result in content["results"]] == ["function", "async function"]
    for result in content["results"]:
        assert [row["share"] for row in result["rows"]] == [0.1, 1.0]
        assert result["seconds_without"] >= content["batches"] * content["batch_seconds"]
        for row in result["rows"]:  # in the loop it costs all of its time, whatever the machine does beside
            assert row["synchronous"]["waited"] >= row["reward_seconds"]
            assert row["beside"]["over_larger"] < row["synchronous"]["over_larger"]


def test_the_page_on_benchmarks_has_the_table_of_slow_rewards(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("reward_overlap")
    content = json.loads((ROOT / "benchmarks" / "results" / "reward_overlap.json").read_text("utf-8"))
    page = (ROOT / "docs" / "source" / "benchmarks.md").read_text("utf-8")
    _, header, rows = script.table(content["results"])
    assert len(rows) == 2 * len(script.SHARES)
    for row in (header, *rows):
        assert "| " + " | ".join(row) + " |" in page, row

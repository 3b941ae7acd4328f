# SPDX-License-Identifier: Apache-2.0
"""Trainers with a real vLLM-Omni server learn what they learn with the local engine, whatever becomes of servers."""

import copy
import threading
import time

import httpx
import psutil
import pytest
import torch

from omnitrl.errors import InputError, RunError
from omnitrl.messages import pack, unpack
from omnitrl.models import load_flow_model
from omnitrl.rollout.vllm_omni.transport import ADAPTER
from tests.distributed.launch import Launch
from tests.rollout.stub import until
from tests.server import two
from tests.server.checkpoints import SERVED
from tests.server.environment import Server, needs_server
from tests.trainer.helpers import LORA, PROMPTS, brightness, logged, trainable, trainer


pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600), needs_server]

LENGTH = {"sd3": 12}


def model_of(family, checkpoint):
    return load_flow_model(str(checkpoint), LENGTH.get(family, 32))


def run_of(place, family, checkpoint, *servers, **options):
    """A trainer of five updates, with the servers if there are any."""
    size = {name: value for name, value in vars(SERVED[family].size).items() if value is not None}
    engine = {}
    if servers:
        urls = [server.url for server in servers]
        engine = {"rollout_engine": "vllm_omni", "vllm_server_base_url": urls, "vllm_server_timeout": 60.0}
    given = {
        "max_steps": 5,
        "guidance_scale": 3.0,
        "epsilon": 1e-3,
        "learning_rate": 3e-4,
        **size,
        **engine,
        **options,
    }
    return trainer(place, model=given.pop("model", None) or model_of(family, checkpoint), **given)


def distance(a, b):
    """Norm of the difference of two sets of tensors, relative to the first."""
    norm = torch.cat([t.flatten() for t in a.values()]).norm()
    return float(torch.cat([(a[name] - b[name]).flatten() for name in a]).norm() / norm)


def seeds_of(run):
    """Lets `run` keep the seeds of what it samples, each rollout's as a list."""
    seen, make_rollout = [], run.make_rollout

    def make_and_keep(rollout):
        buffer = make_rollout(rollout)
        seen.append([t.request.seed for t in buffer.trajectories])
        return buffer

    run.make_rollout = make_and_keep
    return seen


# The same run


@pytest.mark.parametrize("family", ["sd3", "qwen-image", "wan"])
def test_five_updates_are_those_of_the_local_engine(family, checkpoint_of, server_of, tmp_path):
    server = server_of(family)
    local = run_of(tmp_path / "local", family, checkpoint_of(family), rollout_batch_size=1)
    before = trainable(local)
    local.train()
    served = run_of(tmp_path / "served", family, checkpoint_of(family), server)
    served.train()
    ours, theirs = logged(served, "reward"), logged(local, "reward")
    assert len(ours) == len(theirs) == 3  # rollouts of two updates
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert distance(trainable(local), trainable(served)) <= 1e-4
    assert distance(before, trainable(local)) > 1e-3
    assert max(logged(served, "rollout/logp_abs_diff_max")) <= 1e-5
    assert logged(served, "rollout/servers") == [1, 1, 1]
    assert sum(logged(served, "rollout/retries")) == 0
    assert served._resumed_from is None


def test_two_networks_and_all_their_adapters(checkpoint_of, server_of, tmp_path):
    family = "wan-a14b"
    options = {"max_steps": 2, "guidance_scale_2": 2.0}
    local = run_of(tmp_path / "local", family, checkpoint_of(family), rollout_batch_size=1, **options)
    local.train()
    served = run_of(tmp_path / "served", family, checkpoint_of(family), server_of(family), **options)
    served.train()
    assert distance(trainable(local), trainable(served)) <= 1e-4


def test_all_weights_and_averages(checkpoint_of, server_of, tmp_path, caplog):
    """Whole networks go to the server, by a collective, and for evaluation their averages at the same step."""
    server, rows = server_of("sd3"), {"one": PROMPTS[:2]}
    original = run_of(tmp_path / "original", "sd3", checkpoint_of("sd3"), server, peft_config=None)
    options = {"peft_config": None, "learning_rate": 1e-4, "ema_decay": 0.5, "max_steps": 2, "eval_dataset": rows}
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    local = run_of(tmp_path / "local", "sd3", checkpoint_of("sd3"), rollout_batch_size=1, **options)
    local.train()
    options["vllm_weight_transport"] = "collective"
    served = run_of(tmp_path / "served", "sd3", checkpoint_of("sd3"), server, **options)
    served.train()
    assert "over HTTP" not in caplog.text
    assert logged(served, "eval_one_reward") == pytest.approx(logged(local, "eval_one_reward"), abs=1e-4)
    assert distance(trainable(local), trainable(served)) <= 1e-4
    after = run_of(tmp_path / "after", "sd3", checkpoint_of("sd3"), server, max_steps=1)  # adapters, after all weights
    with pytest.raises(RunError, match="serve the checkpoint that is trained"):
        after.train()
    original.engine.update_weights(0)  # for the tests that follow


def test_two_processes_share_one_server(checkpoint_of, server_of, tmp_path, monkeypatch):
    """With weights that both have, and with such that FSDP2 shards: each run is that of one process alone."""
    server = server_of("sd3")
    variables = {"CHECKPOINT": str(checkpoint_of("sd3")), "SERVER": server.url}
    launch = Launch("tests.server.two", tmp_path, "four_updates", "sharded", environment=variables)
    assert launch.wait(280) == 0, launch.output()
    monkeypatch.setenv("CHECKPOINT", variables["CHECKPOINT"])
    alone = two.four_updates(tmp_path / "alone", servers=False)
    for name in ("four_updates", "sharded"):
        first, second = launch.results(name)
        assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])
        assert len(set(first["seeds"]) | set(second["seeds"])) == len(first["seeds"]) + len(second["seeds"]) == 32
        assert max(first["differences"]) <= 1e-5
        assert distance(alone["weights"], first["weights"]) <= 1e-4


# What becomes of servers


def test_a_server_that_is_killed_is_replaced_and_comes_back(checkpoint_of, start_server, tmp_path, caplog):
    """One of two in the midst of a rollout, which is started again, then the engine of the other one alone."""
    folder = checkpoint_of("sd3")
    servers = [start_server(folder), start_server(folder, "--distributed-executor-backend", "mp")]
    options = {"max_steps": 6, "generation_batch_size": 16, "num_generations": 4, "save_steps": 100}
    local = run_of(tmp_path / "local", "sd3", folder, rollout_batch_size=1, **options)
    local.train()
    options |= {"vllm_server_timeout": 240.0, "vllm_max_concurrency": 4}  # half of what each server has to make
    served = run_of(tmp_path / "served", "sd3", folder, *servers, **options)
    seen, client = seeds_of(served), served.engine.client
    deaths = []
    generate = served.engine.generate

    def generate_and_kill(requests, params):
        for number, batch in enumerate(generate(requests, params)):
            if number == 0 and len(seen) == 0:
                servers[0].stop()  # in the midst of the first rollout
                deaths.append(0)
            yield batch
        if len(seen) == 0:
            until(lambda: client.alive == 1)
            servers[1].kill_workers()  # between two rollouts
            deaths.append(1)
            threading.Thread(target=servers[0].start).start()

    served.engine.generate = generate_and_kill
    served.train()
    assert deaths == [0, 1]
    assert logged(served, "reward") == pytest.approx(logged(local, "reward"), abs=1e-4)
    assert distance(trainable(local), trainable(served)) <= 1e-4
    assert all(len(seeds) == len(set(seeds)) == 16 for seeds in seen)
    assert servers[1].process.poll() is None
    assert f"{servers[1].url} is left out: its engine has died" in caplog.text
    assert sum(logged(served, "rollout/retries")) > 0


def test_without_a_server_the_run_ends_in_seconds_and_can_go_on(checkpoint_of, start_server, tmp_path):
    folder = checkpoint_of("sd3")
    server = start_server(folder)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "vllm_server_timeout": 3.0}
    run = run_of(tmp_path, "sd3", folder, server, **options)
    make_rollout, ended = run.make_rollout, []

    def kill_before_the_second(rollout):
        if rollout == 1:
            server.stop()
            ended.append(time.monotonic())
        return make_rollout(rollout)

    run.make_rollout = kill_before_the_second
    with pytest.raises(RunError, match=r"for 3 s \(vllm_server_timeout\)\. .*it cannot be connected to.*vllm-serve"):
        run.train()
    assert time.monotonic() - ended[0] < 20
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    server.start()
    again = run_of(tmp_path, "sd3", folder, server, **options)
    again.train(resume_from_checkpoint=True)
    straight = run_of(tmp_path / "straight", "sd3", folder, rollout_batch_size=1, max_steps=4)
    straight.train()
    assert distance(trainable(straight), trainable(again)) <= 1e-4


def test_weights_that_another_brought_are_replaced(checkpoint_of, server_of, tmp_path, caplog):
    """The server then has another adapter than the one that was asked for, and says so."""
    server = server_of("sd3")
    run = run_of(tmp_path, "sd3", checkpoint_of("sd3"), server, max_steps=2)
    local = run_of(tmp_path / "local", "sd3", checkpoint_of("sd3"), rollout_batch_size=1, max_steps=2)
    local.train()
    update = run.engine.update_weights

    def update_and_spoil(version):
        report = update(version)
        _, body = run.engine.client._wanted.messages[0]
        head, tensors = unpack(body, "rollout")
        tensors = {name: tensor * 0.5 for name, tensor in tensors.items()}
        head["version"] = 12345
        assert httpx.post(server.url + ADAPTER, content=pack(head, tensors)).status_code == 200
        return report

    run.engine.update_weights = update_and_spoil
    run.train()
    assert "has other weights than those of this step" in caplog.text
    assert distance(trainable(local), trainable(run)) <= 1e-4


def test_fifty_updates_leave_memory_and_files_as_they_are(checkpoint_of, server_of, tmp_path):
    server = server_of("sd3")
    run = run_of(tmp_path, "sd3", checkpoint_of("sd3"), server)
    requests, params = run._plan.requests(0), run.sampling_params(0)
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]

    def used():
        return sum(p.memory_info().rss for p in processes) / 2**20, sum(p.num_fds() for p in processes)

    def update(version):
        for parameter in run.trainable_parameters():
            parameter.data += 1e-4
        run.engine.update_weights(version).check()
        assert sum(len(batch) for batch in run.engine.generate(requests[:2], params)) == 2

    for version in range(15):  # allocators and connections settle
        update(version)
    before = used()
    for version in range(15, 65):
        update(version)
    after = used()
    assert after[0] - before[0] < 24, f"{before} MiB and files became {after}"
    # A connection more or less is open at any moment; a file left behind by each update would make fifty.
    assert after[1] - before[1] <= 10, f"{before} MiB and files became {after}"


# Wrong servers


def test_a_server_with_another_model_is_refused_when_the_trainer_is_made(checkpoint_of, server_of, tmp_path):
    server = server_of("qwen-image")
    started = time.monotonic()
    with pytest.raises(InputError, match="with a QwenImagePipeline, but the trainer has a StableDiffusion3Pipeline"):
        run_of(tmp_path, "sd3", checkpoint_of("sd3"), server)
    assert time.monotonic() - started < 30


def test_a_server_with_another_checkpoint_is_found_out_in_the_first_rollout(checkpoint_of, server_of, tmp_path):
    model = model_of("sd3", checkpoint_of("sd3"))
    for parameter in model.networks.parameters():
        parameter.data += 0.02
    run = run_of(tmp_path, "sd3", checkpoint_of("sd3"), server_of("sd3"), model=model)
    with pytest.raises(RunError, match=r"differs by .*: serve the checkpoint that is trained"):
        run.train()


def test_a_server_without_the_hooks_says_how_to_start_it(checkpoint_of, tmp_path):
    command = ["-m", "vllm_omni.entrypoints.cli.main", "serve", str(checkpoint_of("sd3")), "--omni"]
    server = Server([*command, "--port", "{port}", "--dtype", "float32", "--enforce-eager"], tmp_path / "server.log")
    try:
        server.start()
        with pytest.raises(InputError, match=r"without omnitrl's routes .*start it with `omnitrl vllm-serve MODEL`"):
            run_of(tmp_path, "sd3", checkpoint_of("sd3"), server)
    finally:
        server.stop()


def test_modules_that_have_no_place_are_named(checkpoint_of, server_of, tmp_path):
    lora = copy.deepcopy(LORA)
    lora.target_modules = {"attn.to_q", "time_text_embed.timestep_embedder.linear_1"}
    run = run_of(tmp_path, "sd3", checkpoint_of("sd3"), server_of("sd3"), peft_config=lora)
    with pytest.raises((RunError, InputError), match="timestep_embedder"):
        run.train()


def test_a_size_that_cannot_be_is_refused_before_anything_is_sampled(checkpoint_of, server_of, tmp_path):
    with pytest.raises(InputError, match="height=60 does not fit"):
        run_of(tmp_path, "sd3", checkpoint_of("sd3"), server_of("sd3"), height=60)


def test_a_reward_that_fails_does_not_break_the_server(checkpoint_of, server_of, tmp_path):
    def broken(prompts, completions, **_):
        raise ValueError("no score")

    server = server_of("sd3")
    run = run_of(tmp_path, "sd3", checkpoint_of("sd3"), server, rewards=broken, reward_max_retries=0)
    with pytest.raises(RunError, match="no score"):
        run.train()
    assert server.is_healthy()
    well = run_of(tmp_path / "well", "sd3", checkpoint_of("sd3"), server, rewards=brightness, max_steps=1)
    well.train()
    assert well.state.global_step == 1

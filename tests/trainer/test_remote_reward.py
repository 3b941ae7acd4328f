# SPDX-License-Identifier: Apache-2.0
"""A run whose reward server is killed in the middle waits for it, and is the run that was not disturbed."""

import re
import threading
import time

import pytest

from omnitrl.rewards import RemoteReward, get_reward
from tests.rewards.serving import Command
from tests.trainer.helpers import logged, same, trainable, trainer


OF_TIME = re.compile("time|second")

# Hangs in its third call, which is in the second rollout, until it is killed; one that is started after that does not.
REWARD = """
import time
from pathlib import Path

import numpy as np

calls = 0


def mean_of_pixels(prompts, completions, trainer_state, log_metric, log_extra, **kwargs):
    global calls
    calls += 1
    if calls == 3 and not Path("again").exists():
        Path("reached").touch()
        time.sleep(600)
    log_metric("asked_at", trainer_state.global_step)
    log_extra("said", [f"{prompt}!" for prompt in prompts])
    return [float(np.asarray(picture).mean() / 255) for picture in completions]
"""


def run(folder, reward):
    """A short run: its weights, and what it logged but for times."""
    trained = trainer(folder, rewards=reward, max_steps=6, rollout_batch_size=4, reward_max_wait=240)
    trained.train()
    rows = [
        {name: value for name, value in row.items() if not OF_TIME.search(name)} for row in trained.state.log_history
    ]
    return trained, trainable(trained), rows


@pytest.mark.slow
def test_a_server_that_is_killed_mid_run_is_waited_for(tmp_path, monkeypatch, caplog):
    (tmp_path / "pixels_reward.py").write_text(REWARD)
    (tmp_path / "again").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    _, undisturbed, rows = run(tmp_path / "local", get_reward("pixels_reward:mean_of_pixels"))
    (tmp_path / "again").unlink()

    server = Command("pixels_reward:mean_of_pixels", folder=tmp_path)
    waited = []

    def kill_and_start():
        while not (tmp_path / "reached").exists():
            time.sleep(0.05)
        server.kill()
        (tmp_path / "again").touch()
        time.sleep(1.0)
        start = time.monotonic()
        server.start()
        waited.append(time.monotonic() - start)

    with server:
        disturber = threading.Thread(target=kill_and_start, daemon=True)
        disturber.start()
        trained, weights, disturbed_rows = run(tmp_path / "remote", RemoteReward(server.url))
        disturber.join(60)
    assert len(waited) == 1
    assert "reward 'mean_of_pixels' is away, waiting for it" in caplog.text
    assert same(weights, undisturbed)
    assert disturbed_rows == rows
    assert len(logged(trained, "reward")) == 3
    assert logged(trained, "rewards/mean_of_pixels/failed") == [0.0] * 3
    assert logged(trained, "asked_at") == [0.0, 2.0, 4.0]

# SPDX-License-Identifier: Apache-2.0
"""What is left when something outside fails: rewards, disks, uploads."""

import contextlib
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from omnitrl.errors import RunError
from omnitrl.rewards import RewardError
from omnitrl.trainer.checkpoints import STAGING, publish, tidy_up
from tests.marks import first_fast
from tests.trainer.helpers import brightness, fresh_rollout, logged, same, trainable, trainer
from tests.trainer.test_interrupts import At


ROOT = Path(__file__).parents[2]


# Rewards that fail (A11)


def values(*numbers):
    """A reward that gives one number after the other."""
    left = list(numbers)

    def given(completions, **kwargs):
        return [left.pop(0) for _ in completions]

    return given


@pytest.fixture
def scored(tmp_path):
    """Makes one rollout of 8 samples, two groups of four in a batch each, and scores it as training does."""

    def run(reward, **options):
        made = trainer(tmp_path, rewards=reward, reward_max_retries=0, **options)
        return made, fresh_rollout(made)

    return run


NAN = float("nan")


@pytest.mark.parametrize("missing", [None, NAN])
def test_missing_scores_are_left_out_of_mean_and_groups(scored, missing):
    """A11: the mean of [0.5, -, -, 0.8, 0.6, 0.7] is 0.65, and those without a score get no advantage."""
    made, buffer = scored(values(0.5, missing, missing, 0.8, 0.6, 0.7, 0.65, 0.65))
    made.state.global_step = 1
    row = made.metrics.drain()
    assert row["reward"] == pytest.approx(0.65, abs=1e-7)
    assert row["rewards/given/mean"] == pytest.approx(0.65, abs=1e-7)
    assert row["rewards/given/failed"] == (0 if missing is None else 2)
    advantages = buffer.advantages
    assert advantages[1] == advantages[2] == 0
    assert not advantages.isnan().any()
    assert advantages[[0, 3]].tolist() == pytest.approx([-0.15 / 0.1501, 0.15 / 0.1501], rel=1e-5)
    std = (2 * 0.05**2 / 4) ** 0.5
    expected = [-0.05 / (std + 1e-4), 0.05 / (std + 1e-4), 0.0, 0.0]
    assert advantages[4:].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_group_with_one_score_teaches_nothing(scored):
    _, buffer = scored(values(0.5, None, None, None, 0.1, 0.2, 0.3, 0.4))
    assert buffer.advantages[:4].tolist() == [0, 0, 0, 0]
    assert buffer.advantages[4:].abs().min() > 0.1


def test_a_reward_that_raises_once_is_asked_again(tmp_path):
    calls = []

    def flaky(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 1:
            raise ConnectionError("the scorer is restarting")
        return [0.1 * i for i in range(len(completions))]

    run = trainer(tmp_path, rewards=flaky, max_steps=1)
    run.train()
    assert calls == [4, 4, 4]
    assert logged(run, "rewards/flaky/failed") == [0]
    assert logged(run, "reward") == pytest.approx([0.15])


def test_a_reward_that_raises_for_some_is_missing_for_those(scored, caplog):
    seen = []

    def sometimes(completions, **kwargs):
        seen.append(1)
        if len(seen) == 1:
            raise ValueError("no face found")
        return [0.0, 0.0, 1.0, 1.0]

    with caplog.at_level(logging.WARNING):
        made, buffer = scored(sometimes)
    assert buffer.advantages.tolist() == pytest.approx([0, 0, 0, 0, -1, -1, 1, 1], abs=1e-3)
    assert made.metrics.drain()["reward"] == 0.5
    assert (
        "reward 'sometimes' failed for 4 of 8 rows, which are missing, not 0; the first failure: ValueError: no face"
        in (caplog.text)
    )


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            lambda completions, **_: 1 / 0,
            "failed for 8 of 8 rows.*division by zero.*Repair the reward, or give it weight",
        ),
        (lambda completions, **_: [NAN] * 4, r"failed for 8 of 8 rows.*it returned nan"),
        (lambda completions, **_: None, "returned None for 4 rows, expected a list of 4 numbers"),
        (lambda completions, **_: [0.5], "returned 1 values for 4 rows: it must return one value per row"),
        (lambda completions, **_: ["good"] * 4, "returned a value of type str for row 0"),
        (
            lambda completions, texts, **_: [0.5] * 4,
            "requires the argument 'texts', which is neither a dataset column",
        ),
    ],
)
def test_a_reward_that_never_works_stops_the_run_with_a_sentence(tmp_path, reward, message):
    run = trainer(tmp_path, rewards=reward, reward_max_retries=0)
    before = trainable(run)
    with pytest.raises(RewardError, match=message) as error:
        run.train()
    assert "\n" not in str(error.value)
    assert same(before, trainable(run))


def test_a_reward_that_hangs_counts_as_failed_after_its_time(tmp_path):
    release, calls = threading.Event(), []

    def hangs_once(completions, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            release.wait(30)
        return [0.1 * i for i in range(len(completions))]

    run = trainer(tmp_path, rewards=hangs_once, reward_timeout=0.3, reward_max_retries=0, max_steps=1)
    started = time.monotonic()
    run.train()
    release.set()
    assert time.monotonic() - started < 15
    assert logged(run, "rewards/hangs_once/failed") == [4]
    assert logged(run, "reward") == pytest.approx([0.15])


def test_in_a_sum_a_row_with_one_failed_reward_is_missing_altogether(scored):
    def second(completions, **kwargs):
        return [1.0, 1.0, 1.0, NAN] if len(completions) == 4 else []

    made, buffer = scored([values(*[0.1 * i for i in range(12)]), second], reward_max_failed_fraction=0.6)
    assert buffer.advantages[3] == buffer.advantages[7] == 0
    assert made.metrics.drain()["reward"] == pytest.approx(1 + 0.1 * (0 + 1 + 2 + 4 + 5 + 6) / 6)
    evaluated = made.evaluate(["a", "b", "c", "d"])  # by the same rule
    assert evaluated["eval_rewards/missing"] == 1


def test_a_watched_reward_may_fail(tmp_path):
    def broken(completions, **kwargs):
        raise OSError("no such server")

    run = trainer(tmp_path, rewards=[brightness, broken], reward_weights=[1.0, 0.0], reward_max_retries=0, max_steps=2)
    run.train()
    assert run.state.global_step == 2
    assert 0.5 < logged(run, "reward")[0] < 0.8
    assert not logged(run, "rewards/broken/mean")


def test_media_that_is_not_finite_has_no_reward(tmp_path):
    """A11: pixels of NaN are not shown to the reward as a black image."""
    seen = []

    def bright(completions, **kwargs):
        seen.extend(completions)
        return brightness(None, completions)

    run = trainer(tmp_path, rewards=bright)
    decode = run.flow_model.decode

    def decode_with_a_hole(latents, size):
        latents = latents.clone()
        latents[1] = NAN
        return decode(latents, size)

    run.flow_model.decode = decode_with_a_hole
    buffer = fresh_rollout(run)
    assert len(seen) == 6
    assert buffer.advantages[1] == buffer.advantages[5] == 0
    assert (buffer.advantages[[0, 2, 3, 4, 6, 7]].abs() > 1e-3).all()
    row = run.metrics.drain()
    assert row["rewards/bright/failed"] == 2
    assert row["reward"] == pytest.approx(sum(brightness(None, seen)) / 6)


# Disks


def test_an_older_checkpoint_is_replaced_whole(tmp_path):
    old, staged = tmp_path / "checkpoint-2", tmp_path / STAGING / "checkpoint-2"
    for folder, text in ((old, "old"), (staged, "new")):
        folder.mkdir(parents=True)
        (folder / "weights").write_text(text)
    (old / "only_old").touch()
    publish(staged, old)
    assert (old / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert [path.name for path in old.iterdir()] == ["weights"]


def test_a_replacement_that_was_cut_off_is_undone(tmp_path):
    replaced = tmp_path / "_replaced-checkpoint-2"
    replaced.mkdir()
    (replaced / "weights").write_text("old")
    (tmp_path / STAGING / "checkpoint-2").mkdir(parents=True)
    tidy_up(tmp_path)
    assert (tmp_path / "checkpoint-2" / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


@contextlib.contextmanager
def files_of_at_most(size):
    """A disk that is full: writing beyond `size` bytes fails, as it does with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", first_fast([20_000, 2_000]))  # the state file, or the weights, are too large
def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(tmp_path, size):
    run = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    with contextlib.ExitStack() as stack:
        run.add_callback(At("on_step_end", 3, lambda: stack.enter_context(files_of_at_most(size))))
        with pytest.raises(
            RunError, match=r"checkpoint-4 could not be written \(.+\), and what was there before"
        ) as error:
            run.train()
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    again = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"output_dir='.*/file/out' cannot be written to .*: choose a folder of your own"
    ):
        trainer(tmp_path / "file")


# Uploads

CLOSED = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_none"}
PUSHING = """
import sys
from pathlib import Path
from omnitrl.errors import OmniTRLError
from tests.trainer.helpers import trainer

place = Path(sys.argv[1])
try:
    trainer(place / "early", push_to_hub=True, hub_model_id="me/mine")
except OmniTRLError as error:
    print("early:", error)
run = trainer(place, max_steps=1)
run.train()
try:
    run.push_to_hub()
except OmniTRLError as error:
    print("late:", error)
run.hub_model_id = "me/mine"
run.args.push_to_hub, run.args.hub_strategy = True, "every_save"
run._save_checkpoint(run.model, None)
run._finish_current_push()
"""


@pytest.mark.slow
def test_an_upload_that_fails_costs_only_the_upload(tmp_path):
    environment = {
        **os.environ,
        **CLOSED,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PUSHING, str(tmp_path)], env=environment, capture_output=True, timeout=120, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    early, late = [line for line in done.stdout.splitlines() if line.startswith(("early", "late"))]
    out = tmp_path / "out"
    assert re.fullmatch(
        r"early: push_to_hub=True, but the repository 'me/mine' cannot be made \(.*refused.*\): log in with `hf auth "
        r"login`, or train without push_to_hub and run `hf upload me/mine \S+early/out` afterwards\.",
        early,
    )
    assert re.fullmatch(
        rf"late: The upload to the Hub failed \(.*refused.*\), but everything is saved in {out}: log in with `hf auth "
        rf"login` and run `hf upload out {out}` when the Hub can be reached\.",
        late,
    )
    for name in ("README.md", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        assert (out / name).is_file()
    assert (out / "checkpoint-1" / "trainer_state.json").is_file()
    assert f"An upload to the Hub failed ([Errno 111] Connection refused); everything is in {out}" in done.stderr

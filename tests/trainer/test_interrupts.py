# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, errors and kills at every moment of a run: the next run goes on as if nothing had happened."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from omnitrl.trainer.checkpoints import STAGING
from tests.marks import first_fast
from tests.trainer.helpers import brightness, logged, same, trainable, trainer


ROOT = Path(__file__).parents[2]

STEPS = 4  # of two rollouts; the first and the third lie in the midst of one
KEPT = {
    "ema_decay": 0.9,
    "lr_scheduler_type": "linear",
    "max_steps": STEPS,
    "eval_dataset": ["a cat", "a dog"],
    "eval_strategy": "steps",
    "eval_steps": 1,
    "num_inference_steps_eval": 1,
}


def press_ctrl_c(times=1):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


class At(TrainerCallback):
    """Does something in a hook of the Trainer at a step."""

    def __init__(self, hook, step, action):
        self.step, self.action = step, action
        setattr(self, hook, self._run)

    def _run(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def in_rollout(run):
    """In the second network call of the second rollout, after two updates."""
    predict, calls = run.flow_model.predict, []

    def predict_and_press(*args):
        if run.state.global_step == 2 and not torch.is_grad_enabled() and not evaluating:
            calls.append(1)
            if len(calls) == 2:
                press_ctrl_c()
        return predict(*args)

    evaluating = during(run, "evaluate")
    run.flow_model.predict = predict_and_press


def during(run, method):
    """A list that is not empty while `method` runs."""
    original, active = getattr(run, method), []

    def watched(*args, **kwargs):
        active.append(1)
        try:
            return original(*args, **kwargs)
        finally:
            active.pop()

    setattr(run, method, watched)
    return active


def in_evaluation(run):
    predict, evaluating = run.flow_model.predict, during(run, "evaluate")

    def predict_and_press(*args):
        if evaluating and run.state.global_step == 2:
            press_ctrl_c()
        return predict(*args)

    run.flow_model.predict = predict_and_press


def in_training_step(run):
    losses, calls = run.compute_row_losses, []

    def losses_and_press(*args):
        if run.state.global_step == 3:
            calls.append(1)
            if len(calls) == 2:
                press_ctrl_c()
        return losses(*args)

    run.compute_row_losses = losses_and_press


def in_optimizer_step(run):
    run.add_callback(At("on_pre_optimizer_step", 2, press_ctrl_c))


def in_the_last_optimizer_step(run):
    """After which nothing is left to be stopped; the request must not be lost."""
    run.add_callback(At("on_optimizer_step", STEPS - 1, press_ctrl_c))


def in_saving(run):
    save = run.save_model

    def save_and_press(*args, **kwargs):
        if run.state.global_step == 2:
            press_ctrl_c()
        return save(*args, **kwargs)

    run.save_model = save_and_press


def in_reward_wait(run):
    """The reward hangs; the first Ctrl-C ends the wait for it."""
    calls, release = [], threading.Event()

    def hang(prompts, completions, **kwargs):
        if run.state.global_step == 2 and not evaluating:
            calls.append(1)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            release.wait(60)
        return brightness(prompts, completions)

    evaluating = during(run, "evaluate")
    object.__setattr__(run.rewards._rewards[0], "function", hang)
    return calls


PHASES = {
    in_rollout: 2,
    in_optimizer_step: 3,
    in_reward_wait: 2,
    in_training_step: 3,
    in_evaluation: 2,
    in_saving: 2,
    in_the_last_optimizer_step: 4,
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nobody interrupts."""
    run = trainer(tmp_path_factory.mktemp("straight"), **KEPT)
    run.train()
    return run


@pytest.mark.parametrize(("phase", "step"), first_fast(PHASES.items(), 3), ids=[phase.__name__ for phase in PHASES])
def test_ctrl_c_loses_nothing(tmp_path, straight, capsys, phase, step):
    options = {**KEPT, "save_strategy": "steps", "save_steps": 2} if phase is in_saving else KEPT
    run = trainer(tmp_path, **options)
    calls = phase(run)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert time.monotonic() - started < 30
    assert run.state.global_step == step
    folder = tmp_path / "out" / f"checkpoint-{step}"
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Interrupted at")]
    assert lines == [
        f"Interrupted at step {step}: go on from {folder} with `trainer.train(resume_from_checkpoint=True)`."
    ]
    assert_complete(folder)
    assert not (tmp_path / "out" / STAGING).exists()

    again = trainer(tmp_path, **KEPT)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS
    assert_equal(straight, again)
    assert calls in (None, [1])


def assert_complete(folder, average=True):
    names = {path.name for path in folder.iterdir()}
    assert ("ema" in names) == average
    assert names >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
        "omnitrl_state_0_of_1.pt",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
    }


def assert_equal(expected, run):
    assert same(trainable(expected), trainable(run))
    assert all(map(torch.equal, expected.ema.shadow_params, run.ema.shadow_params))


def test_the_handler_of_others_comes_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    run = trainer(tmp_path, max_steps=2)
    in_rollout(run)
    run.train()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_finished_run_that_is_resumed_is_left_as_it_is(tmp_path, straight):
    trainer(tmp_path, **KEPT, save_strategy="steps", save_steps=STEPS).train()
    again = trainer(tmp_path, **KEPT)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS
    assert_equal(straight, again)


def test_the_same_trainer_goes_on_after_ctrl_c(tmp_path, straight):
    """In a notebook: what the broken-off rollout had begun to score is not taken for the next one's."""
    run = trainer(tmp_path, **KEPT)
    predict, evaluating, calls = run.flow_model.predict, during(run, "evaluate"), []

    def predict_and_press(*args):
        if run.state.global_step == 2 and not evaluating:
            calls.append(1)
            if len(calls) == 6:  # in the second batch; the first is with the reward by now
                press_ctrl_c()
        return predict(*args)

    run.flow_model.predict = predict_and_press
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.evaluate()["eval_reward"] == pytest.approx(logged(straight, "eval_reward")[1], abs=1e-6)
    run.train(resume_from_checkpoint=True)
    assert_equal(straight, run)


def test_the_second_ctrl_c_acts_at_once_and_saves_nothing_half_done(tmp_path, capsys):
    """In the midst of an optimizer step, where weights are neither the old nor the new ones."""
    run = trainer(tmp_path, max_steps=STEPS, save_strategy="steps", save_steps=2)
    went_on = []
    run.add_callback(At("on_optimizer_step", 2, lambda: press_ctrl_c(2)))
    run.add_callback(At("on_step_end", 3, lambda: went_on.append(1)))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not went_on
    assert [path.name for path in (tmp_path / "out").glob("checkpoint*")] == ["checkpoint-2"]
    folder = tmp_path / "out" / "checkpoint-2"
    assert f"Interrupted at step 2: go on from {folder} with" in capsys.readouterr().err


def test_the_second_ctrl_c_does_not_wait_for_a_checkpoint(tmp_path, capsys):
    run = trainer(tmp_path, max_steps=STEPS)
    losses = run.compute_row_losses

    def losses_and_press(*args):
        if run.state.global_step == 2:
            press_ctrl_c(2)
        return losses(*args)

    run.compute_row_losses = losses_and_press
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not list((tmp_path / "out").glob("*checkpoint*"))
    assert (
        "Interrupted at step 2, before any checkpoint was written: save_steps says how often"
        in capsys.readouterr().err
    )


def test_ctrl_c_in_the_last_moment_is_not_lost(tmp_path):
    """Nothing follows that could be stopped, but the program that called `train` must not go on either."""
    run = trainer(tmp_path, max_steps=2)
    run.add_callback(At("on_optimizer_step", 1, press_ctrl_c))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert_complete(tmp_path / "out" / "checkpoint-2", average=False)


def test_an_error_within_an_optimizer_step_saves_nothing_half_done(tmp_path):
    run = trainer(tmp_path, max_steps=STEPS)

    def fail():
        raise ValueError("a callback of the user")

    run.add_callback(At("on_optimizer_step", 2, fail))
    with pytest.raises(ValueError, match="a callback of the user"):
        run.train()
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_an_error_between_steps_leaves_a_checkpoint(tmp_path, straight, capsys):
    run = trainer(tmp_path, **KEPT)

    def fail():
        raise ValueError("a callback of the user")

    run.add_callback(At("on_step_end", 3, fail))  # before which the averages have been taken
    with pytest.raises(ValueError, match="a callback of the user"):
        run.train()
    assert "Stopped by ValueError at step 3: go on from " in capsys.readouterr().err
    again = trainer(tmp_path, **KEPT)
    again.train(resume_from_checkpoint=True)
    assert_equal(straight, again)


def test_ctrl_c_before_the_first_update_says_that_there_is_nothing(tmp_path, capsys):
    run = trainer(tmp_path)
    predict = run.flow_model.predict

    def predict_and_press(*args):
        press_ctrl_c()
        return predict(*args)

    run.flow_model.predict = predict_and_press
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert "Interrupted before the first optimizer step: there is nothing to save." in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*checkpoint*"))


def test_an_old_checkpoint_of_the_same_step_is_not_taken_for_this_runs(tmp_path, straight):
    """A run that was started anew in the folder of another one."""
    trainer(tmp_path, **{**KEPT, "learning_rate": 0.1, "save_strategy": "steps", "save_steps": 3}).train()
    run = trainer(tmp_path, **KEPT)
    in_training_step(run)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    again = trainer(tmp_path, **KEPT)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert_equal(straight, again)


def test_starting_anew_in_the_folder_of_another_run_warns(tmp_path, caplog):
    trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, max_steps=1).train()
    assert "has checkpoints of an earlier run, up to checkpoint-2, and this run starts anew" in caplog.text


# A process that is killed

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.trainer.helpers import trainer
from tests.trainer.test_interrupts import KEPT

run = trainer(Path(sys.argv[1]), **KEPT, save_strategy="steps", save_steps=1)
save = run._save_rng_state


def save_and_die(folder):
    if run.state.global_step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder)


run._save_rng_state = save_and_die
run.train()
"""


@pytest.mark.slow
def test_a_process_killed_while_saving_leaves_whole_checkpoints(tmp_path, straight):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-3000:]
    out = tmp_path / "out"
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert (out / STAGING / "checkpoint-3" / "optimizer.pt").is_file()  # it was in the midst of it
    for step in (1, 2):
        assert_complete(out / f"checkpoint-{step}")

    again = trainer(tmp_path, **KEPT, save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=True)
    assert_equal(straight, again)
    assert sorted(path.name for path in out.glob("*checkpoint-*")) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]

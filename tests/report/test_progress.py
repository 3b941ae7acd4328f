# SPDX-License-Identifier: Apache-2.0
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from omnitrl.report import Progress


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def plain(width=80):
    file = io.StringIO()
    return Progress(Console(file=file, width=width, force_terminal=False)), file


def terminal(width):
    file = io.StringIO()
    return Progress(Console(file=file, width=width, height=20, force_terminal=True, _environ={"TERM": "xterm"})), file


def test_a_log_gets_one_line_for_each_logged_step():
    progress, file = plain(width=20)  # lines are not broken at the width
    with progress:
        progress.start(60, "FlowGRPO", initial_step=20)
        progress.phase("rollout 1/4")
        progress.advance(21)
        progress.advance(21, {"reward": 0.5, "reward_std": 0.25, "kl": 1e-5, "epoch": 0.1, "learning_rate": 1e-4})
        progress.advance(22, {"eval_reward": 0.75, "eval_unseen_reward": 0.5, "eval_runtime": 3.0})
        progress.advance(22, {"train_runtime": 1.0})  # no figure that is worth a line
        progress.message("saved to [out]")
    lines = file.getvalue().splitlines()
    assert lines[0] == "FlowGRPO: 60 steps, from step 20"
    assert lines[1].split("  ")[:3] == ["step 21/60", "reward 0.500 ± 0.250", "kl 1.0e-05"]
    assert lines[2].split("  ")[:3] == ["step 22/60", "held-out 0.750", "unseen 0.500"]
    assert lines[3:] == ["saved to [out]"]
    assert "\x1b" not in file.getvalue()


def test_time_left_counts_the_steps_of_this_process(monkeypatch):
    clock = iter([0.0, 100.0, 110.0, 999.0])
    monkeypatch.setattr("omnitrl.report.progress.time.monotonic", lambda: next(clock))
    progress, _ = plain()
    progress.start(60, "FlowGRPO", initial_step=20)  # at 100 s
    assert progress.seconds_left() is None
    progress.advance(25)  # at 110 s: 2 s a step
    assert progress.seconds_left() == 70.0


def test_a_table_keeps_brackets_and_formats_numbers():
    progress, file = plain()
    progress.table("Evaluation", [["set", "before", "after"], ["unseen [x]", 0.5, None]])
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert ["Evaluation"] in rows
    assert ["unseen", "[x]", "0.500", "–"] in rows


@pytest.mark.parametrize("width", [120, 60, 30, 8])
def test_the_bar_fits_any_terminal_and_gives_the_cursor_back(width):
    progress, file = terminal(width)
    progress.start(60, "FlowGRPO on a model with a long name")
    progress.phase("rollout 3/4")
    progress.advance(3, {"reward": 0.5, "ratio/sum_log_std": 0.4})
    lines = progress.console.render_lines(progress._render(), pad=False)
    texts = ["".join(segment.text for segment in line) for line in lines]
    assert all(len(text) <= width for text in texts)
    assert len(texts) == 2
    assert "3/60" in texts[0]
    assert texts[1].startswith("rollout"[: width - 1])
    progress.message("a line that stays")
    progress.stop()
    progress.stop()
    written = file.getvalue()
    assert HIDE in written
    assert written.rindex(SHOW) > written.rindex(HIDE)


def test_ctrl_c_gives_the_cursor_back():
    progress, file = terminal(80)

    def interrupted():
        with progress:
            progress.start(60, "FlowGRPO")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.getvalue().rindex(SHOW) > file.getvalue().rindex(HIDE)


def test_the_cursor_comes_back_when_nobody_stops_the_bar():
    code = (
        "from rich.console import Console; from omnitrl.report import Progress\n"
        "progress = Progress(Console(force_terminal=True)); progress.start(9, 'x'); raise KeyboardInterrupt"
    )
    environment = os.environ | {"TERM": "xterm"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert result.stdout.rindex(SHOW) > result.stdout.rindex(HIDE)
    assert result.returncode != 0

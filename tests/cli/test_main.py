# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from omnitrl.cli import env
from omnitrl.cli.exits import one_line_errors
from omnitrl.cli.main import COMMANDS, main
from omnitrl.errors import InputError, RunError
from omnitrl.version import __version__


def test_without_arguments_it_prints_the_commands(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "quickstart    train a small model" in printed
    assert "serve-reward  put a reward behind HTTP" in printed
    assert "env           print versions" in printed


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"omnitrl {__version__}\n"


def test_an_unknown_command_is_one_line_and_exit_code_2():
    done = subprocess.run([sys.executable, "-m", "omnitrl.cli.main", "quickstrat"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: Unknown command 'quickstrat'; there are {', '.join(COMMANDS)}. Did you mean 'quickstart'?\n"
    )


def test_arguments_go_to_the_command(monkeypatch):
    seen = []
    monkeypatch.setattr(env, "main", seen.append)
    assert main(["env", "--a", "b", "--version"]) == 0
    assert seen == [["--a", "b", "--version"]]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("no such file"), 2, "error: no such file\n"),
        (RunError("the server went away"), 2, "error: the server went away\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_a_user_can_put_right_ends_in_one_line(capsys, error, code, line):
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == line


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError


def test_env_names_versions_and_the_device(capsys):
    import torch

    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"- omnitrl: {__version__}"
    assert f"- torch: {torch.__version__}" in lines
    assert lines[-1].startswith("- device: ")

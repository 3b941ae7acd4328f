# SPDX-License-Identifier: Apache-2.0
"""`omnitrl serve-reward` as people start it."""

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from omnitrl.cli import serve_reward
from omnitrl.errors import InputError
from omnitrl.rewards import RemoteReward
from tests.rewards.serving import ROOT, Command


OWN = """
import time


def slow(prompts, seconds, **kwargs):
    time.sleep(max(seconds))
    return [float(len(prompt)) for prompt in prompts]
"""


def test_a_reward_of_this_folder_is_served_until_it_is_told_to_end(tmp_path):
    """Which is when the call that runs has been answered."""
    (tmp_path / "own.py").write_text(OWN)
    options = ("--max_body_mb", "2", "--token", "abc", "--batch_size", "4", "--name", "length")
    with Command("own:slow", *options, folder=tmp_path) as server:
        assert server.said == f"serving 'length' at {server.url}\n"
        remote = RemoteReward(server.url, token="abc")
        assert remote.__name__ == "length"
        assert (remote.info.max_body_bytes, remote.traits.batch_size) == (2_000_000, 4)
        assert asyncio.run(remote(prompts=["a", "abc"], seconds=[0, 0])) == [1.0, 3.0]
        answers = []
        last = threading.Thread(target=lambda: answers.append(asyncio.run(remote(prompts=["abcd"], seconds=[0.5]))))
        last.start()
        while httpx.get(f"{server.url}/health").json()["requests"] == 0:
            time.sleep(0.02)
        log = server.stop()
        last.join(20)
    assert answers == [[4.0]]
    lines = [line for line in log.splitlines() if " INFO " in line]
    assert re.search(r" INFO 127\.0\.0\.1 GET /info 200: $", lines[0])
    assert re.search(r" INFO 127\.0\.0\.1 POST /score 200: 2 rows, 0\.0 MB, \d\.\d{3} s$", lines[1])
    assert re.search(r" INFO 127\.0\.0\.1 POST /score 200: 1 rows, 0\.0 MB, 0\.[5-9]\d\d s$", lines[2])
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["brigtness"], "unknown reward 'brigtness': did you mean 'brightness'?"),
        (["own_reward:nothing"], "reward 'own_reward:nothing': 'own_reward' has no 'nothing'"),
        (["own_reward:Reward"], "the reward Reward is a class: pass an instance of it, Reward()."),
        (["brightness", "--batch_size", "0"], "batch_size=0 must be more than 0"),
        (["brightness", "--max_body_mb", "0"], "max_body_bytes=0 must be more than 0"),
        (["brightness", "--token", "a b"], "a token of a reward server is a word"),
        (["brightness", "--host", "no.such.host.invalid"], "cannot listen at no.such.host.invalid port 8100"),
    ],
)
def test_a_mistake_is_named(options, sentence, tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text("class Reward:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InputError) as raised:
        serve_reward.main([*options, *([] if "--host" in options else ["--port", "0"])])
    assert str(raised.value).startswith(sentence)


def test_a_port_that_is_taken_is_said_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"cannot listen at 127\.0\.0\.1 port {port} .*: choose another"):
            serve_reward.main(["there.is:none", "--port", str(port)])


def test_without_its_packages_it_says_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InputError, match=r'serve-reward needs the package uvicorn: pip install "omnitrl\[serve\]"'):
        serve_reward.main(["brightness"])


def test_its_help_imports_nothing_heavy():
    code = (
        "import sys; from omnitrl.cli.main import main\n"
        "try: main(['serve-reward', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'httpx', 'starlette', 'uvicorn'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "--max_body_mb" in done.stdout


def test_an_open_server_on_all_addresses_is_warned_of(caplog, monkeypatch):
    monkeypatch.delenv("OMNITRL_REWARD_TOKEN", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    parser = serve_reward._parser()
    _, name = serve_reward._app(parser.parse_args(["brightness", "--host", "0.0.0.0"]))
    assert name == "brightness_reward"
    assert "Everybody who reaches 0.0.0.0 may ask for scores" in caplog.text
    caplog.clear()
    for options in (["--host", "0.0.0.0", "--token", "abc"], []):
        serve_reward._app(parser.parse_args(["brightness", *options]))
    assert caplog.text == ""

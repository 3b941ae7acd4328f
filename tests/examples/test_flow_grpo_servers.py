# SPDX-License-Identifier: Apache-2.0
"""The bridge to the reward servers of Flow-GRPO, against one that speaks as they do."""

import contextlib
import http.server
import importlib.util
import io
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omnitrl.rewards import RemoteReward, RewardRunner, RewardUnavailable
from tests.rewards.serving import serving


ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def bridge():
    spec = importlib.util.spec_from_file_location("flow_grpo_servers", ROOT / "examples/rewards/flow_grpo_servers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def means(files):
    """Of JPEG files, which is all that those servers open."""
    return [float(np.asarray(Image.open(io.BytesIO(file), formats=["jpeg"])).mean() / 255) for file in files]


def theirs(request):
    """Answers in the form of `app_geneval.py` and `app_deqa.py`, with the mean of the pixels as the score."""
    if "meta_datas" not in request:
        return {"outputs": means(request["images"])}
    correct = [float(len(row["include"])) for row in request["meta_datas"]]
    return {
        "scores": means(request["images"]),
        "rewards": [0.0] * len(correct),
        "strict_rewards": correct,
        "group_rewards": {"counting": [-10.0] * len(correct)},
        "group_strict_rewards": {"counting": [-10.0] * len(correct)},
    }


@contextlib.contextmanager
def server(answer=theirs):
    """A server of pickles, and the requests that came."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(pickle.loads(self.rfile.read(int(self.headers["content-length"]))))
            try:
                status, body = 200, pickle.dumps(answer(requests[-1]))
            except Exception as error:
                status, body = 500, f"Traceback\n{error}".encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", requests
        listening.shutdown()
        thread.join()


PICTURES = [Image.new("RGB", (16, 16), (shade, shade, shade)) for shade in (0, 51, 255)]
ROWS = [
    {"prompt": "a cat", "tag": "single_object", "include": [{"class": "cat", "count": 1, "color": None}]},
    {
        "prompt": "two dogs",
        "tag": "counting",
        "include": [{"class": "dog", "count": 2, "color": None}],
        "exclude": None,
    },
    {"prompt": "a red bus", "tag": "colors", "include": [{"class": "bus", "count": 1, "color": "red"}] * 2},
]


def test_geneval_of_another_machine(bridge, monkeypatch):
    """The trainer asks the bridge, which asks the server."""
    with server() as (url, requests):
        monkeypatch.setattr(bridge, "GENEVAL_URL", url)
        with serving(bridge.geneval) as public, RewardRunner(RemoteReward(public)) as runner:
            assert runner.names == ["geneval"]
            runner.submit(ROWS, PICTURES)
            batch = runner.collect()
    np.testing.assert_allclose(batch.rewards[:, 0], [0.0, 0.2, 1.0], atol=1e-6)
    assert batch.extras == {"geneval_correct": [1.0, 1.0, 2.0]}
    (request,) = requests
    assert request["only_strict"] is True
    assert request["meta_datas"] == [
        {"prompt": "a cat", "tag": "single_object", "include": [{"class": "cat", "count": 1}], "exclude": []},
        {"prompt": "two dogs", "tag": "counting", "include": [{"class": "dog", "count": 2}], "exclude": []},
        {
            "prompt": "a red bus",
            "tag": "colors",
            "include": [{"class": "bus", "count": 1, "color": "red"}] * 2,
            "exclude": [],
        },
    ]


def test_deqa(bridge, monkeypatch):
    with server() as (url, _):
        monkeypatch.setattr(bridge, "DEQA_URL", url)
        np.testing.assert_allclose(bridge.deqa(PICTURES), [0.0, 0.2, 1.0], atol=1e-6)


class Trap:
    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


@pytest.mark.parametrize("answer", [Trap(), {"outputs": [Trap()]}, {"outputs": [np.float32(1)]}, Trap])
def test_an_answer_that_would_run_code_is_refused(bridge, monkeypatch, answer):
    pickle.loads(pickle.dumps({"outputs": [Trap()]}))
    assert Trap.sprung
    Trap.sprung = False
    with server(lambda request: answer) as (url, _):
        monkeypatch.setattr(bridge, "DEQA_URL", url)
        with pytest.raises(pickle.UnpicklingError, match=r"the answer asks for .*, but it should be of numbers only"):
            bridge.deqa(PICTURES)
    assert not Trap.sprung


def test_failures_are_exceptions_and_not_0(bridge, monkeypatch):
    def failing(request):
        raise ValueError("CUDA out of memory")

    with server(failing) as (url, _):
        monkeypatch.setattr(bridge, "DEQA_URL", url)
        with pytest.raises(RuntimeError, match=r"answers 500: Traceback\nCUDA out of memory"):
            bridge.deqa(PICTURES)
    with pytest.raises(RewardUnavailable, match="is away"):
        bridge.deqa(PICTURES)

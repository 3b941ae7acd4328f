# SPDX-License-Identifier: Apache-2.0
"""A judge against a server that answers as a script says."""

import asyncio
import builtins
import gc
import logging
import math
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from omnitrl.rewards import (
    CustomTemplate,
    OCRTemplate,
    PairwiseTemplate,
    QuestionsTemplate,
    RewardError,
    RewardRunner,
    RewardUnavailable,
    ScoreTemplate,
    VLMJudge,
    YesNoTemplate,
    get_reward,
)
from tests.rewards.judge_server import JudgeServer, Reply


pytest.importorskip("openai", reason='needs `pip install "omnitrl[judge]"`')

IMAGE = Image.new("RGB", (8, 8), "red")
GOOD = Reply("Final Score: 4")


class Log:
    def __init__(self):
        self.metrics, self.extras = {}, {}

    def metric(self, name, value):
        self.metrics.setdefault(name, []).append(value)

    def extra(self, column, values):
        self.extras[column] = list(values)


def ask(judge, count=1, log=None, **columns):
    """Values of so many rows with the prompts '0', '1', …"""
    known = {"prompts": [str(i) for i in range(count)], "completions": [IMAGE] * count}
    log = log or Log()
    return asyncio.run(judge(**known | columns, log_metric=log.metric, log_extra=log.extra, trainer_state=None))


def scorer(server, template=None, **options):
    return VLMJudge(template or ScoreTemplate(), base_url=server.url, **{"max_retries": 1, "timeout": 20} | options)


def row_of(request):
    """The number of the row that a request of `ScoreTemplate` is about."""
    return int(request["messages"][-1]["content"][-1]["text"].split("Asked for: ")[1].split()[0])


# Values


def test_each_row_is_asked_about_and_scored():
    def script(request, number):
        return Reply(f"Fine.\nFinal Score: {1 + row_of(request)}")

    log = Log()
    with JudgeServer(script) as server:
        assert ask(scorer(server), 5, log) == [0.0, 0.25, 0.5, 0.75, 1.0]
    (request, *_) = server.requests
    assert {name: request[name] for name in ("model", "temperature", "seed", "max_tokens")} == {
        "model": "stub",
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 512,
    }
    assert not {"logprobs", "response_format"} & set(request)
    assert log.extras == {"judge_score_answer": [f"Fine.\nFinal Score: {i}" for i in range(1, 6)]}
    assert log.metrics["judge_score/failed_share"] == [0.0]
    assert log.metrics["judge_score/tokens"] == [100.0]
    assert 0 < log.metrics["judge_score/seconds"][0] < 5


def test_what_is_asked_for_is_sent():
    with JudgeServer(lambda request, number: Reply('{"score": 5}'), models=("a", "b")) as server:
        judge = scorer(
            server,
            ScoreTemplate(structured=True, max_tokens=9, name="mine"),
            model="b",
            api_key="key",
            temperature=None,
            seed=None,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert ask(judge) == [1.0]
    (request,) = server.requests
    assert (request["model"], request["max_tokens"]) == ("b", 9)
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert request["response_format"]["json_schema"]["schema"]["properties"]["score"]["enum"] == [1, 2, 3, 4, 5]
    assert not {"temperature", "seed"} & set(request)
    assert server.authorizations == ["Bearer key"]


def test_probabilities_come_from_the_first_token():
    likely = {"Yes": math.log(0.6), "No": math.log(0.2), "A": math.log(0.1)}
    with JudgeServer(lambda request, number: Reply("Yes", first_token=likely)) as server:
        assert ask(scorer(server, YesNoTemplate())) == [pytest.approx(0.75)]
    (request,) = server.requests
    assert (request["max_tokens"], request["logprobs"], request["top_logprobs"]) == (1, True, 20)


def test_questions_are_asked_one_by_one_and_rows_without_them_are_not():
    def script(request, number):
        return Reply("Yes" if "cat" in str(request) else "No")

    columns = {"questions": [["a cat?", "a dog?"], None, ["a cat?"]]}
    with JudgeServer(script) as server:
        assert ask(scorer(server, QuestionsTemplate()), 3, **columns) == [0.5, None, 1.0]
    assert len(server.requests) == 3


def test_texts_are_judged_too():
    with JudgeServer(lambda request, number: GOOD) as server:
        assert ask(scorer(server), completions=["Paris."]) == [0.75]
    content = server.requests[0]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", "text"]
    assert "Paris." in content[0]["text"]
    assert "Rate how well the text does what was asked for." in content[1]["text"]


def test_chats_are_judged_by_their_last_words():
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "?!"}]},
    ]
    answer = [{"role": "assistant", "content": "Paris."}]
    with JudgeServer(lambda request, number: GOOD) as server:
        assert ask(scorer(server), prompts=[prompt], completions=[answer]) == [0.75]
    text, question = server.requests[0]["messages"][0]["content"]
    assert text["text"] == "[Start of the text]\nParis.\n[End of the text]"
    assert "Asked for: ?!\n" in question["text"]


def test_what_was_edited_and_frames_are_shown():
    video = np.zeros((9, 8, 8, 3), dtype=np.uint8)
    with JudgeServer(lambda request, number: GOOD) as server:
        judge = scorer(server, ScoreTemplate(source="image"), num_frames=4)
        assert ask(judge, completions=[video], image=[IMAGE]) == [0.75]
        with pytest.raises(RewardError, match=r"needs the column 'image', and the dataset has none"):
            ask(judge)
    content = server.requests[0]["messages"][0]["content"]
    kinds = [part["type"] for part in content]
    assert kinds == ["text", "image_url", "text", "text", *["image_url"] * 4, "text"]


def test_members_of_a_group_are_compared():
    def script(request, number):  # the brighter one is better, whichever comes first
        shown = [part["image_url"]["url"] for part in request["messages"][0]["content"] if "image_url" in part]
        order = [images.index(url) for url in shown]
        return Reply(f"Answer: {'A' if order[0] > order[1] else 'B'}")

    pictures = [Image.new("L", (8, 8), 50 * i) for i in range(3)]
    judge = VLMJudge(PairwiseTemplate())
    images = [judge._pictures.part(picture.convert("RGB"))["image_url"]["url"] for picture in pictures]
    log = Log()
    with JudgeServer(script) as server:
        assert ask(scorer(server, PairwiseTemplate()), 3, log, completions=pictures) == [0.0, 0.5, 1.0]
    assert len(server.requests) == 6
    assert log.metrics["judge_pairwise/order_agreement"] == [1.0]
    assert log.extras["judge_pairwise_answer"][2] == "1 against 0; 1 against 0; 1 against 1; 1 against 1"


def test_the_only_model_of_the_server_is_taken():
    with JudgeServer(lambda request, number: GOOD, models=("a", "b")) as server:
        with pytest.raises(RewardError, match=r"has 2 models \('a', 'b'\): pass model='a', or another of them"):
            ask(scorer(server))
        server.models = ()
        with pytest.raises(RewardError, match=r"has 0 models \(none\): pass model='Qwen"):
            ask(scorer(server))
        server.models = ("c",)
        assert ask(scorer(server)) == [0.75]
    assert [request["model"] for request in server.requests] == ["c"]


@pytest.mark.parametrize("concurrency", [3, 12])
def test_as_many_requests_are_in_flight_as_are_allowed(concurrency):
    together = threading.Barrier(concurrency)

    def script(request, number):
        together.wait(20)  # for as many others
        return Reply("Final Score: 4", seconds=0.05)

    with JudgeServer(script) as server:
        assert ask(scorer(server, concurrency=concurrency, timeout=30), 12) == [0.75] * 12
        assert server.most_in_flight == concurrency


def test_a_judge_can_be_called_from_one_event_loop_after_another(caplog):
    with JudgeServer(lambda request, number: GOOD) as server:
        judge = scorer(server)
        for _ in range(3):
            assert ask(judge) == [0.75]
            gc.collect()
    assert len(judge._endpoint._connections) == 1
    assert caplog.records == []  # such as of a client that cannot be closed with the loop that it belonged to


# Rows that fail


def test_garbage_fails_its_row_alone_and_is_quoted(caplog):
    def script(request, number):
        return Reply("As an AI, I enjoy art.") if row_of(request) == 1 else GOOD

    log = Log()
    with JudgeServer(script) as server, caplog.at_level(logging.WARNING):
        values = ask(scorer(server), 3, log)
    assert values[::2] == [0.75, 0.75]
    assert math.isnan(values[1])
    (line,) = [record.getMessage() for record in caplog.records if "judge" in record.getMessage()]
    assert line.startswith("judge 'judge_score' gave no value for 1 of 3 rows, which are missing, not 0; row 1: the ")
    assert line.endswith("'As an AI, I enjoy art.'")
    assert log.metrics["judge_score/failed_share"] == [pytest.approx(1 / 3)]
    assert log.extras["judge_score_failure"][::2] == [None, None]
    assert "As an AI" in log.extras["judge_score_failure"][1]
    assert log.extras["judge_score_answer"][1] == "As an AI, I enjoy art."


def test_a_runner_counts_rows_that_fail():
    def script(request, number):
        return Reply("Hm.") if row_of(request) == 1 else GOOD

    with JudgeServer(script) as server, RewardRunner(scorer(server)) as runner:
        assert runner.names == ["judge_score"]
        runner.submit([{"prompt": str(i)} for i in range(3)], [IMAGE] * 3)
        batch = runner.collect()
    assert batch.rewards[:, 0].tolist() == pytest.approx([0.75, math.nan, 0.75], nan_ok=True)
    assert batch.failed[:, 0].tolist() == [False, True, False]
    assert batch.metrics["rewards/judge_score/failed"] == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        Reply("the image processor broke", status=500),
        Reply("Final Score: 4", seconds=2.5),
        Reply("Final Score: 4", cut_after=60),
    ],
    ids=["500", "slow", "disconnect"],
)
def test_a_request_that_never_works_fails_its_row_where_the_server_is_there(reply):
    said = {500: "500: the image processor broke"}.get(reply.status, "RemoteProtocolError")
    said = "no answer within timeout=1 s" if reply.seconds else said

    def script(request, number):
        return reply if row_of(request) == 1 else GOOD

    log = Log()
    with JudgeServer(script) as server:
        values = ask(scorer(server, timeout=1.0), 3, log)
        assert sum(row_of(request) == 1 for request in server.requests) == 2
    assert values[::2] == [0.75, 0.75]
    assert math.isnan(values[1])
    sentence = log.extras["judge_score_failure"][1]
    assert sentence.startswith(f"no answer after 2 tries, though the server is there: {said}")


def test_a_bad_request_is_the_rows_fault_if_others_are_answered():
    def script(request, number):
        return Reply("the prompt is too long", status=400) if row_of(request) == 1 else GOOD

    log = Log()
    with JudgeServer(script) as server:
        judge = scorer(server)
        assert ask(judge, 3, log)[::2] == [0.75, 0.75]
        assert len(server.requests) == 3  # it is not tried again
        assert log.extras["judge_score_failure"][1].endswith("refuses the request (400): the prompt is too long")
        server.script = lambda request, number: Reply("too long", status=400)
        assert math.isnan(ask(judge)[0])


def test_an_image_that_cannot_be_read_fails_its_row():
    broken = np.full((8, 8, 3), math.nan, dtype=np.float32)
    log = Log()
    with JudgeServer(lambda request, number: GOOD) as server:
        values = ask(scorer(server), 2, log, completions=[broken, IMAGE])
        assert math.isnan(values[0])
        assert values[1] == 0.75
        assert log.extras["judge_score_failure"][0] == "the image has NaN or infinite pixels."
        values = ask(scorer(server, ScoreTemplate(source="image")), 2, log, image=["nowhere.png", IMAGE])
    assert math.isnan(values[0])
    assert "the file nowhere.png, which does not exist" in log.extras["judge_score_failure"][0]


def test_a_body_that_is_no_json_fails_its_row():
    def script(request, number):
        return Reply(body=b'{"choices": [') if row_of(request) == 0 else GOOD

    log = Log()
    with JudgeServer(script) as server:
        values = ask(scorer(server), 2, log)
    assert math.isnan(values[0])
    assert values[1] == 0.75
    assert log.extras["judge_score_failure"][0].startswith("the server's answer cannot be read: ")


# What is tried again


@pytest.mark.parametrize(
    "reply",
    [Reply("oh", status=500), Reply("Final Score: 4", cut_after=60), Reply("Final Score: 4", seconds=2.5)],
    ids=["500", "disconnect", "slow"],
)
def test_a_request_is_tried_again(reply):
    with JudgeServer(lambda request, number: GOOD if number else reply) as server:
        assert ask(scorer(server, timeout=1.0)) == [0.75]
    assert len(server.requests) == 2


def test_a_limit_of_rate_is_waited_for_as_long_as_the_server_says():
    def script(request, number):
        return GOOD if number else Reply("slow down", status=429, headers={"retry-after": "1"})

    with JudgeServer(script) as server:
        assert ask(scorer(server)) == [0.75]
    assert server.times[1] - server.times[0] >= 1.0  # it would be half a second at most


# A server that is away


def test_a_server_that_is_overloaded_is_unavailable():
    reply = Reply("slow down", status=429, headers={"retry-after": "0.1"})
    with (
        JudgeServer(lambda request, number: reply) as server,
        pytest.raises(RewardUnavailable, match=r"answers 429: slow down, after 2 tries") as caught,
    ):
        ask(scorer(server))
    assert caught.value.retry_after == 0.1
    assert len(server.requests) == 2


def free_url():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_a_server_that_is_not_there_is_unavailable():
    judge = VLMJudge(ScoreTemplate(), base_url=free_url(), max_retries=0)
    with pytest.raises(RewardUnavailable, match=r"is away \(ConnectError: .*, after 1 tries\)"):
        ask(judge, 3)


def test_a_server_that_goes_away_and_comes_back_loses_nothing():
    """It goes when two of six rows are answered; the runner asks again until it is back."""
    gone = threading.Event()

    def script(request, number):
        if gone.is_set() and number >= 2:
            return Reply("Final Score: 4", cut_after=0)
        return Reply(f"Final Score: {1 + row_of(request) % 5}")

    with JudgeServer(script, models=lambda: (1 / 0) if gone.is_set() else ("stub",)) as server:
        server._server.handle_error = lambda *args: None  # the division, which breaks the connection
        judge = scorer(server, max_retries=0, concurrency=1)
        assert ask(judge) == [0.0]
        server.requests.clear()
        gone.set()
        with RewardRunner(judge) as runner:
            runner.submit([{"prompt": str(i)} for i in range(6)], [IMAGE] * 6)
            deadline = time.monotonic() + 30
            while len(server.requests) < 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.2)
            gone.clear()
            batch = runner.collect()
    assert len(server.requests) > 6
    assert batch.rewards[:, 0].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0, 0.0]
    assert batch.metrics["rewards/judge_score/failed"] == 0.0


# Settings that are wrong


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply("no such key", status=401), r"answers 401: no such key: pass api_key='…', or set OPENAI_API_KEY"),
        (
            Reply("no model `stub`", status=404),
            r"answers 404: no model `stub`: check model='stub' and base_url, which",
        ),
        (Reply("no images", status=400), r"refuses the request \(400\): no images\. None of the judge's requests was"),
        (
            Reply(body=b"<html>hello</html>", headers={"content-type": "text/html"}),
            r"no chat completion: '<html>hello",
        ),
    ],
    ids=["401", "404", "400", "no API"],
)
def test_wrong_settings_end_the_run_with_the_servers_words(reply, message):
    with JudgeServer(lambda request, number: reply) as server:
        with pytest.raises(RewardError, match=message):
            ask(scorer(server))
        assert len(server.requests) == 1


def test_a_server_without_log_probabilities_is_refused():
    with (
        JudgeServer(lambda request, number: Reply("Yes")) as server,
        pytest.raises(RewardError, match=r"gives no log-probabilities, though top_logprobs=20 was asked for: use a"),
    ):
        ask(scorer(server, YesNoTemplate()))


def test_an_account_without_credit_is_not_waited_for():
    body = b'{"error": {"message": "quota exceeded", "code": "insufficient_quota"}}'
    with (
        JudgeServer(lambda request, number: Reply(status=429, body=body, headers={"retry-after": "0.1"})) as server,
        pytest.raises(RewardError, match="answers 429: quota exceeded: top the account up"),
    ):
        ask(scorer(server))


def test_an_error_that_is_final_ends_the_other_requests():
    def script(request, number):
        return Reply("no key", status=401) if row_of(request) == 1 else Reply("Final Score: 4", seconds=5.0)

    start = time.monotonic()
    with JudgeServer(script) as server, pytest.raises(RewardError, match="answers 401"):
        ask(scorer(server), 3)
    assert time.monotonic() - start < 4.0


def test_an_endpoint_is_not_guessed(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(
        RewardError, match=r"no endpoint: pass base_url='http://localhost:8001/v1', or set OPENAI_BASE"
    ):
        ask(VLMJudge(ScoreTemplate()))
    with pytest.raises(RewardError, match=r"'localhost:8001/v1' is no URL: give for example 'http://localhost:8001/v"):
        ask(VLMJudge(ScoreTemplate(), base_url="localhost:8001/v1"))


@pytest.mark.parametrize("name", ["judge_ocr", "judge_pairwise", "judge_questions", "judge_score", "judge_yes_no"])
def test_judges_by_name_take_the_endpoint_of_the_environment(name, monkeypatch):
    judge = get_reward(name)
    assert judge.__name__ == name
    likely = {"Yes": -0.1, "No": -3.0}
    text = {"judge_pairwise": "Answer: B", "judge_ocr": "open", "judge_score": "Final Score: 5"}.get(name, "Yes")
    with JudgeServer(lambda request, number: Reply(text, first_token=likely)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        values = ask(judge, 2, text=["OPEN", "OPEN"], questions=[["Is it?"]] * 2)
    expected = {"judge_pairwise": 0.5, "judge_yes_no": 1 / (1 + math.exp(-2.9))}.get(name, 1.0)
    assert values == [pytest.approx(expected)] * 2


def test_without_the_package_the_sentence_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "openai":
            raise ModuleNotFoundError("No module named 'openai'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'needs the package openai: `pip install "omnitrl\[judge\]"`'):
        ask(VLMJudge(CustomTemplate(text="?", pattern=r"(\d)"), base_url="http://localhost:1/v1"))


@pytest.mark.slow
def test_judges_are_named_without_the_package():
    """Which takes a second to import."""
    code = (
        "import sys; from omnitrl.rewards import get_reward; get_reward('judge_score'); print('openai' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_a_transcription_is_scored():
    with JudgeServer(lambda request, number: Reply("OPEN 24h")) as server:
        judge = scorer(server, OCRTemplate())
        prompts = ['a sign "open 24 h"', 'a sign "OPEN 24"', 'a sign ""']
        assert ask(judge, 3, prompts=prompts) == [1.0, pytest.approx(5 / 6), None]
    assert len(server.requests) == 2

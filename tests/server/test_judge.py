# SPDX-License-Identifier: Apache-2.0
"""Judges against a real vLLM server with a tiny vision-language model, which transformers runs beside it."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.rewards import (
    CustomTemplate,
    OCRTemplate,
    PairwiseTemplate,
    RewardError,
    RewardRunner,
    ScoreTemplate,
    VLMJudge,
    YesNoTemplate,
    text_score,
)
from omnitrl.rewards.judge.messages import Pictures, Shown
from tests.rewards.tiny_vlm import ANSWERS, save_tiny_vlm
from tests.server.environment import Server, server_python, show_logs
from tests.trainer import helpers


pytest.importorskip("openai", reason='needs `pip install "omnitrl[judge]"`')
pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        server_python() is None, reason="needs the environment of vLLM, which `make test-server` builds"
    ),
]

SIZE = (56, 84)  # whole patches, which neither of the two image processors resizes
MAX_LENGTH = 2048


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder, tokenizer, image processor and model."""
    folder = tmp_path_factory.mktemp("vlm")
    return folder, *save_tiny_vlm(folder)


@pytest.fixture(scope="module")
def server(tiny):
    """
    What `vllm serve` starts.

    The module is run and not the command, which asks for the version of a distribution that is called vllm: the one
    for CPUs has another name. Plugins are those of vLLM-Omni, for its own servers.
    """
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny[0]), "--port", "{port}"]
    small = ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    one = ["--distributed-executor-backend", "uni"]  # a process less to start
    limits = ["--max-model-len", str(MAX_LENGTH), "--limit-mm-per-prompt.image", "8"]
    schema = ["--structured-outputs-config.backend", "xgrammar"]
    schema += ["--structured-outputs-config.disable_any_whitespace", "true"]  # which this model never ends
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "none"}
    server = Server(
        [*command, *small, *one, *limits, *schema, "--served-model-name", "tiny-vlm"],
        tiny[0] / "server.log",
        variables,
        start_seconds=400,  # two processes, which import vLLM one after the other
    )
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def url(server, request):
    """The server's endpoint; its log is shown when a test fails."""
    yield f"{server.url}/v1"
    show_logs(request, [server])


def noise(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIZE[1], SIZE[0], 3), dtype=np.uint8))


def ask(judge, prompts, completions, **columns):
    extras = {}
    values = asyncio.run(judge(prompts=prompts, completions=completions, log_extra=extras.__setitem__, **columns))
    return values, extras


def inputs(tiny, template, prompt, picture, **columns):
    """What transformers is given for the question about a row."""
    _, tokenizer, processor, _ = tiny
    kind, parts = Pictures().shown(picture)
    (question,) = template.questions([Shown(prompt, kind, parts, columns)])
    pixels = processor(images=[picture], return_tensors="pt")
    text = tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
    patches = int(pixels["image_grid_thw"].prod()) // processor.merge_size**2
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * patches), return_tensors="pt").input_ids
    picture_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == picture_token).int(),
        **pixels,
    }


def test_the_probability_of_yes_is_that_of_transformers(url, tiny):
    prompts, pictures = ["a red cat", "a map", "two dogs"], [noise(i) for i in range(3)]
    values, extras = ask(VLMJudge(YesNoTemplate(), base_url=url), prompts, pictures)
    expected = []
    for prompt, picture in zip(prompts, pictures, strict=True):
        with torch.no_grad():
            logits = tiny[3](**inputs(tiny, YesNoTemplate(), prompt, picture)).logits[0, -1]
        yes, no = logits[tiny[1].convert_tokens_to_ids(list(ANSWERS))].tolist()
        expected.append(1 / (1 + math.exp(no - yes)))
    assert values == pytest.approx(expected, abs=1e-4)
    assert max(values) - min(values) > 1e-2  # so that rows cannot be confused
    assert set(extras["judge_yes_no_answer"]) <= set(ANSWERS)


def test_a_transcription_is_that_of_transformers(url, tiny):
    template = OCRTemplate(max_tokens=12)
    prompts, picture = ['a sign "OPEN"', 'a sign "Yes"'], noise(5)
    values, extras = ask(VLMJudge(template, base_url=url), prompts, [picture] * 2)
    given = inputs(tiny, template, prompts[0], picture)
    made = tiny[3].generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    read = tiny[1].decode(made, skip_special_tokens=True).strip()
    assert extras["judge_ocr_answer"] == [read] * 2
    assert values == [text_score(read, "OPEN"), text_score(read, "Yes")]


def test_answers_repeat(url):
    judge = VLMJudge(OCRTemplate(max_tokens=12), base_url=url)
    first, second = (ask(judge, ['"OPEN"'] * 2, [noise(6), noise(7)])[1] for _ in range(2))
    assert first == second


def test_structured_answers_follow_their_schema(url):
    pictures = [noise(i) for i in range(4)]
    judge = VLMJudge(ScoreTemplate(structured=True, max_tokens=64), base_url=url)
    values, extras = ask(judge, ["a cat"] * 4, pictures)
    scores = [json.loads(answer)["score"] for answer in extras["judge_score_answer"]]
    assert set(scores) <= {1, 2, 3, 4, 5}
    assert values == [(score - 1) / 4 for score in scores]


def test_garbage_is_missing_and_quoted(url):
    values, extras = ask(VLMJudge(ScoreTemplate(max_tokens=8), base_url=url), ["a cat"], [noise(0)])
    assert math.isnan(values[0])
    assert extras["judge_score_failure"][0].startswith("the answer has no number behind 'Final Score': ")
    assert extras["judge_score_failure"][0].endswith(", cut off at max_tokens")


def test_pairs_frames_edits_and_texts_are_taken(url):
    group = VLMJudge(PairwiseTemplate(max_tokens=4), base_url=url)
    _, extras = ask(group, ["a cat"] * 2, [noise(0), noise(1)])
    assert all(failure.startswith("the answer has none of a, b, tie") for failure in extras["judge_pairwise_failure"])
    video = np.stack([np.asarray(noise(i)) for i in range(5)])
    yes_no = VLMJudge(YesNoTemplate(source="image"), base_url=url, num_frames=3)
    (first,), _ = ask(yes_no, ["a cat"], [video], image=[noise(8)])
    (second,), _ = ask(yes_no, ["a cat"], [video[::-1]], image=[noise(8)])
    assert 0 < first < 1
    assert first != second  # the frames' order is seen
    text = VLMJudge(YesNoTemplate(text="Is it right?"), base_url=url)
    (first, second), _ = ask(text, ["2 + 2?"] * 2, ["4", "5"])
    assert 0 < min(first, second) < max(first, second) < 1


def test_wrong_settings_end_with_the_words_of_vllm(url):
    wrong = VLMJudge(YesNoTemplate(), base_url=url, model="other")
    with pytest.raises(RewardError, match=r"answers 404: The model `other` does not exist.*: check model='other'"):
        ask(wrong, ["a cat"], [noise(0)])
    long = VLMJudge(CustomTemplate(text="x" * 2 * MAX_LENGTH, pattern=r"(\d)"), base_url=url)
    with pytest.raises(RewardError, match=f"maximum context length is {MAX_LENGTH} tokens.*it is its settings"):
        ask(long, ["a cat"], [noise(0)])
    many = VLMJudge(YesNoTemplate(), base_url=url, num_frames=9)
    with pytest.raises(RewardError, match="At most 8 image"):
        ask(many, ["a cat"], [np.zeros((9, 56, 56, 3), dtype=np.uint8)])


def test_a_runner_scores_beside_others(url):
    judge = VLMJudge(YesNoTemplate(), base_url=url, concurrency=2)
    with RewardRunner([judge, "brightness"]) as runner:
        for i in range(3):
            runner.submit([{"prompt": "a cat"}] * 2, [noise(2 * i), noise(2 * i + 1)])
        batch = runner.collect()
    alone, _ = ask(judge, ["a cat"] * 6, [noise(i) for i in range(6)])
    assert batch.rewards[:, 0].tolist() == pytest.approx(alone, abs=1e-5)
    assert batch.metrics["rewards/judge_yes_no/failed"] == 0.0


def test_a_step_of_flow_grpo_is_rewarded_by_a_judge(url, tmp_path):
    judge = VLMJudge(YesNoTemplate(), base_url=url)
    trained = helpers.trainer(tmp_path, "flow_grpo", rewards=judge, max_steps=1)
    before = helpers.trainable(trained)
    trained.train()
    (reward,) = helpers.logged(trained, "rewards/judge_yes_no/mean")
    assert 0 < reward < 1
    assert helpers.logged(trained, "rewards/judge_yes_no/failed") == [0.0]
    assert helpers.logged(trained, "reward_std")[0] > 0
    assert not helpers.same(before, helpers.trainable(trained))

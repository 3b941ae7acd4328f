# SPDX-License-Identifier: Apache-2.0
import logging
import time

import pytest
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.rewards import (
    AnswerReward,
    FormatReward,
    RewardError,
    RewardRunner,
    audio_answer_reward,
    exact_answer_reward,
    format_reward,
    math_answer_reward,
    multiple_choice_reward,
    think_format_reward,
)
from omnitrl.rewards import answers as answers_module
from omnitrl.rewards.answer_texts import choice_of, completion_text, final_answer
from omnitrl.rewards.kinds import media_kind


CHOICES = ["a cat", "a dog", "Vitamin A", "two"]


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(autouse=True)
def warnings_of_their_own(monkeypatch):
    monkeypatch.setattr(answers_module, "_WARNED", set())


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b.", "B"),
        ("(B) a dog", "B"),
        ("B: a dog", "B"),
        ("a dog", "B"),
        ("The dog!", "B"),
        ("Answer: (B)", "B"),
        ("**Answer:** B", "B"),
        ("The answer is b", "B"),
        ("the correct choice is **(B)**.", "B"),
        ("Answer: B because C is wrong", "B"),
        ("Answer: (b) a dog", "B"),
        ("b) a dog", "B"),
        ("Is the answer A?\n\n**Answer:**\n\nB", "B"),
        ("The answer is:\n\n**B**", "B"),
        ("B, so that is my answer:", "B"),
        ("Answer: A or perhaps\nAnswer: B", "B"),
        (r"so \boxed{B}", "B"),
        (r"so \boxed{\text{B}}", "B"),
        (r"not \boxed{A} but \boxed{(B)}", "B"),
        ("<answer>B</answer>", "B"),
        ("<answer> A </answer> no <answer> B. a dog </answer>", "B"),
        (r"<answer>\boxed{B}</answer>", "B"),
        ("<answer>a vitamin, Vitamin a</answer> B", None),
        ("<answer>Vitamin A</answer>", "C"),
        ("<think>A? No, (C).</think>B", "B"),
        ("<think>A? No, (C).", None),
        ("thought of A</think> <answer>B</answer>", "B"),
        ("A cat I see, so it is B", "B"),
        ("It could be (A), and I say (B) after C", "B"),
        ("Is it A, or B", "B"),
        ("A dog is what I hear", None),
        ("It is E", None),
        ("Answer: either C or D", None),
        ("no letter here", None),
        ("", None),
    ],
)
def test_the_choice_of_a_text(text, letter):
    assert choice_of(text, CHOICES) == letter
    assert multiple_choice_reward([text, chat(text)], answer=["B"] * 2, choices=[CHOICES] * 2) == [letter == "B"] * 2


def test_right_choices_as_letters_numbers_and_texts():
    right = ["B", "(b)", 1, "A dog.", "a cat", None]
    score = multiple_choice_reward(["B"] * 6, answer=right, choices=[CHOICES] * 6)
    assert score == [1.0, 1.0, 1.0, 1.0, 0.0, None]
    assert multiple_choice_reward(["B", "Z"], solution=["B", "C"]) == [1.0, 0.0]
    assert multiple_choice_reward(["The answer is $6."], answer=["(b) $6"], choices=[["$5", "$6"]]) == [1]
    assert multiple_choice_reward(["B"], answer=["dog"], choices=[{"text": ["cat", "dog"], "label": ["1", "2"]}]) == [
        1
    ]


def test_a_right_choice_that_is_none_is_no_wrong_answer(caplog):
    with caplog.at_level(logging.WARNING):
        score = multiple_choice_reward(["B"] * 4, answer=["E", 4, "a hen", "B"], choices=[CHOICES] * 4)
    assert score == [None, None, None, 1.0]
    assert [record.message for record in caplog.records] == [
        "The right choice 'E' is not among the 4 choices: such rows have no reward. This is said once."
    ]


@pytest.mark.parametrize(
    "text", ["A is correct", "The answer is A because B is wrong.", "It is A since I see two", "Answer: A and not B"]
)
def test_a_letter_that_is_also_an_article(text):
    assert choice_of(text, CHOICES) == "A"


@pytest.mark.parametrize(
    ("text", "right", "exact", "contains", "words"),
    [
        ("Blue whale", "blue whale", 1, 1, 1),
        ("Answer: The  blue\twhale.", "blue whale", 1, 1, 1),
        ("<think>a cat</think><answer>blue whale</answer>", "The blue whale", 1, 1, 1),
        ("a big blue whale", "blue whale", 0, 1, 0.5),
        ("blueish whale", "blue whale", 0, 0, 0.5),
        ("whale", "blue whale", 0, 0, 0.5),
        ("", "blue whale", 0, 0, 0),
        ("one two three four five", "six", 0, 0, 0),
        (r"it is \boxed{3.5}", "3.5", 1, 1, 1),
        ("35", "3.5", 0, 0, 0),
        ("5", "-5", 0, 0, 0),
        ("so, 72", "She has 40 + 32 = 72.\n#### 72", 0, 1, 0),
        ("72", "She has 40 + 32 = 72.\n#### 72", 1, 1, 1),
        ("72", 72, 1, 1, 1),
        ("cats", "cat", 0, 0, 0),
        ("ｃａｔ", "cat", 1, 1, 1),
        ("A", "a", 1, 1, 1),
        ("狗在叫", "狗叫", 0, 0, 0.5),
        ("a hen", ["cat", "hen"], 1, 1, 1),
        ("**Answer:**\n\n42", "42", 1, 1, 1),
        ("The answer is:\n$$42$$", "42", 1, 1, 1),
        ("The answer is $3.", "$3", 1, 1, 1),
        ("<answer>$3$</answer>", "3", 1, 1, 1),
        ("The answer is `snake_case`.", "snake_case", 1, 1, 1),
        ("The answer is 2*3", "23", 0, 0, 0),
        (r"<answer>\text{dog}</answer>", "dog", 1, 1, 1),
    ],
)
def test_answers_as_texts(text, right, exact, contains, words):
    assert exact_answer_reward([text, chat(text)], answer=[right] * 2) == [exact] * 2
    assert AnswerReward("contains")([text], solution=[right]) == [contains]
    assert audio_answer_reward([text, chat(text)], answer=[right] * 2) == pytest.approx([words] * 2)


def test_what_is_ignored():
    texts = ["the cat", "Cat", "cat!", "cat"]
    assert AnswerReward(ignore=())(texts, ["cat"] * 4) == [0, 0, 0, 1]
    assert AnswerReward(ignore=("case",))(texts, ["cat"] * 4) == [0, 1, 0, 1]
    assert AnswerReward(ignore=["articles"])(texts, ["cat"] * 4) == [1, 0, 0, 1]
    assert AnswerReward(ignore=("punctuation",))(texts, ["cat"] * 4) == [0, 0, 1, 1]


def test_answer_counts_before_solution_and_is_recorded():
    seen = {}
    assert exact_answer_reward(
        ["Answer: 4", "5", "6"], answer=["4", None, None], solution=["5", "5", None], log_extra=seen.__setitem__
    ) == [1.0, 1.0, None]
    assert seen == {"answer_read": ["4", "5", "6"]}
    multiple_choice_reward(["Answer: d", "?"], answer=["D", "D"], log_extra=seen.__setitem__)
    assert seen["choice_read"] == ["D", None]


def test_a_right_answer_without_characters_is_none(caplog):
    with caplog.at_level(logging.WARNING):
        assert exact_answer_reward(["x"] * 3, answer=["?!", "", "x"]) == [None, None, 1.0]
    assert [record.message for record in caplog.records] == [
        "The right answer '?!' has no characters to compare with: such rows have no reward. This is said once."
    ]


@pytest.mark.parametrize(
    ("text", "right", "score"),
    [
        (r"So \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"So \boxed{\frac{1}{2}}.", r"\frac{2}{4}", 1),
        ("The answer is $0.5$", r"$\frac{1}{2}$", 1),
        ("It is $0.5$", "0.5", 0),
        ("<think>3</think><answer>1/2</answer>", "0.5", 1),
        (r"<answer>$x + 1$</answer>", "$1 + x$", 1),
        (r"<answer>\boxed{7}</answer>", 7, 1),
        ("<Answer>$7$.</Answer>", 7, 1),
        (r"<answer>\$7</answer>", r"\$7", 1),
        (r"\boxed{7}", "3 + 4 is seven.\n#### 7", 1),
        (r"<think>\boxed{7}</think>", "7", 0),
        (r"<think>\boxed{7}", "7", 0),
        (r"\boxed{8}", "7", 0),
        ("it is 7", "7", 0),
        ("", "7", 0),
        (r"\boxed{7}", None, None),
        (r"\boxed{7}", "", None),
    ],
)
def test_mathematical_answers(text, right, score):
    assert math_answer_reward([text, chat(text)], answer=[right] * 2) == [score] * 2


def test_right_answers_that_are_no_mathematics(caplog):
    seen = {}
    with caplog.at_level(logging.WARNING, logger="omnitrl"):
        assert math_answer_reward([r"\boxed{7}"] * 2, solution=["?!", "7"], log_extra=seen.__setitem__) == [None, 1.0]
    assert "The right answer '?!' is nothing that math-verify reads" in caplog.text
    assert seen == {"gold_parsed": ["[unparseable]", "[7, '7']"], "answer_parsed": ["[skipped]", "[7, '7']"]}


def test_mathematics_without_its_package(monkeypatch):
    monkeypatch.setattr(answers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "omnitrl\[math\]"'):
        math_answer_reward([r"\boxed{7}"], answer=["7"])


@pytest.mark.parametrize(
    ("text", "score", "of_trl"),
    [
        ("<think>2 + 2</think><answer>4</answer>", 1, 1),
        ("\n<think>\n2 + 2\n</think>\n\n<answer>\n4\n</answer>\n", 1, 0),
        ("<think>2 < 3</think><answer>yes</answer>", 1, 1),
        ("<think></think><answer>4</answer>", 0, 1),
        ("<think>2</think><answer> </answer>", 0, 1),
        ("<think>2</think>so <answer>4</answer>", 0, 1),
        ("<think>2</think><answer>4</answer> bye", 0, 1),
        ("<think>2<think>3</think><answer>4</answer>", 0, 0),
        ("<think>2</think><answer>4</answer><answer>5</answer>", 0, 1),
        ("<answer>4</answer><think>2</think>", 0, 0),
        ("<think>2", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_form_of_a_text(text, score, of_trl):
    assert format_reward([text, chat(text)]) == [score] * 2
    assert think_format_reward([text, chat(text)]) == [of_trl] * 2


def test_the_form_with_other_tags():
    assert FormatReward(tags=("listen", "think", "answer"))(
        ["<listen>a</listen><think>b</think><answer>c</answer>", "<think>b</think><answer>c</answer>"]
    ) == [1.0, 0.0]


def test_which_completions_are_texts():
    parts = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": "dog"}]
    assert completion_text([{"role": "assistant", "content": "I look"}, *chat(parts)]) == "a dog"
    assert completion_text(chat(None)) == ""
    assert [media_kind(one) for one in ("", chat("x"), [], [Image.new("RGB", (8, 8))])] == [
        "text",
        "text",
        None,
        "video",
    ]
    assert final_answer(r"\boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    picture = Image.new("RGB", (8, 8))
    with pytest.raises(RewardError, match=r"completions\[1\]: expected a text .* got Image"):
        format_reward(["x", picture])
    with RewardRunner("exact_answer") as runner, pytest.raises(RewardError, match="takes texts, and was given images"):
        runner.submit([{"prompt": "", "answer": "x"}], [picture])


NAMES = ["multiple_choice", "exact_answer", "audio_answer", "format", "think_format"]


def test_by_name_in_the_runner():
    rows = [{"prompt": "", "answer": "B", "choices": ["1", "2"]}, {"prompt": "", "answer": "7", "choices": ["7", "8"]}]
    with RewardRunner(NAMES) as runner:
        runner.submit(rows, [chat("<think>?</think><answer>B</answer>"), chat(r"\boxed{7}")])
        batch = runner.collect()
    assert batch.rewards.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


@pytest.mark.slow
def test_a_number_that_nobody_can_write_down_is_a_wrong_answer():
    with RewardRunner("math_answer", max_retries=0, timeout=120) as runner:
        runner.submit([{"prompt": "", "answer": "7"}] * 2, [r"\boxed{9^{9^{9^9}}}", r"\boxed{7}"])
        assert runner.collect().rewards.tolist() == [[0.0], [1.0]]


def test_datasets_without_answers_stop_the_run():
    for reward in (multiple_choice_reward, exact_answer_reward, audio_answer_reward, math_answer_reward):
        with pytest.raises(InputError, match=r"needs the dataset column 'answer' or 'solution', .*rename"):
            reward(completions=["x"])
    with RewardRunner("exact_answer") as runner:
        runner.submit([{"prompt": "", "label": "x"}], ["x"])
        with pytest.raises(RewardError, match="needs the dataset column 'answer'"):
            runner.collect()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AnswerReward(match="fuzzy"), "match='fuzzy' must be one of 'exact', 'contains', 'words'"),
        (lambda: AnswerReward(ignore=("accents",)), r"ignore=\('accents',\) must be some of 'case', 'articles'"),
        (lambda: AnswerReward(ignore="case"), "ignore='case' must be some of"),
        (lambda: FormatReward(tags=()), r"tags=\(\) must be different names: give for example \('think', 'answer'\)"),
        (lambda: FormatReward(tags="think"), "tags='think' must be"),
        (lambda: FormatReward(tags=("a", "a")), "must be different names"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("choices", ["a cat", [], 4])
def test_choices_that_are_no_list(choices):
    with pytest.raises(RewardError, match=r"choices\[0\]=.* must be a list of at most 26 texts"):
        multiple_choice_reward(["A"], answer=["A"], choices=[choices])


@pytest.mark.parametrize("text", [r"\boxed{" * 3000, "<answer>" * 8000, "<think>" + "so " * 3000])
def test_texts_that_repeat_themselves_are_read_in_no_time(text):
    """A policy that goes round in circles writes them, and a reward holds the interpreter's lock."""
    began = time.process_time()
    assert exact_answer_reward(completions=[text], answer=["B"]) == [0.0]
    assert format_reward(completions=[text]) == [0.0]
    assert time.process_time() - began < 0.5

# SPDX-License-Identifier: Apache-2.0
import json
import logging
import threading
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from omnitrl.media import Audio, Video
from omnitrl.rewards import (
    OCRReward,
    RewardError,
    RewardRunner,
    TextRecognizer,
    framewise,
    ocr,
    ocr_exact_reward,
    ocr_reward,
    quoted_text,
    read_text,
    text_score,
)


ROWS = json.loads((Path(__file__).parents[1] / "golden" / "08_reward_ocr_text" / "case.json").read_text())["rows"]
FONT = Path(matplotlib.__file__).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
CHINESE = Path(__file__).with_name("chinese_line.png")  # 你好世界
WORDS = (
    "CAT DOG SUN MAP RED SKY BOX CUP HAT PEN TEA KEY JAM OWL FOX "
    "ICE NET LOG BEE RUN BUS CAR COW EGG FAN GEM HEN INK JAR KID"
).split()


def render(word, size=(64, 32), font_size=30, colour="black", background="white"):
    image = Image.new("RGB", size, background)
    font = ImageFont.truetype(str(FONT), font_size)
    ImageDraw.Draw(image).text((size[0] / 2, size[1] / 2), word, font=font, fill=colour, anchor="mm")
    return image


# --- text against text (golden case 08, acceptance test A12) --------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['recognised']}-{row['target']}")
@pytest.mark.parametrize(
    ("project", "options"),
    [
        ("flow_grpo", {"substring": True, "strip": "spaces"}),
        ("flow_factory", {"substring": True, "strip": "spaces"}),
        ("verl_omni", {"substring": True, "strip": "whitespace", "empty_target": "match"}),
    ],
)
def test_golden_08_text_score(row, project, options):
    expected = row[project]
    if expected == "ZeroDivisionError":
        with pytest.raises(ValueError, match="no characters"):
            text_score(row["recognised"], row["target"], **options)
    else:
        assert text_score(row["recognised"], row["target"], **options) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("recognised", "target", "options", "expected"),
    [
        ("Hello World", "Hello World", {}, 1.0),
        ("hellowor1d", "Hello World", {}, 0.9),
        ("你好吗", "你好", {}, 0.5),
        ("你好吗", "你好", {"substring": True}, 1.0),
        ("你好", "你好吗", {}, 2 / 3),
        ("", "Hello World", {}, 0.0),
        ("#" * 40, "Hello World", {}, 0.0),  # not -3
        ("SALE Hello World 50% OFF", "Hello World", {}, 0.0),
        ("SALE Hello World 50% OFF", "Hello World", {"substring": True}, 1.0),
        ("STOP STOP", "STOP", {}, 0.0),
        ("New\nYork", "New York", {}, 1.0),
        ("New\nYork", "New York", {"strip": "spaces"}, 6 / 7),
        ("École", "E\u0301COLE", {}, 1.0),  # an accent as a character of its own
        ("kitten", "sitting", {}, 4 / 7),
    ],
)
def test_a12_text_score(recognised, target, options, expected):
    assert text_score(recognised, target, **options) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("options", [{"strip": "tabs"}, {"empty_target": "zero"}])
def test_unknown_options_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*must be"):
        text_score("a", "a", **options)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('A sign that says "Hello World" in red', "Hello World"),
        ("curly “Hello” quotes", "Hello"),
        ("the wrong way round ”Hello“", "Hello"),
        ("German „Guten Tag“", "Guten Tag"),
        ("French « Bonjour »", "Bonjour"),
        ("Japanese 「你好」", "你好"),
        ("book 『千と千尋』", "千と千尋"),
        ('two "first" and "second"', "first"),
        ('nothing "" and "then"', "then"),
        ('only ""', ""),
        ('“curly” before "straight"', "curly"),
        ("fullwidth ＂你好＂", "你好"),
        ("vertical 〝你好〟", "你好"),
        ("German books »Guten Tag«", "Guten Tag"),
        ("two French « Bonjour » and « Merci »", "Bonjour"),
        ("straight 'Hello World' in red", "Hello World"),
        ("curly ‘Hello World’ in red", "Hello World"),
        ("low ‚Guten Tag‘ in red", "Guten Tag"),
        ("angle ‹ Bonjour › in red", "Bonjour"),
        ("'Don't walk', and it isn't lit", "Don't walk"),
        ("‘Don’t walk’, and it isn’t lit", "Don’t walk"),
        ("the boys' room in the '90s says 'OPEN'", "OPEN"),
        ("'single' before \"double\"", "double"),
        ("写着‘欢迎’的牌子", "欢迎"),
        ("'환영'이라고 쓰인 간판", "환영"),
        ("it isn't the girl's, nor the boys' dog", None),
        ("blank '' and ' '", None),
        ("no quotes at all", None),
        ('one " alone', None),
        ("", None),
    ],
)
def test_a12_quoted_text(prompt, expected):
    assert quoted_text(prompt) == expected


# --- text in images -------------------------------------------------------------------------------------------------


def test_rendered_words_are_read_exactly():
    images = [render(word) for word in WORDS]
    assert TextRecognizer().read(images) == WORDS
    assert ocr_reward(prompts=WORDS, completions=images) == [1.0] * 30
    assert ocr_exact_reward(prompts=WORDS, completions=images) == [1.0] * 30


def test_reading_depends_on_neither_batch_nor_order_nor_colour():
    images = [render(word, colour="yellow", background="navy") for word in WORDS[:7]]
    images.insert(3, render("WIDE WORD", size=(192, 32)))
    expected = [*WORDS[:3], "WIDE WORD", *WORDS[3:7]]
    assert TextRecognizer(batch_size=1).read(images) == expected
    assert TextRecognizer(batch_size=3).read(images[::-1]) == expected[::-1]


def test_an_image_is_read_once(monkeypatch):
    reader = TextRecognizer(cache_size=2)
    read = []
    whole = TextRecognizer._read_batch
    monkeypatch.setattr(reader, "_read_batch", lambda p, width: read.append(len(p)) or whole(reader, p, width))
    cat, dog, sun = (render(word) for word in ("CAT", "DOG", "SUN"))
    assert reader.read([cat, dog, render("CAT")]) == ["CAT", "DOG", "CAT"]
    assert reader.read([render("DOG")]) == ["DOG"]
    assert read == [2]
    assert reader.read([sun, cat]) == ["SUN", "CAT"]  # CAT was the older of the two and still counts here
    assert read == [2, 1]
    assert reader.read([dog]) == ["DOG"]  # pushed out
    assert read == [2, 1, 1]


def test_images_of_other_shape_with_the_same_bytes_are_different():
    image = render("CAT")
    folded = Image.frombytes("RGB", (32, 64), image.tobytes())
    assert TextRecognizer().read([image, folded])[0] == "CAT"
    assert TextRecognizer().read([folded, image])[1] == "CAT"


def test_two_rewards_in_one_run_read_the_images_once(monkeypatch):
    reader = ocr._shared_reader(page=False, threads=1)
    read = []
    whole = TextRecognizer._read_batch
    monkeypatch.setattr(reader, "_read_batch", lambda p, width: read.extend(p) or whole(reader, p, width))
    words = ["VAN", "WEB", "YAK"]
    images = [render(word, colour=(0, 0, 90)) for word in words]  # not read before
    with RewardRunner(["ocr", "ocr_exact"], weights=[1, 0]) as runner:
        for word, image in zip(words, images, strict=True):
            runner.submit([{"prompt": f'the word "{word}"'}], [image])
        batch = runner.collect()
    assert batch.rewards.tolist() == [[1.0, 1.0]] * 3
    assert batch.extras == {"ocr_text": words}
    assert len(read) == 3


def test_the_target_is_the_column_then_the_quotes_then_the_prompt():
    images = [render("CAT")] * 5
    prompts = ['draw "CAT"', 'draw "CAT"', "cat", 'draw "CUT"', 'draw "DOG"']
    assert ocr_reward(prompts, images, text=["DOG", None, None, None, "CAT"]) == [
        0.0,
        1.0,
        1.0,
        pytest.approx(2 / 3),
        1.0,
    ]
    assert ocr_exact_reward(prompts, images) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_wanted_number_must_be_a_text():
    with pytest.raises(RewardError, match=r"column 'text' .* has 2024 of type int: make it a text, .* '2024'"):
        ocr_reward(["a year"], [render("CAT")], text=[2024])


def test_an_empty_target_has_no_reward(caplog):
    with caplog.at_level(logging.WARNING):
        scores = ocr_reward(["", 'an empty "" sign', 'a "CAT"'], [render("CAT")] * 3, text=[" ", None, None])
    assert scores == [None, None, 1.0]
    assert "2 of 3 rows have no OCR reward" in caplog.text


def test_options_of_the_class():
    images = [render("ACATS", size=(96, 32))]
    assert OCRReward()(["cat"], images) == [pytest.approx(1 / 3)]
    assert OCRReward(substring=True)(["cat"], images) == [1.0]
    assert OCRReward(exact=True)(["cat"], images) == [0.0]
    with pytest.raises(ValueError, match="exclude each other"):
        OCRReward(exact=True, substring=True)
    with pytest.raises(ValueError, match="strip='tabs'"):
        OCRReward(strip="tabs")


def test_large_images_are_searched_for_text():
    page = Image.new("RGB", (320, 200), "white")
    page.paste(render("HELLO", size=(120, 40)), (10, 20))
    page.paste(render("WORLD", size=(120, 40)), (180, 140))
    seen = {}
    assert ocr_reward(["Hello World"], [page], log_extra=seen.__setitem__) == [1.0]
    assert seen == {"ocr_text": ["HELLO WORLD"]}
    assert OCRReward(detect=False)(["Hello World"], [page])[0] < 1.0
    mixed = ocr_reward(["cat", "Hello World", "dog"], [render("CAT"), page, render("DOG")])
    assert mixed == [1.0, 1.0, 1.0]
    assert ocr_reward(["cat"], [Image.new("RGB", (128, 128), "white")]) == [0.0]


def test_chinese_is_read_in_a_line_and_on_a_page():
    line = Image.open(CHINESE)
    page = Image.new("RGB", (160, 128), "white")
    page.paste(line, (20, 20))
    page.paste(render("Hello", size=(112, 32)), (20, 70))
    assert read_text([line, page]) == ["你好世界", "你好世界 Hello"]
    prompts = ["灯笼上写着「你好世界」", "lanterns that say “你好”", "lanterns that say '你好世界人'"]
    assert ocr_reward(prompts, [line] * 3) == [1.0, 0.0, 0.8]
    assert OCRReward(substring=True)(prompts, [line] * 3) == [1.0, 1.0, 0.8]


# --- text in videos -------------------------------------------------------------------------------------------------


def words_in_frames(*words):
    """A video with one word in each frame."""
    return Video(np.stack([np.asarray(render(word)) for word in words]), 8.0)


FRAMES = ("CAT", "DOG", "DOG", "DOG", "CAP", "DOG", "DOG", "DOG", "SUN")  # 1, 2/3 and 0 of "CAT" in every fourth


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 5 / 9),
        ({"reduce": "min"}, 0.0),
        ({"reduce": "max"}, 1.0),
        ({"reduce": "median"}, 2 / 3),
        ({"reduce": "mean_above_zero"}, 5 / 6),  # flow_grpo's
        ({"frames": "first_last"}, 0.5),
        ({"frames": 1}, 2 / 3),
        ({"frames": "all", "exact": True}, 1 / 9),
    ],
)
def test_frames_of_a_video_are_read_and_their_scores_reduced(options, expected):
    assert OCRReward(**options)(['the word "CAT"'], [words_in_frames(*FRAMES)]) == [pytest.approx(expected)]


def test_videos_and_pictures_may_be_mixed_and_what_was_read_is_recorded():
    seen = {}
    media = [
        words_in_frames("CAT", "DOG"),
        render("DOG"),
        np.array(words_in_frames("DOG", "CAT", "CAT", "CAT", "SUN")),
    ]
    scores = ocr_reward(["cat", "dog", "dog"], media, log_extra=seen.__setitem__)
    assert scores == [1.0, 1.0, 0.5]
    assert seen == {"ocr_text": ["CAT", "DOG", "DOG | SUN"]}
    assert ocr_exact_reward(["cat", "", "dog"], media, text=[None, "", None]) == [1.0, None, 0.5]


def test_the_wrapper_for_frames_gives_what_the_reward_itself_does():
    media = [words_in_frames(*FRAMES), words_in_frames("DOG", "CAT")]
    with RewardRunner([OCRReward(frames="all"), framewise("ocr")]) as runner:
        runner.submit([{"prompt": "cat"}] * 2, media)
        rewards = runner.collect().rewards
    assert rewards[:, 0].tolist() == rewards[:, 1].tolist() == [pytest.approx(5 / 27), 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"frames": "some"}, "frames='some' must be 'all'"), ({"reduce": "sum"}, "reduce='sum' must be one of")],
)
def test_unknown_choices_of_frames_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OCRReward(**options)


@pytest.mark.parametrize("completion", [Audio(np.zeros((1, 8), np.float32), 8), "CAT"])
def test_what_has_no_text_to_read(completion):
    with pytest.raises(RewardError, match=r"completions\[1\]: expected an image .*, got (a sound|str)"):
        ocr_reward(["cat", "cat"], [render("CAT"), completion])


# --- loading --------------------------------------------------------------------------------------------------------


def test_the_network_is_loaded_once_by_many_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(ocr._shared_reader(False, 1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({id(reader) for reader in found}) == 1


def test_a_missing_package_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(ocr, "_PACKAGE", "no_such_ocr_package")
    with pytest.raises(ImportError, match=r'pip install "omnitrl\[ocr\]"'):
        TextRecognizer()

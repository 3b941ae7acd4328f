# SPDX-License-Identifier: Apache-2.0
import base64
import io
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from omnitrl.report import EvaluationRecord, RunSummary, Sample, write_report
from omnitrl.report.page import step_seconds


VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements and visible text of a page; fails on a tag that is not closed in order."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.html = path.read_text("utf-8")
        self.feed(self.html)
        self.text = " ".join(self.text.split())
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "head" not in self.open:
            self.text += f" {data}"

    def pictures(self):
        uris = [attrs["src"] for tag, attrs in self.elements if tag == "img"]
        return [Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))) for uri in uris]


@pytest.fixture
def page(run, tmp_path):
    write_report(tmp_path / "new" / "report.html", run)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.html"]
    return Page(tmp_path / "new" / "report.html")


def test_the_page_needs_nothing_else(page):
    for tag, attrs in page.elements:
        assert tag not in ("script", "link", "iframe", "object")
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "xlink:href"):
            assert attrs.get(name, "data:").startswith("data:"), (tag, attrs)
    style = re.search(r"<style>(.*?)</style>", page.html, re.DOTALL).group(1)
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_text_of_the_run_is_escaped(page):
    # `run` has this prompt, and it is in its title too; parsed back it is text.
    assert "<script>" not in page.html
    assert "&lt;script&gt;alert(" in page.html
    assert 'FlowGRPO on <script>alert("x")</script> & <img src=http://evil.example/x.png>' in page.text
    assert "Words & <b>letters</b>." in page.text
    assert "one <fast> device" in page.text


def test_headline_numbers(page):
    assert "held-out reward 0.500 → 0.812 +0.312" in page.text
    assert "exact_match 0.250 0.406" in page.text
    assert "unseen reward 0.400 → 0.300 -0.100" in page.text
    assert "finished: 3 steps" in page.text
    assert "wall time 31 s" in page.text


def test_pictures_are_png_in_the_order_before_after(page):
    pictures = page.pictures()
    assert {picture.format for picture in pictures} == {"PNG"}
    colors = [picture.convert("RGB").getpixel((5, 5)) for picture in pictures]
    red, green, blue = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    assert colors == [red, blue, red, blue] + [red, red, green, green, blue, blue]  # two pairs, three rows of two
    sizes = {(attrs["width"], attrs["height"], attrs.get("class")) for tag, attrs in page.elements if tag == "img"}
    assert sizes == {("128", "64", "pixelated")}


def test_curves_carry_their_numbers(page):
    assert "held-out: 0.812 at step 3 · 30 s" in page.text
    assert "unseen: 0.400 at step 0 · 0 s" in page.text
    assert "training: 0.650 at step 3" in page.text
    assert "training: – at" not in page.text
    assert sum(tag == "rect" and attrs["class"] == "healthy" for tag, attrs in page.elements) == 1


def test_the_configuration_hides_secrets(page):
    assert "hf_secret" not in page.html
    assert "hub_token (hidden)" in page.text
    assert "num_generations 8" in page.text
    assert "All 5 settings" in page.text
    assert 'pipe.load_lora_weights("out")' in page.text


def test_where_the_time_went(page, run):
    assert step_seconds(run.history) == [("rollout", 2.0), ("train", 1.0), ("other", 1.0)]
    assert "4.000 seconds a step on average." in page.text
    assert "rollout 2.000 s (50 %)" in page.text


def test_a_row_counts_for_the_steps_it_stands_for():
    rows = [{"step": 1, "time/a": 1.0}, {"step": 4, "time/a": 3.0, "time/b": 4.0}, {"step": 4, "eval_reward": 1.0}]
    assert step_seconds(rows) == [("b", 3.0), ("a", 2.5)]
    assert step_seconds([{"step": 1, "step_time": 2.0}]) == []


def test_one_evaluation_shows_its_pictures(tmp_path):
    sample = Sample("CAT", Image.new("RGB", (400, 200), "red"), 0.5)
    run = RunSummary(
        "t", "a", "m", "running: step 0 of 9", evaluations=[EvaluationRecord(0, "eval", {"reward": 0.5}, [sample])]
    )
    write_report(tmp_path / "report.html", run)
    page = Page(tmp_path / "report.html")
    assert "held-out reward, one evaluation so far 0.500" in page.text
    assert "→" not in page.text
    assert [picture.size for picture in page.pictures()] == [(256, 128)]


def test_an_empty_run_has_a_page(tmp_path):
    write_report(tmp_path / "report.html", RunSummary("t", "a", "m", status=""))
    page = Page(tmp_path / "report.html")
    assert "No evaluation yet" in page.text
    assert page.pictures() == []

# SPDX-License-Identifier: Apache-2.0
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.report import reward_curve, small_multiples
from omnitrl.report.curves import SET_COLORS, TRAINING_COLOR, evaluated_sets
from omnitrl.report.health import health_keys, series
from omnitrl.report.svg import Line, line_chart, nice_ticks


def pixels_of(path, color):
    """Rows and columns of the pixels of one colour."""
    image = np.asarray(Image.open(path).convert("RGB"), dtype=int)
    near = np.abs(image - np.round(np.array(to_rgb(color)) * 255)).max(axis=-1) <= 2
    return np.nonzero(near)


def test_the_curve_rises_where_the_reward_does(tmp_path):
    rows = [{"step": step, "reward": 0.1 * step} for step in range(1, 9)]
    reward_curve(rows, tmp_path / "up.png", "up")
    down = [row | {"reward": 1 - row["reward"]} for row in rows]
    reward_curve(down, tmp_path / "down.png", "down")
    for name, sign in (("up", -1), ("down", 1)):
        ys, xs = pixels_of(tmp_path / f"{name}.png", TRAINING_COLOR)
        plot = ys > 60  # below the title
        assert np.sign(np.corrcoef(xs[plot], ys[plot])[0, 1]) == sign  # y of a picture grows downwards


def test_each_evaluated_set_has_its_colour(run, tmp_path):
    reward_curve(run.history, tmp_path / "curve.png")
    assert evaluated_sets(run.history) == ["eval", "eval_unseen"]
    for color in (TRAINING_COLOR, *SET_COLORS[:2]):
        assert len(pixels_of(tmp_path / "curve.png", color)[0]) > 50
    assert len(pixels_of(tmp_path / "curve.png", SET_COLORS[2])[0]) == 0


def test_curves_leave_pyplot_alone(run, tmp_path):
    reward_curve(run.history, tmp_path / "new" / "curve.png")
    assert (tmp_path / "new" / "curve.png").is_file()
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_the_healthy_band_is_shaded(run, tmp_path):
    small_multiples(run.history, ["ratio/sum_log_std"], tmp_path / "band.png")
    small_multiples(run.history, ["kl", "absent"], tmp_path / "plain.png")
    greenish = [
        np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"), dtype=int) for name in ("band", "plain")
    ]
    share = [((picture[..., 1] - picture[..., 0]) > 10).mean() for picture in greenish]
    assert share[0] > 0.3
    assert share[1] < 0.05


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(InputError, match="no reward to draw"):
        reward_curve([{"step": 1, "loss": 0.1}, {"step": 2, "reward": None}], tmp_path / "x.png")
    with pytest.raises(InputError, match="keys is empty"):
        small_multiples([], [], tmp_path / "x.png")


def test_series_leave_out_what_is_missing(run):
    assert series(run.history, "reward") == [(1, 0.55), (3, 0.65)]
    assert health_keys(run.history) == ["ratio/sum_log_std", "kl", "step_time"]


@pytest.mark.parametrize(
    ("low", "high", "count", "ticks"),
    [
        (0, 100, 5, [0, 20, 40, 60, 80, 100]),
        (0.31, 0.89, 4, [0.4, 0.6, 0.8]),
        (-1, 1, 4, [-1, -0.5, 0, 0.5, 1]),
        (0, 1, 4, [0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_ticks_are_round(low, high, count, ticks):
    assert nice_ticks(low, high, count) == ticks


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.found if name == tag]


def test_a_chart_puts_points_where_they_belong():
    line = Line("a < b", [(0, 0.0), (5, 1.0), (10, 0.5)], "s0", markers=True)
    chart = Elements(line_chart([line], "title", width=200, height=100))
    dots = [(float(dot["cx"]), float(dot["cy"])) for dot in chart.all("circle")]
    assert dots[1][0] - dots[0][0] == pytest.approx(dots[2][0] - dots[1][0], abs=0.2)
    assert dots[0][0] == 54  # left edge of the plot
    assert dots[2][0] == 188
    assert dots[0][1] - dots[2][1] == pytest.approx(dots[2][1] - dots[1][1], abs=0.2)
    assert "a < b: 1.000 at step 5" in chart.texts
    assert "a < b:" not in line_chart([line], "title")  # it was escaped


def test_a_chart_shades_its_band_and_survives_one_point():
    chart = Elements(line_chart([Line("x", [(3, 0.5)], "s0")], "title", band=(0.25, 0.75)))
    (band,), (dot,) = chart.all("rect"), chart.all("circle")
    middle = float(band["y"]) + float(band["height"]) / 2
    assert middle == pytest.approx(float(dot["cy"]), abs=0.2)
    assert line_chart([Line("x", [], "s0")], "title") == ""


def test_a_long_history_is_thinned_to_its_ends():
    points = [(step, step / 5000) for step in range(5000)]
    chart = Elements(line_chart([Line("x", points, "s0", spread=[0.1] * 5000)], "title"))
    dots = chart.all("circle")
    assert len(dots) == 400
    assert "x: 1.000 at step 4999" in chart.texts
    assert len(chart.all("polygon")[0]["points"].split()) == 800

# SPDX-License-Identifier: Apache-2.0
"""The page of a run: one HTML file that needs nothing else, neither beside it nor from the network."""

from __future__ import annotations

import base64
import io
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrl.report.curves import evaluated_sets
from omnitrl.report.grid import MIN_TILE_WIDTH, TIMELINE_COLUMNS
from omnitrl.report.health import HEALTH, health_keys, series
from omnitrl.report.recipe import config_rows, recipe_rows
from omnitrl.report.records import (
    RunSummary,
    Sample,
    column,
    format_duration,
    format_number,
    headlines,
    is_missing,
    matched_samples,
    png_bytes,
    set_label,
    thumbnail,
    timeline_records,
)
from omnitrl.report.svg import Line, line_chart


if TYPE_CHECKING:
    from PIL.Image import Image

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
TIMELINE_SIDE = 128  # six rows of eight pictures at full size would make a page of many megabytes


def write_report(path: str | os.PathLike[str], run: RunSummary) -> None:
    """
    Write the page of a run as one self-contained HTML file.

    It opens without a network and can be sent by mail: pictures are inside, there are no scripts, and it is light or
    dark as the reader's system is. All text of the run, such as prompts, is escaped.

    Args:
        path (`str` or `os.PathLike`):
            File to write; its folder is made if need be, and a page that is there is replaced at once.
        run ([`RunSummary`]):
            What to show. Parts without data are left out.

    Example:

    ```python
    >>> run = RunSummary(title="FlowGRPO on tiny words", algorithm="FlowGRPO", model_name="tiny", history=rows)
    >>> write_report("run/report.html", run)
    ```
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    html = environment.get_template("report.html.j2").render(_view(run))
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(html, encoding="utf-8")
    os.replace(temporary, file)  # a reader who reloads never sees half a page


def step_seconds(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """
    Average seconds of a step by what they were spent on, from the metrics `time/*` and `step_time`.

    Args:
        history (`Sequence[Mapping[str, Any]]`):
            Rows of `metrics.jsonl`. A row that stands for several steps counts as often.

    Returns:
        `list[tuple[str, float]]`: (name, seconds), the largest first. What `step_time` has beyond the parts comes last
        as `"other"`. Empty without `time/*`.
    """
    totals: dict[str, float] = {}
    weights = 0.0
    whole = 0.0
    last_step = 0.0
    for row in history:
        parts = {key.removeprefix("time/"): row[key] for key in row if key.startswith("time/")}
        if not parts:
            continue
        step = row.get("step") or last_step + 1
        weight = max(step - last_step, 1)
        last_step = step
        weights += weight
        whole += weight * (row.get("step_time") or 0.0)
        for name, seconds in parts.items():
            totals[name] = totals.get(name, 0.0) + weight * (seconds or 0.0)
    spent = sorted(((name, total / weights) for name, total in totals.items() if total > 0), key=lambda part: -part[1])
    rest = whole / weights - sum(seconds for _, seconds in spent) if weights else 0.0
    # Below a hundredth it is rounding, not something that took time.
    return [*spent, ("other", rest)] if spent and rest > 0.01 * whole / weights else spent


def _view(run: RunSummary) -> dict[str, Any]:
    name = run.pictured_set()
    return {
        "run": run,
        "status_kind": run.status.split(":")[0].split()[0] if run.status else "",
        "facts": _facts(run),
        "headlines": _headlines(run),
        "reward_chart": _reward_chart(run),
        "pairs": _pairs(run, name),
        "latest": _latest(run, name),
        "timeline": _timeline(run, name),
        "rollout": _rollout(run),
        "health": _health(run),
        "time": _time(run),
        "recipe": recipe_rows(run.config),
        "config": config_rows(run.config),
    }


def _facts(run: RunSummary) -> list[tuple[str, str]]:
    steps, seconds = column(run.history, "step"), column(run.history, "seconds")
    facts = [("algorithm", run.algorithm), ("model", run.model_name)]
    if steps:
        facts.append(("steps", f"{max(steps):,}"))
    if seconds:
        facts.append(("wall time", format_duration(max(seconds))))
    return [(label, value) for label, value in facts if value]


def _headlines(run: RunSummary) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for line in headlines(run):
        shown = {
            "metric": line.metric,
            "before": format_number(line.before),
            "after": format_number(line.after),
            "change": f"{line.change:+.3f}",
            "direction": "up" if line.change > 0 else "down" if line.change < 0 else "same",
        }
        group = groups.setdefault(
            line.set_name,
            {"label": set_label(line.set_name), "single": line.before_step == line.after_step, "rows": [],
             "reward": None},
        )  # fmt: skip
        if line.metric == "reward":
            group["reward"] = shown
        else:
            group["rows"].append(shown)
    return list(groups.values())


def _reward_chart(run: RunSummary) -> dict[str, Any] | None:
    stds = dict(series(run.history, "reward_std"))
    training = series(run.history, "reward")
    lines = []
    if training:
        spread = [stds.get(step, 0.0) for step, _ in training] if stds else None
        lines.append(Line("training", training, "s0", spread))
    for index, name in enumerate(evaluated_sets(run.history)):
        points = series(run.history, f"{name}_reward")
        lines.append(Line(set_label(name), points, f"s{1 + index % 4}", markers=True))
    svg = line_chart(lines, f"Reward of {run.title} over the steps", clock=_clock(run))
    legend = [(line.style, line.label) for line in lines]
    return {"svg": svg, "legend": legend, "spread": bool(stds) and bool(training)} if svg else None


def _clock(run: RunSummary) -> Callable[[float], str] | None:
    points = sorted(series(run.history, "seconds"))
    if len(points) < 2:
        return None
    steps = [step for step, _ in points]

    def passed(step: float) -> str:
        at = bisect_left(steps, step)
        if at == len(steps) or (at == 0 and steps[0] != step):
            return ""
        (left, start), (right, end) = points[max(at - 1, 0)], points[at]
        share = 1.0 if right == left else (step - left) / (right - left)
        return format_duration(start + share * (end - start))

    return passed


def _picture(sample: Sample, side: int | None = None) -> dict[str, Any]:
    image = sample.image
    shown: dict[str, Any] = {"prompt": sample.prompt, "caption": sample.caption, "uri": None, "sound": None}
    shown["width"] = MIN_TILE_WIDTH
    shown["reward"] = None if is_missing(sample.reward) else format_number(sample.reward, 2)
    if image is not None:
        image = thumbnail(image, side) if side else thumbnail(image)
        factor = max(1, -(-MIN_TILE_WIDTH // image.width))
        shown |= {"uri": _data_uri(image), "width": image.width * factor, "height": image.height * factor}
        shown["pixelated"] = factor > 1
    if side is not None:
        return shown  # small pictures do not play
    if sample.clip is not None:
        shown |= _clip(sample.clip)
    if sample.sound is not None:
        shown["sound"] = "data:audio/wav;base64," + base64.b64encode(sample.sound).decode("ascii")
    return shown


def _clip(data: bytes) -> dict[str, Any]:
    """What shows an animation in place of a picture."""
    from PIL import Image

    width, height = Image.open(io.BytesIO(data)).size
    factor = max(1, -(-MIN_TILE_WIDTH // width))
    uri = "data:image/webp;base64," + base64.b64encode(data).decode("ascii")
    return {"uri": uri, "width": width * factor, "height": height * factor, "pixelated": factor > 1}


def _data_uri(image: Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png_bytes(image)).decode("ascii")


def _pairs(run: RunSummary, name: str | None) -> dict[str, Any] | None:
    ends = None if name is None else run.first_and_last(name)
    if ends is None or ends[0].step == ends[1].step:
        return None
    pairs = [(_picture(before), _picture(after)) for before, after in matched_samples(ends)]
    if not pairs:
        return None
    width = 2 * max(picture["width"] for pair in pairs for picture in pair) + 8
    label = set_label(ends[0].name)
    return {"label": label, "before": ends[0].step, "after": ends[1].step, "pairs": pairs, "width": width}


def _latest(run: RunSummary, name: str | None) -> dict[str, Any] | None:
    """The pictures of the only evaluation so far, until there is a second one to compare with."""
    ends = None if name is None else run.first_and_last(name)
    if ends is None or ends[0].step != ends[1].step:
        return None
    pictures = [_picture(sample) for sample in ends[1].samples]
    width = max(picture["width"] for picture in pictures)
    return {"label": set_label(ends[1].name), "step": ends[1].step, "pictures": pictures, "width": width}


def _timeline(run: RunSummary, name: str | None) -> dict[str, Any] | None:
    records = [] if name is None else timeline_records(run, name)
    shared = matched_samples(records)[:TIMELINE_COLUMNS] if len(records) > 2 else []
    if not shared:
        return None
    rows = [
        {"step": record.step, "pictures": [_picture(column[index], TIMELINE_SIDE) for column in shared]}
        for index, record in enumerate(records)
    ]
    return {"prompts": [column[0].prompt for column in shared], "rows": rows}


def _rollout(run: RunSummary) -> dict[str, Any] | None:
    """The pictures of training."""
    if run.rollout is None or not run.rollout.samples:
        return None
    pictures = [_picture(sample) for sample in run.rollout.samples]
    return {"step": run.rollout.step, "pictures": pictures, "width": max(picture["width"] for picture in pictures)}


def _health(run: RunSummary) -> list[dict[str, str]]:
    shown = []
    for key in health_keys(run.history):
        about = HEALTH[key]
        band = (about.low, about.high) if about.low is not None and about.high is not None else None
        line = Line(about.label, series(run.history, key), "s0")
        svg = line_chart([line], about.label, width=340, height=170, band=band, tick_count=4)
        shown.append({"key": key, "label": about.label, "note": about.note, "svg": svg})
    return shown


def _time(run: RunSummary) -> dict[str, Any] | None:
    parts = step_seconds(run.history)
    total = sum(seconds for _, seconds in parts)
    if not total:
        return None
    rows = [
        {
            "name": name.replace("_", " "),
            "style": f"s{index % 5}" if name != "other" else "other",
            "percent": round(100 * seconds / total, 2),
            "seconds": format_number(seconds),
        }
        for index, (name, seconds) in enumerate(parts)
    ]
    return {"rows": rows, "total": format_number(total)}

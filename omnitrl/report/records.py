# SPDX-License-Identifier: Apache-2.0
"""The records that pictures, page and card are made of."""

from __future__ import annotations

import base64
import io
import math
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from omnitrl.media import Audio, Video, still


if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL_SIDE = 256
"""Longest side, in pixels, of the pictures that a report keeps."""

# `eval_reward` is the held-out set, `eval_unseen_reward` the set named "unseen".
_EVAL_REWARD = re.compile(r"^(eval(?:_.+)?)_reward$")
_VERSIONED = ("omnitrl", "torch", "diffusers", "transformers", "accelerate", "peft", "trl", "datasets")

# The mean of one of several reward functions.
_PART = re.compile(r"^rewards/.+/mean$")


@dataclass
class Sample:
    """
    One sample of an evaluation.

    Args:
        prompt (`str`):
            The prompt.
        image (`PIL.Image.Image`, *optional*):
            The picture, `None` where there is none to show; of a video some frames, of a sound its waveform.
        reward (`float`, *optional*):
            Its reward. `None` or NaN means that the reward is missing.
        caption (`str`, *optional*):
            Short text shown beside the prompt, for example what an OCR reward read.
        clip, sound (`bytes`, *optional*):
            A small animated WebP and a small WAV file, which the page plays.
    """

    prompt: str
    image: Image | None = None
    reward: float | None = None
    caption: str | None = None
    clip: bytes | None = None
    sound: bytes | None = None

    @classmethod
    def of(cls, prompt: str, media: Any, reward: float | None = None, caption: str | None = None) -> Sample:
        """Made of a medium: a picture, a [`~omnitrl.media.Video`] or an [`~omnitrl.media.Audio`]."""
        sound = media.audio if isinstance(media, Video) else media
        return cls(
            prompt,
            still(media),
            reward,
            caption,
            clip=media.webp_bytes(THUMBNAIL_SIDE) if isinstance(media, Video) else None,
            sound=sound.preview().wav_bytes() if isinstance(sound, Audio) else None,
        )

    def label(self) -> str:
        """The text under a picture: a line each for the prompt, the caption and the reward, where there are any."""
        reward = None if is_missing(self.reward) else format_number(self.reward, 2)
        return "\n".join(line for line in (self.prompt, self.caption, reward) if line)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary that JSON can hold; the picture is shrunk to 256 pixels and becomes base64 PNG."""
        picture = None if self.image is None else base64.b64encode(png_bytes(thumbnail(self.image))).decode("ascii")
        reward = None if self.reward is None or is_missing(self.reward) else float(self.reward)
        files = {"clip": self.clip, "sound": self.sound}
        encoded = {name: base64.b64encode(data).decode("ascii") for name, data in files.items() if data is not None}
        return {"prompt": self.prompt, "reward": reward, "caption": self.caption, "image": picture, **encoded}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """The inverse of [`~Sample.to_dict`]."""
        from PIL import Image

        image = None
        if values["image"] is not None:
            image = Image.open(io.BytesIO(base64.b64decode(values["image"])))
            image.load()
        files = {name: base64.b64decode(values[name]) for name in ("clip", "sound") if name in values}
        return cls(values["prompt"], image, values["reward"], values["caption"], **files)


@dataclass
class EvaluationRecord:
    """
    One evaluation of one set of prompts.

    Args:
        step (`int`):
            Optimizer steps done when the evaluation was made; 0 is before training.
        name (`str`):
            Name of the set: `"eval"` for the held-out prompts, `"eval_unseen"` and so on for others.
        metrics (`dict[str, float]`):
            What was measured, with or without the prefix `eval_`: `{"eval_reward": 0.51}` and `{"reward": 0.51}` mean
            the same.
        samples (`list[Sample]`):
            Pictures. The same prompts in the same order at every evaluation make them comparable.
    """

    step: int
    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def has_pictures(self) -> bool:
        """Whether any sample has a picture."""
        return any(sample.image is not None for sample in self.samples)

    def headline(self) -> str:
        """What the record is in a few words: `"held-out reward 0.505"`."""
        reward = self.plain_metrics().get("reward")
        label = set_label(self.name)
        return label if reward is None else f"{label} reward {format_number(reward)}"

    def plain_metrics(self) -> dict[str, float]:
        """The metrics without the prefix of the set, without missing values, and without run-time bookkeeping."""
        plain = {key.removeprefix(f"{self.name}_"): value for key, value in self.metrics.items()}
        hidden = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch", "step")
        return {key: float(value) for key, value in plain.items() if key not in hidden and not is_missing(value)}

    def to_dict(self) -> dict[str, Any]:
        """A dictionary that JSON can hold."""
        metrics = {key: None if is_missing(value) else float(value) for key, value in self.metrics.items()}
        samples = [sample.to_dict() for sample in self.samples]
        return {"step": self.step, "name": self.name, "metrics": metrics, "samples": samples}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EvaluationRecord:
        """The inverse of [`~EvaluationRecord.to_dict`]; missing numbers come back as NaN."""
        metrics = {key: math.nan if value is None else value for key, value in values["metrics"].items()}
        samples = [Sample.from_dict(sample) for sample in values["samples"]]
        return cls(step=values["step"], name=values["name"], metrics=metrics, samples=samples)


@dataclass
class RunSummary:
    """
    Everything that the run page and the model card say about a run.

    Args:
        title (`str`):
            Heading, for example `"FlowGRPO on omnitrl/tiny-words"`.
        algorithm (`str`):
            Name of the algorithm, for example `"FlowGRPO"`.
        model_name (`str`):
            Hub id or folder of the model that is trained.
        status (`str`, *optional*, defaults to `"not started"`):
            One line, for example `"finished: 60 steps"` or `"stopped at step 20 of 60"`.
        config (`dict[str, Any]`):
            The training arguments, every one of them.
        environment (`dict[str, str]`):
            Versions, device, number of processes.
        history (`list[dict[str, float | None]]`):
            The rows of `metrics.jsonl`.
        evaluations (`list[EvaluationRecord]`):
            In the order in which they were made.
        load_snippet (`str`, *optional*, defaults to `""`):
            Python code that loads the result.
        notes (`list[str]`):
            Sentences worth reading, shown under the headline numbers.
        rollout ([`EvaluationRecord`], *optional*):
            Pictures of the last rollout that was shown.
    """

    title: str
    algorithm: str
    model_name: str
    status: str = "not started"
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, float | None]] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    load_snippet: str = ""
    notes: list[str] = field(default_factory=list)
    rollout: EvaluationRecord | None = None

    def evaluation_names(self) -> list[str]:
        """Names of the sets that were evaluated, the held-out set `"eval"` first."""
        names = [record.name for record in self.evaluations]
        names += [name for row in self.history for name in map(eval_set_of, row) if name is not None]
        unique = list(dict.fromkeys(names))
        return sorted(unique, key=lambda name: (name != "eval", unique.index(name)))

    def pictured_set(self) -> str | None:
        """The first of `evaluation_names` that has pictures, `None` if there are none."""
        pictured = {record.name for record in self.evaluations if record.has_pictures()}
        return next((name for name in self.evaluation_names() if name in pictured), None)

    def first_and_last(self, name: str) -> tuple[EvaluationRecord, EvaluationRecord] | None:
        """The first and the last record of a set; the same one twice if there is just one, `None` if none."""
        records = sorted((record for record in self.evaluations if record.name == name), key=lambda r: r.step)
        if not records:
            records = _records_from_history(self.history, name)
        return (records[0], records[-1]) if records else None


class Headline(NamedTuple):
    """A number before and after training."""

    set_name: str
    metric: str
    before: float
    after: float
    before_step: int
    after_step: int

    @property
    def change(self) -> float:
        """After minus before."""
        return self.after - self.before


def headlines(run: RunSummary) -> list[Headline]:
    """
    Before and after of every metric of every set that was evaluated, `reward` first.

    A metric is left out if it is missing at either end. With one evaluation before and after are the same number.

    Args:
        run ([`RunSummary`]):
            The run.

    Returns:
        `list[Headline]`: in the order of [`~RunSummary.evaluation_names`].
    """
    found = []
    for name in run.evaluation_names():
        ends = run.first_and_last(name)
        if ends is None:
            continue
        before, after = (record.plain_metrics() for record in ends)
        keys = sorted((key for key in after if key in before and _is_result(key, after)), key=lambda k: k != "reward")
        found += [Headline(name, key, before[key], after[key], ends[0].step, ends[1].step) for key in keys]
    return found


def _is_result(key: str, metrics: Mapping[str, float]) -> bool:
    """Whether a metric of an evaluation says how good the pictures are, and is not the reward a second time."""
    if key == "loss" or key.endswith(("_std", "/std", "_time")) or key.startswith("time/"):
        return False
    parts = [name for name in metrics if _PART.match(name)]
    return not (_PART.match(key) and len(parts) == 1 and "reward" in metrics)


def eval_set_of(key: str) -> str | None:
    """The name of the evaluated set if `key` is the reward of one (`"eval_unseen_reward"` → `"eval_unseen"`)."""
    match = _EVAL_REWARD.match(key)
    return match.group(1) if match else None


def set_label(name: str) -> str:
    """How a person calls an evaluated set: `"eval"` → `"held-out"`, `"eval_unseen"` → `"unseen"`."""
    return "held-out" if name == "eval" else name.removeprefix("eval_").replace("_", " ")


def is_missing(value: float | None) -> bool:
    """Whether a number is `None`, NaN or infinite."""
    return value is None or not math.isfinite(value)


def column(history: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The numbers that rows have under `key`; missing ones are left out."""
    return [row[key] for row in history if not is_missing(row.get(key))]


def format_number(value: float | None, digits: int = 3) -> str:
    """A number as a person writes it: `0.505`, `12.3`, `1,250`, `2.1e-05`, `–` when missing."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size and size < 10 ** (1 - digits):
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}" if size < 10 else f"{value:.1f}"


def format_duration(seconds: float) -> str:
    """Seconds as `42 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def thumbnail(image: Image, side: int = THUMBNAIL_SIDE) -> Image:
    """An RGB copy of a picture, its longest side at most `side` pixels; transparent pixels become white."""
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image)
    image = image.convert("RGB")
    if max(image.size) > side:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def png_bytes(image: Image) -> bytes:
    """The picture as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def package_versions(names: Iterable[str] = _VERSIONED) -> dict[str, str]:
    """
    Versions of Python, the platform and the libraries that a result depends on.

    Args:
        names (`Iterable[str]`, *optional*):
            Distributions to look up; those that are not installed are left out.

    Returns:
        `dict[str, str]`: name → version.

    Example:

    ```python
    >>> package_versions(["torch"])["torch"]
    '2.13.0'
    ```
    """
    versions = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def matched_samples(records: Sequence[EvaluationRecord]) -> list[tuple[Sample, ...]]:
    """
    The samples that all records share: same prompt, and the same how-many-th sample of it.

    Args:
        records (`Sequence[EvaluationRecord]`):
            Records of one set.

    Returns:
        `list[tuple[Sample, ...]]`: one tuple for each shared sample, in the order of the first record; each holds one
        sample of each record.
    """
    keyed = []
    for record in records:
        seen: Counter[str] = Counter()
        slots = {}
        for sample in record.samples:
            slots[sample.prompt, seen[sample.prompt]] = sample
            seen[sample.prompt] += 1
        keyed.append(slots)
    return [tuple(slots[key] for slots in keyed) for key in keyed[0] if all(key in slots for slots in keyed)]


def timeline_records(run: RunSummary, name: str, limit: int = 6) -> list[EvaluationRecord]:
    """At most `limit` records of a set that have pictures, evenly spaced, the first and the last among them."""
    records = sorted((r for r in run.evaluations if r.name == name and r.has_pictures()), key=lambda r: r.step)
    if len(records) <= limit:
        return records
    return [records[round(index * (len(records) - 1) / (limit - 1))] for index in range(limit)]


def _records_from_history(history: list[dict[str, float | None]], name: str) -> list[EvaluationRecord]:
    # `eval_unseen_reward` starts with `eval_` too: a row belongs to "eval" only through keys of no longer set name.
    others = {found for row in history for found in map(eval_set_of, row) if found and found.startswith(f"{name}_")}
    records = []
    for row in history:
        if f"{name}_reward" not in row:
            continue
        own = {
            key: value
            for key, value in row.items()
            if key.startswith(f"{name}_") and not any(key.startswith(f"{other}_") for other in others)
        }
        metrics = {key: math.nan if value is None else value for key, value in own.items()}
        records.append(EvaluationRecord(step=int(row.get("step") or 0), name=name, metrics=metrics))
    return records


def pick_samples(samples: list[Sample], limit: int) -> list[Sample]:
    """
    At most `limit` samples with their pictures shrunk, one of each prompt first, in the order given.

    Args:
        samples (`list[Sample]`):
            All samples of an evaluation.
        limit (`int`):
            How many to keep.

    Returns:
        `list[Sample]`: new samples; those given are left as they are.
    """
    first_of_prompt = {sample.prompt: index for index, sample in reversed(list(enumerate(samples)))}
    order = sorted(range(len(samples)), key=lambda index: first_of_prompt[samples[index].prompt] != index)
    chosen = [samples[index] for index in sorted(order[:limit])]
    return [replace(sample, image=None if sample.image is None else thumbnail(sample.image)) for sample in chosen]

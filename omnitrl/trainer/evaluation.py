# SPDX-License-Identifier: Apache-2.0
"""Evaluation: ODE samples of fixed prompts with fixed seeds, scored by the same rewards."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from omnitrl.data import naming
from omnitrl.models import MediaSize
from omnitrl.report import EvaluationRecord, Sample
from omnitrl.rollout import SampleRequest, SamplingParams, stable_seed
from omnitrl.trainer.completions import caption
from omnitrl.trainer.metrics import gather_list
from omnitrl.trainer.prompt_rows import Rows, numbered, sizes_of


if TYPE_CHECKING:
    from omnitrl.trainer.sampling_trainer import SamplingTrainer


@dataclass
class _Scored:
    """
    What this rank's samples got.

    Args:
        rows (`list[tuple]`): Position of each sample, its rewards, and for which of them the reward failed.
        media, captions (`dict`): Medium, and what rewards recorded of it, of the samples that are pictured.
    """

    rows: list[tuple[int, list[float], list[bool]]]
    media: dict[int, Any]
    captions: dict[int, str]


@dataclass
class _Part:
    """What this rank samples of one media size: requests, and which sample of the evaluation each of them is."""

    size: MediaSize
    requests: list[SampleRequest]
    positions: list[int]  # of the requests but for those at the end that only fill the share


def evaluate_prompts(
    trainer: SamplingTrainer, dataset: Any, prefix: str, also: dict[str, float] | None = None
) -> dict[str, float]:
    """
    Scores every prompt of `dataset` `num_generations_eval` times, whatever the number of ranks, with the weights that
    rewards have in the end.

    The seed of a sample is a function of the run's seed, the row and the member, so every evaluation of a run starts
    from the same noise. Of each media size, ranks take equal shares; a rank that would have fewer repeats a sample, so
    that collective network calls stay in step, and the repetition is dropped before anything is averaged. Where a
    reward compares the samples of a prompt, they are all of one rank.

    Args:
        trainer ([`SamplingTrainer`]):
            Samples and scores.
        dataset (`Dataset` or `PreferenceRows`):
            Rows with a `prompt`.
        prefix (`str`):
            Of the metrics.
        also (`dict[str, float]`, *optional*):
            Metrics of this set that were measured otherwise.

    Returns:
        `dict[str, float]`: metrics with `prefix`, those of `also` first.
    """
    args, started = trainer.args, time.perf_counter()
    parts = _parts(trainer, numbered(dataset, "eval_dataset"))
    # Every rank knows its own media only; the first one's are pictured, and they begin with the first samples.
    mine = {p: request for part in parts for p, request in zip(part.positions, part.requests, strict=False)}
    wanted = sorted(mine)[: args.num_samples_to_save if args.process_index == 0 else 0]
    scored = _score(trainer, parts, prefix, set(wanted))
    gathered = sorted(gather_list(scored.rows))
    rewards = torch.tensor([values for _, values, _ in gathered], dtype=torch.float32)  # (N, F)
    failed = torch.tensor([failures for _, _, failures in gathered], dtype=torch.bool)
    total = torch.full((len(rewards),), math.nan)
    if trainer.rewards is not None:
        total = trainer.rewards.total(rewards, trainer.rewards.final_weights)
    metrics = dict(also or {})
    if trainer.rewards is not None:
        metrics |= _metrics(trainer.rewards.names, rewards, failed, total, prefix)
    metrics[f"{prefix}_runtime"] = round(time.perf_counter() - started, 3)
    samples = [
        Sample.of(mine[p].row["prompt"], scored.media[p], float(total[p]), scored.captions.get(p)) for p in wanted
    ]
    trainer.report.record_evaluation(
        EvaluationRecord(step=trainer.state.global_step, name=prefix, metrics=metrics, samples=samples)
    )
    return metrics


def _parts(trainer: SamplingTrainer, rows: Rows) -> list[_Part]:
    """This rank's share of the samples of each size; pictures are of different prompts first."""
    args, members = trainer.args, trainer.args.num_generations_eval
    sizes = sizes_of(trainer.flow_model, rows, args.media_size)
    together = trainer.rewards is not None and bool(trainer.rewards.groupwise)
    read: dict[int, dict[str, Any]] = {}
    parts = []
    for size in dict.fromkeys(sizes):
        indices = [index for index, its in enumerate(sizes) if its == size]
        if together:  # the samples of a prompt are a unit
            units = [[(index, member) for member in range(members)] for index in indices]
        else:
            units = [[(index, member)] for member in range(members) for index in indices]
        share = math.ceil(len(units) / args.world_size)
        mine = units[args.process_index * share :][:share]
        requests = []
        for number, unit in enumerate(mine + units[-1:] * (share - len(mine))):
            for index, member in unit:
                if index not in read:
                    read[index] = _row(trainer, rows, index)
                # A repeated group is another one.
                group = index if number < len(mine) else len(rows) + number
                seed = stable_seed(args.seed, "eval", index, member)
                requests.append(SampleRequest(read[index], group, member, seed))
        positions = [member * len(rows) + index for unit in mine for index, member in unit]
        parts.append(_Part(size, requests, positions))
    return parts


def _row(trainer: SamplingTrainer, rows: Rows, index: int) -> dict[str, Any]:
    """A row whose condition images can be read."""
    row = rows[index]
    if trainer.flow_model.num_images[1]:
        with naming(rows.where(index)):
            trainer.flow_model.images(row)
    return row


def _score(trainer: SamplingTrainer, parts: list[_Part], prefix: str, wanted: set[int]) -> _Scored:
    """Scores this rank's samples, of which those at the positions `wanted` are pictured."""
    args = trainer.args
    params = SamplingParams(
        num_inference_steps=args.num_inference_steps_eval,
        guidance_scale=trainer.guidance_scale,
        keep_clean=trainer.rewards is not None and trainer.rewards.needs_latents,
    )
    media: dict[int, Any] = {}
    done, scoring, count = 0, trainer.new_scoring(args.num_generations_eval), sum(len(part.requests) for part in parts)
    places = [place for part in parts for place in _filled(part)]
    for part in parts:
        for batch in trainer.engine.generate(part.requests, replace(params, size=part.size)):
            scoring.submit(batch)
            for place, trajectory in zip(places[done:], batch, strict=False):
                if place in wanted:
                    media[place] = trajectory.media
            done += len(batch)
            trainer.progress.phase(f"{prefix} {done}/{count}")
    scored = scoring.collect()
    rows = zip(places, scored.rewards.tolist(), scored.failed.tolist(), strict=True)
    captions = {
        place: caption({column: values[i] for column, values in scored.extras.items()})
        for i, place in enumerate(places)
        if place in wanted
    }
    return _Scored([(place, *row) for place, *row in rows if place is not None], media, captions)


def _filled(part: _Part) -> list[int | None]:
    """Position of each request, `None` for those that only fill the share."""
    return [*part.positions, *[None] * (len(part.requests) - len(part.positions))]


def _metrics(
    names: list[str], rewards: torch.Tensor, failed: torch.Tensor, total: torch.Tensor, prefix: str
) -> dict[str, float]:
    """Means over the scores that are there; a missing score lowers the count, not the mean."""
    metrics = {f"{prefix}_reward": _mean(total), f"{prefix}_reward_std": _std(total)}
    for i, name in enumerate(names):
        metrics[f"{prefix}_rewards/{name}/mean"] = _mean(rewards[:, i])
        if failed[:, i].any():
            metrics[f"{prefix}_rewards/{name}/failed"] = float(failed[:, i].sum())
    missing = int(total.isnan().sum())
    if missing:
        metrics[f"{prefix}_rewards/missing"] = float(missing)
    return metrics


def _mean(values: torch.Tensor) -> float:
    return float(values.nanmean())


def _std(values: torch.Tensor) -> float:
    values = values[~values.isnan()]
    return float(values.std(correction=0)) if len(values) else float("nan")

# SPDX-License-Identifier: Apache-2.0
"""Evaluation: ODE samples of fixed prompts with fixed seeds, scored by the same rewards."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from omnitrl.report import EvaluationRecord, Sample
from omnitrl.rollout import SampleRequest, SamplingParams, stable_seed
from omnitrl.trainer.metrics import gather_list


if TYPE_CHECKING:
    from omnitrl.trainer.sampling_trainer import SamplingTrainer


def evaluate_prompts(
    trainer: SamplingTrainer, dataset: Any, prefix: str, also: dict[str, float] | None = None
) -> dict[str, float]:
    """
    Scores every prompt of `dataset` `num_generations_eval` times, whatever the number of ranks.

    The seed of a sample is a function of the run's seed, the row and the member, so every evaluation of a run starts
    from the same noise. Ranks take equal shares; a rank that would have fewer repeats a sample, so that collective
    network calls stay in step, and the repetition is dropped before anything is averaged.

    Args:
        trainer ([`SamplingTrainer`]):
            Samples and scores.
        dataset (`Iterable[dict]`):
            Rows with a `prompt`.
        prefix (`str`):
            Of the metrics.
        also (`dict[str, float]`, *optional*):
            Metrics of this set that were measured otherwise.

    Returns:
        `dict[str, float]`: metrics with `prefix`, those of `also` first.
    """
    args, started = trainer.args, time.perf_counter()
    members = args.num_generations_eval
    requests = [
        SampleRequest(row, i, m, stable_seed(args.seed, "eval", i, m))
        for i, row in enumerate(dataset)
        for m in range(members)
    ]
    if members > 1:  # pictures are of different prompts first
        requests.sort(key=lambda request: request.member)
    share = math.ceil(len(requests) / args.world_size)
    first = args.process_index * share
    mine = requests[first : first + share]
    padded = mine + [requests[-1]] * (share - len(mine))
    rows, shown = _score(trainer, padded, prefix, wanted=args.num_samples_to_save if first == 0 else 0)
    gathered = gather_list(rows[: len(mine)])
    rewards = torch.tensor(gathered, dtype=torch.float32)  # (N, F)
    total = torch.full((len(rewards),), math.nan) if trainer.rewards is None else trainer.rewards.total(rewards)
    metrics = dict(also or {})
    if trainer.rewards is not None:
        metrics |= _metrics(trainer.rewards.names, rewards, total, prefix)
    metrics[f"{prefix}_runtime"] = round(time.perf_counter() - started, 3)
    samples = [
        Sample.of(request.row["prompt"], media, float(reward))
        for request, media, reward in zip(requests, shown, total, strict=False)
    ]
    trainer.report.record_evaluation(
        EvaluationRecord(step=trainer.state.global_step, name=prefix, metrics=metrics, samples=samples)
    )
    return metrics


def _score(
    trainer: SamplingTrainer, requests: list[SampleRequest], prefix: str, wanted: int
) -> tuple[list[list[float]], list[Any]]:
    """Reward rows of `requests`, and the media of the first `wanted`."""
    args = trainer.args
    params = SamplingParams(
        num_inference_steps=args.num_inference_steps_eval,
        guidance_scale=trainer.guidance_scale,
        size=trainer.size,
    )
    media: list[Any] = []
    done = 0
    scoring = trainer.new_scoring()
    for batch in trainer.engine.generate(requests, params):
        scoring.submit(batch)
        media += [t.media for t in batch[: max(wanted - len(media), 0)]]
        done += len(batch)
        trainer.progress.phase(f"{prefix} {done}/{len(requests)}")
    return scoring.collect().rewards.tolist(), media


def _metrics(names: list[str], rewards: torch.Tensor, total: torch.Tensor, prefix: str) -> dict[str, float]:
    """Means over the scores that are there; a missing score lowers the count, not the mean."""
    metrics = {f"{prefix}_reward": _mean(total), f"{prefix}_reward_std": _std(total)}
    for i, name in enumerate(names):
        metrics[f"{prefix}_rewards/{name}/mean"] = _mean(rewards[:, i])
    missing = int(total.isnan().sum())
    if missing:
        metrics[f"{prefix}_rewards/missing"] = float(missing)
    return metrics


def _mean(values: torch.Tensor) -> float:
    return float(values.nanmean())


def _std(values: torch.Tensor) -> float:
    values = values[~values.isnan()]
    return float(values.std(correction=0)) if len(values) else float("nan")

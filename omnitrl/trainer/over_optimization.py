# SPDX-License-Identifier: Apache-2.0
"""A callback that sounds an alarm when the reward is bought at the expense of the samples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from omnitrl.errors import InputError, did_you_mean
from omnitrl.rollout import Trajectory
from omnitrl.trainer.alarms import Figure, Limit, Rule, figure, mean_of
from omnitrl.trainer.checkpoints import checkpoint_name
from omnitrl.trainer.metrics import gather_list
from omnitrl.trainer.sample_statistics import (
    DIVERSITY,
    STATISTICS,
    Embedding,
    SampleStatistics,
    group_distances,
    small_pictures,
)


logger = logging.getLogger(__name__)

LimitLike = float | tuple[float | None, float | None] | None
"""How far a figure may fall, or how far it may fall and rise, as shares of it; `None` for any distance."""

ACTIONS = ("warn", "keep_best", "stop")
DEFAULT_STATISTICS: dict[str, LimitLike] = {
    "entropy": 0.3,
    "saturation": (0.5, 1.0),
    "jpeg_kilobytes": (0.5, 1.0),
    DIVERSITY: 0.5,
}
"""What is watched by default, with the fall that is allowed, or fall and rise."""

_HELD_OUT_FALL = 0.1
_REWARD = "the reward"  # with a space, which no name of a reward has


class OverOptimizationCallback(TrainerCallback):
    """
    Watches what the reward does not see, and warns, keeps the best checkpoint, or stops.

    A policy that is trained long enough finds what a reward overlooks: pictures become flat, oversaturated or all
    alike, while the reward rises. Three kinds of figures tell of it:

    - statistics of the pictures (of videos, of the middle frame) and the diversity, which is how far the members of a
      group are apart: `patience` rollouts in a row beyond their limits, against the mean of the first `baseline`
      rollouts;
    - `held_out` rewards, which are not trained on: `patience` rollouts in a row below their best mean of `baseline`
      rollouts in a row, or `patience` evaluations in a row below the best one;
    - the reward itself: one rollout below the one before.

    Moves within two standard errors do not count. Each figure sounds one alarm until it has recovered. Statistics are
    computed in a thread beside the rollouts and logged as `watch/<name>`, and `watch/alarms` is the number of figures
    that are out of bounds. Media without a picture (sounds, latents) have no statistics; their rewards are watched.

    Args:
        action (`str`, *optional*, defaults to `"warn"`):
            What an alarm does. `"warn"` says so. `"keep_best"` also spares the best checkpoint when old ones are
            removed, and at the end of a run with an alarm brings its weights back. `"stop"` does the same and ends the
            training at this step, which it saves.
        statistics (`dict[str, float | tuple]`, *optional*):
            Statistics with their limits: a number is the share by which they may fall, a pair bounds fall and rise,
            with `None` for no bound. There are `entropy`, `saturation`, `jpeg_kilobytes`, `colourfulness`,
            `sharpness`, `brightness`, `contrast` and `diversity`. `{}` for none. By default
            `{"entropy": 0.3, "saturation": (0.5, 1.0), "jpeg_kilobytes": (0.5, 1.0), "diversity": 0.5}`.
        held_out (`str`, `list[str]` or `dict[str, float | tuple]`, *optional*):
            Rewards to be held against the trained one, by the names that they are logged by, such as one of weight 0,
            and metrics of evaluations, such as `"eval_reward"`; with their limits, which are 0.1 by default.
        reward_fall (`float`, *optional*, defaults to 0.5):
            Share of the reward that may be lost from one rollout to the next; `None` for any.
        baseline (`int`, *optional*, defaults to 5):
            Rollouts that a figure is compared with.
        patience (`int`, *optional*, defaults to 3):
            Rollouts, or evaluations, in a row that must be out of bounds.
        embed (`Callable`, *optional*):
            For the diversity: from a list of media to one vector (D,) each, or `None`. By default pictures of 8×8
            pixels, whose root mean square difference is the diversity, from 0 to 1.

    Attributes:
        alarms (`list[tuple[int, str]]`): step and sentence of each alarm so far.

    Raises:
        [`~omnitrl.errors.InputError`]: a name or limit is unknown; when training begins, if a name is no reward, or
        the best checkpoint could not be kept.

    Example:

    ```python
    >>> callback = OverOptimizationCallback(action="stop", held_out="PickScoreReward")
    >>> trainer = FlowGRPOTrainer(
    ...     model="stabilityai/stable-diffusion-3.5-medium",
    ...     reward_funcs=["hpsv2", "pickscore"],
    ...     args=FlowGRPOConfig(reward_weights=[1.0, 0.0], save_steps=20, save_total_limit=3),
    ...     train_dataset=load_prompts("prompts.txt"),
    ...     callbacks=[callback],
    ... )
    ```
    """

    def __init__(
        self,
        action: str = "warn",
        statistics: Mapping[str, LimitLike] | None = None,
        held_out: str | Sequence[str] | Mapping[str, LimitLike] | None = None,
        reward_fall: float | None = 0.5,
        baseline: int = 5,
        patience: int = 3,
        embed: Embedding | None = None,
    ) -> None:
        statistics = DEFAULT_STATISTICS if statistics is None else statistics
        _check_options(action, statistics, baseline, patience)
        self.action = action
        self.embed = embed if embed is not None else small_pictures
        self.statistics = {name: Limit.of(name, limit) for name, limit in statistics.items()}
        self.held_out = {name: Limit.of(name, limit) for name, limit in _with_limits(held_out).items()}
        rules = [Rule(f"watch/{name}", limit, "first", baseline, patience) for name, limit in self.statistics.items()]
        for name, limit in self.held_out.items():
            rules.append(Rule(name, limit, "best", 1 if _is_evaluated(name) else baseline, patience))
        if reward_fall is not None:
            rules.append(Rule(_REWARD, Limit.of("reward_fall", reward_fall), "last"))
        self._rules = {rule.name: rule for rule in rules}
        self._baseline = baseline
        self._keeps_best = self._running = self._stopping = self._from_log = False
        self._folder = Path()
        self._unrated: int | None = None  # step of a checkpoint whose weights have not made a rollout yet
        self._metrics: set[str] = set()  # of evaluations
        self._looker: SampleStatistics | None = None
        self._history: dict[str, list[Figure]] = {}
        self.alarms: list[tuple[int, str]] = []

    # What the trainer calls

    def begin(
        self, args: TrainingArguments, state: TrainerState, rewards: Sequence[str], makes_rollouts: bool, scored: bool
    ) -> None:
        """
        Forgets an earlier run and checks what is asked for.

        Args:
            args (`TrainingArguments`), state (`TrainerState`):
                Of the trainer.
            rewards (`list[str]`):
                Names of the rewards that rollouts are scored by.
            makes_rollouts (`bool`):
                Whether the trainer makes samples in training.
            scored (`bool`):
                Whether they are scored; otherwise the reward is taken from the log.
        """
        self._check(args, rewards if scored else [], makes_rollouts)
        chosen = args.load_best_model_at_end or args.metric_for_best_model is not None
        self._keeps_best = self.action != "warn" and args.save_strategy != "no" and not chosen
        self._running, self._stopping, self._from_log = True, False, not scored
        self._history, self.alarms, self._metrics = {}, [], set()
        self._folder = Path(str(args.output_dir))
        resumed = state.global_step > 0 and (self._folder / checkpoint_name(state.global_step)).is_dir()
        self._unrated = state.global_step if resumed else None
        if self._looker is not None:
            self._looker.close()
        self._looker = None
        if self.statistics:
            names = [name for name in self.statistics if name != DIVERSITY]
            self._looker = SampleStatistics(names, self.embed if DIVERSITY in self.statistics else None)

    def discard(self) -> None:
        """Forgets the samples of a rollout that was broken off."""
        if self._looker is not None:
            self._looker.discard()

    def submit(self, batch: Sequence[Trajectory]) -> None:
        """Starts on samples that have just been decoded."""
        if self._looker is not None:
            self._looker.submit(batch)

    def observe(
        self, state: TrainerState, groups: Tensor, rewards: Mapping[str, Tensor], total: Tensor | None
    ) -> dict[str, float]:
        """
        Takes in a rollout; every rank calls it, and all come to the same.

        Args:
            state (`TrainerState`):
                Of the trainer, where the best checkpoint is noted.
            groups (`Tensor`):
                (N,) group of each sample of all ranks.
            rewards (`dict[str, Tensor]`):
                (N,) of each reward, NaN where missing.
            total (`Tensor`, *optional*):
                (N,) their weighted sum; `None` where samples are not scored.

        Returns:
            `dict[str, float]`: what is logged.
        """
        step = state.global_step + 1
        seen = {name: rewards[name] for name in self.held_out if name in rewards}
        if total is not None:
            seen[_REWARD] = total
        looked = self._statistics(groups)
        figures = {name: figure(step, values) for name, values in {**looked, **seen}.items()}
        self._take_in(figures, state)
        if total is not None:
            self._rate(step, state)
        logged = {name: now.mean for name in looked if (now := figures[name]) is not None}
        return {**logged, "watch/alarms": float(len(self._broken()))}

    def state_dict(self, step: int) -> dict[str, Any]:
        """What has been seen up to an optimizer step; a rollout after it is made again by a resumed run."""
        kept = {name: [tuple(one) for one in found if one.step <= step] for name, found in self._history.items()}
        return {"history": kept, "alarms": [alarm for alarm in self.alarms if alarm[0] <= step]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._history = {name: [Figure(*one) for one in found] for name, found in state["history"].items()}
        self.alarms = [(step, sentence) for step, sentence in state["alarms"]]

    @property
    def looks_at_samples(self) -> bool:
        """Whether samples must be decoded."""
        return bool(self.statistics)

    @property
    def wants_best(self) -> bool:
        """Whether the weights of the best checkpoint are to come back at the end of the run."""
        return self._keeps_best and bool(self.alarms)

    # Events

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for name in filter(_is_evaluated, self.held_out):
            if self._metrics and name not in self._metrics:
                known = ", ".join(sorted(self._metrics))
                raise InputError(
                    f"held_out={name!r} is no metric of the evaluations, which have {known}."
                    f"{did_you_mean(name, self._metrics)}"
                )
        self._act(args, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self._running and self._from_log and logs and "loss" in logs and "reward" in logs:
            self._take_in({_REWARD: Figure(state.global_step, float(logs["reward"]), 0.0)}, state)
            self._rate(state.global_step, state)
            self._act(args, control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not self._running or not metrics:
            return
        self._metrics |= metrics.keys()
        for name in [name for name in self.held_out if name in metrics]:
            self._take_in({name: figure(state.global_step, torch.tensor([metrics[name]]))}, state)
        self._act(args, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._unrated = state.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._running = False
        if self._looker is not None:
            self._looker.close()
            self._looker = None

    # Within

    def _check(self, args: TrainingArguments, rewards: Sequence[str], makes_rollouts: bool) -> None:
        for name in self.held_out:
            if _is_evaluated(name) and args.eval_strategy == "no":
                raise InputError(
                    f"held_out={name!r} is a metric of evaluations, but there are none: set eval_strategy='steps', or "
                    "hold out a reward of weight 0."
                )
            if not _is_evaluated(name) and name not in rewards:
                raise InputError(
                    f"held_out={name!r} is no reward that rollouts are scored by "
                    f"({', '.join(rewards) or 'there are none'}), and no metric of evaluations, such as 'eval_reward'."
                    f"{did_you_mean(name, rewards)}"
                )
        if not makes_rollouts and not self.held_out:
            raise InputError(
                "OverOptimizationCallback has nothing to watch, since this trainer makes no rollouts: give it a "
                "metric of evaluations, such as held_out='eval_reward'."
            )
        if self.action == "keep_best":
            chosen = args.load_best_model_at_end or args.metric_for_best_model is not None
            if args.save_strategy == "no" or chosen:
                raise InputError(
                    "action='keep_best' keeps one of the run's checkpoints by its rollouts, so it needs "
                    "save_strategy='steps' and neither load_best_model_at_end nor metric_for_best_model: set these, "
                    "or action='warn'."
                )
        if self.action != "warn" and args.save_total_limit == 1:
            raise InputError(
                f"action={self.action!r} keeps the best checkpoint beside the last one, which is more than "
                "save_total_limit=1: use save_total_limit=2."
            )

    def _statistics(self, groups: Tensor) -> dict[str, Tensor]:
        """Statistics (N,) of the samples of all ranks, and the diversity (G,) of their groups."""
        if self._looker is None:
            return {}
        looks = gather_list(self._looker.collect())
        if not looks:
            return {}
        columns = torch.tensor([look.values for look in looks], dtype=torch.float64)  # (N, S)
        found = {f"watch/{name}": column for name, column in zip(self._looker.names, columns.unbind(1), strict=True)}
        if DIVERSITY in self.statistics:
            found[f"watch/{DIVERSITY}"] = group_distances([look.embedding for look in looks], groups)
        return found

    def _take_in(self, figures: Mapping[str, Figure | None], state: TrainerState) -> None:
        """Adds figures to what has been seen, and sounds the alarms of those that have moved too far."""
        for name, now in figures.items():
            if now is not None:
                self._history.setdefault(name, []).append(now)
        for name, now in figures.items():
            rule = self._rules.get(name)
            if now is not None and rule is not None and rule.broken_for(self._history[name]) == rule.patience:
                self._sound(rule, state)

    def _sound(self, rule: Rule, state: TrainerState) -> None:
        history = self._history[rule.name]
        sentence = f"{rule.describe(history)}{self._of_the_reward(rule.name)}."
        self.alarms.append((history[-1].step, sentence))
        self._stopping = self._stopping or self.action == "stop"
        if state.is_world_process_zero:
            logger.warning("%s %s", sentence[0].upper() + sentence[1:], self._what_now(state))

    def _of_the_reward(self, name: str) -> str:
        rewards = self._history.get(_REWARD, [])
        if name == _REWARD or not rewards:
            return ""
        start = mean_of(rewards[: self._baseline])
        return f", while the reward has gone from {start.mean:.4g} to {rewards[-1].mean:.4g}"

    def _what_now(self, state: TrainerState) -> str:
        """What the alarm does, in sentences."""
        stops = "Training stops here. " if self.action == "stop" else ""
        if not self._keeps_best:
            return f"{stops}Look at the samples: what the reward does not see may have been given up for it."
        best = state.best_model_checkpoint
        if best is None:
            return f"{stops}No checkpoint of a healthy rollout was written before: save_steps says how often one is."
        return f"{stops}The best checkpoint before is {best}, whose weights come back at the end."

    def _broken(self) -> list[str]:
        """Names of the figures that are out of bounds now."""
        rules, history = self._rules, self._history
        return [name for name in history if name in rules and rules[name].is_broken(history[name])]

    def _rate(self, step: int, state: TrainerState) -> None:
        """Rates the last checkpoint by what its weights have just made in the course of a step."""
        checkpoint, self._unrated = self._unrated, None
        rated = [*(name for name in self.held_out if not _is_evaluated(name)), _REWARD][0]
        history = [one for one in self._history.get(rated, []) if one.step == step]
        if not self._keeps_best or checkpoint is None or not history or self._broken():
            return
        score = history[-1].mean
        if state.best_metric is None or score > state.best_metric:
            state.best_metric, state.best_global_step = score, checkpoint
            state.best_model_checkpoint = str(self._folder / checkpoint_name(checkpoint))

    def _act(self, args: TrainingArguments, control: TrainerControl) -> None:
        if self._stopping:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != "no"


def find_watch(callbacks: Iterable[TrainerCallback]) -> OverOptimizationCallback | None:
    """
    The one among a trainer's callbacks, if there is one.

    Raises:
        [`~omnitrl.errors.InputError`]: there are several, which would log under the same names.
    """
    found = [callback for callback in callbacks if isinstance(callback, OverOptimizationCallback)]
    if len(found) > 1:
        raise InputError(f"There are {len(found)} OverOptimizationCallbacks: give one all that is to be watched.")
    return found[0] if found else None


def _is_evaluated(name: str) -> bool:
    """Whether it is a metric of evaluations rather than a reward."""
    return name.startswith("eval_")


def _with_limits(held_out: str | Sequence[str] | Mapping[str, LimitLike] | None) -> dict[str, LimitLike]:
    if isinstance(held_out, Mapping):
        return dict(held_out)
    names = [held_out] if isinstance(held_out, str) else list(held_out or [])
    return dict.fromkeys(names, _HELD_OUT_FALL)


def _check_options(action: str, statistics: Mapping[str, LimitLike], baseline: int, patience: int) -> None:
    if action not in ACTIONS:
        raise InputError(f"action={action!r} is unknown: use {', '.join(map(repr, ACTIONS))}.")
    known = [*STATISTICS, DIVERSITY]
    unknown = [name for name in statistics if name not in known]
    if unknown:
        raise InputError(
            f"statistics has {unknown[0]!r}, but there are {', '.join(known)}.{did_you_mean(unknown[0], known)}"
        )
    for name, value in {"baseline": baseline, "patience": patience}.items():
        if value < 1:
            raise InputError(f"{name}={value} must be at least 1, for example 3.")

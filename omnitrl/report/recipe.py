# SPDX-License-Identifier: Apache-2.0
"""Which settings of a run are worth a line, and which must not be shown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


# In reading order. A trainer has some of them; those that it lacks, or leaves at None, are not shown.
RECIPE_KEYS = (
    "num_generations",
    "num_inference_steps",
    "num_inference_steps_eval",
    "height",
    "width",
    "num_frames",
    "audio_length",
    "guidance_scale",
    "guidance_scale_2",
    "guidance_scale_train",
    "sde_type",
    "noise_level",
    "sde_window_size",
    "sde_window_range",
    "sde_window_strategy",
    "timestep_fraction",
    "same_init_noise",
    "beta",
    "kl_form",
    "epsilon",
    "epsilon_high",
    "advantage_clip",
    "scale_rewards",
    "reward_weights",
    "multi_objective_aggregation",
    "num_iterations",
    "steps_per_generation",
    "generation_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "max_grad_norm",
    "max_steps",
    "ema_decay",
    "old_policy_decay",
    "bf16",
    "seed",
)

_SECRET = re.compile(r"(token|api_?key|password|secret)$", re.IGNORECASE)


def recipe_rows(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The settings that make the result, as (name, value) in reading order."""
    return [(key, show_value(key, config[key])) for key in RECIPE_KEYS if config.get(key) is not None]


def config_rows(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every setting as (name, value), by name; the values of tokens, keys and passwords are hidden."""
    return [(key, show_value(key, config[key])) for key in sorted(config)]


def show_value(key: str, value: Any) -> str:
    """A setting as text; `"(hidden)"` where the name says that it is a secret."""
    if isinstance(value, str):
        return "(hidden)" if value and _SECRET.search(key) else value
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return str(value)

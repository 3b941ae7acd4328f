# SPDX-License-Identifier: Apache-2.0
"""From a name or a dotted path to a reward function."""

import difflib
import importlib
import inspect
from pathlib import Path
from typing import Any

from omnitrl.errors import InputError

from .contract import RewardFunc


BUILTIN_REWARDS = {
    "aesthetic": "omnitrl.rewards.learned.aesthetic:aesthetic_reward",
    "aspect_ratio": "omnitrl.rewards.rules:AspectRatioReward",
    "audio_answer": "omnitrl.rewards.answers:audio_answer_reward",
    "brightness": "omnitrl.rewards.image:brightness_reward",
    "clap": "omnitrl.rewards.learned.clap:clap_reward",
    "clip": "omnitrl.rewards.learned.clip:clip_reward",
    "colourfulness": "omnitrl.rewards.image:colourfulness_reward",
    "contrast": "omnitrl.rewards.image:contrast_reward",
    "duration": "omnitrl.rewards.audio:DurationReward",
    "entropy": "omnitrl.rewards.image:entropy_reward",
    "exact_answer": "omnitrl.rewards.answers:exact_answer_reward",
    "flicker": "omnitrl.rewards.video:flicker_reward",
    "format": "omnitrl.rewards.answers:format_reward",
    "hpsv2": "omnitrl.rewards.learned.hps:hpsv2_reward",
    "hpsv3": "omnitrl.rewards.learned.hpsv3:hpsv3_reward",
    "imagereward": "omnitrl.rewards.learned.image_reward:imagereward_reward",
    "jpeg_compressibility": "omnitrl.rewards.image:jpeg_compressibility_reward",
    "jpeg_incompressibility": "omnitrl.rewards.image:jpeg_incompressibility_reward",
    "judge_ocr": "omnitrl.rewards.judge.builtin:judge_ocr",
    "judge_pairwise": "omnitrl.rewards.judge.builtin:judge_pairwise",
    "judge_questions": "omnitrl.rewards.judge.builtin:judge_questions",
    "judge_score": "omnitrl.rewards.judge.builtin:judge_score",
    "judge_yes_no": "omnitrl.rewards.judge.builtin:judge_yes_no",
    "latent_scale": "omnitrl.rewards.latents:latent_scale_reward",
    "loudness": "omnitrl.rewards.audio:LoudnessReward",
    "math_answer": "omnitrl.rewards.answers:math_answer_reward",
    "motion": "omnitrl.rewards.video:motion_reward",
    "moving": "omnitrl.rewards.video:MovingReward",
    "multiple_choice": "omnitrl.rewards.answers:multiple_choice_reward",
    "ocr": "omnitrl.rewards.ocr:ocr_reward",
    "ocr_exact": "omnitrl.rewards.ocr:ocr_exact_reward",
    "pickscore": "omnitrl.rewards.learned.clip:pickscore_reward",
    "saturation": "omnitrl.rewards.image:saturation_reward",
    "sharpness": "omnitrl.rewards.image:sharpness_reward",
    "silence": "omnitrl.rewards.audio:SilenceReward",
    "size": "omnitrl.rewards.rules:SizeReward",
    "text_length": "omnitrl.rewards.rules:TextLengthReward",
    "think_format": "omnitrl.rewards.answers:think_format_reward",
}
"""Names of the built-in rewards and where they live. A class stands for an instance with its defaults."""


def get_reward(spec: "str | RewardFunc") -> RewardFunc:
    """
    Resolves what a user may give as a reward.

    Args:
        spec (`str` or `Callable`):
            A callable is returned as it is. A string is the name of a built-in reward (see [`BUILTIN_REWARDS`]), a
            dotted path, `package.module:function` or `package.module.function`, the Hub id of a reward model (see
            [`reward_from_hub`]), or the URL of a reward server, which must be running (see [`RemoteReward`]).

    Returns:
        `Callable`: the reward.

    Raises:
        `ValueError`: for a name or path that leads nowhere.
        `TypeError`: for something that cannot be called, or a class where an instance of it is meant.

    Example:

    ```python
    >>> from omnitrl.rewards import get_reward

    >>> get_reward("ocr").__name__
    'ocr_reward'
    ```
    """
    found: Any = _from_string(spec) if isinstance(spec, str) else spec
    if inspect.isclass(found):
        raise TypeError(f"the reward {found.__name__} is a class: pass an instance of it, {found.__name__}().")
    if not callable(found):
        raise TypeError(
            f"a reward must be callable or a string, got {spec!r:.80} of type {type(found).__name__}: pass for "
            f"example a function `def reward(completions, **kwargs)` or the name 'ocr'."
        )
    return found


def _from_string(spec: str) -> Any:
    if spec.startswith(("http://", "https://")):
        from .remote.client import RemoteReward

        return RemoteReward(spec)
    if spec in BUILTIN_REWARDS:
        found = _import(BUILTIN_REWARDS[spec])
        return found() if inspect.isclass(found) else found
    if "/" in spec and ":" not in spec:
        from .hub import reward_from_hub

        return reward_from_hub(spec)
    if ":" in spec or "." in spec:
        return _import(spec)
    near = difflib.get_close_matches(spec.lower(), BUILTIN_REWARDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(
        f"unknown reward {spec!r}: {hint}Built-in rewards are {', '.join(sorted(BUILTIN_REWARDS))}; for your own, "
        f"give the path 'package.module:function'."
    )


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise InputError(f"reward {path!r} is not a path of the form 'package.module:function'.")
    if "/" in module_name or module_name.endswith(".py"):
        module = Path(module_name).name.removesuffix(".py")
        raise InputError(
            f"reward {path!r} names a file, and modules are named without folder and ending: give "
            f"'{module}:{attribute}', with the folder on PYTHONPATH."
        )
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but misses a package of its own has its own, better message.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        top = module_name.partition(".")[0]
        here = Path(f"{top}.py").exists() or Path(top).is_dir()
        hint = "it is in the current folder, so run with PYTHONPATH=." if here else "is it installed or on PYTHONPATH?"
        raise InputError(f"reward {path!r}: there is no module {error.name!r} to import ({hint})") from error
    for part in attribute.split("."):
        if part not in dir(found):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f": did you mean {near[0]!r}?" if near else "."
            raise InputError(f"reward {path!r}: {module_name!r} has no {part!r}{hint}")
        found = getattr(found, part)
    return found

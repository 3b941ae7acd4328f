# SPDX-License-Identifier: Apache-2.0
"""What the Hub id of a model, or its folder, means where a reward is expected."""

import json
from pathlib import Path
from typing import Any

from omnitrl.errors import InputError

from .contract import RewardFunc


# Repositories that do not say themselves what they are, in lower case as the Hub compares them.
_KNOWN = {
    "yuvalkirstain/pickscore_v1": "pickscore",
    "xswu/hpsv2": "hpsv2",
    "mizzenai/hpsv3": "hpsv3",
    "thudm/imagereward": "imagereward",
    "zai-org/imagereward": "imagereward",
    "trl-lib/ddpo-aesthetic-predictor": "aesthetic",
}
_MODEL_TYPES = {"clip": "CLIPReward", "clap": "CLAPReward"}


def reward_from_hub(model_id: str) -> RewardFunc:
    """
    The reward that a model on the Hub, or in a folder, is.

    The repositories of the built-in rewards are known; of others, `config.json` is read, and a CLIP becomes a
    [`CLIPReward`], a CLAP a [`CLAPReward`]. No weights are read yet.

    Args:
        model_id (`str`):
            Hub id such as `"yuvalkirstain/PickScore_v1"`, or a folder with a `config.json`.

    Returns:
        `Callable`: the reward.

    Raises:
        [`~omnitrl.errors.InputError`]: there is no such model, or it is none that makes a reward by itself.

    Example:

    ```python
    >>> from omnitrl.rewards import reward_from_hub

    >>> type(reward_from_hub("yuvalkirstain/PickScore_v1")).__name__
    'PickScoreReward'
    ```
    """
    from . import registry  # which asks this module in turn

    if model_id.lower() in _KNOWN and not Path(model_id).is_dir():
        return registry.get_reward(_KNOWN[model_id.lower()])
    kind = _config(model_id).get("model_type")
    if kind not in _MODEL_TYPES:
        raise InputError(
            f"{model_id!r} is a model of type {kind!r}, which does not make a reward by itself. Models of the types "
            f"{', '.join(_MODEL_TYPES)} do, and {', '.join(sorted(_KNOWN))}; for a vision-language model as a judge, "
            f"serve it and use VLMJudge, or write a function that calls it."
        )
    from omnitrl import rewards

    reward_class: Any = getattr(rewards, _MODEL_TYPES[kind])
    reward: RewardFunc = reward_class(model_id)
    return reward


def _config(model_id: str) -> dict[str, Any]:
    path = Path(model_id) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(model_id, "config.json"))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(
                f"reward {model_id!r}: there is no config.json of such a model to read ({reason[0]}). Give a Hub id "
                f"such as 'openai/clip-vit-large-patch14', a folder, the name of a built-in reward, or the path "
                f"'package.module:function'."
            ) from error
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return config

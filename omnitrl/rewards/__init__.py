# SPDX-License-Identifier: Apache-2.0
"""Rewards: callables from media to numbers, the runner that calls them, and the built-in ones.

A reward is called with keyword arguments only:

| keyword | value |
|---|---|
| `prompts` | `list[str]`, one per row |
| `completions` | `list` of what was generated: PIL images, `omnitrl.media.Video` or `Audio`, or latents |
| each other dataset column | `list`, one value per row |
| `trainer_state` | `transformers.TrainerState` or `None` |
| `log_metric(name, value)` | records a number; the mean over the calls is logged |
| `log_extra(column, values)` | records one value per row, which is shown beside the sample |

It returns one `float` or `None` per row, as a list, a 1-D tensor or a 1-D array. `None` means that the reward does not
apply to the row. An exception, a time-out, NaN or infinity means that it failed. Both make the reward *missing* for
the row; neither is ever taken for 0.

A reward is a function, an `async` function, an object with `__call__` (or `async __call__`), an `nn.Module`, the name
of a built-in reward, a dotted path `package.module:function`, the Hub id of a reward model, or the URL of a reward
server. It is given those of the keywords above that its signature accepts: all of them if it takes `**kwargs`. It runs
in a background thread, without gradients. Its [`RewardTraits`] say whether it wants to be called otherwise: for
certain media, with whole groups, in batches, in a process of its own.

Example:

```python
def red_share(completions, **kwargs):
    return [np.asarray(image)[..., 0].mean() / 255 for image in completions]
```
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .answers import (
        AnswerReward,
        FormatReward,
        audio_answer_reward,
        exact_answer_reward,
        format_reward,
        math_answer_reward,
        multiple_choice_reward,
        think_format_reward,
    )
    from .audio import DurationReward, LoudnessReward, SilenceReward
    from .contract import RewardError, RewardFunc, RewardUnavailable
    from .differentiable import DifferentiableRewards
    from .frames import framewise
    from .hub import reward_from_hub
    from .image import (
        brightness_reward,
        colourfulness_reward,
        contrast_reward,
        entropy_reward,
        jpeg_compressibility_reward,
        jpeg_incompressibility_reward,
        saturation_reward,
        sharpness_reward,
    )
    from .judge import (
        CustomTemplate,
        JudgeTemplate,
        OCRTemplate,
        PairwiseTemplate,
        QuestionsTemplate,
        ScoreTemplate,
        VLMJudge,
        YesNoTemplate,
    )
    from .latents import latent_scale_reward
    from .learned.aesthetic import AestheticReward
    from .learned.base import LearnedReward
    from .learned.clap import CLAPReward
    from .learned.clip import CLIPReward, PickScoreReward
    from .learned.hps import HPSv2Reward
    from .learned.hpsv3 import HPSv3Reward
    from .learned.image_reward import ImageRewardModel
    from .media import to_pil
    from .ocr import OCRReward, TextRecognizer, ocr_exact_reward, ocr_reward, read_text
    from .registry import BUILTIN_REWARDS, get_reward
    from .remote.client import RemoteReward
    from .remote.server import reward_app
    from .results import RewardBatch
    from .rules import AspectRatioReward, SizeReward, TextLengthReward
    from .runner import RewardRunner
    from .text import quoted_text, text_score
    from .traits import RewardTraits, differentiable_as, differentiable_form, groupwise, reward_traits
    from .video import MovingReward, flicker_reward, motion_reward

# Where each public name lives. It is imported when it is asked for: a reward's packages are needed by its users only.
_EXPORTS = {
    "AestheticReward": "learned.aesthetic",
    "AnswerReward": "answers",
    "AspectRatioReward": "rules",
    "BUILTIN_REWARDS": "registry",
    "CLAPReward": "learned.clap",
    "CLIPReward": "learned.clip",
    "CustomTemplate": "judge",
    "DifferentiableRewards": "differentiable",
    "DurationReward": "audio",
    "FormatReward": "answers",
    "HPSv2Reward": "learned.hps",
    "HPSv3Reward": "learned.hpsv3",
    "ImageRewardModel": "learned.image_reward",
    "JudgeTemplate": "judge",
    "LearnedReward": "learned.base",
    "LoudnessReward": "audio",
    "MovingReward": "video",
    "OCRReward": "ocr",
    "OCRTemplate": "judge",
    "PairwiseTemplate": "judge",
    "PickScoreReward": "learned.clip",
    "QuestionsTemplate": "judge",
    "RemoteReward": "remote.client",
    "RewardBatch": "results",
    "RewardError": "contract",
    "RewardFunc": "contract",
    "RewardRunner": "runner",
    "RewardTraits": "traits",
    "RewardUnavailable": "contract",
    "ScoreTemplate": "judge",
    "SilenceReward": "audio",
    "SizeReward": "rules",
    "TextLengthReward": "rules",
    "TextRecognizer": "ocr",
    "VLMJudge": "judge",
    "YesNoTemplate": "judge",
    "audio_answer_reward": "answers",
    "brightness_reward": "image",
    "colourfulness_reward": "image",
    "contrast_reward": "image",
    "differentiable_as": "traits",
    "differentiable_form": "traits",
    "entropy_reward": "image",
    "exact_answer_reward": "answers",
    "flicker_reward": "video",
    "format_reward": "answers",
    "framewise": "frames",
    "get_reward": "registry",
    "groupwise": "traits",
    "jpeg_compressibility_reward": "image",
    "jpeg_incompressibility_reward": "image",
    "latent_scale_reward": "latents",
    "math_answer_reward": "answers",
    "motion_reward": "video",
    "multiple_choice_reward": "answers",
    "ocr_exact_reward": "ocr",
    "ocr_reward": "ocr",
    "quoted_text": "text",
    "read_text": "ocr",
    "reward_app": "remote.server",
    "reward_from_hub": "hub",
    "reward_traits": "traits",
    "saturation_reward": "image",
    "sharpness_reward": "image",
    "text_score": "text",
    "think_format_reward": "answers",
    "to_pil": "media",
}

__all__ = [
    "BUILTIN_REWARDS",
    "AestheticReward",
    "AnswerReward",
    "AspectRatioReward",
    "CLAPReward",
    "CLIPReward",
    "CustomTemplate",
    "DifferentiableRewards",
    "DurationReward",
    "FormatReward",
    "HPSv2Reward",
    "HPSv3Reward",
    "ImageRewardModel",
    "JudgeTemplate",
    "LearnedReward",
    "LoudnessReward",
    "MovingReward",
    "OCRReward",
    "OCRTemplate",
    "PairwiseTemplate",
    "PickScoreReward",
    "QuestionsTemplate",
    "RemoteReward",
    "RewardBatch",
    "RewardError",
    "RewardFunc",
    "RewardRunner",
    "RewardTraits",
    "RewardUnavailable",
    "ScoreTemplate",
    "SilenceReward",
    "SizeReward",
    "TextLengthReward",
    "TextRecognizer",
    "VLMJudge",
    "YesNoTemplate",
    "audio_answer_reward",
    "brightness_reward",
    "colourfulness_reward",
    "contrast_reward",
    "differentiable_as",
    "differentiable_form",
    "entropy_reward",
    "exact_answer_reward",
    "flicker_reward",
    "format_reward",
    "framewise",
    "get_reward",
    "groupwise",
    "jpeg_compressibility_reward",
    "jpeg_incompressibility_reward",
    "latent_scale_reward",
    "math_answer_reward",
    "motion_reward",
    "multiple_choice_reward",
    "ocr_exact_reward",
    "ocr_reward",
    "quoted_text",
    "read_text",
    "reward_app",
    "reward_from_hub",
    "reward_traits",
    "saturation_reward",
    "sharpness_reward",
    "text_score",
    "think_format_reward",
    "to_pil",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])

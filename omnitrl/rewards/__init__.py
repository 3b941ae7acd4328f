# SPDX-License-Identifier: Apache-2.0
"""Rewards: callables from media to numbers, the runner that calls them, and the built-in ones.

A reward is called with keyword arguments only:

| keyword | value |
|---|---|
| `prompts` | `list[str]`, one per row |
| `completions` | `list` of what was generated: PIL images, or `uint8` arrays `(T, H, W, C)` for video |
| each other dataset column | `list`, one value per row |
| `trainer_state` | `transformers.TrainerState` or `None` |
| `log_metric(name, value)` | records a number; the mean over the calls is logged |
| `log_extra(column, values)` | records one value per row, for the table of samples |

It returns one `float` or `None` per row, as a list, a 1-D tensor or a 1-D array. `None` means that the reward does not
apply to the row. An exception, a time-out, NaN or infinity means that it failed. Both make the reward *missing* for
the row; neither is ever taken for 0.

A reward is a function, an `async` function, an object with `__call__` (or `async __call__`), an `nn.Module`, the name
of a built-in reward, or a dotted path `package.module:function`. It is given those of the keywords above that its
signature accepts: all of them if it takes `**kwargs`. It runs in a background thread, without gradients.

Example:

```python
def red_share(completions, **kwargs):
    return [np.asarray(image)[..., 0].mean() / 255 for image in completions]
```
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .contract import RewardError, RewardFunc, RewardUnavailable
    from .differentiable import DifferentiableRewards
    from .image import brightness_reward, jpeg_compressibility_reward, jpeg_incompressibility_reward
    from .media import to_pil
    from .ocr import OCRReward, TextRecognizer, ocr_exact_reward, ocr_reward, quoted_text, text_score
    from .registry import BUILTIN_REWARDS, get_reward
    from .runner import RewardBatch, RewardRunner
    from .traits import RewardTraits, differentiable_as, differentiable_form, groupwise, reward_traits

# Where each public name lives. It is imported when it is asked for: a reward's packages are needed by its users only.
_EXPORTS = {
    "BUILTIN_REWARDS": "registry",
    "DifferentiableRewards": "differentiable",
    "OCRReward": "ocr",
    "RewardBatch": "runner",
    "RewardError": "contract",
    "RewardFunc": "contract",
    "RewardRunner": "runner",
    "RewardTraits": "traits",
    "RewardUnavailable": "contract",
    "TextRecognizer": "ocr",
    "brightness_reward": "image",
    "differentiable_as": "traits",
    "differentiable_form": "traits",
    "get_reward": "registry",
    "groupwise": "traits",
    "jpeg_compressibility_reward": "image",
    "jpeg_incompressibility_reward": "image",
    "ocr_exact_reward": "ocr",
    "ocr_reward": "ocr",
    "quoted_text": "ocr",
    "reward_traits": "traits",
    "text_score": "ocr",
    "to_pil": "media",
}

__all__ = [
    "BUILTIN_REWARDS",
    "DifferentiableRewards",
    "OCRReward",
    "RewardBatch",
    "RewardError",
    "RewardFunc",
    "RewardRunner",
    "RewardTraits",
    "RewardUnavailable",
    "TextRecognizer",
    "brightness_reward",
    "differentiable_as",
    "differentiable_form",
    "get_reward",
    "groupwise",
    "jpeg_compressibility_reward",
    "jpeg_incompressibility_reward",
    "ocr_exact_reward",
    "ocr_reward",
    "quoted_text",
    "reward_traits",
    "text_score",
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

# SPDX-License-Identifier: Apache-2.0
"""Which kind of media something is, and whether a reward takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from omnitrl.media import Audio, Video

from .contract import Reward, RewardError


def media_kind(medium: Any) -> str | None:
    """
    `"image"`, `"video"`, `"audio"`, `"text"`, or `None` for what is none of them.

    Images are PIL images, arrays `(H, W)` or `(H, W, C)` and tensors `(C, H, W)`; videos are [`~omnitrl.media.Video`],
    arrays and tensors with one dimension more, and lists of images; texts are strings, and lists of messages.
    """
    if isinstance(medium, Image.Image):
        return "image"
    if isinstance(medium, Video):
        return "video"
    if isinstance(medium, Audio):
        return "audio"
    if isinstance(medium, str) or is_messages(medium):
        return "text"
    if isinstance(medium, np.ndarray | torch.Tensor):
        return {2: "image", 3: "image", 4: "video"}.get(medium.ndim)
    if isinstance(medium, list | tuple) and medium:
        return "video" if all(media_kind(frame) == "image" for frame in medium) else None
    return None


def is_messages(medium: Any) -> bool:
    """Whether something is a text as TRL has those of chats: `[{"role": "assistant", "content": "B"}]`."""
    return (
        isinstance(medium, list | tuple)
        and len(medium) > 0
        and all(isinstance(message, Mapping) and "content" in message for message in medium)
    )


def shown_media(reward: Reward, media: Sequence[Any]) -> list[Any]:
    """
    The media as the reward is shown them: as they are, but that one of sounds gets those of videos.

    Args:
        reward ([`Reward`]):
            Whoever looks at them.
        media (`list`):
            What was decoded; `None` and broken ones are passed on.

    Raises:
        [`RewardError`]: the reward does not take such media.
    """
    kinds = reward.traits.media
    if not kinds or kinds == ("latents",):
        return list(media)
    shown = []
    for medium in media:
        kind = media_kind(medium)
        if kind == "video" and kind not in kinds and "audio" in kinds and getattr(medium, "audio", None) is not None:
            medium, kind = medium.audio, "audio"
        if medium is not None and kind not in kinds:
            raise RewardError(_sentence(reward, medium, kind))
        shown.append(medium)
    return shown


def _sentence(reward: Reward, medium: Any, kind: str | None) -> str:
    takes = " or ".join(_PLURALS[k] for k in reward.traits.media)
    came = _PLURALS.get(kind or "", f"a {type(medium).__name__}")
    return f"reward {reward.name!r} takes {takes}, and was given {came}: {_cure(reward.traits.media, kind)}"


def _cure(takes: Sequence[str], kind: str | None) -> str:
    if kind == "video" and "image" in takes:
        return "use framewise(reward) of omnitrl.rewards, which calls it with frames."
    if kind == "video" and "audio" in takes:
        return "these have no sound, which needs a model that makes videos with sound, such as LTX-2."
    if kind is None:
        return "media are PIL images, uint8 arrays (T, H, W, C) or omnitrl.media.Video, and omnitrl.media.Audio."
    return (
        f"use a reward for {_PLURALS[kind]}, or a model that makes {' or '.join(_PLURALS[k] for k in takes)}; the "
        "kinds that a reward of your own takes are those in its reward_traits(media=...)."
    )


_PLURALS = {"image": "images", "video": "videos", "audio": "sounds", "text": "texts", "latents": "latents"}

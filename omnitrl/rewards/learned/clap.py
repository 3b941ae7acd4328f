# SPDX-License-Identifier: Apache-2.0
"""CLAP score: how well a sound fits its prompt."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from omnitrl.media import Audio

from ..contract import RewardError
from ..media import sounds
from .base import LearnedReward
from .weights import load_model, load_part


class _ClapNetwork(nn.Module):
    def __init__(self, model: Any, tokenizer: Any, features: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.features = features

    @property
    def text_length(self) -> int:
        # RoBERTa counts positions from behind its padding token
        config = self.model.config.text_config
        return int(config.max_position_embeddings - config.pad_token_id - 1)


class CLAPReward(LearnedReward):
    r"""
    CLAP score: how well a sound fits its prompt.

    \\( \cos(E_\text{audio}, E_\text{prompt}) \\) of [LAION-CLAP](https://huggingface.co/papers/2211.06687). Range
    [-1, 1]; sounds that fit have 0.2 to 0.6.

    A sound is mixed to one channel and resampled to the rate of the network (48 kHz). It is heard in windows of 10 s,
    the last of which ends where the sound ends, and the score is their mean: the original takes one window at random,
    so that the same sound would have another score each time. A shorter sound is repeated and filled up, as there.

    Resampling needs `pip install "omnitrl[audio]"`.

    Args:
        model (`str` or `transformers.ClapModel`, *optional*, defaults to `"laion/clap-htsat-unfused"`):
            Hub id, folder, or a network; one without feature fusion, such as `"laion/larger_clap_general"`.
        tokenizer, features (*optional*):
            Its tokenizer and `ClapFeatureExtractor`, or where they are found; by default where the model is.
        device, dtype, batch_size, scale:
            See [`LearnedReward`].

    Example:

    ```python
    >>> from omnitrl.rewards import CLAPReward

    >>> CLAPReward("laion/larger_clap_music").traits.media
    ('audio',)
    ```
    """

    media = "audio"

    def __init__(
        self,
        model: Any = "laion/clap-htsat-unfused",
        tokenizer: Any = None,
        features: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        batch_size: int = 16,
        scale: float = 1.0,
    ) -> None:
        super().__init__(device, dtype, batch_size, scale)
        self.model = model
        self.tokenizer = tokenizer
        self.features = features

    def _build(self) -> nn.Module:
        from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

        name = type(self).__name__
        model = self.model
        source = model if isinstance(model, str) else model.config.name_or_path
        model = load_model(ClapModel, model, name) if isinstance(model, str) else model
        if model.config.audio_config.enable_fusion:
            raise RewardError(
                f"{name}: {source!r} was trained with feature fusion, which listens to windows drawn at random: use "
                f"'laion/clap-htsat-unfused' or 'laion/larger_clap_general'."
            )
        tokenizer, features = self.tokenizer or source, self.features or source
        if isinstance(tokenizer, str):
            tokenizer = load_part(AutoTokenizer, tokenizer, name)
        if isinstance(features, str):
            features = load_part(ClapFeatureExtractor, features, name)
        return _ClapNetwork(model, tokenizer, features)

    def _read(self, completions: Sequence[Any]) -> list[Audio]:
        return sounds(completions)

    def _score(self, network: Any, prompts: Sequence[str], media: list[Audio]) -> Tensor:
        model = network.model
        windows, owners = [], []
        for row, sound in enumerate(media):
            mono = resampled(sound, network.features.sampling_rate)
            for window in _windows(mono, network.features.nb_max_samples):
                windows.append(window)
                owners.append(row)
        heard = torch.cat(
            [self._heard(network, windows[i : i + self.batch_size]) for i in range(0, len(windows), self.batch_size)]
        )
        tokens, rows = self._tokens(network.tokenizer, prompts, network.text_length, padding=True)
        inputs = {key: tokens[key].to(model.device) for key in ("input_ids", "attention_mask")}
        text = functional.normalize(model.get_text_features(**inputs).pooler_output.float(), dim=-1)[
            rows.to(model.device)
        ]
        owner = torch.tensor(owners, device=heard.device)
        cosines = (heard * text[owner]).sum(dim=-1)  # (windows,)
        totals = torch.zeros(len(media), device=heard.device).index_add_(0, owner, cosines)
        return totals / owner.bincount(minlength=len(media))

    def _heard(self, network: Any, windows: list[np.ndarray]) -> Tensor:
        """Unit vectors (W, D) of windows of sound."""
        features = network.features
        mel = features(windows, sampling_rate=features.sampling_rate, truncation="rand_trunc", return_tensors="pt")
        inputs = mel["input_features"].to(network.model.device, network.model.dtype)
        return functional.normalize(network.model.get_audio_features(inputs).pooler_output.float(), dim=-1)


def resampled(sound: Audio, rate: int) -> np.ndarray:
    """A sound in one channel (S,) at a rate; see [`CLAPReward`]."""
    mono = np.ascontiguousarray(sound.samples.mean(axis=0, dtype=np.float32))
    if sound.sampling_rate == rate:
        return mono
    try:
        import soxr
    except ImportError as error:
        raise ImportError(
            f"CLAPReward resamples sounds from {sound.sampling_rate} to {rate} Hz with soxr: "
            'pip install "omnitrl[audio]"'
        ) from error
    return np.asarray(soxr.resample(mono, sound.sampling_rate, rate))


def _windows(mono: np.ndarray, length: int) -> list[np.ndarray]:
    """Pieces of at most `length` samples that cover a sound, the last of which ends with it."""
    if len(mono) <= length:
        return [mono]
    starts = [*range(0, len(mono) - length, length), len(mono) - length]
    return [mono[start : start + length] for start in starts]


clap_reward = CLAPReward()

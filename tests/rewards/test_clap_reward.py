# SPDX-License-Identifier: Apache-2.0
"""CLAP score on a tiny network, against transformers' own processor and model."""

import builtins

import numpy as np
import pytest
import torch

from omnitrl.media import Audio, Video
from omnitrl.rewards import CLAPReward, RewardError
from omnitrl.rewards.learned.clap import resampled
from tests.rewards.tiny_scorers import clap_folder


PROMPTS = ["rain on a roof", "a violin", "rain on a roof"]
RATE = 48000


@pytest.fixture(scope="module")
def clap(tmp_path_factory):
    return clap_folder(tmp_path_factory.mktemp("clap"))


def tone(seconds, frequency=440.0, rate=RATE, channels=1):
    wave = 0.3 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)
    return Audio(np.repeat(wave[None].astype(np.float32), channels, axis=0), rate)


def cosine(clap, prompt, samples):
    from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

    model = ClapModel.from_pretrained(clap).eval()
    features = ClapFeatureExtractor.from_pretrained(clap)(samples, sampling_rate=RATE, return_tensors="pt")
    tokens = AutoTokenizer.from_pretrained(clap)([prompt], return_tensors="pt")
    with torch.no_grad():
        output = model(**tokens, input_features=features["input_features"])
    return (output.audio_embeds @ output.text_embeds.T).item()


def test_it_is_the_cosine_of_sound_and_prompt(clap):
    sounds = [tone(2.0), tone(3.0, 1500.0), tone(0.5, 90.0)]
    values = CLAPReward(clap, batch_size=2)(PROMPTS, sounds)
    expected = [cosine(clap, prompt, sound.samples[0]) for prompt, sound in zip(PROMPTS, sounds, strict=True)]
    assert values == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01


def test_channels_are_mixed_and_the_sound_of_a_video_is_heard(clap):
    reward = CLAPReward(clap, scale=2.0)
    mono = tone(1.0)
    halves = Audio(np.concatenate([mono.samples * 1.5, mono.samples * 0.5]), RATE)
    video = Video(np.zeros((2, 8, 8, 3), dtype=np.uint8), 2.0, mono)
    one, two, three = reward(["a"] * 3, [mono, halves, video])
    assert two == pytest.approx(one, abs=1e-6)
    assert three == one
    assert one == pytest.approx(2 * CLAPReward(clap)(["a"], [mono])[0])


def test_a_long_sound_is_the_mean_of_windows_and_always_the_same(clap):
    sound = Audio(np.concatenate([tone(10.0).samples, tone(4.0, 2000.0).samples], axis=1), RATE)
    reward = CLAPReward(clap)
    windows = [sound.samples[0, : 10 * RATE], sound.samples[0, 4 * RATE :]]
    expected = np.mean([cosine(clap, "a", window) for window in windows])
    first = reward(["a"], [sound])
    assert first == pytest.approx([expected], abs=1e-5)
    assert reward(["a"], [sound]) == first


def test_sounds_are_resampled():
    made = resampled(tone(1.0, 440.0, 16000), RATE)
    assert made.shape == (RATE,)
    middle = slice(RATE // 4, 3 * RATE // 4)  # away from the ends, which ring
    assert np.abs(made - tone(1.0).samples[0])[middle].max() < 1e-3
    assert resampled(tone(0.1), RATE).tolist() == tone(0.1).samples[0].tolist()


def test_a_missing_resampler_is_named(clap, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "soxr":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'from 16000 to 48000 Hz with soxr: pip install "omnitrl\[audio\]"'):
        resampled(tone(0.1, rate=16000), RATE)


def test_other_media_are_refused(clap):
    silent = Video(np.zeros((2, 8, 8, 3), dtype=np.uint8), 2.0)
    with pytest.raises(RewardError, match=r"completions\[1\]: expected a sound .*, got a video without sound"):
        CLAPReward(clap)(["a", "b"], [tone(0.1), silent])


def test_a_network_that_draws_windows_at_random_is_refused(tmp_path):
    with pytest.raises(
        RewardError, match=r"feature fusion, which listens to windows drawn at random: use 'laion/clap"
    ):
        CLAPReward(clap_folder(tmp_path, fused=True)).load()

# SPDX-License-Identifier: Apache-2.0
"""A language model that writes the tokens of a codec is trained on what the codec makes of them."""

import datasets
import pytest
import torch
from transformers import DacConfig, DacModel, Qwen3Config, Qwen3ForCausalLM

from tests.omni import chats, tiny


# Tokens of a vocabulary that stand for sounds follow those that stand for text.
FIRST, CODES = 266, 32


def codec():
    """One codebook of 32 entries, 4 samples for each."""
    sizes = {"encoder_hidden_size": 8, "decoder_hidden_size": 16, "hidden_size": 16, "codebook_dim": 4}
    strides = {"downsampling_ratios": [2, 2], "upsampling_ratios": [2, 2]}
    made = tiny.livened(DacModel(DacConfig(n_codebooks=1, codebook_size=CODES, **strides, **sizes)))
    with torch.no_grad():
        made.decoder.conv2.weight.mul_(1e-6)  # or it would clip
    return made


def speaker():
    config = tiny.language_model().config
    return tiny.livened(Qwen3ForCausalLM(Qwen3Config(**{**config.to_dict(), "vocab_size": FIRST + CODES})))


@pytest.mark.slow
def test_answers_are_sounds_and_the_reward_hears_them(tmp_path):
    dac = codec()

    def loudness(ids):
        codes = torch.tensor([[[token - FIRST for token in ids if token >= FIRST]]])
        with torch.no_grad():
            return dac.decode(audio_codes=codes).audio_values.square().mean().sqrt().item()

    heard = []

    def loud(completion_ids, **kwargs):
        heard.extend(completion_ids)
        return [loudness(ids) for ids in completion_ids]

    rows = [{"prompt": f"Say {word}: "} for word in ("hello", "goodbye")]
    trained = chats.trainer(
        tmp_path, datasets.Dataset.from_list(rows), speaker(), reward=loud, processing_class=tiny.tokenizer(),
        max_completion_length=6, max_steps=16, learning_rate=1e-2,
        lr_scheduler_type="constant", epsilon=0.2, epsilon_high=0.2, num_generations=8, per_device_train_batch_size=16,
        steps_per_generation=1, num_iterations=2,
        generation_kwargs={"suppress_tokens": list(range(FIRST))},
    )  # fmt: skip
    trained.train()
    assert all(len(ids) == 6 and min(ids) >= FIRST for ids in heard)
    rewards = chats.logged(trained, "reward")
    assert rewards[0] == pytest.approx(sum(map(loudness, heard[:16])) / 16, rel=1e-4)
    assert sum(rewards[-3:]) / 3 > 1.1 * sum(rewards[:3]) / 3

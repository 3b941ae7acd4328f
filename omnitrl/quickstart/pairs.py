# SPDX-License-Identifier: Apache-2.0
"""Preference pairs for the quickstart: the best and the worst of several pictures that the shipped model draws."""

from typing import Any

from omnitrl.quickstart.words import Split, rows


def preference_pairs(
    split: Split = "train", num_generations: int = 8, num_words: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """
    Draw each word several times with the shipped model, and pair the picture that OCR reads best with the worst.

    Takes about 15 seconds on one core for the 73 training words.

    Args:
        split (`str`, defaults to `"train"`):
            Which words, see [`rows`].
        num_generations (`int`, defaults to 8):
            Pictures of each word.
        num_words (`int`, *optional*):
            How many of the words; all by default.
        seed (`int`, defaults to 0):
            Seed of the noise.

    Returns:
        `list[dict]`: `prompt`, the PIL images `chosen` and `rejected`, and their `score_chosen` and `score_rejected`.
        Words whose pictures all have the same score are left out.

    Example:

    ```python
    >>> from omnitrl.quickstart import preference_pairs

    >>> pairs = preference_pairs(num_words=2)
    >>> sorted(pairs[0])
    ['chosen', 'prompt', 'rejected', 'score_chosen', 'score_rejected']
    ```
    """
    import torch

    from omnitrl.algorithms import preference_pairs as best_and_worst
    from omnitrl.models import MediaSize, load_flow_model
    from omnitrl.quickstart import GLYPHS
    from omnitrl.rewards import ocr_reward
    from omnitrl.rollout import LocalEngine, SampleRequest, SamplingParams, stable_seed

    words = rows(split)[:num_words]
    requests = [
        SampleRequest(row, group, member, stable_seed(seed, "pairs", group, member))
        for group, row in enumerate(words)
        for member in range(num_generations)
    ]
    model = load_flow_model(GLYPHS, max_sequence_length=1, dtype=torch.float32)
    params = SamplingParams(num_inference_steps=6, size=MediaSize(32, 64))
    pictures = [t.media for batch in LocalEngine(model, batch_size=64).generate(requests, params) for t in batch]
    scores = torch.tensor(ocr_reward([request.row["prompt"] for request in requests], pictures))
    pairs = best_and_worst(scores, torch.tensor([request.group_id for request in requests]))
    return [
        {
            "prompt": row["prompt"],
            "chosen": pictures[chosen],
            "rejected": pictures[rejected],
            "score_chosen": float(scores[chosen]),
            "score_rejected": float(scores[rejected]),
        }
        for row, chosen, rejected, valid in zip(
            words, pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.valid.tolist(), strict=True
        )
        if valid
    ]

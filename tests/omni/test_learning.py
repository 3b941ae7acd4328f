# SPDX-License-Identifier: Apache-2.0
"""GSPO teaches a tiny model to answer what it sees or hears; with advantages of other answers it learns nothing."""

import datasets
import pytest
import torch

from omnitrl.omni import OmniProcessor, read_row
from omnitrl.omni.thinker import media_tokens
from tests.omni import chats, tiny


pytestmark = pytest.mark.slow

# Two rows that differ in what is seen or heard alone. The answer is a token with an even or with an odd number.
TASKS = {
    "colour": [chats.chat("Which?", [chats.png(colour)], label=i) for i, colour in enumerate(("black", "white"))],
    "pitch": [chats.chat("Which?", audios=[chats.tone(hertz, 1.0)], label=i) for i, hertz in enumerate((500, 4000))],
}


def is_right(completion_ids, label, **kwargs):
    return [float(ids[0] % 2 == wanted) for ids, wanted in zip(completion_ids, label, strict=True)]


def chance_to_be_right(model, rows):
    """The mean over the rows of the probability of a right answer."""
    processor = OmniProcessor(tiny.processor())
    chances = []
    for row in rows:
        inputs = processor(read_row(row))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([inputs.input_ids]), **inputs.media).logits[0, -1]
        logits[media_tokens(model.config)] = -torch.inf
        chances.append(logits.softmax(-1)[row["label"] :: 2].sum().item())
    return sum(chances) / len(chances)


def learnt(folder, task, seed, **changed):
    """Chances before and after a run."""
    rows = TASKS[task]
    trained = chats.trainer(
        folder, datasets.Dataset.from_list(rows), tiny.thinker(seed), is_right, seed=seed, max_steps=28,
        learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=1.0, per_device_train_batch_size=32,
        num_generations=16, steps_per_generation=1, num_iterations=2, max_completion_length=1, epsilon=0.2,
        epsilon_high=0.2, logging_steps=100, **changed,
    )  # fmt: skip
    before = chance_to_be_right(trained.model, rows)
    trained.train()
    return before, chance_to_be_right(trained.model.eval(), rows)


@pytest.mark.parametrize(("task", "seed"), [("pitch", 0), ("pitch", 1), ("pitch", 2), ("colour", 0)])
def test_it_learns_what_to_answer_and_the_control_does_not(task, seed, tmp_path):
    before, after = learnt(tmp_path / "run", task, seed)
    control_before, control = learnt(tmp_path / "control", task, seed, shuffle_advantages=True)
    print(f"{task} {seed}: {before:.3f} -> {after:.3f}, control {control:.3f}")  # noqa: T201
    assert before == control_before
    assert abs(before - 0.5) < 0.1
    assert after > 0.7
    assert control < 0.65

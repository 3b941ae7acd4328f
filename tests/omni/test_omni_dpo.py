# SPDX-License-Identifier: Apache-2.0
"""The numbers of DPO on the tiny Thinker: losses, log-probs, gradients and references."""

import math

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import trl

from omnitrl.omni import VideoLimits, read_row
from omnitrl.trainer.omni_dpo_config import LOSS_TYPES, OmniDPOConfig
from tests.omni import chats, pairs, tiny


PROCESSOR = tiny.processor()
PLACES = {
    "images": "<|vision_start|><|image_pad|><|vision_end|>",
    "videos": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A trainer on mixed rows whose adapter is not the one it began with."""
    made = pairs.trainer(tmp_path_factory.mktemp("moved"), label_smoothing=0.1, beta=0.3)
    pairs.moved(made.model)
    return made


def loss_of(trained, batch):
    trained.model.train()
    return trained.compute_loss(trained.model, batch)


def log_probs(model, batch):
    """(2 B,) of the answers, as the trainer has them."""
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    inputs = {name: value for name, value in batch.items() if name != "completion_mask"}
    with torch.no_grad():
        return model(**inputs, labels=labels, fused_lm_head=True).log_probs.sum(1)


def alone(model, row, answer):
    """The log-prob of an answer and its number of tokens, of one sequence by its processor and the model's logits."""
    decoded = read_row(row).decoded(tiny.RATE, VideoLimits())
    media = {
        "images": decoded.images,
        "videos": [video.frames for video in decoded.videos],
        "audio": [np.pad(samples, (0, max(tiny.RATE - len(samples), 0))) for samples in decoded.audios],
    }
    places = "".join(PLACES[kind] * len(values) for kind, values in media.items())
    prompt = f"<|im_start|>user\n{places}{row['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    end = answer + "<|im_end|>\n"
    given = {kind: values for kind, values in media.items() if values}
    inputs = PROCESSOR(text=[prompt + end], return_tensors="pt", **given)
    if decoded.videos:
        inputs["video_second_per_grid"] = torch.tensor([2 / video.frame_rate for video in decoded.videos])
    count = len(PROCESSOR.tokenizer(end)["input_ids"])
    with torch.no_grad():
        logits = model(**inputs).logits[0, :-1].double()
    found = logits.log_softmax(-1).gather(-1, inputs["input_ids"][0, 1:, None])[-count:]
    return found.sum().item(), count


def table(model, rows):
    """Log-probs and lengths of the chosen and of the rejected answers, (2, B) each."""
    found = [[alone(model, row, row[name]) for row in rows] for name in ("chosen", "rejected")]
    values = torch.tensor([[value for value, _ in line] for line in found], dtype=torch.float64)
    return values, torch.tensor([[count for _, count in line] for line in found])


@pytest.mark.parametrize("kind", chats.KINDS)
def test_the_loss_is_log_2_at_the_start(kind, tmp_path):
    made = pairs.trainer(tmp_path, kind, label_smoothing=0.1)
    assert abs(loss_of(made, pairs.batch_of(made)).item() - math.log(2)) <= 1e-6
    assert made._metrics["train"]["rewards/margins"] == [0.0]


def test_log_probs_are_those_of_single_sequences(moved):
    """Padding, other rows and their media change none."""
    batch, rows = pairs.batch_of(moved), pairs.rows("mixed")
    assert len({int(n) for n in batch["attention_mask"].sum(1)}) > 4
    together = log_probs(moved.model, batch).reshape(2, -1)
    expected, lengths = table(moved.model, rows)
    assert ((together - expected) / lengths).abs().max() <= 1e-5
    for i in range(len(rows)):
        one = log_probs(moved.model, pairs.batch_of(moved, [i]))
        assert ((together[:, i] - one) / lengths[:, i]).abs().max() <= 1e-5


def test_sigmoid_with_smoothed_labels_is_what_a_hand_computes(moved):
    rows = pairs.rows("mixed")
    policy, _ = table(moved.model, rows)
    with moved.model.disable_adapter():
        reference, _ = table(moved.model, rows)
    ratios = policy - reference
    margins = 0.3 * (ratios[0] - ratios[1])
    expected = (0.9 * F.softplus(-margins) + 0.1 * F.softplus(margins)).mean()
    assert (margins.abs() > 0.01).all()
    loss = loss_of(moved, pairs.batch_of(moved))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    metrics = {name: values[-1] for name, values in moved._metrics["train"].items()}
    assert metrics["rewards/margins"] == pytest.approx(margins.mean().item(), abs=1e-4)
    assert metrics["rewards/chosen"] == pytest.approx(0.3 * ratios[0].mean().item(), abs=1e-4)
    assert metrics["rewards/accuracies"] == pytest.approx((margins > 0).double().mean().item())
    assert metrics["logps/rejected"] == pytest.approx(policy[1].mean().item(), abs=1e-3)


def test_ipo_is_what_a_hand_computes(tmp_path):
    made = pairs.trainer(tmp_path, "image", loss_type="ipo", beta=0.5)
    assert loss_of(made, pairs.batch_of(made)).item() == pytest.approx(1.0, abs=1e-6)  # (0 - 1 / (2 · 0.5))²
    pairs.moved(made.model)
    rows = pairs.rows("image")
    policy, lengths = table(made.model, rows)
    with made.model.disable_adapter():
        reference, _ = table(made.model, rows)
    ratios = (policy - reference) / lengths  # means over tokens, as TRL takes them
    expected = ((ratios[0] - ratios[1] - 1.0) ** 2).mean()
    loss = loss_of(made, pairs.batch_of(made)).item()
    assert abs(loss - 1.0) > 1e-3
    assert loss == pytest.approx(expected.item(), abs=1e-5)


def as_messages(row):
    """A row as TRL takes it."""
    answers = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    return {"prompt": row["prompt"], **answers}


@pytest.fixture(scope="module")
def with_and_of_trl(tmp_path_factory):
    """Options of each loss, and our trainer and TRL's on the same texts, with adapters that have moved."""
    folder, adapter = tmp_path_factory.mktemp("both"), {"target_parameters": None, "exclude_modules": None}
    smoothed = dict.fromkeys(("robust", "exo_pair", "aot", "aot_unpaired"), 0.1)
    options = {
        name: OmniDPOConfig(**pairs.options(folder, loss_type=name, label_smoothing=smoothed.get(name, 0.0)))
        for name in LOSS_TYPES
    }
    given = {"processing_class": tiny.tokenizer(), "peft_config": pairs.lora(**adapter)}
    ours = pairs.trainer(folder, "text", tiny.language_model(), **given)
    theirs = trl.DPOTrainer(
        model=tiny.language_model(),
        args=trl.DPOConfig(**pairs.options(folder)),
        train_dataset=datasets.Dataset.from_list([as_messages(row) for row in pairs.rows("text")]),
        **given | {"peft_config": pairs.lora(**adapter)},
    )
    for trained in (ours, theirs):
        pairs.moved(trained.model, std=0.3)
    return options, ours, theirs


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_loss_is_that_of_trl(loss_type, with_and_of_trl):
    options, *both = with_and_of_trl
    args, losses, gradients = options[loss_type], [], []
    for trained in both:
        trained.loss_types, trained.label_smoothing = args.loss_type, args.label_smoothing
        trained.model.zero_grad()
        losses.append(loss_of(trained, pairs.batch_of(trained)))
        losses[-1].backward()
        named = trained.model.named_parameters()
        gradients.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    assert max(gradient.abs().max() for gradient in gradients[0].values()) > 1e-3
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-4, msg=name)

# SPDX-License-Identifier: Apache-2.0
"""Runs of DPO on tiny models: what is learnt, saved and resumed, which weights move, and what is refused."""

import copy
import math
import random

import datasets
import pytest
import torch
from peft import PeftModel

from omnitrl.errors import InputError
from omnitrl.omni.thinker import ATTENTION
from omnitrl.trainer import omni_dpo_trainer
from omnitrl.trainer.omni_dpo_config import OmniDPOConfig
from omnitrl.trainer.omni_dpo_trainer import OmniDPOTrainer
from tests.omni import chats, pairs, tiny
from tests.omni.test_omni_dpo import log_probs, loss_of


def gradients(trained, *batches):
    """Of the weights that are trained, for the mean of the losses of some batches."""
    trained.model.zero_grad()
    for batch in batches:
        (loss_of(trained, batch) / len(batches)).backward()
    named = trained.model.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def difference(a, b):
    """The largest, of the largest value."""
    assert a.keys() == b.keys()
    assert a
    return max((a[name] - b[name]).abs().max() for name in a) / max(value.abs().max() for value in a.values())


def weights(trained):
    return {name: weight.detach().clone() for name, weight in trained.model.named_parameters() if weight.requires_grad}


# Gradients


@pytest.mark.slow
def test_accumulated_micro_batches_have_the_gradient_of_one_batch(tmp_path):
    made = pairs.trainer(tmp_path)
    pairs.moved(made.model)
    whole = gradients(made, pairs.batch_of(made))
    parts = gradients(made, pairs.batch_of(made, [0, 1]), pairs.batch_of(made, [2, 3]))
    assert difference(whole, parts) <= 1e-5
    assert max(value.abs().max() for value in whole.values()) > 1e-3


@pytest.mark.slow
def test_accumulation_makes_the_update_of_one_batch(tmp_path):
    sizes = [{"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}]
    ends = []
    for i, size in enumerate(sizes):
        made = pairs.trainer(tmp_path / str(i), optim="sgd", learning_rate=1.0, max_grad_norm=0.0, **size)
        made.train()
        ends.append(weights(made))
    assert difference(*ends) <= 1e-5
    assert any(value.abs().max() > 0 for name, value in ends[0].items() if "lora_B" in name)


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_gradient(tmp_path):
    found = []
    for on in (False, True):
        made = pairs.trainer(tmp_path / str(on), gradient_checkpointing=on)
        pairs.moved(made.model)
        if on:
            made.model.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(gradients(made, pairs.batch_of(made)))
    assert difference(*found) <= 1e-5


# The reference


def test_the_reference_is_the_model_without_its_adapter(tmp_path):
    losses = []
    for reference in (None, tiny.thinker()):
        made = pairs.trainer(tmp_path, ref_model=reference)
        assert (made.ref_model is None) == (reference is None)
        pairs.moved(made.model)
        losses.append(loss_of(made, pairs.batch_of(made)).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert abs(losses[0] - math.log(2)) > 1e-3


@pytest.mark.slow
def test_an_adapter_that_is_trained_on_is_its_own_reference(tmp_path):
    first = pairs.trainer(tmp_path / "first", "image")
    pairs.moved(first.model)
    first.save_model(str(tmp_path / "saved"))
    model = PeftModel.from_pretrained(tiny.thinker(), str(tmp_path / "saved"), is_trainable=True)
    made = pairs.trainer(tmp_path, "image", model, peft_config=None)
    assert loss_of(made, pairs.batch_of(made)).item() == pytest.approx(math.log(2), abs=1e-6)
    made.train()
    batch = pairs.batch_of(made)
    assert not torch.equal(log_probs(made.model, batch), log_probs(first.model, batch))


@pytest.mark.slow
def test_log_probs_of_the_reference_before_training(tmp_path):
    """TRL refuses it for pictures; options and processors that change the tokens are not given old values."""
    pairs.dataset("mixed").save_to_disk(tmp_path / "rows")  # beside which the cache is
    given, expected = datasets.load_from_disk(tmp_path / "rows"), []
    made = pairs.trainer(tmp_path, given, precompute_ref_log_probs=True, eval_dataset=pairs.dataset("image"))
    with made.model.disable_adapter():
        expected = log_probs(made.model, pairs.batch_of(made)).reshape(2, -1)
    for i, name in enumerate(("ref_chosen_logps", "ref_rejected_logps")):
        assert torch.tensor(made.train_dataset[name]).sub(expected[i]).abs().max() <= 1e-4
    pairs.moved(made.model)
    plain = pairs.trainer(tmp_path, given)
    pairs.moved(plain.model)
    numbers = [pairs.batch_of(trained) for trained in (made, plain)]
    assert loss_of(made, numbers[0]).item() == pytest.approx(loss_of(plain, numbers[1]).item(), abs=1e-5)
    assert made.evaluate()["eval_rewards/margins"] != 0
    shorter = pairs.trainer(tmp_path, given, precompute_ref_log_probs=True, max_length=55)
    assert shorter.train_dataset["ref_chosen_logps"][:] != made.train_dataset["ref_chosen_logps"][:]
    processor = tiny.processor()
    processor.chat_template = processor.chat_template.replace("assistant", "model")
    other = pairs.trainer(tmp_path, given, precompute_ref_log_probs=True, processing_class=processor)
    assert other.train_dataset["ref_chosen_logps"][:] != made.train_dataset["ref_chosen_logps"][:]


# Models


@pytest.mark.slow
def test_of_a_whole_checkpoint_the_thinker_is_trained_with_a_copy_as_reference(tmp_path):
    tiny.save_full(tmp_path / "model")
    made = pairs.trainer(tmp_path, "audio", str(tmp_path / "model"), peft_config=None, learning_rate=1e-4)
    assert type(made.model).__name__ == type(made.ref_model).__name__ == type(tiny.thinker()).__name__
    assert loss_of(made, pairs.batch_of(made)).item() == pytest.approx(math.log(2), abs=1e-6)
    before = copy.deepcopy(made.ref_model.state_dict())
    made.train()
    moved = {name for name, weight in made.model.named_parameters() if not torch.equal(weight, before[name])}
    assert {"lm_head.weight", "model.language_model.layers.0.mlp.experts.down_proj"} <= moved
    assert "model.audio_tower.proj1.weight" in moved
    assert not [name for name in moved if name.endswith("mlp.gate.weight") or ".visual." in name]
    assert all(torch.equal(weight, before[name]) for name, weight in made.ref_model.state_dict().items())


MODELS = {
    "qwen2.5-omni": (tiny.thinker_25, tiny.processor, "mixed"),
    "qwen2.5-vl": (tiny.vision_language_model, tiny.vision_language_processor, "image"),
    "qwen3": (tiny.language_model, tiny.tokenizer, "text"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_other_models_with_the_same_class(name, tmp_path):
    model, processing_class, kind = MODELS[name]
    given = {"peft_config": pairs.lora(target_parameters=None), "processing_class": processing_class()}
    made = pairs.trainer(tmp_path, kind, model(), max_steps=6, **given)
    made.train()
    losses = pairs.logged(made, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < 0.66
    one = log_probs(made.model, pairs.batch_of(made, [1]))
    together = log_probs(made.model, pairs.batch_of(made))
    assert (one - together[[1, 1 + len(together) // 2]]).abs().max() <= 1e-4


# Experts


@pytest.mark.slow
def test_routers_are_trained_and_balanced_where_that_is_asked_for(tmp_path):
    def run(folder, **options):
        made = pairs.trainer(tmp_path / folder, "text", peft_config=None, learning_rate=1e-3, **options)
        before = {name: weight.clone() for name, weight in made.model.named_parameters()}
        made.train()
        return made, {name for name, weight in made.model.named_parameters() if not torch.equal(weight, before[name])}

    frozen, moved = run("frozen")
    assert not [name for name in moved if name.endswith("mlp.gate.weight")]
    assert pairs.logged(frozen, "aux_loss") == []
    trained, moved = run("trained", freeze_router=False, router_aux_loss_coef=0.01)
    assert [name for name in moved if name.endswith("mlp.gate.weight")]
    (balance,) = pairs.logged(trained, "aux_loss")
    assert pairs.logged(trained, "loss")[0] == pytest.approx(math.log(2) + 0.01 * balance, abs=1e-5)


@pytest.mark.slow
def test_balancing_with_frozen_routers_is_warned_of(tmp_path, caplog):
    pairs.trainer(tmp_path, "text", router_aux_loss_coef=0.01)
    assert "router_aux_loss_coef=0.01 balances the load of experts, but with freeze_router=True" in caplog.text


# Saving


@pytest.mark.slow
def test_a_saved_adapter_has_equal_logits_in_transformers_and_peft(tmp_path):
    made = pairs.trainer(tmp_path, max_steps=2)
    made.train()
    made.save_model()
    batch = pairs.batch_of(made)
    inputs = {name: value for name, value in batch.items() if name != "completion_mask"}
    loaded = PeftModel.from_pretrained(tiny.thinker(), str(tmp_path / "out"))
    with torch.no_grad():
        before, ours, theirs = tiny.thinker()(**inputs), made.model.eval()(**inputs), loaded.eval()(**inputs)
    assert torch.equal(ours.logits, theirs.logits)
    assert (ours.logits - before.logits).abs().max() > 1e-3
    card = (tmp_path / "out" / "README.md").read_text("utf-8") if (tmp_path / "out" / "README.md").exists() else ""
    assert card == "" or "omnitrl" in card


@pytest.mark.slow
@pytest.mark.parametrize("peft_config", ["lora", None])
def test_a_resumed_run_is_the_run_that_went_on(peft_config, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    options |= {"learning_rate": 1e-3, "peft_config": peft_config}
    whole = pairs.trainer(tmp_path / "whole", **options)
    whole.train()
    resumed = pairs.trainer(tmp_path / "whole", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "out" / "checkpoint-2"))
    a, b = weights(whole), weights(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert pairs.logged(whole, "loss") == pairs.logged(resumed, "loss")


# Learning

SIDES = {"red": (230, 30, 30), "blue": (30, 30, 230)}


def questions(seed, count, swapped=False):
    """Colours of shades and pitches of sounds; in a control half of the answers change places."""
    draw, rows = random.Random(seed), []
    for i in range(count):
        if i % 2:
            chosen, rejected = draw.sample(["red", "blue"], 2)
            shade = tuple(min(255, value + draw.randint(-25, 25)) for value in SIDES[chosen])
            row = chats.chat("Colour?", [chats.png(shade, (16, 16))])
        else:
            chosen, rejected = draw.sample(["low", "high"], 2)
            hertz = draw.uniform(150, 300) if chosen == "low" else draw.uniform(1500, 3000)
            row = chats.chat("Pitch?", audios=[chats.tone(hertz, 0.3)])
        if swapped and i // 2 % 2:
            chosen, rejected = rejected, chosen
        rows.append({**row, "chosen": chosen, "rejected": rejected})
    return datasets.Dataset.from_list(rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_is_seen_and_heard_decides_and_swapped_pairs_teach_nothing(seed, tmp_path):
    """
    The accuracy on other shades and pitches than were trained on.

    The control has the same media, answers and updates; half of its pairs say the opposite. It may remember some of
    its own pairs, but has nothing to say of others.
    """
    accuracies = []
    for swapped in (False, True):
        made = pairs.trainer(
            tmp_path / str(swapped),
            questions(seed, 32, swapped),
            eval_dataset=questions(seed + 100, 16),
            max_steps=25,
            lr_scheduler_type="constant",
            per_device_train_batch_size=8,
            per_device_eval_batch_size=16,
            seed=seed,
        )
        made.train()
        accuracies.append(made.evaluate()["eval_rewards/accuracies"])
        if not swapped:
            assert pairs.logged(made, "rewards/accuracies")[-1] == 1.0
    assert accuracies[0] == 1.0
    assert accuracies[1] <= 0.75


# Data


@pytest.mark.slow
def test_streamed_rows_train_as_stored_ones_do(tmp_path):
    ends = []
    for data in (pairs.dataset("mixed"), pairs.dataset("mixed").to_iterable_dataset()):
        made = pairs.trainer(
            tmp_path, data, max_steps=2, train_sampling_strategy="sequential", per_device_train_batch_size=2
        )
        made.train()
        ends.append(weights(made))
    assert difference(*ends) <= 1e-6


@pytest.mark.slow
def test_evaluation_takes_other_datasets(tmp_path):
    made = pairs.trainer(tmp_path, "image")
    found = made.evaluate({"heard": pairs.dataset("audio"), "seen": pairs.dataset("video")})
    for name in ("heard", "seen"):
        assert found[f"eval_{name}_loss"] == pytest.approx(math.log(2), abs=1e-6)


# What is refused

IMAGE = {**chats.ROWS["image"][0], "chosen": "red", "rejected": "blue"}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({**IMAGE, "images": ["no.png"]}, r"Image 0 of row 1 of train_dataset is the file no.png, which does not ex"),
        ({**IMAGE, "rejected": None}, r"Row 1 of train_dataset has no rejected but None"),
    ],
)
def test_rows_are_looked_at_before_training(row, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        pairs.trainer(tmp_path, datasets.Dataset.from_list([{**IMAGE, "images": []}, row]))


def test_later_rows_are_looked_at_when_they_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr(omni_dpo_trainer, "CHECKED_ROWS", 1)
    made = pairs.trainer(tmp_path, datasets.Dataset.from_list([{**IMAGE, "images": []}, {**IMAGE, "images": ["x"]}]))
    with pytest.raises(InputError, match="Image 0 of row 1 is the file x, which does not exist"):
        made.train()


def test_datasets_that_are_none(tmp_path):
    for data, sentence in [
        (None, "train_dataset is missing: give a datasets.Dataset with the columns prompt, chosen, rejected"),
        ([IMAGE], r"train_dataset is a list: give a datasets.Dataset, such as datasets.Dataset.from_list\(rows\)"),
        (pairs.dataset("image").select([]), "train_dataset has no rows"),
    ]:
        with pytest.raises(InputError, match=sentence):
            pairs.trainer(tmp_path, data)


def test_a_pattern_that_peft_would_take_for_names_is_refused(tmp_path):
    pattern = r".*language_model.*\.(q_proj|v_proj)"
    with pytest.raises(InputError, match=rf"PEFT adapted .*audio_tower.*which target_modules=.*{ATTENTION[0]}"):
        pairs.trainer(tmp_path, "text", peft_config=pairs.lora(target_modules=pattern, exclude_modules=None))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loss_type": "sigmod"}, r"loss_type='sigmod' is unknown: .*Did you mean 'sigmoid'"),
        ({"beta": 0.0}, r"beta=0.0 must be above 0: use 0.1"),
        ({"label_smoothing": 0.5}, r"label_smoothing=0.5 must be at least 0 and below 0.5, .*: use 0.1"),
        (
            {"loss_type": ["sigmoid", "robust"], "label_smoothing": 0.1},
            r"label_smoothing=0.1 has one meaning for loss_type='sigmoid' and another for 'robust'",
        ),
        ({"video_fps": 0.0}, r"video_fps=0.0 must be above 0"),
        ({"video_max_frames": 1}, r"video_max_frames=1 must be at least 2"),
        ({"router_aux_loss_coef": -1.0}, r"router_aux_loss_coef=-1.0 must be at least 0"),
        ({"truncation_mode": "keep_end"}, r"truncation_mode='keep_end' would cut media off the prompt"),
    ],
)
def test_options_that_cannot_be(options, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        OmniDPOConfig(**pairs.options(tmp_path, **options))


def test_args_of_another_trainer(tmp_path):
    from trl import DPOConfig

    with pytest.raises(InputError, match="args is a DPOConfig: use OmniDPOConfig"):
        OmniDPOTrainer(tiny.thinker(), args=DPOConfig(str(tmp_path), bf16=False, use_cpu=True))

# SPDX-License-Identifier: Apache-2.0
"""Diffusion-DPO on pairs of a dataset: the loss against its formula, the order of pairs, evaluation, bad input."""

import logging
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig
from PIL import Image

from omnitrl.data import PromptStream
from omnitrl.errors import InputError, RunError
from omnitrl.rollout import stable_seed
from omnitrl.trainer import pair_latents
from tests.marks import first_fast
from tests.tiny_models import tiny_model
from tests.trainer.helpers import LORA, PROMPTS, brightness, config, logged, pairs, same, trainable, trainer
from tests.trainer.test_laws import StopAt, _moments


FRESH = LoraConfig(r=4, lora_alpha=16, init_lora_weights="gaussian")  # the identity at first
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")


def dpo(tmp_path, **options):
    return trainer(tmp_path, "diffusion_dpo", **{"rewards": None, **options})


def gradients(run):
    """Gradients of a run of one update, by name."""
    kept = {}

    def keep(*_):
        named = run.flow_model.networks.named_parameters()
        kept.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    run.create_optimizer()
    run.optimizer.register_step_pre_hook(keep)
    run.train()
    return kept


def flat(tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


def noised_by_hand(place, clean, shape):
    """A pair (2, ...) at its place in the order of training, in float64: latents, target, noise level."""
    generator = torch.Generator().manual_seed(stable_seed(42, "levels", place))
    sigma = 0.001 + 0.998 * torch.randn(1, generator=generator).sigmoid()
    noise = torch.randn(1, *shape, generator=generator).double()
    level = sigma.double()
    return (1 - level) * clean + level * noise, noise - clean, sigma


# The loss


@pytest.mark.parametrize("form", ["sigmoid", "ipo", "hinge"])
def test_the_first_gradient_is_that_of_the_formula_in_float64(tmp_path, form):
    beta = {"sigmoid": 20.0, "ipo": 2.0, "hinge": 0.5}[form]
    run = dpo(tmp_path, beta=beta, loss_type=form, max_steps=1, max_grad_norm=0.0, per_device_train_batch_size=3)
    ours = gradients(run)

    # The same model and adapters, made anew
    model = dpo(tmp_path / "again").flow_model
    rows, images = pairs(), run.flow_model.encode_images
    conditions = [model.encode([row]) for row in rows]
    model.networks.double()
    margins = []
    for place in range(3):
        row = PromptStream(5, 5, 42).indices(0)[place]
        clean = [images([Image.fromarray(rows[row][side])])[0].double() for side in ("chosen", "rejected")]
        latents, target, sigma = noised_by_hand(place, torch.stack(clean), clean[0].shape)

        def error(latents=latents, target=target, sigma=sigma, row=row):
            velocity = model.velocity(latents, 1000 * sigma.expand(2), conditions[row][[0, 0]])
            return (velocity - target).square().mean(dim=(1, 2, 3))

        with torch.no_grad(), model.transformer.disable_adapter():
            reference = error()
        gap = error() - reference
        margins.append(-beta / 2 * (gap[0] - gap[1]))
    margins = torch.stack(margins)
    loss = {
        "sigmoid": lambda m: torch.nn.functional.softplus(-m),
        "ipo": lambda m: (m / beta - 1 / (2 * beta)) ** 2,
        "hinge": lambda m: (1 - m).clamp(min=0),
    }[form](margins).mean()
    loss.backward()
    exact = {name: p.grad for name, p in model.networks.named_parameters() if p.requires_grad and p.grad is not None}

    assert logged(run, "loss")[0] == pytest.approx(loss.item(), rel=1e-5)
    assert logged(run, "rewards/margins")[0] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert logged(run, "rewards/accuracies")[0] == pytest.approx(float((margins > 0).double().mean()))
    assert margins.abs().min() > 1e-3
    assert ours.keys() == exact.keys()
    assert (flat(ours) - flat(exact)).norm() <= 1e-4 * flat(exact).norm()


@pytest.mark.parametrize(("form", "value"), [("sigmoid", math.log(2)), ("ipo", 1 / (4 * 50.0**2)), ("hinge", 1.0)])
def test_t15_at_the_reference(tmp_path, form, value):
    run = dpo(tmp_path, beta=50.0, loss_type=form, peft_config=FRESH, max_steps=1, timesteps_per_sample=3)
    run.train()
    assert logged(run, "loss") == pytest.approx([value], abs=1e-7)
    assert [logged(run, name) for name in REWARDS] == [[0.0]] * 4
    assert logged(run, "error/chosen")[0] > 0.1
    assert logged(run, "forwards_per_sample") == [2 * 3]  # the policy and the reference, at three levels


def test_t15_the_gradient_at_the_reference_does_not_depend_on_the_rest_of_the_loss(tmp_path):
    """beta/4 (de_chosen - de_rejected): linear in beta, and reversed where the pair is."""
    options = {"peft_config": FRESH, "max_steps": 1, "max_grad_norm": 0.0}
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs()]
    one = flat(gradients(dpo(tmp_path / "a", beta=40.0, **options)))
    two = flat(gradients(dpo(tmp_path / "b", beta=80.0, **options)))
    back = flat(gradients(dpo(tmp_path / "c", beta=40.0, data=swapped, **options)))
    assert one.norm() > 0
    assert (two - 2 * one).norm() <= 1e-5 * two.norm()
    assert (back + one).norm() <= 1e-5 * one.norm()


def test_t15_swapping_the_pictures_swaps_the_rewards(tmp_path):
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs()]
    one, back = dpo(tmp_path / "a", max_steps=1), dpo(tmp_path / "b", max_steps=1, data=swapped)
    one.train()
    back.train()
    assert logged(one, "rewards/chosen") == logged(back, "rewards/rejected")
    assert logged(one, "rewards/rejected") == logged(back, "rewards/chosen")
    assert logged(one, "rewards/margins")[0] == pytest.approx(-logged(back, "rewards/margins")[0], rel=1e-5)
    assert logged(one, "error/chosen") == logged(back, "error/rejected")
    assert abs(logged(one, "rewards/margins")[0]) > 1e-2


def test_full_fine_tuning_compares_with_a_frozen_copy(tmp_path):
    run = dpo(tmp_path, peft_config=None, max_steps=3, learning_rate=1e-4, data=pairs(2), timesteps_per_sample=4)
    run.train()
    assert logged(run, "loss")[0] == pytest.approx(math.log(2), abs=1e-7)
    assert logged(run, "rewards/margins")[0] == 0.0
    assert logged(run, "rewards/margins")[1] != 0.0
    frozen = run.reference._copy.networks.state_dict()
    assert same(frozen, tiny_model().networks.state_dict())


@pytest.mark.slow
def test_it_learns_the_pairs_and_the_control_learns_others(tmp_path):
    options = {"max_steps": 16, "learning_rate": 3e-3, "timesteps_per_sample": 2, "timesteps_per_forward": 2}
    options |= {"data": pairs(8), "eval_dataset": pairs(8), "per_device_train_batch_size": 8, "peft_config": FRESH}
    run = dpo(tmp_path / "a", **options)
    run.train()
    learnt = run.evaluate()
    control = dpo(tmp_path / "b", shuffle_preferences=True, **options)
    control.train()
    other = control.evaluate()
    assert learnt["eval_rewards/accuracies"] > 0.9
    assert learnt["eval_rewards/margins"] > 0.2
    swapped = [control._is_swapped(row) for row in range(8)]
    assert 0.25 <= np.mean(swapped) <= 0.75
    assert other["eval_rewards/accuracies"] == pytest.approx(1 - np.mean(swapped), abs=0.15)


def test_the_control_swaps_the_pictures_of_a_row_wherever_it_comes(tmp_path):
    plain = dpo(tmp_path / "a", per_device_train_batch_size=5, shuffle_dataset=False)
    control = dpo(tmp_path / "b", per_device_train_batch_size=5, shuffle_dataset=False, shuffle_preferences=True)
    for step in range(2):
        plain._micro_step = control._micro_step = step
        (rows, one), (_, other) = plain.next_micro_batch(), control.next_micro_batch()
        assert rows == [0, 1, 2, 3, 4]
        for i in rows:
            order = [2 * i + 1, 2 * i] if control._is_swapped(i) else [2 * i, 2 * i + 1]
            assert torch.equal(other[0].clean_latents[2 * i : 2 * i + 2], one[0].clean_latents[order])
        assert torch.equal(one[0].noise, other[0].noise)


# Which pairs


def recorded(run, steps):
    """Rows, noise and levels of some micro-batches."""
    found = []
    for step in range(steps):
        run._micro_step = step
        rows, batches = run.next_micro_batch()
        assert batches[0].samples.tolist() == [row for row in rows for _ in range(2)]
        found += [(row, batches[0].noise[2 * i], float(batches[0].sigmas[2 * i])) for i, row in enumerate(rows)]
        assert torch.equal(batches[0].noise[::2], batches[0].noise[1::2])
        assert torch.equal(batches[0].sigmas[::2], batches[0].sigmas[1::2])
    return found


def test_pairs_and_noise_do_not_depend_on_micro_batches_or_ranks(tmp_path, monkeypatch):
    run = dpo(tmp_path, per_device_train_batch_size=4)
    whole = recorded(run, 5)  # four passes over five pairs
    for start in range(0, 20, 5):
        assert sorted(row for row, _, _ in whole[start : start + 5]) == [0, 1, 2, 3, 4]
    assert [row for row, _, _ in whole[:5]] != [row for row, _, _ in whole[5:10]]
    assert len({sigma for _, _, sigma in whole}) == 20

    spread = [None] * 20
    config_class = type(run.args)
    for rank in range(2):
        other = dpo(tmp_path, per_device_train_batch_size=1)
        monkeypatch.setattr(config_class, "world_size", 2)
        monkeypatch.setattr(config_class, "process_index", rank)
        for i, found in enumerate(recorded(other, 10)):
            spread[2 * i + rank] = found
        monkeypatch.undo()
    for one, other in zip(whole, spread, strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
        assert one[2] == other[2]


@pytest.mark.parametrize(("batch", "accumulation", "levels"), [(4, 1, 1), (2, 2, 3), (1, 4, 2)])
def test_law_09_any_split_gives_the_gradient_of_the_one_big_batch(tmp_path, batch, accumulation, levels):
    options = {"timesteps_per_sample": 3, "max_steps": 1, "max_grad_norm": 0.0}
    whole = dpo(tmp_path / "a", per_device_train_batch_size=4, timesteps_per_forward=3, **options)
    split = dpo(
        tmp_path / "b",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        timesteps_per_forward=levels,
        **options,
    )
    one, other = flat(gradients(whole)), flat(gradients(split))
    assert one.norm() > 0
    assert (one - other).norm() <= 1e-5 * one.norm()
    assert logged(whole, "loss") == pytest.approx(logged(split, "loss"), rel=1e-5)


def test_an_epoch_is_one_pass(tmp_path):
    run = dpo(tmp_path, per_device_train_batch_size=1, max_steps=-1, num_train_epochs=2)
    seen = []
    loss = run.compute_row_losses
    run.compute_row_losses = lambda model, batch, source: seen.extend(source) or loss(model, batch, source)
    run.train()
    assert run.state.global_step == 10
    assert sorted(seen[:5]) == sorted(seen[5:]) == [0, 1, 2, 3, 4]


# Pictures and latents


def test_latents_and_pictures_give_the_same_run(tmp_path):
    rows, model = pairs(), tiny_model()
    encoded = [
        {**row, **{side: model.encode_images([Image.fromarray(row[side])])[0] for side in ("chosen", "rejected")}}
        for row in rows
    ]
    runs = [dpo(tmp_path / name, data=data, max_steps=3) for name, data in (("a", rows), ("b", encoded))]
    for run in runs:
        run.train()
    assert logged(runs[0], "loss") == logged(runs[1], "loss")
    assert same(*(trainable(run) for run in runs))


def test_pictures_are_encoded_once_unless_there_is_no_room(tmp_path, monkeypatch, caplog):
    def encodings(place):
        run, calls = dpo(place, per_device_train_batch_size=5, max_steps=3), []
        encode = run.flow_model.encode_images
        run.flow_model.encode_images = lambda images, *size: calls.append(len(images)) or encode(images, *size)
        run.train()
        return calls, logged(run, "loss")

    calls, losses = encodings(tmp_path / "a")
    assert calls == [1] * 10
    monkeypatch.setattr(pair_latents, "LATENT_CACHE_BYTES", 3 * 2 * 4 * 4 * 16 * 16)  # three pairs
    with caplog.at_level(logging.WARNING):
        calls, again = encodings(tmp_path / "b")
    assert len(calls) > 20
    assert again == losses
    assert "pictures are encoded again in each epoch" in caplog.text


def test_a_micro_batch_is_of_the_size_that_was_asked_for(tmp_path):
    run = dpo(tmp_path, height=32, width=48)
    assert run.next_micro_batch()[1][0].clean_latents.shape == (4, 4, 8, 12)


# Resuming


@pytest.mark.parametrize("stop", first_fast([1, 3]))
def test_law_10_resumed_equals_uninterrupted(tmp_path, stop):
    """Five pairs by twos: passes end in the midst of an update."""
    common = {"ema_decay": 0.9, "save_strategy": "steps", "save_steps": stop, "gradient_accumulation_steps": 2}
    straight = dpo(tmp_path / "a", max_steps=5, **common)
    straight.train()
    dpo(tmp_path / "b", max_steps=5, callbacks=[StopAt(stop)], **common).train()
    resumed = dpo(tmp_path / "b", max_steps=5, **common)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    assert same(trainable(straight), trainable(resumed))
    assert all(map(torch.equal, straight.ema.shadow_params, resumed.ema.shadow_params))
    assert all(map(torch.equal, _moments(straight), _moments(resumed)))
    assert logged(straight, "loss") == logged(resumed, "loss")
    assert straight.num_forwards == resumed.num_forwards == 5 * 8 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 7}, "written with seed=42, which decides which pairs an update has, but this run has seed=7"),
        ({"per_device_train_batch_size": 1}, "with per_device_train_batch_size=2"),
        ({"shuffle_preferences": True}, "with shuffle_preferences=False"),
        ({"data": pairs(4)}, "with pairs in train_dataset=5"),
    ],
)
def test_a_checkpoint_of_other_pairs_is_refused(tmp_path, options, message):
    dpo(tmp_path / "a", max_steps=1, save_strategy="steps", save_steps=1).train()
    run = dpo(tmp_path / "b", **options)
    with pytest.raises(RunError, match=message):
        run.train(resume_from_checkpoint=str(tmp_path / "a" / "out" / "checkpoint-1"))


# Evaluation


def test_evaluation_is_of_fixed_noise_and_changes_nothing(tmp_path):
    plain = dpo(tmp_path / "a", max_steps=3)
    plain.train()
    run = dpo(tmp_path / "b", max_steps=3, eval_dataset=pairs(3, seed=1), eval_strategy="steps", eval_steps=1)
    run.train()
    assert same(trainable(plain), trainable(run))
    assert logged(plain, "loss") == logged(run, "loss")
    assert plain.num_forwards == run.num_forwards
    result = run.evaluate()
    assert {k: v for k, v in result.items() if "runtime" not in k} == {
        k: v for k, v in run.evaluate().items() if "runtime" not in k
    }
    losses = logged(run, "eval_loss")
    assert len({*losses[:3]}) == 3
    assert losses[2] == result["eval_loss"]
    assert "eval_reward" not in result


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_evaluation_is_the_mean_over_pairs_and_levels(tmp_path, batch):
    rows = pairs(3, seed=1)
    run = dpo(tmp_path, beta=10.0, eval_dataset=rows, per_device_train_batch_size=batch)
    result, model, margins = run.evaluate(), run.flow_model, []
    for i, row in enumerate(rows):
        clean = torch.cat([model.encode_images([Image.fromarray(row[side])]) for side in ("chosen", "rejected")])
        draws = run.noised(run.eval_dataset, [i], [stable_seed(42, "eval_levels", i)], 4)
        for level in range(4):
            noise, sigma = draws[level].noise[:1], draws[level].sigmas[:1]
            latents, timesteps = (1 - sigma) * clean + sigma * noise, (1000 * sigma).expand(2)
            with torch.no_grad():
                conditions = model.encode([row])[[0, 0]]
                error = (model.velocity(latents, timesteps, conditions) - (noise - clean)).square().mean((1, 2, 3))
                with model.transformer.disable_adapter():
                    velocity = model.velocity(latents, timesteps, conditions)
                gap = error - (velocity - (noise - clean)).square().mean((1, 2, 3))
            margins.append(float(-10 / 2 * (gap[0] - gap[1])))
    margins = np.array(margins)
    assert result["eval_rewards/margins"] == pytest.approx(margins.mean(), abs=1e-5)
    assert result["eval_rewards/accuracies"] == pytest.approx((margins > 0).mean())
    assert result["eval_loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-5)


def test_with_rewards_samples_are_scored_too(tmp_path):
    sets = {"pairs": pairs(2), "prompts": PROMPTS[:3]}
    run = dpo(tmp_path, rewards=brightness, eval_dataset=sets, max_steps=1)
    result = run.evaluate()
    assert 0 < result["eval_pairs_reward"] < 1
    assert result["eval_pairs_loss"] > 0
    assert 0 < result["eval_prompts_reward"] < 1
    assert "eval_prompts_loss" not in result
    record = {entry.name: entry for entry in run.report.summary.evaluations}["eval_pairs"]
    assert record.metrics["eval_pairs_loss"] == result["eval_pairs_loss"]
    assert [sample.prompt for sample in record.samples] == PROMPTS[:2]


def test_without_rewards_only_what_is_pictured_is_sampled(tmp_path):
    run = dpo(tmp_path, eval_dataset=pairs(4), save_report=True, num_samples_to_save=2)
    before = run.engine.forwards
    run.evaluate()
    assert run.engine.forwards - before == 2 * 4  # two prompts, four steps
    assert [s.prompt for s in run.report.summary.evaluations[0].samples] == PROMPTS[:2]
    assert (tmp_path / "out" / "samples").is_dir()


def test_without_an_eval_dataset_training_pairs_are_pictured(tmp_path):
    run = dpo(tmp_path, max_steps=1, save_report=True, num_inference_steps_eval=2)
    run.train()
    assert len(logged(run, "eval_preview_loss")) == 2  # before and after
    assert [s.prompt for s in run.report.summary.evaluations[0].samples] == PROMPTS


def test_the_best_checkpoint_is_that_of_the_lowest_loss(tmp_path):
    args = config(tmp_path, "diffusion_dpo", load_best_model_at_end=True, save_strategy="steps", eval_strategy="steps")
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, r"beta=0.0 must be above 0: use 100.0"),
        ({"loss_type": "sigmod"}, "loss_type='sigmod' is unknown: .*'ipo', 'hinge'. Did you mean 'sigmoid'"),
        ({"sigma_sampling": "grid"}, "sigma_sampling='grid' is the grid of a rollout.*'logit_normal' or 'uniform'"),
        ({"sigma_sampling": "normal"}, "sigma_sampling='normal' is unknown"),
        ({"timestep_range": [0.5, 0.5]}, "two rising numbers"),
        ({"timesteps_per_sample": 0}, "timesteps_per_sample=0 must be at least 1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be at least 1"),
    ],
)
def test_options_are_checked(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        config(tmp_path, "diffusion_dpo", **options)


def changed(**changes):
    rows = pairs(3)
    return [*rows[:1], {**rows[1], **changes}, rows[2]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["a cat"], "Row 0 of the dataset is a str"),
        (changed(chosen=None), "'chosen' of row 1 of the dataset is missing"),
        (changed(chosen=pairs(3)[1]["rejected"]), "'chosen' and 'rejected' of row 1 of the dataset are the same"),
        (changed(score_chosen=0.1, score_rejected=0.9), "Row 1 of the dataset has score_chosen=0.1 .* swapped"),
        (changed(rejected="gone.png"), "'rejected' of row 1 of the dataset is the file gone.png, which does not"),
        (
            changed(rejected=torch.zeros(4, 8, 8)),
            r"'rejected' of row 1 .* is of shape \(4, 8, 8\), .* latents are of shape \(4, 16, 16\)",
        ),
        (changed(rejected=torch.full((4, 16, 16), math.nan)), "'rejected' of row 1 .* latents with NaN"),
        (changed(chosen=np.full((8, 8, 3), 2.0)), "'chosen' of row 1 .* array of float32 from 2 to 2"),
    ],
)
def test_pairs_that_cannot_be_used_are_refused_at_construction(tmp_path, data, message):
    with pytest.raises(InputError, match=message):
        dpo(tmp_path, data=data)
    with pytest.raises(InputError, match=message):
        dpo(tmp_path, eval_dataset=data)


def test_prompts_alone_cannot_be_evaluated_without_rewards(tmp_path):
    with pytest.raises(InputError, match="has no column 'chosen'"):
        dpo(tmp_path, eval_dataset=[{"prompt": "a cat"}])


def test_a_nan_loss_names_the_rows(tmp_path):
    run = dpo(tmp_path, data=pairs(3), per_device_train_batch_size=1, shuffle_dataset=False, max_steps=3)
    good = run.compute_row_losses
    run.compute_row_losses = lambda *a: good(*a) * (float("nan") if run.state.global_step == 1 else 1.0)
    with pytest.raises(RunError, match=r"loss is nan at optimizer step 1, on the pairs of rows \[1\]: the weights of"):
        run.train()


def test_a_bare_trainer_says_what_is_missing(tmp_path):
    run = trainer(tmp_path, "diffusion_dpo", rewards=None, peft_config=LORA)
    run.train_dataset = None
    with pytest.raises(InputError, match="Training needs a train_dataset"):
        run.train()

# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch

from omnitrl import DiffusionOPDConfig
from omnitrl.algorithms import reference_kl
from omnitrl.errors import InputError
from omnitrl.models import load_flow_model
from omnitrl.trainer.adapters import attach_adapters
from tests.marks import first_fast
from tests.tiny_models import tiny_model, tiny_sd3
from tests.toy_model import Field, model_of
from tests.trainer.helpers import LORA, all_rows, fresh_rollout, logged, same, teacher_of, trainable, trainer
from tests.trainer.test_laws import StopAt


FORMS = ["exact", "flow_grpo", "velocity"]


def opd(tmp_path, **options):
    """Without rewards, unless they are given."""
    options = {"num_generations": 1, "generation_batch_size": 4, "rewards": None, **options}
    return trainer(tmp_path, "diffusion_opd", **options)


def losses_of(run, buffer=None):
    buffer = run._buffer = fresh_rollout(run) if buffer is None else buffer
    return run.compute_row_losses(run.model, all_rows(buffer), buffer), buffer


@pytest.mark.parametrize("form", FORMS)
def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path, form):
    model = tiny_model()
    run = opd(tmp_path, model=model, teacher_model=copied(model), peft_config=None, distillation_form=form)
    losses, _ = losses_of(run)
    losses.sum().backward()
    assert losses.abs().max() < 1e-9  # rows of another batch size differ in the last bits
    assert max(float(p.grad.abs().max()) for p in run.trainable_parameters() if p.grad is not None) < 1e-3


def copied(model):
    """The same model with weights of its own."""
    twin = copy.copy(model)
    twin.networks = copy.deepcopy(model.networks)
    return twin


@pytest.mark.parametrize("sde_type", first_fast(["flow_sde", "dance_sde", "cps"]))
@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_the_divergence_of_the_two_steps(tmp_path, form, sde_type):
    """From the velocities of both models, with coefficients and std from the transition table, in float64."""
    run = opd(tmp_path, distillation_form=form, sde_type=sde_type, noise_level=0.5)
    losses, buffer = losses_of(run)
    batch = all_rows(buffer)
    with torch.no_grad():
        student = run.flow_model.velocity(batch.latents, batch.timesteps, batch.conditions).double()
        teacher = run.teacher.model.velocity(batch.latents, batch.timesteps, batch.conditions).double()
    coefficients = buffer.transitions.velocity_coef[batch.steps].double()
    gap = (coefficients[:, None, None, None] * (student - teacher)).square().flatten(1).mean(dim=1)
    std = buffer.transitions.std[batch.steps].double()
    sigmas = buffer.table.sigmas.double()
    expected = {
        "exact": gap / (2 * std**2),
        "flow_grpo": gap / (2 * std**2) * (sigmas[batch.steps] - sigmas[batch.steps + 1]),
        "velocity": (student - teacher).square().flatten(1).mean(dim=1),
    }[form]
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=2e-3)
    assert expected.min() > 0


def test_the_first_gradient_is_that_of_the_mean_over_all_rows(tmp_path):
    run = opd(tmp_path)
    losses, buffer = losses_of(run)
    gradient = torch.autograd.grad(losses.mean(), run.trainable_parameters())
    batch = all_rows(buffer)
    velocity = run.flow_model.velocity(batch.latents, batch.timesteps, batch.conditions)
    with torch.no_grad():
        teacher = run.teacher.model.velocity(batch.latents, batch.timesteps, batch.conditions)
    c, std = buffer.transitions.velocity_coef[batch.steps], buffer.transitions.std[batch.steps]
    value = reference_kl(
        "exact",
        mean=c[:, None, None, None] * velocity,
        mean_ref=c[:, None, None, None] * teacher,
        std=std,
    )
    expected = torch.autograd.grad(value.mean(), run.trainable_parameters())
    gap = sum((a - b).square().sum() for a, b in zip(gradient, expected, strict=True)).sqrt()
    size = sum(b.square().sum() for b in expected).sqrt()
    assert size > 1e-3
    assert gap < 1e-4 * size


@pytest.mark.slow
def test_the_student_comes_closer(tmp_path):
    run = opd(tmp_path, max_steps=16, learning_rate=5e-3, distillation_form="velocity", generation_batch_size=8)
    run.train()
    distances = logged(run, "distillation/velocity_mse")
    assert sum(distances[-2:]) < 0.7 * sum(distances[:2])
    assert logged(run, "loss") == pytest.approx(logged(run, "distillation/distance"), rel=1e-3)


def test_the_guided_teacher_of_an_unguided_student(tmp_path):
    run = opd(tmp_path, teacher_guidance_scale=4.0, distillation_form="velocity")
    losses, buffer = losses_of(run)
    batch = all_rows(buffer)
    rows = [buffer.trajectories[i].request.row for i in batch.samples]
    with torch.no_grad():
        student = run.flow_model.velocity(batch.latents, batch.timesteps, batch.conditions)
        conditions = run.teacher.model.encode(rows, guidance=True)
        teacher = run.teacher.model.velocity(batch.latents, batch.timesteps, conditions, 4.0)
    expected = (student - teacher).square().flatten(1).mean(dim=1)
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert run._forwards == 4 * 4 + len(batch) * 3  # rollout; student, and both branches of the teacher


def test_the_control_shows_the_teacher_other_prompts(tmp_path):
    run = opd(tmp_path, shuffle_prompts=True)
    buffer = fresh_rollout(run)
    batch = all_rows(buffer)
    other = [run._plan.other_row(0, t.request.group_id) for t in buffer.trajectories]
    assert all(a["prompt"] != t.request.row["prompt"] for a, t in zip(other, buffer.trajectories, strict=True))
    expected = run.teacher.model.encode([other[i] for i in batch.samples]).positive
    seen = run._teacher_conditions(batch, buffer).positive
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


def test_the_teacher_encodes_prompts_once_a_rollout(tmp_path):
    run = opd(tmp_path, num_generations=2, generation_batch_size=8, max_steps=4)
    calls = []
    encode = run.teacher.model.encode
    run.teacher.model.encode = lambda rows, *args: calls.append(len(rows)) or encode(rows, *args)
    run.train()
    assert calls == [4, 4]  # two rollouts of two updates, a row for each group


def test_without_rewards_nothing_is_decoded(tmp_path):
    run = opd(tmp_path, max_steps=2, eval_dataset=["a cat"])
    run.flow_model.decode = lambda *_: pytest.fail("a rollout was decoded")
    run.train()
    assert logged(run, "reward") == []
    del run.flow_model.decode
    assert run.evaluate().keys() >= {"eval_runtime"}


def test_rewards_are_watched(tmp_path, caplog):
    def constant(completions, **kwargs):
        return [0.25] * len(completions)

    watched = opd(tmp_path / "a", rewards=constant, max_steps=6)
    watched.train()
    assert logged(watched, "reward") == [0.25] * 6
    assert "nothing can be learnt" not in caplog.text
    blind = opd(tmp_path / "b", max_steps=6)
    blind.train()
    assert same(trainable(watched), trainable(blind))


# Adapters


@pytest.fixture
def saved_adapter(tmp_path):
    """A saved LoRA of the tiny model, and the velocity that it makes."""
    run = trainer(tmp_path / "teacher", max_steps=1, learning_rate=0.1)
    run.train()
    run.save_model()
    inputs = run.flow_model.example_inputs()
    with torch.no_grad():
        return str(run.args.output_dir), run.flow_model.velocity(**inputs)


@pytest.mark.parametrize("peft_config", [LORA, None])
def test_an_adapter_as_teacher(tmp_path, saved_adapter, peft_config):
    folder, expected = saved_adapter
    run = opd(tmp_path, model=tiny_model(), teacher_adapter=folder, teacher_model=None, peft_config=peft_config)
    inputs = run.flow_model.example_inputs()
    own = run.flow_model.velocity(**inputs)
    with run.teacher.velocity(run.model) as velocity:
        assert torch.allclose(velocity(**inputs), expected, atol=1e-6)
    after = run.flow_model.velocity(**inputs)
    assert torch.equal(own, after)
    assert (own - expected).abs().max() > 1e-3
    shared = run.teacher.model is run.flow_model
    assert shared == (peft_config is not None)  # no second copy of the base


@pytest.mark.parametrize("peft_config", first_fast([LORA, None]))
def test_only_the_student_is_trained_and_saved(tmp_path, saved_adapter, peft_config):
    folder, expected = saved_adapter
    run = opd(
        tmp_path, model=tiny_model(), teacher_adapter=folder, teacher_model=None, peft_config=peft_config, max_steps=3
    )
    before = trainable(run)
    assert not any("teacher" in name for name in before)
    run.train()
    after = trainable(run)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    with run.teacher.velocity(run.model) as velocity:
        assert torch.allclose(velocity(**run.flow_model.example_inputs()), expected, atol=1e-6)
    run.save_model()
    reloaded = tiny_model()
    if peft_config is not None:
        attach_adapters(reloaded, str(run.args.output_dir))
        inputs = run.flow_model.example_inputs()
        assert torch.allclose(reloaded.velocity(**inputs), run.flow_model.velocity(**inputs), atol=1e-6)


@pytest.mark.parametrize("teacher", first_fast(["model", "adapter"]))
@pytest.mark.parametrize("stop", first_fast([1, 2]))
def test_resumed_equals_uninterrupted(tmp_path, saved_adapter, stop, teacher):
    """Step 1 lies in the midst of a rollout of two updates."""
    common = {"save_strategy": "steps", "save_steps": stop, "max_steps": 3, "generation_batch_size": 8}
    if teacher == "adapter":
        common |= {"teacher_adapter": saved_adapter[0], "teacher_model": None}
    straight = opd(tmp_path / "a", **common)
    straight.train()
    opd(tmp_path / "b", callbacks=[StopAt(stop)], **common).train()
    resumed = opd(tmp_path / "b", **common)
    resumed.train(resume_from_checkpoint=True)
    assert same(trainable(straight), trainable(resumed))
    assert logged(straight, "loss") == logged(resumed, "loss")


# Bad input


def refused(make, message):
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_one_teacher(tmp_path):
    refused(lambda: opd(tmp_path, teacher_model=None), "needs one teacher, got none: pass `teacher_model`")
    refused(lambda: opd(tmp_path, teacher_adapter="folder"), "needs one teacher, got two")


def test_the_student_itself_is_no_teacher(tmp_path):
    model = tiny_model()
    refused(lambda: opd(tmp_path, model=model, teacher_model=model), "is the very model that is trained")
    models = [load_flow_model(pipeline) for pipeline in [tiny_sd3()] * 2]
    refused(lambda: opd(tmp_path, model=models[0], teacher_model=models[1]), "is the very model that is trained")


def test_a_teacher_of_another_kind(tmp_path):
    refused(
        lambda: opd(tmp_path, teacher_model=model_of(Field())), "is a ToyModel, but the student is a SD3Model, whose"
    )
    smaller = teacher_of(tiny_model())
    smaller.latent_shape = lambda size=None: (4, 8, 8)
    refused(
        lambda: opd(tmp_path, teacher_model=smaller), r"latents of shape \(4, 8, 8\), the student of \(4, 16, 16\)"
    )


def test_an_adapter_that_is_not_there(tmp_path):
    for peft_config in (LORA, None):
        refused(
            lambda peft_config=peft_config: opd(
                tmp_path, teacher_model=None, teacher_adapter=str(tmp_path), peft_config=peft_config
            ),
            "No adapter can be loaded from teacher_adapter=",
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation_form": "mse"}, "distillation_form='mse' is unknown: use one of 'exact', 'flow_grpo'"),
        ({"shuffle_advantages": True}, "use shuffle_prompts=True"),
        ({"num_generations": 0}, "num_generations=0 must be at least 1"),
        ({"teacher_guidance_scale": -1.0}, "teacher_guidance_scale=-1.0 must be at least 0"),
    ],
)
def test_bad_options(tmp_path, options, message):
    refused(lambda: DiffusionOPDConfig(output_dir=str(tmp_path), use_cpu=True, **options), message)


def test_prompts_to_mix_up(tmp_path):
    refused(
        lambda: opd(tmp_path, shuffle_prompts=True, data=["a cat"]), "needs other prompts, but train_dataset has 1"
    )

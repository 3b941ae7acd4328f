# SPDX-License-Identifier: Apache-2.0
"""
Does it learn, and is it the rewards that it learns from?

'The reward went up' alone passes on garbage: noise in the updates moves samples too. So each run has to reach a level,
and to beat its control, the same run with what it learns from mixed up. Points in the plane take a second for what
pictures take a minute for; one run on pictures keeps the two apart from each other.
"""

import dataclasses

import pytest
import torch
from peft import LoraConfig

from omnitrl.models import load_flow_model
from omnitrl.quickstart import GLYPHS, rows
from omnitrl.trainer import TRAINERS, get_trainer
from tests.toy_model import closeness, distance, toy_model
from tests.trainer.helpers import brightness, trainer


PROMPTS = [str(i) for i in range(8)]  # without an effect: groups of the same prompt

# For all algorithms, of which each takes what it has. The clip range is that of two latent elements.
SHARED = {
    "num_inference_steps": 10,
    "num_inference_steps_eval": 10,
    "num_generations": 16,
    "num_generations_eval": 256,
    "generation_batch_size": 128,
    "per_device_train_batch_size": 64,
    "rollout_batch_size": 256,
    "timesteps_per_forward": 16,
    "epsilon": 0.2,
    "learning_rate": 2e-3,
    "weight_decay": 0.0,
    "max_steps": 60,
    "logging_steps": 1000,
    "num_samples_to_save": 0,
    "save_strategy": "no",
    "save_report": False,
    "report_to": [],
    "use_cpu": True,
}
# What an algorithm wants otherwise.
SETTINGS: dict[str, dict] = {
    "flow_dppo": {"kl_threshold": 0.05},
}
# Arguments of the trainer, where rewards and prompts are not what it learns from.
ARGUMENTS: dict[str, dict] = {}


def toy_run(folder, algorithm, seed, control):
    """Held-out reward before and after a run."""
    trainer_class = get_trainer(algorithm)
    known = {field.name for field in dataclasses.fields(trainer_class.config_class)}
    shared = {name: value for name, value in SHARED.items() if name in known}
    options = {**shared, **SETTINGS.get(algorithm, {}), trainer_class.control_option: control}
    given = {"reward_funcs": distance, "train_dataset": PROMPTS, **ARGUMENTS.get(algorithm, dict)()}
    args = trainer_class.config_class(output_dir=str(folder), seed=seed, **options)
    run = trainer_class(toy_model(), args=args, eval_dataset=PROMPTS[:1], **given)
    before = run.evaluate()["eval_reward"]
    run.train()
    return before, run.evaluate()["eval_reward"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("algorithm", TRAINERS)
def test_learning_reaches_a_level_and_beats_its_control(tmp_path, algorithm, seed):
    before, learnt = toy_run(tmp_path / "run", algorithm, seed, control=False)
    again, control = toy_run(tmp_path / "control", algorithm, seed, control=True)
    assert again == before == pytest.approx(-2.5, abs=0.1)
    assert learnt > -0.7
    assert control < -1.5


def test_the_toy_is_what_it_is_taken_for():
    """Eight modes at distances of 4 |sin(k pi / 8)| from the target, which is a mode itself."""
    model, generator = toy_model(), torch.Generator().manual_seed(0)
    latents = torch.randn(1024, 2, 1, 1, generator=generator)
    conditions = model.encode([{"prompt": "0"}] * 1024)
    table = model.sigmas(40, (2, 1, 1))
    with torch.no_grad():
        for step in range(40):
            timesteps = table.timesteps[step].expand(1024)
            latents += (table.sigmas[step + 1] - table.sigmas[step]) * model.velocity(latents, timesteps, conditions)
    points = latents.flatten(1)
    assert float(closeness(points).mean()) == pytest.approx(-2.51, abs=0.15)
    angles = torch.arange(8) * torch.pi / 4
    modes = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)
    shares = torch.cdist(points, modes).argmin(dim=1).bincount(minlength=8) / 1024
    assert shares.min() > 0.07
    assert torch.cdist(points, modes).min(dim=1).values.mean() < 0.3


def change_of_brightness(tmp_path, seed, control):
    """Held-out brightness of glyphs before and after 32 updates from 16 rollouts of 32 samples."""
    run = trainer(
        tmp_path,
        model=load_flow_model(GLYPHS, max_sequence_length=1, dtype=torch.float32),
        rewards=brightness,
        peft_config=LoraConfig(r=8, lora_alpha=16, init_lora_weights="gaussian"),
        data=rows("train"),
        eval_dataset=rows("heldout"),
        height=32,
        width=64,
        per_device_train_batch_size=16,
        num_generations=8,
        generation_batch_size=32,
        max_steps=32,
        sde_window_strategy="first",
        sde_window_size=2,
        timesteps_per_forward=2,
        epsilon=5e-3,
        learning_rate=2e-3,
        seed=seed,
        shuffle_advantages=control,
    )
    before = run.evaluate()["eval_reward"]
    run.train()
    return before, run.evaluate()["eval_reward"]


@pytest.mark.slow
def test_pictures_get_brighter_and_those_of_the_control_do_not(tmp_path):
    before, learnt = change_of_brightness(tmp_path / "run", seed=1, control=False)
    _, control = change_of_brightness(tmp_path / "control", seed=1, control=True)
    assert before < 0.6
    assert learnt > before + 0.1
    assert learnt > control + 0.05

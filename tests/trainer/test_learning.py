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
from tests.toy_model import (
    MODES,
    PROMPTS,
    closeness,
    closeness_of_media,
    closeness_of_pixels,
    toy_model,
    toy_pairs,
)
from tests.trainer.helpers import brightness, trainer


# For all algorithms, of which each takes what it has. The clip range is that of two latent elements.
SHARED = {
    "num_inference_steps": 10,
    "num_inference_steps_eval": 10,
    "num_generations": 16,
    "num_generations_eval": 32,
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
    "online_diffusion_dpo": {"num_generations": 4, "per_device_train_batch_size": 16, "beta": 1.0},
    "diffusion_dpo": {"beta": 1.0, "learning_rate": 4e-3, "timesteps_per_sample": 4},
    "srpo": {"positive_words": None, "negative_words": None, "branches": ["denoise"], "learning_rate": 4e-3},
    "diffusion_opd": {"learning_rate": 5e-3},
}
# Arguments of the trainer, where rewards of points are not what it learns from. Where the control mixes up prompts,
# there have to be several.
ONE = ["0"] * 8
ARGUMENTS = {
    "srpo": lambda: {
        "reward_funcs": closeness_of_pixels,
        "eval_reward_funcs": closeness_of_media,
        "train_dataset": PROMPTS,
        "eval_dataset": PROMPTS,
    },
    "diffusion_dpo": lambda: {"train_dataset": toy_pairs("0")},
    "diffusion_opd": lambda: {
        "teacher_model": toy_model(follows_prompts=True),
        "train_dataset": PROMPTS,
        "eval_dataset": PROMPTS,
    },
}


def toy_run(folder, algorithm, seed, control):
    """Held-out reward before and after a run."""
    trainer_class = get_trainer(algorithm)
    known = {field.name for field in dataclasses.fields(trainer_class.config_class)}
    shared = {name: value for name, value in SHARED.items() if name in known}
    options = {**shared, **SETTINGS.get(algorithm, {}), trainer_class.control_option: control}
    given = {"reward_funcs": closeness_of_media, "train_dataset": ONE, "eval_dataset": ONE}
    given |= ARGUMENTS.get(algorithm, dict)()
    args = trainer_class.config_class(output_dir=str(folder), seed=seed, **options)
    run = trainer_class(toy_model(), args=args, **given)
    before = run.evaluate()["eval_reward"]
    run.train()
    return before, run.evaluate()["eval_reward"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("algorithm", TRAINERS)
def test_learning_reaches_a_level_and_beats_its_control(tmp_path, algorithm, seed):
    before, learnt = toy_run(tmp_path / "run", algorithm, seed, control=False)
    again, control = toy_run(tmp_path / "control", algorithm, seed, control=True)
    assert again == before == pytest.approx(-2.5, abs=0.2)
    assert learnt > -0.7
    assert control < -1.3
    assert learnt > control + 1


@pytest.mark.parametrize("follows_prompts", [False, True])
def test_the_toy_is_what_it_is_taken_for(follows_prompts):
    """Points near the modes: of a prompt at distances of 4 |sin(k pi / 8)| from its own, or of that one alone."""
    model, generator = toy_model(follows_prompts), torch.Generator().manual_seed(0)
    latents = torch.randn(1024, 2, 1, 1, generator=generator)
    prompts = PROMPTS * 128
    conditions, table = model.encode([{"prompt": prompt} for prompt in prompts]), model.sigmas(40)
    with torch.no_grad():
        for step in range(40):
            timesteps = table.timesteps[step].expand(1024)
            latents += (table.sigmas[step + 1] - table.sigmas[step]) * model.velocity(latents, timesteps, conditions)
    points = latents.flatten(1)
    expected = -0.2 if follows_prompts else -2.51
    assert float(closeness(prompts, points).mean()) == pytest.approx(expected, abs=0.1)
    distances = torch.cdist(points, MODES)
    assert distances.argmin(dim=1).bincount(minlength=8).min() > 0.07 * 1024
    assert distances.min(dim=1).values.mean() < 0.3


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

# SPDX-License-Identifier: Apache-2.0
"""Trainers of a tiny model that run in a second, and what goes into them."""

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from peft import LoraConfig

from omnitrl.media import Audio
from omnitrl.models import FlowModel
from omnitrl.trainer import TRAINERS, ReplayTrainer, RolloutTrainer, get_trainer
from tests.tiny_models import tiny_model, tiny_of


PROMPTS = ["a cat", "two dogs", "the red sun", "ice and snow", "a map"]
LORA = LoraConfig(r=4, lora_alpha=16, init_lora_weights=False)  # not the identity: what is lost would show


def brightness(prompts, completions, **kwargs):
    """The mean of pixels from 0 to 1, or of a sound's samples from -1 to 1."""
    largest = {True: 1, False: 255}
    return [float(np.asarray(medium).mean() / largest[isinstance(medium, Audio)]) for medium in completions]


def lightness(prompts, completions, **kwargs):
    """The same with a gradient, for algorithms that follow it."""
    return completions.flatten(1).mean(dim=1)


def teacher_of(model):
    """The same model with other weights."""
    teacher, generator = copy.copy(model), torch.Generator().manual_seed(0)
    teacher.networks = copy.deepcopy(model.networks)
    for p in teacher.networks.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator).to(p.dtype)
    return teacher


def pairs(count=5, seed=0):
    """Preference pairs of pictures of noise, each of another size."""
    generator = np.random.default_rng(seed)
    pixels = [generator.integers(0, 255, (64 - 4 * i, 64, 3), dtype=np.uint8) for i in range(2 * count)]
    return [
        {"prompt": PROMPTS[i % len(PROMPTS)], "chosen": pixels[2 * i], "rejected": pixels[2 * i + 1]}
        for i in range(count)
    ]


def latent_pairs(model, size, rows, seed=0):
    """Preference pairs of latents, for media that are no pictures."""
    generator = torch.Generator().manual_seed(seed)
    shape = model.latent_shape(size)
    return [
        {**row, **{side: torch.randn(shape, generator=generator) for side in ("chosen", "rejected")}} for row in rows
    ]


# What an algorithm needs beside what all are given: options by name, and arguments of the trainer, made of the model.
SETTINGS: dict[str, dict] = {
    "diffusion_dpo": {"beta": 100.0, "per_device_train_batch_size": 2},
    "online_diffusion_dpo": {"beta": 100.0, "per_device_train_batch_size": 1},  # two pairs a rollout of 8 samples
    "mix_grpo": {"sde_window_size": 3},  # its window of 4 does not fit 4 steps
    "dance_grpo": {"timestep_fraction": 1.0},  # 0.6 of three steps is one
}
ARGUMENTS: dict[str, Callable] = {
    "diffusion_dpo": lambda model: {"train_dataset": pairs()},
    "srpo": lambda model: {"reward_funcs": lightness},
    "diffusion_opd": lambda model: {"teacher_model": teacher_of(model)},
}

# What an algorithm needs on one pipeline class.
OF_A_FAMILY: dict[tuple[str, str], dict] = {
    ("srpo", "StableAudio3Pipeline"): {"align_range": [10, 25]},  # its first levels have little but noise
}

# Algorithms by what their trainers do; tests of a part of the loop run over those that have it.
WITH_ROLLOUTS = [name for name in TRAINERS if issubclass(get_trainer(name), RolloutTrainer)]
WITH_REPLAY = [name for name in TRAINERS if issubclass(get_trainer(name), ReplayTrainer)]


def config(tmp_path, algorithm="flow_grpo", **options):
    """A config of small numbers; of the shared defaults, those that the algorithm has."""
    config_class = get_trainer(algorithm).config_class
    known = {field.name for field in dataclasses.fields(config_class)}
    defaults = {
        "output_dir": str(tmp_path / "out"),
        "num_inference_steps": 4,
        "num_inference_steps_eval": 4,
        "guidance_scale": 1.0,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "generation_batch_size": 8,
        "max_steps": 4,
        "beta": 0.0,
        "epsilon": 1e-2,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "save_report": False,
        "report_to": [],
        "use_cpu": True,
    }
    shared = {name: value for name, value in defaults.items() if name in known}
    return config_class(**{**shared, **SETTINGS.get(algorithm, {}), **options})


def trainer(tmp_path, algorithm="flow_grpo", model=None, rewards=brightness, peft_config=LORA, data=None, **options):
    """A trainer; rewards and data of its own win over those that the algorithm needs."""
    names = ("eval_dataset", "callbacks", "eval_reward_funcs", "teacher_model", "teacher_adapter")
    given = {key: options.pop(key) for key in names if key in options}
    model = tiny_model() if model is None else model
    arguments = {
        "reward_funcs": brightness,
        "train_dataset": PROMPTS,
        **(ARGUMENTS[algorithm](model) if algorithm in ARGUMENTS else {}),
        **({} if rewards is brightness else {"reward_funcs": rewards}),
        **({} if data is None else {"train_dataset": data}),
        **given,
    }
    args = config(tmp_path, algorithm, **options)
    return get_trainer(algorithm)(model, args=args, peft_config=peft_config, **arguments)


def family_run(tmp_path, algorithm, pipeline, **options):
    """
    A trainer of a tiny checkpoint of a pipeline class, at its size and with its condition images.

    Args:
        pipeline: Name of the pipeline class.
    """
    tiny = tiny_of(pipeline)
    model = tiny.model()
    rows = [tiny.row(prompt, i % len(tiny.image_sizes)) for i, prompt in enumerate(PROMPTS)]
    size = {name: value for name, value in vars(tiny.size).items() if value is not None}
    given = {"data": rows} | size | OF_A_FAMILY.get((algorithm, pipeline), {}) | options
    if algorithm == "diffusion_dpo":
        pictures = type(model).encode_images is FlowModel.encode_images
        made = pairs() if pictures else latent_pairs(model, tiny.size, rows)
        given["data"] = [{**row, **pair} for row, pair in zip(rows, made, strict=True)]
    return trainer(tmp_path, algorithm, model=model, **given)


def trainable(trained):
    """Copies of the trained weights by name."""
    named = trained.flow_model.networks.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


def logged(trained, name):
    """All logged values of a metric."""
    return [row[name] for row in trained.state.log_history if name in row]


def fresh_rollout(trained, rollout=0):
    """Makes a rollout as training would, without training."""
    trained.get_train_dataloader()
    trained.flow_model.networks.eval()
    return trained.make_rollout(rollout)


def all_rows(buffer):
    """Every trained step of every sample of a rollout as one batch."""
    (batch,) = buffer.replay(list(range(len(buffer.trajectories))), timesteps_per_forward=len(buffer.steps))
    return batch


def same(a, b):
    """Whether two dicts of tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

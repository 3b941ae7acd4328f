# SPDX-License-Identifier: Apache-2.0
"""
A model of points in the plane: eight modes on a circle of radius 2. What it learns can be told in seconds.

The prompts "0" to "7" name the modes, and before training have no effect: every prompt gives points of all modes.
"""

import copy
import functools
import math
from types import SimpleNamespace

import torch
from torch import nn

from omnitrl.algorithms import make_sigma_table
from omnitrl.models import Conditions, FlowModel, MediaSize
from omnitrl.models.size import CHECKPOINT_SIZE


MODES = 2.0 * torch.tensor([[math.cos(k * math.pi / 4), math.sin(k * math.pi / 4)] for k in range(8)])
PROMPTS = [str(k) for k in range(8)]
SPREAD = 0.15  # standard deviation of a mode
SCALE = 4.0  # pixels are points divided by this, so that nearly all lie in [-1, 1]
WIDTH = 64


class Field(nn.Module):
    """A velocity for points (B, 2, 1, 1) at timesteps (B,), given the modes (B, 2) that are asked for."""

    def __init__(self):
        super().__init__()
        hidden = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.SiLU())]
        self.layers = nn.Sequential(nn.Linear(7, WIDTH), nn.SiLU(), *hidden, nn.Linear(WIDTH, 2))
        nn.init.zeros_(self.layers[0].weight[:, 5:])  # prompts have no effect before they are trained

    def forward(self, latents, timesteps, wanted):
        time = (timesteps / 1000).to(latents.dtype)[:, None]
        angle = math.pi * time
        inputs = torch.cat([latents.flatten(1), time, angle.sin(), angle.cos(), wanted], dim=1)
        return self.layers(inputs).view_as(latents)


class ToyModel(FlowModel):
    """The family: media are points (2,)."""

    pipeline_classes = ()
    network_names = ("network",)
    default_lora_targets = ("layers.0", "layers.2", "layers.4", "layers.6")
    default_guidance_scale = 1.0
    default_max_sequence_length = 1

    default_size = MediaSize()

    def encode_row(self, row, size):
        return Conditions({"wanted": wanted(row["prompt"])[None]})

    def latent_shape(self, size=CHECKPOINT_SIZE):
        return (2, 1, 1)

    def sigmas(self, num_steps, size=CHECKPOINT_SIZE):
        return make_sigma_table(torch.linspace(1, 0, num_steps + 1))

    def predict(self, latents, timesteps, inputs, layout=None):
        return self.networks["network"](latents, timesteps, inputs["wanted"])

    def decode_pixels(self, latents):
        return torch.cat([latents, torch.zeros_like(latents[:, :1])], dim=1) / SCALE

    def encode_pixels(self, pixels):
        return pixels[:, :2] * SCALE

    @torch.no_grad()
    def decode(self, latents, size=CHECKPOINT_SIZE):
        return list(latents.flatten(1))


def wanted(prompt):
    """The mode that a prompt asks for, (2,); for a prompt that is no number the middle."""
    return MODES[int(prompt)] if prompt in PROMPTS else torch.zeros(2)


def closeness(prompts, points):
    """The reward (B,) of points (B, 2): minus the distance from the mode that was asked for."""
    return -(points - torch.stack([wanted(prompt) for prompt in prompts])).norm(dim=-1)


def closeness_of_media(prompts, completions, **kwargs):
    """The reward as trainers call it, of points."""
    return closeness(prompts, torch.stack(list(completions))).tolist()


def closeness_of_pixels(prompts, completions, **kwargs):
    """The same of pixels (B, 3, 1, 1) in [0, 1], with a gradient."""
    return closeness(prompts, (2 * completions[:, :2, 0, 0] - 1) * SCALE)


def _points(wanted_modes, generator):
    return MODES[wanted_modes] + SPREAD * torch.randn(len(wanted_modes), 2, generator=generator)


def _fit(field, follows_prompts, steps):
    """Flow matching on points of the modes, which follow the prompts or do not."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(field.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        modes = torch.randint(8, (512,), generator=generator)
        data, sigma = _points(modes, generator), torch.rand(512, generator=generator)
        noise = torch.randn(512, 2, generator=generator)
        noised = (1 - sigma[:, None]) * data + sigma[:, None] * noise
        given = MODES[modes] if follows_prompts else torch.zeros(512, 2)
        velocity = field(noised[..., None, None], 1000 * sigma, given).flatten(1)
        loss = (velocity - (noise - data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return field


@functools.cache
def _fitted(follows_prompts):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        field = Field()
    return _fit(field, follows_prompts, 500 if follows_prompts else 1500)


def toy_model(follows_prompts=False):
    """A model whose prompts have no effect, or do what is asked; fitted once a process, and copied."""
    return model_of(copy.deepcopy(_fitted(follows_prompts)))


def model_of(network, family=ToyModel):
    """A model of a network, fitted or not."""
    return family(SimpleNamespace(network=network, components={"network": network}, config={}))


def toy_pairs(prompt, count=512):
    """Preference pairs of latents: two points, of which the one that is closer to what the prompt asks is chosen."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        pair = _points(torch.randint(8, (2,), generator=generator), generator)
        first, second = pair[closeness([prompt] * 2, pair).argsort(descending=True)]
        rows.append({"prompt": prompt, "chosen": first.view(2, 1, 1), "rejected": second.view(2, 1, 1)})
    return rows

# SPDX-License-Identifier: Apache-2.0
"""A model of points in the plane: eight modes on a circle of radius 2. What it learns can be told in seconds."""

import copy
import functools
import math
from types import SimpleNamespace

import torch
from torch import nn

from omnitrl.algorithms import make_sigma_table
from omnitrl.models import FlowModel


RADIUS = 2.0
TARGET = torch.tensor([RADIUS, 0.0])  # one of the modes
SPREAD = 0.15  # standard deviation of a mode
SCALE = 4.0  # pixels are points divided by this, so that nearly all lie in [-1, 1]
WIDTH = 64


def closeness(points):
    """The reward (B,) of points (B, 2): minus the distance from the target, -2.51 for the eight modes."""
    return -(points - TARGET.to(points)).norm(dim=-1)


class Field(nn.Module):
    """A velocity for points (B, 2, 1, 1) at timesteps (B,)."""

    _no_split_modules = None

    def __init__(self):
        super().__init__()
        hidden = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.SiLU())]
        self.layers = nn.Sequential(nn.Linear(5, WIDTH), nn.SiLU(), *hidden, nn.Linear(WIDTH, 2))

    def forward(self, latents, timesteps):
        time = (timesteps / 1000).to(latents.dtype)[:, None]
        angle = math.pi * time
        return self.layers(torch.cat([latents.flatten(1), time, angle.sin(), angle.cos()], dim=1)).view_as(latents)


class ToyModel(FlowModel):
    """The family: prompts have no effect, and media are points (2,)."""

    pipeline_classes = ()
    network_names = ("network",)
    default_lora_targets = ("layers.0", "layers.2", "layers.4", "layers.6")
    default_guidance_scale = 1.0
    default_max_sequence_length = 1

    def encode_rows(self, rows):
        return {"nothing": torch.zeros(len(rows), 1)}

    def latent_shape(self, height, width):
        return (2, 1, 1)

    def sigmas(self, num_steps, latent_shape):
        return make_sigma_table(torch.linspace(1, 0, num_steps + 1))

    def predict(self, latents, timesteps, inputs):
        return self.networks["network"](latents, timesteps)

    def decode_pixels(self, latents):
        return torch.cat([latents, torch.zeros_like(latents[:, :1])], dim=1) / SCALE

    def encode_pixels(self, pixels):
        return pixels[:, :2] * SCALE

    @torch.no_grad()
    def decode(self, latents):
        return list(latents.flatten(1))


def points_of(media):
    """Points (B, 2) of what a trainer hands to a reward: a list of points, or pixels (B, 3, 1, 1)."""
    if isinstance(media, torch.Tensor):
        return media[:, :2, 0, 0] * SCALE
    return torch.stack(list(media))


def distance(prompts, completions, **kwargs):
    """The reward of points as trainers call it."""
    return closeness(points_of(completions)).tolist()


def _fit(field, draw, steps, seed):
    """Flow matching on points that `draw` makes."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(field.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        data, sigma = draw(512, generator), torch.rand(512, generator=generator)
        noise = torch.randn(512, 2, generator=generator)
        noised = (1 - sigma[:, None]) * data + sigma[:, None] * noise
        velocity = field(noised[..., None, None], 1000 * sigma).flatten(1)
        loss = (velocity - (noise - data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return field


def _eight_modes(count, generator):
    angle = torch.randint(8, (count,), generator=generator) * (math.pi / 4)
    centre = RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)
    return centre + SPREAD * torch.randn(count, 2, generator=generator)


def _target_mode(count, generator):
    return TARGET + SPREAD * torch.randn(count, 2, generator=generator)


@functools.cache
def _fitted(target_only):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        field = Field()
    return _fit(field, _target_mode if target_only else _eight_modes, 300 if target_only else 1500, seed=0)


def toy_model(target_only=False):
    """A model of the eight modes, or of the target alone; fitted once a process, and copied."""
    network = copy.deepcopy(_fitted(target_only))
    pipeline = SimpleNamespace(network=network, components={"network": network}, config={})
    return ToyModel(pipeline)

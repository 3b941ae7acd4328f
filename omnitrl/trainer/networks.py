# SPDX-License-Identifier: Apache-2.0
"""What models of several networks, of which each has a part of the noise levels, ask of a trainer."""

from __future__ import annotations

from collections.abc import Iterable

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import InputError
from omnitrl.models import FlowModel


def set_second_guidance(model: FlowModel, guidance_scale_2: float | None) -> None:
    """
    Sets the guidance of the second network, where one is given.

    Raises:
        [`~omnitrl.errors.InputError`]: the model has one network only.
    """
    if guidance_scale_2 is None:
        return
    if len(model.networks) == 1:
        raise InputError(
            f"guidance_scale_2={guidance_scale_2} is for models of two networks, and this "
            f"{type(model.pipeline).__name__} has one: leave it out, and set guidance_scale."
        )
    model.guidance_scale_2 = guidance_scale_2


def check_networks(model: FlowModel, name: str, draws_noise_levels: bool, sharded: bool) -> None:
    """
    Raises where an algorithm cannot train a model of several networks, or some of them only.

    Args:
        model ([`FlowModel`]):
            With the networks that are to be trained made trainable.
        name (`str`):
            Name of the algorithm.
        draws_noise_levels (`bool`):
            Whether samples of one micro-batch are trained at noise levels of their own.
        sharded (`bool`):
            Whether each process has a part of the weights only.
    """
    known, trained = list(model.network_names), list(model.trained_networks)
    if len(known) == 1 or not draws_noise_levels:
        return
    if sharded:
        raise InputError(
            f"{name} draws the noise levels of each sample, so a process could skip one of the networks {known} while "
            "others wait for its shards: use DDP in place of FSDP or DeepSpeed, or an algorithm that replays steps, "
            "such as FlowGRPO."
        )
    if trained != known:
        raise InputError(
            f"{name} draws noise levels of all the networks {known}, but trainable_networks={trained} leaves some "
            "out: use trainable_networks=None, or an algorithm that replays steps, such as FlowGRPO."
        )


def check_trained_steps(model: FlowModel, table: SigmaTable, steps: Iterable[int]) -> None:
    """
    Raises unless each of these steps calls a network that is trained.

    Args:
        model ([`FlowModel`]):
            With the networks that are to be trained made trainable.
        table ([`~omnitrl.algorithms.SigmaTable`]):
            Of the rollouts.
        steps (`Iterable[int]`):
            Steps of it that may be trained.
    """
    trained, networks = list(model.trained_networks), model.networks_at(table.timesteps)
    own = [step for step, name in enumerate(networks) if name in trained]
    idle = sorted(step for step in steps if step not in own)
    if not idle:
        return
    last = len(networks) - 1  # never stochastic
    fits = [step for step in own if step < last]
    advice = f"use sde_window_range=[{fits[0]}, {fits[-1] + 1}]" if fits else "use more num_inference_steps"
    raise InputError(
        f"trainable_networks={trained} are not called in the steps {idle} of num_inference_steps={len(networks)}, "
        f"which would be trained: {advice}."
    )

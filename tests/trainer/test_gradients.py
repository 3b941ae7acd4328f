# SPDX-License-Identifier: Apache-2.0
"""
Law 9 on every algorithm: however an update is cut, its gradient is that of the one big batch.

Networks compute in float64 here: the sums over rows and weights of a float32 backward differ by some 1e-6 for no other
reason than their order, which is as much as a real mistake in one row may come to. Samples, log-probs and losses stay
float32, as in training.
"""

import pytest
import torch

from omnitrl.trainer import TRAINERS, RolloutTrainer, get_trainer
from tests.trainer.helpers import LORA, config, trainer


SAMPLES = 8  # of two prompts, or rows of a dataset


def units_of(algorithm, place):
    """What an update is made of: samples, pairs, or rows of a dataset."""
    args = config(place, algorithm)
    if issubclass(get_trainer(algorithm), RolloutTrainer):
        return SAMPLES // args.num_generations * args.units_per_group
    return SAMPLES


def gradient_of_an_update(place, algorithm, parts, timesteps_per_forward=1, world_size=1, peft_config=LORA):
    """The gradient of one update in so many micro-batches on each of `world_size` processes, by name."""
    units = units_of(algorithm, place)
    size = units // (parts * world_size)
    options = {
        "timesteps_per_forward": timesteps_per_forward,
        "rollout_batch_size": 4,
        "generation_batch_size": SAMPLES,
    }
    known = config(place, algorithm)
    run = trainer(
        place,
        algorithm,
        peft_config=peft_config,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=parts,
        max_steps=1,
        max_grad_norm=0.0,
        **{name: value for name, value in options.items() if name in vars(known)},
    )
    for module in (run.flow_model.networks, *run.flow_model.frozen_modules):
        module.double()
    gradient = {}

    def keep(*_):
        named = run.flow_model.networks.named_parameters()
        gradient.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    run.create_optimizer()
    run.optimizer.register_step_pre_hook(keep)
    run.train()
    assert run.state.global_step == 1
    assert all(tensor.dtype == torch.float64 for tensor in gradient.values())
    return gradient


def difference(a, b):
    """Norm of the difference of two gradients, relative to the first."""
    assert a.keys() == b.keys()
    whole = torch.cat([tensor.flatten() for tensor in a.values()])
    return float((whole - torch.cat([tensor.flatten() for tensor in b.values()])).norm() / whole.norm())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The gradient of the one big batch, made once an algorithm."""
    made = {}

    def get(algorithm):
        if algorithm not in made:
            place = tmp_path_factory.mktemp(algorithm)
            made[algorithm] = gradient_of_an_update(place, algorithm, parts=1, timesteps_per_forward=100)
        return made[algorithm]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "timesteps_per_forward"), [(1, 1), (1, 2), (2, 1), (2, 100), (4, 2), (8, 1)])
@pytest.mark.parametrize("algorithm", TRAINERS)
def test_any_split_of_an_update_has_the_gradient_of_the_one_big_batch(
    tmp_path, whole, algorithm, parts, timesteps_per_forward
):
    parts = min(parts, units_of(algorithm, tmp_path))
    expected = whole(algorithm)
    assert sum(float(tensor.square().sum()) for tensor in expected.values()) > 0
    found = gradient_of_an_update(tmp_path, algorithm, parts, timesteps_per_forward)
    assert difference(expected, found) <= 1e-6

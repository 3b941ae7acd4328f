# SPDX-License-Identifier: Apache-2.0
import functools

import pytest
import torch
from PIL import Image
from torch import nn

from omnitrl.errors import InputError
from omnitrl.rewards import (
    DifferentiableRewards,
    RewardError,
    RewardRunner,
    brightness_reward,
    differentiable_as,
    differentiable_form,
    ocr_reward,
)


def red(completions, **kwargs):
    return completions[:, 0].mean(dim=(1, 2))


def wanted(prompts, completions, colour):
    """The share of the colour that the dataset column names."""
    return torch.stack([image["rgb".index(c)].mean() for image, c in zip(completions, colour, strict=True)])


ROWS = [{"prompt": "a", "colour": "r"}, {"prompt": "b", "colour": "b"}]


def pixels():
    result = torch.zeros(2, 3, 4, 4)
    result[0, 0], result[1, 2] = 0.5, 0.75
    return result


def test_a_column_for_each_reward_with_a_gradient():
    rewards = DifferentiableRewards([red, wanted], [1.0, 2.0])
    leaf = pixels().requires_grad_()
    values = rewards(["x", "y"], leaf, ROWS)
    assert values.tolist() == [[0.5, 0.5], [0.0, 0.75]]
    (gradient,) = torch.autograd.grad((values * torch.tensor(rewards.weights)).sum(), leaf)
    assert gradient[0, 0].unique().tolist() == pytest.approx([3 / 16])
    assert gradient[1, 0].unique().tolist() == pytest.approx([1 / 16])
    assert gradient[1, 2].unique().tolist() == pytest.approx([2 / 16])
    assert rewards.names == ["red", "wanted"]


def test_a_reward_sees_the_prompts_it_is_asked_for_and_may_log():
    seen, logged = [], []

    def reward(prompts, completions, log_metric, trainer_state):
        seen.append((prompts, trainer_state))
        log_metric("sharpness", 0.5)
        return red(completions)

    DifferentiableRewards(reward)(["good. a", "good. b"], pixels(), ROWS, "state", lambda *what: logged.append(what))
    assert seen == [(["good. a", "good. b"], "state")]
    assert logged == [("sharpness", 0.5)]


def test_as_ordinary_rewards_they_take_pictures():
    rewards = DifferentiableRewards([red, wanted])
    images = [Image.new("RGB", (4, 4), (51, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))]
    with RewardRunner(rewards.ordinary()) as runner:
        runner.submit(ROWS, images)
        scored = runner.collect()
        assert runner.names == ["red", "wanted"]
    assert scored.rewards.tolist() == [pytest.approx([0.2, 0.2]), pytest.approx([0.0, 1.0])]


def test_modules_are_frozen():
    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, completions, **kwargs):
            assert not self.training
            return self.weight * completions.mean(dim=(1, 2, 3))

    scorer = Scorer()
    leaf = pixels().requires_grad_()
    DifferentiableRewards(scorer)(["", ""], leaf, ROWS).sum().backward()
    assert scorer.weight.grad is None
    assert leaf.grad.unique().tolist() == pytest.approx([2 / 48])


def tinted_red(completions, share=1.0, **kwargs):
    return red(completions) * share


@differentiable_as(tinted_red)
def red_of_pictures(completions, share=1.0, **kwargs):
    return [share * image.getpixel((0, 0))[0] / 255 for image in completions]


class Reader:
    """A reward of pictures whose differentiable form is a module."""

    def __init__(self):
        self.differentiable = nn.Conv2d(3, 1, 1)

    def __call__(self, completions, **kwargs):
        return [0.25 for _ in completions]


def test_a_name_stands_for_the_differentiable_form():
    leaf = pixels().requires_grad_()
    rewards = DifferentiableRewards("brightness")
    assert rewards.names == ["brightness_reward"]
    values = rewards(["", ""], leaf, ROWS)
    assert values[:, 0].tolist() == pytest.approx([0.5 * 0.299, 0.75 * 0.114])
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    assert gradient[0, :, 0, 0].tolist() == pytest.approx([0.299 / 16, 0.587 / 16, 0.114 / 16])
    assert rewards.ordinary() == [brightness_reward]


def test_a_reward_with_either_form_is_asked_in_the_right_one():
    half = functools.partial(red_of_pictures, share=0.5)
    rewards = DifferentiableRewards([red_of_pictures, half, red])
    assert rewards(["", ""], pixels(), ROWS).tolist() == [[0.5, 0.25, 0.5], [0.0, 0.0, 0.0]]
    with RewardRunner(rewards.ordinary()) as runner:
        runner.submit(ROWS, [Image.new("RGB", (4, 4), (51, 0, 0)), Image.new("RGB", (4, 4))])
        assert runner.collect().rewards.tolist() == [pytest.approx([0.2, 0.1, 0.2]), [0.0, 0.0, 0.0]]
    assert differentiable_form(ocr_reward) is None
    assert differentiable_form(red) is None


def test_a_module_that_is_the_form_of_a_reward_is_frozen():
    reader = Reader()
    rewards = DifferentiableRewards(reader).to("cpu")
    assert not any(parameter.requires_grad for parameter in reader.differentiable.parameters())
    assert not reader.differentiable.training
    assert rewards.ordinary() == [reader]


async def later(completions, **kwargs):
    return red(completions)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions, **_: completions.mean(dim=(1, 2, 3)).tolist(), "type list, which has no gradient"),
        (lambda completions, **_: completions.mean(dim=(2, 3)), r"shape \(2, 3\) for 2 rows: return one number"),
        (lambda completions, score, **_: red(completions), "requires the argument 'score'"),
        (later, "'later' is asynchronous: a differentiable reward is a plain function"),
    ],
)
def test_what_breaks_the_contract(reward, message):
    with pytest.raises(RewardError, match=message):
        DifferentiableRewards(reward)(["", ""], pixels(), ROWS)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions, **_: completions.round().detach().mean(dim=(1, 2, 3)), "has no gradient with respect to"),
        (lambda completions, **_: torch.zeros(2, requires_grad=True), "has no gradient with respect to the pixels"),
        (lambda completions, **_: completions.log().sum(dim=(1, 2, 3)), "has a gradient that is not finite"),
        (lambda completions, **_: [0.0, 1.0], "which has no gradient: pass a reward that takes"),
    ],
)
def test_the_probe_refuses_what_has_no_gradient(reward, message):
    with pytest.raises(InputError, match=message):
        DifferentiableRewards(reward).probe(pixels(), ROWS)


def test_the_probe_works_where_gradients_are_off():
    with torch.no_grad():
        DifferentiableRewards([red, wanted]).probe(pixels(), ROWS)


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [([], None, "There is no reward"), ([red], [1.0, 2.0], "2 values for 1 reward"), ("nothing", None, "unknown")],
)
def test_what_cannot_be_made(functions, weights, message):
    with pytest.raises(InputError, match=message):
        DifferentiableRewards(functions, weights)

# SPDX-License-Identifier: Apache-2.0
"""Rewards of every kind that say the same, and the steps of a runner that tests repeat."""

import asyncio
import math
import time

import torch
from torch import nn


NAN = math.nan


def rows(*prompts, **columns):
    return [{"prompt": p, **{k: v[i] for k, v in columns.items()}} for i, p in enumerate(prompts)]


def score(runner, *prompts, completions=None, **columns):
    runner.submit(rows(*prompts, **columns), completions or [f"image of {p}" for p in prompts])
    return runner.collect()


def length(prompts, **kwargs):
    return [len(p) for p in prompts]


async def length_async(prompts, **kwargs):
    await asyncio.sleep(0.001)
    return [len(p) for p in prompts]


class Length:
    def __call__(self, prompts, **kwargs):
        return [len(p) for p in prompts]


class LengthAsync:
    async def __call__(self, prompts, **kwargs):
        return [len(p) for p in prompts]


class LengthModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.5)
        self.grad_enabled = None

    def forward(self, prompts, **kwargs):
        self.grad_enabled = torch.is_grad_enabled()
        return self.dropout(self.weight * torch.tensor([float(len(p)) for p in prompts]))


def flaky(failures, then):
    """A reward that does each of `failures` in turn, and then returns `then`."""
    left = list(failures)
    calls = []

    def reward(prompts, **kwargs):
        calls.append(len(prompts))
        if left:
            failure = left.pop(0)
            if isinstance(failure, BaseException):
                raise failure
            time.sleep(failure)
        return list(then)

    reward.calls = calls
    return reward

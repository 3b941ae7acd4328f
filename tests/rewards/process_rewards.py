# SPDX-License-Identifier: Apache-2.0
"""Rewards that other processes import."""

import os
import time

import torch

from omnitrl.rewards import RewardUnavailable, reward_traits


class Odd(Exception):
    """An exception that can be written to a pickle and not read from one."""

    def __init__(self, first, second):
        super().__init__(first)


@reward_traits(in_process=True)
def lengths(prompts, completions, log_metric, log_extra, level):
    """The number of pixels and a column, and what a prompt asks for: to hang, to raise, to die."""
    for prompt in prompts:
        if prompt == "hang":
            time.sleep(60)
        if prompt == "die":
            os._exit(3)
        if prompt == "odd":
            raise Odd("cannot", "be read")
        if prompt == "away":
            raise RewardUnavailable("not yet", retry_after=0.0)
    log_metric("process", os.getpid())
    log_metric("gradients", torch.is_grad_enabled())
    log_extra("upper", [prompt.upper() for prompt in prompts])
    return [image.width + number for image, number in zip(completions, level, strict=True)]

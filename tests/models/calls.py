# SPDX-License-Identifier: Apache-2.0
"""What a network is told."""

import torch


def network_calls(network, function):
    """Keyword arguments of the network's calls while `function` runs."""
    seen = []
    hook = network.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        function()
    hook.remove()
    return seen

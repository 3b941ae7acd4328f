# SPDX-License-Identifier: Apache-2.0
"""A CPU platform for vLLM-Omni, found by it through the entry point `vllm_omni.platform_plugins`."""


def register():
    """Name of the platform class, or `None` where there is a GPU: a plugin would win over the built-in platforms."""
    import torch

    return None if torch.cuda.is_available() else "omni_cpu_platform.platform.CPUPlatform"

# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints that vLLM-Omni can load: it warms up with a picture of 512 × 512."""

from dataclasses import replace

from tests.tiny import CHECKPOINTS
from tests.tiny.sd3 import tiny_sd3


# Family -> checkpoint.
SERVED = {
    "sd3": replace(CHECKPOINTS["sd3"], build=lambda: tiny_sd3(factor=8, positions=32)),
    "qwen-image": CHECKPOINTS["qwen-image"],
    "flux": CHECKPOINTS["flux-dev"],
    "wan": CHECKPOINTS["wan"],
    "wan-a14b": CHECKPOINTS["wan-a14b"],
}

# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints that vLLM-Omni can load: it warms up with a picture of 512 × 512."""

import json
from dataclasses import replace

from tests.tiny import CHECKPOINTS
from tests.tiny.sd3 import tiny_sd3
from tests.tiny.wan import tiny_wan


WAN_HEAD = 24  # the native rotary embedding is that of diffusers where a third of this, as of the real 128, is even

# Family -> checkpoint.
SERVED = {
    "sd3": replace(CHECKPOINTS["sd3"], build=lambda: tiny_sd3(factor=8, positions=32)),
    "qwen-image": CHECKPOINTS["qwen-image"],
    "qwen-image-edit": CHECKPOINTS["qwen-image-edit"],
    "flux": CHECKPOINTS["flux-dev"],
    "wan": replace(CHECKPOINTS["wan"], build=lambda: tiny_wan(attention_head_dim=WAN_HEAD)),
    "wan-a14b": replace(CHECKPOINTS["wan-a14b"], build=lambda: tiny_wan(networks=2, attention_head_dim=WAN_HEAD)),
}


def save_checkpoint(family, folder):
    """Writes the checkpoint of a family, with what the full processor of Qwen2-VL looks for and the tests' has not."""
    SERVED[family].build().save_pretrained(folder)
    if (folder / "processor").is_dir():
        video = {"video_processor_type": "Qwen2VLVideoProcessor"}
        (folder / "processor" / "video_preprocessor_config.json").write_text(json.dumps(video))

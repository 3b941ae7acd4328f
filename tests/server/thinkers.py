# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-Omni that vLLM-Omni serves on a CPU, and the flags for that."""

import json

import torch
from peft import LoraConfig
from transformers import Qwen3OmniMoeForConditionalGeneration

from omnitrl.omni.thinker import ATTENTION, TOWERS
from tests.omni import tiny


LEVEL = 3  # of the dimension that is the same everywhere
HEAD = 32  # the smallest that vLLM's attention for CPUs has
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}

# One process less to start, and no media that are invented to see how much memory they take.
STAGE = {"distributed_executor_backend": "uni", "skip_mm_profiling": True}
FLAGS = ["--max-num-seqs", "16", "--max-model-len", "512", "--stage-overrides", json.dumps({"0": STAGE})]
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def lora(**options):
    """An adapter on the attention of the language model."""
    return LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION, exclude_modules=TOWERS, **options)


def save_thinker(folder):
    """
    Writes a whole checkpoint with its processor.

    As models that were trained, this one does not write tokens that stand for media: one dimension of its hidden
    states is the same at all positions, and these tokens lie far on the other side of it.
    """
    config = tiny.full_config(head_dim=HEAD, rope_parameters=ROPE)
    model = tiny.livened(Qwen3OmniMoeForConditionalGeneration(config))
    with torch.no_grad():
        for name, weight in model.thinker.named_parameters():
            if name.endswith(("o_proj.weight", "mlp.down_proj.weight", "merger.linear_fc2.weight", "proj2.weight")):
                weight[0] = 0
            if name.endswith("experts.down_proj"):  # (experts, hidden, inner)
                weight[:, 0] = 0
            if name.endswith(("merger.linear_fc2.bias", "proj2.bias")):
                weight[0] = LEVEL
        model.thinker.get_input_embeddings().weight[:, 0] = LEVEL
        head = model.thinker.lm_head.weight
        head[:, 0] = 0
        for token in tiny.NAMED.values():
            head[256 + tiny.SPECIAL.index(token)] = 0
            head[256 + tiny.SPECIAL.index(token), 0] = -20
    model.save_pretrained(folder)
    tiny.processor().save_pretrained(folder)
    _complete(folder / "processor_config.json", folder / "config.json")


def _complete(processor, config):
    """The names of the real classes, and what configs of Transformers have no fields for and vLLM asks them for."""
    content = json.loads(processor.read_text())
    content["processor_class"] = "Qwen3OmniMoeProcessor"
    video = {"video_processor_type": "Qwen2VLVideoProcessor", "temporal_patch_size": 2}
    content["video_processor"] = {**video, **tiny.VISION}
    processor.write_text(json.dumps(content))
    content = json.loads(config.read_text())
    content["thinker_config"]["vision_config"] |= {"image_size": 64, "apply_vit_abs_pos_embed": True}
    config.write_text(json.dumps(content))

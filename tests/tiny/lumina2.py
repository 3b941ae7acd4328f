# SPDX-License-Identifier: Apache-2.0
"""Lumina-Image 2.0."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from transformers import Gemma2Config, Gemma2Model

from tests.tiny.checkpoint import Tiny, quiet
from tests.tiny.parts import WIDTH, gemma_tokenizer, kl_vae, liven


def tiny_lumina2(dynamic=False):
    """A `Lumina2Pipeline` of 64 × 64 pixels, with a short system prompt."""
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer()
    encoder = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    transformer = Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=4,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(8, 8, 8),
        axes_lens=(64, 32, 32),
        cap_feat_dim=WIDTH,
    )
    liven(transformer.norm_out.linear_2)
    pipeline = Lumina2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0 if dynamic else 6.0, use_dynamic_shifting=dynamic),
        vae=kl_vae(factor=8),
        text_encoder=Gemma2Model(encoder),
        tokenizer=tokenizer,
    )
    pipeline.system_prompt = "draw"
    return quiet(pipeline)


CHECKPOINTS = {
    "lumina2": Tiny(tiny_lumina2, max_sequence_length=48),
    "lumina2-dynamic": Tiny(lambda: tiny_lumina2(dynamic=True), max_sequence_length=48),
}

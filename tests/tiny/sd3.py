# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from tests.tiny.checkpoint import Tiny, quiet
from tests.tiny.parts import WIDTH, clip_encoder, clip_tokenizer, kl_vae, liven, t5_encoder, t5_tokenizer


def tiny_sd3(shift=3.0, without=(), dual_attention=True, dynamic=False, factor=4, positions=16):
    """
    A `StableDiffusion3Pipeline` of 64 × 64 pixels; `without` names absent text encoders (1, 2, 3).

    With another `factor` of the VAE the pictures are larger; `positions` is how many tokens a side may have.
    """
    torch.manual_seed(0)
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=positions,
        qk_norm="rms_norm",
        dual_attention_layers=(0,) if dual_attention else (),
    )
    liven(transformer.proj_out)
    encoders = {1: (clip_encoder(clip), clip), 2: (clip_encoder(clip), clip), 3: (t5_encoder(t5), t5)}
    encoders |= dict.fromkeys(without, (None, None))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0 if dynamic else shift, use_dynamic_shifting=dynamic)
    return quiet(
        StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=scheduler,
            vae=kl_vae(factor=factor),
            text_encoder=encoders[1][0],
            tokenizer=encoders[1][1],
            text_encoder_2=encoders[2][0],
            tokenizer_2=encoders[2][1],
            text_encoder_3=encoders[3][0],
            tokenizer_3=encoders[3][1],
        )
    )


CHECKPOINTS = {"sd3": Tiny(tiny_sd3), "sd3-dynamic": Tiny(lambda: tiny_sd3(dynamic=True))}

# SPDX-License-Identifier: Apache-2.0
"""Z-Image."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from omnitrl.models import MediaSize
from tests.tiny.checkpoint import Tiny, quiet
from tests.tiny.parts import WIDTH, kl_vae, qwen3_config, qwen_tokenizer


def tiny_z_image(shift=6.0, dynamic=False):
    """A `ZImagePipeline` up to 1024 × 1024 pixels, with Z-Image's shift; Z-Image-Turbo has 3."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[8, 12, 12],
        axes_lens=[256, 128, 128],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):  # learned, and zero until then
        torch.nn.init.normal_(token)
    return quiet(
        ZImagePipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=dynamic),
            vae=kl_vae(),
            text_encoder=Qwen3Model(qwen3_config(tokenizer, layers=2)),
            tokenizer=tokenizer,
        )
    )


# 48 picture tokens, which the network pads to 64; captions of 30 to 50 tokens, which it pads to 32 or 64.
CHECKPOINTS = {
    "z-image": Tiny(
        tiny_z_image,
        size=MediaSize(48, 64),
        max_sequence_length=64,
        guidance=lambda scale: {"guidance_scale": scale - 1},  # the stock pipeline counts from 0
    ),
}

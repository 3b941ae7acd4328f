# SPDX-License-Identifier: Apache-2.0
"""FLUX.1."""

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)

from tests.tiny.checkpoint import Tiny, quiet
from tests.tiny.parts import WIDTH, clip_text_model, clip_tokenizer, kl_vae, liven, t5_encoder, t5_tokenizer


def tiny_flux(pipeline_class=FluxPipeline, guidance_embeds=True, dynamic=True):
    """FLUX.1-dev, of which schnell has neither a guidance embedding nor a dynamic shift."""
    torch.manual_seed(0)
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=guidance_embeds,
    )
    liven(transformer.proj_out)
    shift = {"shift": 3.0, "base_shift": 0.5, "max_shift": 1.15} if dynamic else {"shift": 1.0}
    return quiet(
        pipeline_class(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=dynamic, **shift),
            vae=kl_vae(),
            text_encoder=clip_text_model(clip),
            tokenizer=clip,
            text_encoder_2=t5_encoder(t5),
            tokenizer_2=t5,
        )
    )


def unpacked(model, tokens, size):
    """The stock pipeline's own unpacking of its latents."""
    return model.pipeline._unpack_latents(tokens, size.height, size.width, model.pipeline.vae_scale_factor)


CHECKPOINTS = {
    "flux-dev": Tiny(tiny_flux, latents=unpacked),
    "flux-schnell": Tiny(
        lambda: tiny_flux(guidance_embeds=False, dynamic=False),
        guidance=lambda scale: {"true_cfg_scale": scale},
        latents=unpacked,
    ),
    # The stock pipeline scales sizes to a megapixel unless it is told another area. The sizes of the images are those
    # that they are resized to.
    "flux-kontext": Tiny(
        lambda: tiny_flux(FluxKontextPipeline),
        num_images=1,
        image_sizes=((64, 64), (80, 48), (64, 64)),
        arguments={"max_area": 64 * 64, "_auto_resize": False},
        latents=unpacked,
    ),
}

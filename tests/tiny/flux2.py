# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 [dev] and [klein]."""

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from torch.nn.functional import pixel_unshuffle
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from omnitrl.models import MediaSize
from tests.tiny.checkpoint import Tiny, quiet
from tests.tiny.parts import liven, qwen3_config, qwen_tokenizer


TEXT_WIDTH = 16


def _vae():
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
    )
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def _parts(guidance_embeds):
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * TEXT_WIDTH,  # of three layers of the text encoder
        timestep_guidance_channels=64,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    liven(transformer.proj_out)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    return {"transformer": transformer, "scheduler": scheduler, "vae": _vae()}


def tiny_flux2_klein(is_distilled=False):
    """A `Flux2KleinPipeline`; the stock pipeline reads layers 9, 18 and 27 of its Qwen3."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    encoder = Qwen3ForCausalLM(qwen3_config(tokenizer, layers=27, width=TEXT_WIDTH))
    parts = _parts(guidance_embeds=False)
    return quiet(Flux2KleinPipeline(text_encoder=encoder, tokenizer=tokenizer, is_distilled=is_distilled, **parts))


def tiny_flux2():
    """
    A `Flux2Pipeline`; the stock pipeline reads layers 10, 20 and 30 of its Mistral.

    Its tokenizer stands for the processor, which needs torchvision, and leaves the long system message out.
    """
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages if message['role'] == 'user' %}<|im_start|>{{ message['content'][0]['text'] }}"
        "<|im_end|>{% endfor %}"
    )
    text = {
        "model_type": "mistral",
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 30,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 16,
    }
    encoder = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))
    return quiet(Flux2Pipeline(text_encoder=encoder, tokenizer=tokenizer, **_parts(guidance_embeds=True)))


def unpacked(model, tokens, size):
    """Positions (B, H W, C), as the stock pipeline of dev gives its latents."""
    return tokens.transpose(1, 2).reshape(len(tokens), *model.latent_shape(size))


def normalised(model, latents, size):
    """Latents of klein's stock pipeline, which it gives as its VAE takes them."""
    vae = model.pipeline.vae
    mean, variance = vae.bn.running_mean[:, None, None], vae.bn.running_var[:, None, None]
    return (pixel_unshuffle(latents, 2) - mean) / (variance + vae.config.batch_norm_eps).sqrt()


_SIZE = MediaSize(48, 64)

# Condition images are optional in all of them: two, one and none.
CHECKPOINTS = {
    "flux2-dev": Tiny(
        tiny_flux2, size=_SIZE, max_sequence_length=24, num_images=2, latents=unpacked, negative_prompt=None
    ),
    "flux2-klein-base": Tiny(
        tiny_flux2_klein, size=_SIZE, max_sequence_length=48, num_images=1, latents=normalised, negative_prompt=None
    ),
    "flux2-klein": Tiny(
        lambda: tiny_flux2_klein(is_distilled=True),
        size=_SIZE,
        max_sequence_length=48,
        guidance=lambda scale: {"guidance_scale": 4.0},  # ignored
        latents=normalised,
        negative_prompt=None,
    ),
}

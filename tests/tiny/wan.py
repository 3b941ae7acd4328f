# SPDX-License-Identifier: Apache-2.0
"""Wan2.1 and Wan2.2."""

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from omnitrl.models import MediaSize
from tests.tiny.checkpoint import Tiny, quiet
from tests.tiny.parts import t5_tokenizer


CHANNELS, WIDTH = 4, 32
BOUNDARY = 0.875  # with shift 5 two of four steps lie on each side


def wan_transformer(in_channels=CHANNELS, attention_head_dim=16, **options):
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=attention_head_dim,
        in_channels=in_channels,
        out_channels=CHANNELS,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=64,
        **options,
    )


def wan_vae(expands=False):
    """That of TI2V-5B has patches of its own and residual connections, and halves the sides once more."""
    options = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.2, -0.3, 0.1, 0.4],
        latents_std=[1.5, 0.8, 1.2, 0.7],
        **(options if expands else {}),
    )


def _parts(networks, expands, scheduler):
    t5 = t5_tokenizer()
    config = UMT5Config(vocab_size=len(t5), d_model=WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    return {
        "tokenizer": t5,
        "text_encoder": UMT5EncoderModel(config).eval(),
        "vae": wan_vae(expands),
        "scheduler": scheduler or FlowMatchEulerDiscreteScheduler(shift=5.0),
        "transformer": networks[0],
        "transformer_2": networks[1] if len(networks) > 1 else None,
        "boundary_ratio": BOUNDARY if len(networks) > 1 else None,
        "expand_timesteps": expands,
    }


def tiny_wan(networks=1, expands=False, scheduler=None, **options):
    """A `WanPipeline`; of Wan2.2 A14B with two networks, of TI2V-5B if it expands timesteps."""
    torch.manual_seed(0)
    return quiet(WanPipeline(**_parts([wan_transformer(**options) for _ in range(networks)], expands, scheduler)))


def tiny_wan_i2v(networks=1, expands=False, clip=False, last_image=False):
    """A `WanImageToVideoPipeline`; of Wan2.1 with `clip`, whose FLF2V takes a `last_image`."""
    torch.manual_seed(0)
    options, seen = {}, {}
    if clip:
        config = CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
        size = {"height": 28, "width": 28}
        seen = {
            "image_encoder": CLIPVisionModel(config).eval(),
            "image_processor": CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size),
        }
        options = {"image_dim": WIDTH, "added_kv_proj_dim": WIDTH}
        options |= {"pos_embed_seq_len": 10} if last_image else {}
    channels = CHANNELS if expands else 2 * CHANNELS + 4  # and the four frames of a latent in a mask
    parts = _parts([wan_transformer(channels, **options) for _ in range(networks)], expands, None)
    return quiet(WanImageToVideoPipeline(**parts, **seen))


def _frames(output):
    return output.frames


_VIDEO = {"size": MediaSize(64, 64, 5), "media": _frames}

CHECKPOINTS = {
    "wan": Tiny(tiny_wan, **_VIDEO),
    "wan-a14b": Tiny(lambda: tiny_wan(networks=2), **_VIDEO),
    "wan-ti2v": Tiny(lambda: tiny_wan(expands=True), **_VIDEO),
    "wan-i2v": Tiny(lambda: tiny_wan_i2v(clip=True), num_images=1, max_sequence_length=512, **_VIDEO),
    "wan-i2v-a14b": Tiny(lambda: tiny_wan_i2v(networks=2), num_images=1, **_VIDEO),
    "wan-i2v-ti2v": Tiny(lambda: tiny_wan_i2v(expands=True), num_images=1, **_VIDEO),
}

# SPDX-License-Identifier: Apache-2.0
"""Random pipelines of a few hundred thousand weights, built in code with tokenizers of their own."""

import string

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from omnitrl.models import family_of


WIDTH = 32  # of the CLIP encoders


def clip_tokenizer():
    characters = string.ascii_lowercase + string.digits + ".,!?'\"-"
    words = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=16)


def clip_encoder(tokenizer):
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=tokenizer.model_max_length,
            projection_dim=WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def t5_tokenizer():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(c, -3.0) for c in string.ascii_letters + string.digits + string.punctuation]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def t5_encoder(tokenizer):
    return T5EncoderModel(
        T5Config(vocab_size=len(tokenizer), d_model=2 * WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    )


def tiny_vae():
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    )


def tiny_sd3(shift=3.0, without=(), dual_attention=True, dynamic=False):
    """A `StableDiffusion3Pipeline` of 64 × 64 pixels; `without` names absent text encoders (1, 2, 3)."""
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
        pos_embed_max_size=16,
        qk_norm="rms_norm",
        dual_attention_layers=(0,) if dual_attention else (),
    )
    # A fresh network ends in a projection near zero; without this all velocities, and all tests, would be alike.
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    encoders = {1: (clip_encoder(clip), clip), 2: (clip_encoder(clip), clip), 3: (t5_encoder(t5), t5)}
    encoders |= dict.fromkeys(without, (None, None))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0 if dynamic else shift, use_dynamic_shifting=dynamic)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=scheduler,
        vae=tiny_vae(),
        text_encoder=encoders[1][0],
        tokenizer=encoders[1][1],
        text_encoder_2=encoders[2][0],
        tokenizer_2=encoders[2][1],
        text_encoder_3=encoders[3][0],
        tokenizer_3=encoders[3][1],
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# Pipeline class -> builder; tests of all families run over these.
PIPELINES = {"StableDiffusion3Pipeline": tiny_sd3}


def tiny_model(pipeline_class="StableDiffusion3Pipeline", max_sequence_length=12, **options):
    """A [`FlowModel`] of a tiny pipeline."""
    return family_of(pipeline_class)(PIPELINES[pipeline_class](**options), max_sequence_length=max_sequence_length)

# SPDX-License-Identifier: Apache-2.0
"""Stable Audio 3."""

import torch
from diffusers import (
    AutoencoderSAME,
    FlowMatchEulerDiscreteScheduler,
    StableAudio3DiTModel,
    StableAudio3DurationEmbedder,
    StableAudio3Pipeline,
)
from transformers import T5GemmaConfig, T5GemmaEncoderModel
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

from omnitrl.models import MediaSize
from tests.tiny.checkpoint import LEFT_OUT, Tiny, quiet
from tests.tiny.parts import WIDTH, gemma_tokenizer, liven


LENGTH = 1.3  # seconds, 41.6 blocks of the autoencoder


def _text_encoder(tokenizer):
    config = T5GemmaModuleConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        sliding_window=64,
        layer_types=["full_attention", "full_attention"],
    )
    parts = {"encoder": config.to_dict(), "decoder": config.to_dict()}
    return T5GemmaEncoderModel(T5GemmaConfig(**parts, is_encoder_decoder=False))


def _autoencoder():
    """512 samples a second in blocks of 16; its branches start at zero, so that it would make nothing of nothing."""
    vae = AutoencoderSAME(
        audio_channels=2,
        patch_size=8,
        encoder_channels=16,
        encoder_c_mults=(2,),
        encoder_strides=(2,),
        encoder_transformer_depths=(1,),
        latent_dim=8,
        dim_heads=16,
        sampling_rate=512,
    )
    for name, parameter in vae.named_parameters():
        if name.endswith(("attn.to_out.weight", "ff.proj_out.weight")):
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("new_tokens"):
            torch.nn.init.normal_(parameter, std=0.5)
    return vae


def tiny_stable_audio3(distilled=False):
    """A `StableAudio3Pipeline` of stereo sounds at 512 samples a second."""
    torch.manual_seed(0)
    tokenizer = gemma_tokenizer()
    transformer = StableAudio3DiTModel(
        io_channels=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        cond_token_dim=WIDTH,
        global_cond_dim=WIDTH,
        local_add_cond_dim=9,
        timestep_features_dim=16,
        ff_mult=2,
        num_memory_tokens=3,
    )
    liven(transformer.proj_out, std=0.05)
    for projection in (transformer.to_cond_embed[2], transformer.to_global_embed[2]):
        liven(projection)
    torch.nn.init.normal_(transformer.prompt_padding_embedding)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, stochastic_sampling=distilled)
    return quiet(
        StableAudio3Pipeline(
            vae=_autoencoder(),
            text_encoder=_text_encoder(tokenizer),
            tokenizer=tokenizer,
            duration_embedder=StableAudio3DurationEmbedder(output_dim=WIDTH, fourier_dim=16, max_val=20.0),
            transformer=transformer,
            scheduler=scheduler,
        )
    )


def _sounds(output):
    return output.audios


# The length of its text is that of the tokenizer, and its autoencoder makes tensors.
CHECKPOINTS = {
    "stable-audio-3": Tiny(
        tiny_stable_audio3,
        size=MediaSize(audio_length=LENGTH),
        guidance_scale=7.0,
        arguments={"audio_length": LEFT_OUT, "max_sequence_length": LEFT_OUT, "duration": LENGTH},
        media=_sounds,
        loads_lora=False,
    )
}

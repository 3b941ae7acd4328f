# SPDX-License-Identifier: Apache-2.0
"""LTX-2 and LTX-2.3."""

import string

import numpy as np
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    SiglipVisionConfig,
)

from omnitrl.media import Audio, Video
from omnitrl.models import MediaSize
from tests.tiny.checkpoint import Tiny, quiet
from tests.tiny.parts import WIDTH, liven


AUDIO_WIDTH = WIDTH // 2
CHANNELS = 16  # of video latents; audio latents have 2 x 8
REGISTERS = 8
MEL_RATE, MEL_HOP = 1600, 40  # 10 latent frames of audio a second


def gemma_tokenizer():
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"]
    words += [*string.ascii_letters, *string.digits, *string.punctuation]
    return GemmaTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=1024)


def gemma_encoder(tokenizer, layers=2):
    text = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        sliding_window=8,
    )
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3)
    encoder = Gemma3ForConditionalGeneration(config)
    # Large enough that prompts differ: the usual 0.02 is near the epsilon of the norms that follow.
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=0.5)
    return encoder


def video_vae(**options):
    """16 times smaller in space, 4 times in time."""
    vae = AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(16, 32),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(16, 32),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_residual=(True, True),
        upsample_factor=(2, 2),
        decoder_causal=False,  # as in LTX-2
        scaling_factor=1.2,
        **options,
    )
    normalise(vae)
    return vae


def audio_vae():
    vae = AutoencoderKLLTX2Audio(
        base_channels=CHANNELS,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=2,
        mel_bins=32,
        sample_rate=MEL_RATE,
        mel_hop_length=MEL_HOP,
    )
    normalise(vae)
    return vae


def normalise(vae):
    """Statistics that are not those of no normalisation, another one for each channel."""
    vae.latents_mean.copy_(torch.linspace(-0.3, 0.4, len(vae.latents_mean)))
    vae.latents_std.copy_(torch.linspace(0.8, 1.3, len(vae.latents_std)))


def vocoder(extended):
    """Of 2.4 kHz, or of 1.6 kHz extended to 4.8 kHz."""
    parts = {"in_channels": 64, "hidden_channels": 16, "resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]]}
    if not extended:
        made = LTX2Vocoder(
            upsample_kernel_sizes=[12, 20], upsample_factors=[6, 10], output_sampling_rate=2400, **parts
        )
        liven(made.conv_out, 0.5)
        return made
    made = LTX2VocoderWithBWE(
        upsample_kernel_sizes=[11, 16],
        upsample_factors=[5, 8],
        filter_length=32,
        hop_length=10,
        window_length=32,
        num_mel_channels=8,
        bwe_in_channels=16,
        bwe_hidden_channels=16,
        bwe_upsample_kernel_sizes=[12, 11],
        bwe_upsample_factors=[6, 5],
        bwe_resnet_kernel_sizes=[3],
        bwe_resnet_dilations=[[1, 3]],
        input_sampling_rate=1600,
        output_sampling_rate=4800,
        **parts,
    )
    for buffer in (made.mel_stft.stft_fn.forward_basis, made.mel_stft.mel_basis):
        buffer.copy_(torch.rand_like(buffer))
    liven(made.vocoder.conv_out, 0.5)
    return made


def connectors(modern, registers, layers):
    """`modern` ones project the text for each modality, with biases and gates."""
    options = {}
    if modern:
        options = {
            "video_gated_attn": True,
            "audio_gated_attn": True,
            "per_modality_projections": True,
            "video_hidden_dim": WIDTH,
            "audio_hidden_dim": AUDIO_WIDTH,
            "proj_bias": True,
        }
    return LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=layers + 1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=WIDTH // 2,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=registers,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=(AUDIO_WIDTH if modern else WIDTH) // 2,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=registers,
        rope_type="split",
        **options,
    )


def transformer(modern, audio_channels=CHANNELS):
    options = {}
    if modern:
        options = {
            "gated_attn": True,
            "cross_attn_mod": True,
            "audio_gated_attn": True,
            "audio_cross_attn_mod": True,
            "use_prompt_embeddings": False,
            "perturbed_attn": True,
        }
    made = LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=2,
        attention_head_dim=WIDTH // 2,
        cross_attention_dim=WIDTH,
        vae_scale_factors=(4, 16, 16),
        audio_in_channels=audio_channels,
        audio_out_channels=audio_channels,
        audio_num_attention_heads=2,
        audio_attention_head_dim=AUDIO_WIDTH // 2,
        audio_cross_attention_dim=AUDIO_WIDTH,
        audio_sampling_rate=MEL_RATE,
        audio_hop_length=MEL_HOP,
        num_layers=2,
        caption_channels=WIDTH,
        rope_type="split",
        **options,
    )
    liven(made.proj_out)
    liven(made.audio_proj_out)
    return made


def tiny_ltx2(modern=False, registers=REGISTERS):
    """LTX-2, or (`modern`) LTX-2.3; without `registers` the padding of texts stays padding."""
    torch.manual_seed(0)
    tokenizer, layers = gemma_tokenizer(), 2
    return quiet(
        LTX2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_image_seq_len=16,
                max_image_seq_len=64,
                base_shift=0.95,
                max_shift=2.05,
                shift_terminal=0.1,
            ),
            vae=video_vae(),
            audio_vae=audio_vae(),
            text_encoder=gemma_encoder(tokenizer, layers),
            tokenizer=tokenizer,
            connectors=connectors(modern, registers, layers),
            transformer=transformer(modern),
            vocoder=vocoder(extended=modern),
        )
    )


def media(output):
    """Videos with sound of a stock output, or its latents."""
    if isinstance(output.frames, torch.Tensor):
        return output.frames, output.audio
    return [
        Video(np.stack([np.asarray(frame) for frame in frames]), 24.0, Audio(wave.numpy(), 1))
        for frames, wave in zip(output.frames, output.audio, strict=True)
    ]


def flat_latents(model, latents, size):
    """The stock's latents of both modalities, normalised again, as omnitrl has them."""
    (video, audio), pipe = latents, model.pipeline
    video = pipe._normalize_latents(video, pipe.vae.latents_mean, pipe.vae.latents_std, pipe.vae.config.scaling_factor)
    packed = pipe._normalize_audio_latents(
        pipe._pack_audio_latents(audio), pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std
    )
    audio = pipe._unpack_audio_latents(packed, audio.shape[2], audio.shape[3])
    return torch.cat([video.flatten(1), audio.flatten(1)], dim=1)


def guidance(scale):
    """Guidance by the prompt alone; the stock defaults have three other kinds besides."""
    return {
        "guidance_scale": scale,
        "audio_guidance_scale": scale,
        "stg_scale": 0.0,
        "audio_stg_scale": 0.0,
        "modality_scale": 1.0,
        "audio_modality_scale": 1.0,
        "guidance_rescale": 0.0,
        "audio_guidance_rescale": 0.0,
    }


def checkpoint(build):
    return Tiny(build, size=MediaSize(32, 64, 9), guidance=guidance, media=media, latents=flat_latents)


CHECKPOINTS = {
    "ltx2": checkpoint(tiny_ltx2),
    "ltx2.3": checkpoint(lambda: tiny_ltx2(modern=True)),
}

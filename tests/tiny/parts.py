# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, text encoders and VAEs that tiny checkpoints are made of."""

import string

import torch
from diffusers import AutoencoderKL
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    GemmaTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)


WIDTH = 32  # of the CLIP encoders

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] if message['content'] is string else message['content'][0]['text'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def clip_tokenizer():
    characters = string.ascii_lowercase + string.digits + ".,!?'\"-"
    words = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=16)


def clip_config(tokenizer, width=WIDTH):
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def clip_encoder(tokenizer):
    return CLIPTextModelWithProjection(clip_config(tokenizer))


def clip_text_model(tokenizer):
    return CLIPTextModel(clip_config(tokenizer))


def t5_tokenizer():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(c, -3.0) for c in string.ascii_letters + string.digits + string.punctuation]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def t5_config(tokenizer, width=2 * WIDTH):
    return T5Config(vocab_size=len(tokenizer), d_model=width, d_kv=16, d_ff=64, num_layers=1, num_heads=2)


def t5_encoder(tokenizer, width=2 * WIDTH):
    return T5EncoderModel(t5_config(tokenizer, width))


def qwen_tokenizer():
    """Byte-level, with the special tokens of Qwen-VL; token 256 is the first of `QWEN_TOKENS`."""
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    vocab |= {token: len(vocab) + i for i, token in enumerate(QWEN_TOKENS)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        additional_special_tokens=list(QWEN_TOKENS[1:]),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def qwen3_config(tokenizer, layers, width=WIDTH):
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
    )


def gemma_tokenizer(max_length=16):
    """Letter by letter; `<bos>` first, padding on the left, as the real one."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"]
    words += string.ascii_letters + string.digits + string.punctuation
    vocab = {word: i for i, word in enumerate(words)}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=max_length, add_bos_token=True)


def kl_vae(latent_channels=4, factor=4, **options):
    """A VAE whose latents have a side `factor` times shorter than the picture's, as the pipeline takes it to be."""
    blocks = factor.bit_length()
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8, *(16,) * (blocks - 1)),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
        **options,
    )


def liven(layer, std=0.2):
    """Random weights for a layer that starts near zero; without them all velocities, and all tests, are alike."""
    torch.nn.init.normal_(layer.weight, std=std)

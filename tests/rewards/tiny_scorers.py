# SPDX-License-Identifier: Apache-2.0
"""Tiny reward models with random weights, in the layouts of the checkpoints that their authors publish."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import pre_tokenizers
from torch import nn


PROMPTS = ["a red fox in the snow", 'Two cups & a "sign"', "a red fox in the snow"]
SIZES = [(40, 40), (70, 41), (33, 90)]  # width, height


def pictures():
    """Three pictures of different shapes, smooth with some noise."""
    rng = np.random.default_rng(3)
    made = []
    for i, (width, height) in enumerate(SIZES):
        y, x = np.mgrid[0:height, 0:width]
        waves = [np.sin(x / (5 + c + i)) * np.cos(y / (7 - c)) for c in range(3)]
        pixels = 127 + 90 * np.stack(waves, axis=-1) + rng.normal(0, 12, (height, width, 3))
        made.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    return made


def filled(shapes, seed):
    """Weights of these shapes: matrices that keep the size of vectors, norms near 1, small biases."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        if len(shape) > 1:
            values /= np.sqrt(np.prod(shape[1:]))
        elif name.endswith("weight"):
            values = 1 + 0.1 * values
        else:
            values *= 0.1
        weights[name] = torch.from_numpy(np.asarray(values)).float()
    return weights


def _linear(name, inputs, outputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


# CLIP

TEXT = {"width": 32, "layers": 2, "heads": 2}
VISION = {"width": 48, "layers": 2, "heads": 3, "patch": 8, "image": 32}
SHARED = 16
WORDS = 514


def clip_config():
    from transformers import CLIPConfig

    text = {
        "hidden_size": TEXT["width"],
        "intermediate_size": 4 * TEXT["width"],
        "num_hidden_layers": TEXT["layers"],
        "num_attention_heads": TEXT["heads"],
        "vocab_size": WORDS,
        "bos_token_id": WORDS - 2,
        "eos_token_id": WORDS - 1,
        "pad_token_id": WORDS - 1,
        "hidden_act": "gelu",
    }
    vision = {
        "hidden_size": VISION["width"],
        "intermediate_size": 4 * VISION["width"],
        "num_hidden_layers": VISION["layers"],
        "num_attention_heads": VISION["heads"],
        "patch_size": VISION["patch"],
        "image_size": VISION["image"],
        "hidden_act": "gelu",
    }
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=SHARED)


def _open_clip_layers(prefix, width, layers):
    shapes = {}
    for i in range(layers):
        layer = f"{prefix}transformer.resblocks.{i}"
        shapes |= _norm(f"{layer}.ln_1", width) | _norm(f"{layer}.ln_2", width)
        shapes |= {f"{layer}.attn.in_proj_weight": (3 * width, width), f"{layer}.attn.in_proj_bias": (3 * width,)}
        shapes |= _linear(f"{layer}.attn.out_proj", width, width)
        shapes |= _linear(f"{layer}.mlp.c_fc", width, 4 * width) | _linear(f"{layer}.mlp.c_proj", 4 * width, width)
    return shapes


def open_clip_weights(seed=39):
    """The weights of an `open_clip.CLIP`."""
    text, vision = TEXT["width"], VISION["width"]
    shapes = {
        "positional_embedding": (77, text),
        "text_projection": (text, SHARED),
        "token_embedding.weight": (WORDS, text),
        **_norm("ln_final", text),
        **_open_clip_layers("", text, TEXT["layers"]),
        "visual.class_embedding": (vision,),
        "visual.positional_embedding": ((VISION["image"] // VISION["patch"]) ** 2 + 1, vision),
        "visual.proj": (vision, SHARED),
        "visual.conv1.weight": (vision, 3, VISION["patch"], VISION["patch"]),
        **_norm("visual.ln_pre", vision),
        **_norm("visual.ln_post", vision),
        **_open_clip_layers("visual.", vision, VISION["layers"]),
    }
    return filled(shapes, seed) | {"logit_scale": torch.tensor(2.5)}


def _byte_tokens():
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def clip_tokenizer():
    """A tokenizer of CLIP that knows letters and no words; its end has the highest number, as in CLIP's own."""
    from transformers import CLIPTokenizer

    letters = _byte_tokens()
    tokens = [*letters, *[f"{letter}</w>" for letter in letters], "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=77)


def clip_folder(folder):
    """A CLIP with its tokenizer, as `save_pretrained` leaves them."""
    from transformers import CLIPModel

    from omnitrl.rewards.learned.open_clip import clip_from_open_clip

    model = CLIPModel(clip_config())
    model.load_state_dict(clip_from_open_clip(open_clip_weights()))
    model.save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
    return str(folder)


# Heads of linear layers

HEAD = (SHARED, 12, 8, 6, 4, 1)


def head_weights(widths=HEAD, prefix="layers.", seed=12):
    shapes = {}
    for number, inputs, outputs in zip((0, 2, 4, 6, 7), widths, widths[1:], strict=False):
        shapes |= _linear(f"{prefix}{number}", inputs, outputs)
    return filled(shapes, seed)


# ImageReward

BLIP = {"vision": 128, "text": 64, "layers": 2, "patch": 16, "image": 32, "words": 300, "positions": 40}


def image_reward_weights(seed=13):
    """The weights of `ImageReward.ImageReward`."""
    vision, text = BLIP["vision"], BLIP["text"]
    shapes = {
        "cls_token": (1, 1, vision),
        "pos_embed": (1, (BLIP["image"] // BLIP["patch"]) ** 2 + 1, vision),
        "patch_embed.proj.weight": (vision, 3, BLIP["patch"], BLIP["patch"]),
        "patch_embed.proj.bias": (vision,),
        **_norm("norm", vision),
    }
    for i in range(BLIP["layers"]):
        block = f"blocks.{i}"
        shapes |= _norm(f"{block}.norm1", vision) | _norm(f"{block}.norm2", vision)
        shapes |= _linear(f"{block}.attn.qkv", vision, 3 * vision) | _linear(f"{block}.attn.proj", vision, vision)
        shapes |= _linear(f"{block}.mlp.fc1", vision, 4 * vision) | _linear(f"{block}.mlp.fc2", 4 * vision, vision)
    shapes = {f"blip.visual_encoder.{name}": shape for name, shape in shapes.items()}
    shapes |= {f"blip.text_encoder.{name}": shape for name, shape in _bert_shapes(text, vision).items()}
    shapes |= _linear("blip.vision_proj", vision, 8) | _linear("blip.text_proj", text, 8)
    weights = filled(shapes, seed) | head_weights((text, 12, 8, 6, 4, 1), "mlp.layers.", seed)
    weights["blip.text_encoder.embeddings.position_ids"] = torch.arange(BLIP["positions"])[None]
    return weights


def _bert_shapes(width, seen):
    shapes = {
        "embeddings.word_embeddings.weight": (BLIP["words"], width),
        "embeddings.position_embeddings.weight": (BLIP["positions"], width),
        **_norm("embeddings.LayerNorm", width),
    }
    for i in range(BLIP["layers"]):
        layer = f"encoder.layer.{i}"
        for attention, keys in (("attention", width), ("crossattention", seen)):
            shapes |= _linear(f"{layer}.{attention}.self.query", width, width)
            shapes |= _linear(f"{layer}.{attention}.self.key", keys, width)
            shapes |= _linear(f"{layer}.{attention}.self.value", keys, width)
            shapes |= _linear(f"{layer}.{attention}.output.dense", width, width)
            shapes |= _norm(f"{layer}.{attention}.output.LayerNorm", width)
        shapes |= _linear(f"{layer}.intermediate.dense", width, 2 * width)
        shapes |= _linear(f"{layer}.output.dense", 2 * width, width) | _norm(f"{layer}.output.LayerNorm", width)
    return shapes


def bert_tokenizer():
    """A tokenizer of BERT that knows letters and no words."""
    from transformers import BertTokenizer

    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *[f"##{letter}" for letter in letters]]
    return BertTokenizer(vocab={token: i for i, token in enumerate(tokens)})


# HPS v3

QWEN_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


def qwen_options():
    """Options of a `Qwen2VLConfig`: those of its language model, those of its vision model, and the others."""
    language = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 300,  # more than there are tokens, as in the original
        "max_position_embeddings": 4096,
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    ids = {token: 256 + i for i, token in enumerate(QWEN_SPECIALS)}
    others = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    return language, vision, others


def qwen_folder(folder):
    """The configuration and tokenizer of a Qwen2-VL that knows bytes and no words."""
    from transformers import Qwen2Tokenizer, Qwen2VLConfig

    language, vision, others = qwen_options()
    ends = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    config = Qwen2VLConfig(text_config=language | ends | {"rope_parameters": rope}, vision_config=vision, **others)
    config.save_pretrained(folder)
    vocabulary = {token: i for i, token in enumerate(_byte_tokens())}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=8192)
    tokenizer.add_tokens(QWEN_SPECIALS, special_tokens=True)
    tokenizer.save_pretrained(folder)
    return str(folder)


def hpsv3_weights(seed=14):
    """The weights of `hpsv3.model.Qwen2VLRewardModelBT`, by the names of transformers 4.45."""
    language, vision, _ = qwen_options()
    width, middle, words = language["hidden_size"], language["intermediate_size"], 256 + len(QWEN_SPECIALS) + 1
    shapes = {"model.embed_tokens.weight": (words, width), "model.norm.weight": (width,)}
    for i in range(language["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= _linear(f"{layer}.self_attn.q_proj", width, width)
        shapes |= _linear(f"{layer}.self_attn.k_proj", width, width // 2)
        shapes |= _linear(f"{layer}.self_attn.v_proj", width, width // 2)
        shapes |= {f"{layer}.self_attn.o_proj.weight": (width, width)}
        shapes |= {f"{layer}.mlp.gate_proj.weight": (middle, width), f"{layer}.mlp.up_proj.weight": (middle, width)}
        shapes |= {f"{layer}.mlp.down_proj.weight": (width, middle)}
        shapes |= {f"{layer}.{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
    seen = vision["embed_dim"]
    shapes |= {"visual.patch_embed.proj.weight": (seen, 3, 2, 14, 14)}
    for i in range(vision["depth"]):
        block = f"visual.blocks.{i}"
        shapes |= _norm(f"{block}.norm1", seen) | _norm(f"{block}.norm2", seen)
        shapes |= _linear(f"{block}.attn.qkv", seen, 3 * seen) | _linear(f"{block}.attn.proj", seen, seen)
        shapes |= _linear(f"{block}.mlp.fc1", seen, 2 * seen) | _linear(f"{block}.mlp.fc2", 2 * seen, seen)
    shapes |= _norm("visual.merger.ln_q", seen)
    shapes |= _linear("visual.merger.mlp.0", 4 * seen, 4 * seen) | _linear("visual.merger.mlp.2", 4 * seen, width)
    shapes |= {"lm_head.weight": (words, width)}
    shapes |= _linear("rm_head.0", width, 12) | _linear("rm_head.3", 12, 6) | _linear("rm_head.5", 6, 2)
    return filled(shapes, seed)


# CLAP


def clap_folder(folder, fused=False):
    """A CLAP with its tokenizer and feature extractor."""
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, RobertaTokenizer

    text = {
        "vocab_size": 261,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 80,
        "projection_dim": 8,
    }
    audio = {
        "hidden_size": 32,
        "patch_embeds_hidden_size": 8,
        "depths": [1, 1, 1],
        "num_attention_heads": [2, 2, 2],
        "num_hidden_layers": 3,
        "projection_dim": 8,
        "enable_fusion": fused,
    }
    torch.manual_seed(0)
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=8))
    for parameter in model.parameters():  # an initial one is so small that all sounds are alike
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *_byte_tokens()])}
    RobertaTokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    ClapFeatureExtractor(truncation="rand_trunc").save_pretrained(folder)
    return str(Path(folder))

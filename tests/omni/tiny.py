# SPDX-License-Identifier: Apache-2.0
"""Tiny random omni-modality models with their processors, built in code, and media that go with them.

The video processors of Transformers need torchvision. [`TinyVideoProcessor`] stands in for the one of Qwen and cuts
frames into the same patches.
"""

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    BatchFeature,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor


RATE = 16000
PATCH, MERGE, MEL_BINS = 8, 2, 16

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
]
NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% elif c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TinyVideoProcessor(BaseVideoProcessor):
    """Frames (T, H, W, 3) in uint8 to patches in the order of the Qwen-VL models, with numpy and PIL."""

    patch_size, merge_size, temporal_patch_size = PATCH, MERGE, 2
    model_input_names = ["pixel_values_videos", "video_grid_thw"]

    def __init__(self, **options):
        pass

    def __call__(self, videos, **options):
        patches, grids = zip(*map(self._patches, videos), strict=True)
        return BatchFeature({"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids)})

    def _patches(self, video):
        side, per_patch = self.patch_size * self.merge_size, self.temporal_patch_size
        frames = [np.transpose(np.asarray(frame), (2, 0, 1)) for frame in video]
        frames += [frames[-1]] * (-len(frames) % per_patch)
        images, size = Qwen2VLImageProcessorPil(**VISION), SizeDict(**VISION["size"])
        pixels = np.stack([images.resize(frame, size, 3, side) for frame in frames]) / 255.0
        mean, std = (np.array(v)[:, None, None] for v in (images.image_mean, images.image_std))
        pixels = ((pixels - mean) / std).astype(np.float32)
        t, (h, w) = len(frames) // per_patch, (n // self.patch_size for n in pixels.shape[-2:])
        m, p = self.merge_size, self.patch_size
        cut = pixels.reshape(t, per_patch, 3, h // m, m, p, w // m, m, p).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return cut.reshape(t * h * w, -1), (t, h, w)

    def save_pretrained(self, folder, **options):
        return []


VISION = {"patch_size": PATCH, "merge_size": MERGE, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}


def tokenizer():
    """One token a byte, and the special tokens of Qwen3-Omni."""
    vocab = {token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), *SPECIAL])}
    made = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED,
        padding_side="left",
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    made.chat_template = CHAT_TEMPLATE
    return made


class TakesStandIn:
    """A processor that does not ask of which class the one of videos is."""

    def check_argument_for_proper_class(self, argument_name, argument):
        if argument_name != "video_processor":
            super().check_argument_for_proper_class(argument_name, argument)


class TinyOmniProcessor(TakesStandIn, Qwen3OmniMoeProcessor):
    """That of Qwen3-Omni."""


class TinyOmni25Processor(TakesStandIn, Qwen2_5OmniProcessor):
    """That of Qwen2.5-Omni."""


class TinyVLProcessor(TakesStandIn, Qwen2_5_VLProcessor):
    """That of Qwen2.5-VL."""


def processor(class_=TinyOmniProcessor):
    """A processor for sounds at 16 kHz and pictures up to 64 × 64."""
    return class_(
        image_processor=Qwen2VLImageProcessorPil(**VISION),
        video_processor=TinyVideoProcessor(),
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS, sampling_rate=RATE),
        tokenizer=tokenizer(),
        chat_template=CHAT_TEMPLATE,
    )


def vision_language_processor():
    """A processor for pictures and text."""
    return TinyVLProcessor(
        image_processor=Qwen2VLImageProcessorPil(**VISION),
        tokenizer=tokenizer(),
        video_processor=TinyVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def thinker_config(**text):
    """Two layers of four experts, one layer each for pictures and sounds."""
    token = {name: SPECIAL.index(value) + 256 for name, value in NAMED.items()}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    return Qwen3OmniMoeThinkerConfig(
        text_config={
            "vocab_size": 256 + len(SPECIAL),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "max_position_embeddings": 2048,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "router_aux_loss_coef": 0.001,
            **text,
        },
        audio_config={
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "output_dim": 32,
            "downsample_hidden_size": 8,
            "max_source_positions": 200,
            "n_window": 50,
            "n_window_infer": 100,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "num_position_embeddings": 64,
        },
        image_token_id=token["image_token"],
        video_token_id=token["video_token"],
        audio_token_id=token["audio_token"],
        vision_start_token_id=token["vision_bos_token"],
        vision_end_token_id=token["vision_eos_token"],
        audio_start_token_id=token["audio_bos_token"],
        audio_end_token_id=token["audio_eos_token"],
    )


def livened(model, seed=0):
    """The model with weights that are large enough for what it sees and hears to move its answers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                std = 0.5 if name.endswith("embed_tokens.weight") else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    return model.eval()


def thinker(seed=0, **text):
    """A Thinker of 60 thousand parameters."""
    return livened(Qwen3OmniMoeThinkerForConditionalGeneration(thinker_config(**text)), seed)


def full_config(**thinker_text):
    """Qwen3-Omni with everything: the Thinker, and the Talker and Code2Wav that no trainer wants."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    talker = {**small, "vocab_size": 64, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1}
    talker |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    talker["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    return Qwen3OmniMoeConfig(
        thinker_config=thinker_config(**thinker_text).to_dict(),
        talker_config={
            "text_config": talker,
            "code_predictor_config": {**small, "vocab_size": 64, "head_dim": 16, "num_code_groups": 4},
            "num_code_groups": 4,
            "thinker_hidden_size": 32,
            "accept_hidden_layer": 1,
            "spatial_merge_size": MERGE,
        },
        code2wav_config={
            **small,
            "num_key_value_heads": 2,
            "codebook_size": 64,
            "num_quantizers": 4,
            "upsample_rates": [2],
            "upsampling_ratios": [2],
            "decoder_dim": 32,
        },
    )


def save_full(folder, seed=0, **options):
    """Writes a checkpoint as it is published, and returns its Thinker."""
    model = livened(Qwen3OmniMoeForConditionalGeneration(full_config()), seed)
    model.save_pretrained(folder, **options)
    return model.thinker


def language_model(seed=0):
    """A dense model that takes text alone."""
    config = Qwen3Config(
        vocab_size=256 + len(SPECIAL),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=258,
        pad_token_id=256,
        tie_word_embeddings=False,
    )
    return livened(Qwen3ForCausalLM(config), seed)


TEXT = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
SIGHT = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "window_size": 4 * PATCH,
    "fullatt_block_indexes": [0],
}


def token_id(name):
    """Id of a token by its name, such as `image_token`."""
    return 256 + SPECIAL.index(NAMED[name])


def full_config_25():
    """Qwen2.5-Omni without its Talker."""
    hearing = {"num_mel_bins": MEL_BINS, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    hearing |= {"d_model": 32, "output_dim": 32, "max_source_positions": 200, "n_window": 50}
    return Qwen2_5OmniConfig(
        enable_audio_output=False,
        thinker_config={
            "text_config": TEXT,
            "audio_config": hearing,
            "vision_config": SIGHT,
            "tie_word_embeddings": False,
            **{f"{kind}_token_index": token_id(f"{kind}_token") for kind in ("image", "video", "audio")},
            "vision_start_token_id": token_id("vision_bos_token"),
            "vision_end_token_id": token_id("vision_eos_token"),
            "audio_start_token_id": token_id("audio_bos_token"),
            "audio_end_token_id": token_id("audio_eos_token"),
        },
    )


def save_full_25(folder, seed=0):
    """Writes a checkpoint of Qwen2.5-Omni, and returns its Thinker."""
    model = livened(Qwen2_5OmniForConditionalGeneration(full_config_25()), seed)
    model.save_pretrained(folder)
    return model.thinker


def thinker_25(seed=0):
    """The Thinker of Qwen2.5-Omni, which is dense."""
    return livened(Qwen2_5OmniForConditionalGeneration(full_config_25()).thinker, seed)


def vision_language_model(seed=0):
    """Qwen2.5-VL."""
    config = Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=SIGHT,
        image_token_id=token_id("image_token"),
        video_token_id=token_id("video_token"),
        vision_start_token_id=token_id("vision_bos_token"),
        vision_end_token_id=token_id("vision_eos_token"),
        tie_word_embeddings=False,
    )
    return livened(Qwen2_5_VLForConditionalGeneration(config), seed)

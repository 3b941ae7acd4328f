# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-2.1 and HunyuanVideo-1.5."""

import inspect
import itertools

import torch
from diffusers import (
    AutoencoderKLHunyuanImage,
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from omnitrl.models import MediaSize
from tests.tiny.checkpoint import LEFT_OUT, Tiny, quiet
from tests.tiny.parts import WIDTH, liven, qwen_tokenizer


GLYPH_WIDTH = 16  # of the encoder of quoted text


def stock_default(function, name):
    """A value that a stock pipeline has written into its code."""
    return inspect.signature(function).parameters[name].default


def template_tokenizer(template, count):
    """Byte-level, with the template as `count` tokens, which is what the pipelines cut off before the prompt."""
    tokenizer = qwen_tokenizer()
    system = template.removeprefix("<|im_start|>").partition("<|im_end|>")[0]
    parts = count - len(tokenizer(template.replace(system, "")).input_ids)
    ends = [4 * i for i in range(parts)] + [len(system)]  # pieces of one length, none of which is in another; the rest
    tokenizer.add_tokens([system[start:end] for start, end in itertools.pairwise(ends)])
    assert len(tokenizer(template).input_ids) == count
    return tokenizer


def qwen_text_config(tokenizer):
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 3,  # the pipelines take the output of the last but two
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "max_position_embeddings": 2048,
        **{f"{name}_token_id": tokenizer.pad_token_id for name in ("bos", "eos", "pad")},
    }


def glyph_encoder():
    tokenizer = ByT5Tokenizer()
    config = T5Config(vocab_size=len(tokenizer), d_model=GLYPH_WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return {"tokenizer_2": tokenizer, "text_encoder_2": T5EncoderModel(config)}


def tiny_hunyuan_image(guidance_embeds=False, use_meanflow=False, glyphs=True, guider=None):
    """A `HunyuanImagePipeline`; `guider` is a `ClassifierFreeGuidance` unless the checkpoint embeds its guidance."""
    torch.manual_seed(0)
    template = stock_default(HunyuanImagePipeline._get_qwen_prompt_embeds, "template")
    tokenizer = template_tokenizer(
        template.partition("{}")[0], stock_default(HunyuanImagePipeline._get_qwen_prompt_embeds, "drop_idx")
    )
    transformer = HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=WIDTH,
        text_embed_2_dim=GLYPH_WIDTH if glyphs else None,
        rope_axes_dim=(8, 8),
        guidance_embeds=guidance_embeds,
        use_meanflow=use_meanflow,
    )
    liven(transformer.proj_out)
    vae = AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=64,
        scaling_factor=0.75,
    )
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": WIDTH}
    config = Qwen2_5_VLConfig(text_config=qwen_text_config(tokenizer), vision_config=vision)
    if guider is None and not guidance_embeds:
        guider = ClassifierFreeGuidance(guidance_scale=3.5)
    return quiet(
        HunyuanImagePipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            vae=vae,
            text_encoder=Qwen2_5_VLForConditionalGeneration(config),
            tokenizer=tokenizer,
            guider=guider,
            **glyph_encoder(),
        )
    )


def tiny_hunyuan_video15(pipeline_class=HunyuanVideo15Pipeline, use_meanflow=False, guidance_scale=6.0):
    """Videos of 24 × 36 pixels, which is what the image-to-video pipeline makes of pictures of 2 : 3."""
    torch.manual_seed(0)
    encode = HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    chat = [("system", stock_default(encode, "system_message")), ("user", "{}")]
    messages = [{"role": role, "content": content} for role, content in chat]
    template = qwen_tokenizer().apply_chat_template(messages, tokenize=False)
    tokenizer = template_tokenizer(template.partition("{}")[0], stock_default(encode, "crop_start"))
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=WIDTH,
        text_embed_2_dim=GLYPH_WIDTH,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        target_size=32,
        use_meanflow=use_meanflow,
    )
    liven(transformer.proj_out)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    images = vision_encoder() if pipeline_class is HunyuanVideo15ImageToVideoPipeline else {}
    return quiet(
        pipeline_class(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            vae=vae,
            text_encoder=Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**qwen_text_config(tokenizer))),
            tokenizer=tokenizer,
            guider=ClassifierFreeGuidance(guidance_scale=guidance_scale),
            **glyph_encoder(),
            **images,
        )
    )


def vision_encoder():
    config = SiglipVisionConfig(
        image_size=16, patch_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    processor = SiglipImageProcessor(size={"height": 16, "width": 16})
    return {"image_encoder": SiglipVisionModel(config), "feature_extractor": processor}


def guider(scale):
    return {"guider": ClassifierFreeGuidance(guidance_scale=scale)}


def frames(output):
    return output.frames


# Weights of the projection of quoted text, 2048 wide in diffusers' code, are nearly all that a tiny network has.
_SHARE = 0.01

_VIDEO = {
    "wrapped_share": _SHARE,
    "moved_share": 0.75,  # not those of quoted text and of pictures, nor the last block's of the text
    "size": MediaSize(24, 36, num_frames=5),
    "max_sequence_length": 40,
    "guidance": guider,
    "media": frames,
    "loads_lora": False,
}
_IMAGE = {"max_sequence_length": 40, "guidance": guider, "loads_lora": False}
_NO_LENGTH = {"max_sequence_length": LEFT_OUT}  # an attribute of these pipelines

CHECKPOINTS = {
    "hunyuan-image": Tiny(tiny_hunyuan_image, arguments=_NO_LENGTH, wrapped_share=_SHARE, **_IMAGE),
    "hunyuan-image-embedded": Tiny(
        lambda: tiny_hunyuan_image(guidance_embeds=True, glyphs=False),
        arguments=_NO_LENGTH,
        **{**_IMAGE, "guidance": lambda scale: {"distilled_guidance_scale": scale}},
    ),
    "hunyuan-video15": Tiny(tiny_hunyuan_video15, arguments=_NO_LENGTH, **_VIDEO),
    "hunyuan-video15-image": Tiny(
        lambda: tiny_hunyuan_video15(HunyuanVideo15ImageToVideoPipeline),
        num_images=1,
        image_sizes=((36, 24), (72, 48), (45, 30)),
        arguments={**_NO_LENGTH, "height": LEFT_OUT, "width": LEFT_OUT},
        **_VIDEO,
    ),
}

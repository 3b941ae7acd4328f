# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image and Qwen-Image-Edit."""

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from transformers import (
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
)

from tests.tiny.checkpoint import Tiny, quiet
from tests.tiny.parts import liven, qwen_tokenizer


# A VAE of any width takes seconds for the megapixel that the stock pipelines have in their code. So from here on they,
# and what asks them for the size, resize condition images to 1/64 of that area.
STOCK_DIMENSIONS = pipeline_qwenimage_edit.calculate_dimensions, pipeline_qwenimage_edit_plus.calculate_dimensions
pipeline_qwenimage_edit.calculate_dimensions = lambda area, ratio: STOCK_DIMENSIONS[0](area / 64, ratio)
pipeline_qwenimage_edit_plus.calculate_dimensions = lambda area, ratio: STOCK_DIMENSIONS[1](area / 64, ratio)


class PictureProcessor(Qwen2VLProcessor):
    """Qwen2-VL's processor without that of videos, which cannot be made where torchvision is not installed."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def fitted(pipeline):
    """
    The pipeline, with what comes before the prompt being as many tokens as it cuts off.

    It cuts by number, which fits the real tokenizer; for this one of bytes a part of the template becomes one token.
    """
    template, tokenizer = pipeline.prompt_template_encode, pipeline.tokenizer
    user = "<|im_start|>user\n"
    before = template[: template.index(user) + len(user)]
    surplus = len(tokenizer(before).input_ids) - pipeline.prompt_template_encode_start_idx
    sentence = template.index("\n") + 1
    tokenizer.add_tokens([template[sentence : sentence + surplus + 1]])
    assert len(tokenizer(before).input_ids) == pipeline.prompt_template_encode_start_idx
    return pipeline


def qwen_vl(tokenizer, width=32):
    """Qwen2.5-VL."""
    rope = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e4}
    text = {
        "vocab_size": len(tokenizer) + 1,  # see `fitted`
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": rope,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    image, video, start, end = tokenizer.convert_tokens_to_ids(names)
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def tiny_qwen_image(pipeline_class=QwenImagePipeline, zero_cond_t=False):
    """`zero_cond_t` is how Qwen-Image-Edit-2511 tells the tokens of condition images from those of the media."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )
    liven(transformer.proj_out)
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[-0.3, 0.1, 0.0, 0.5],
        latents_std=[1.5, 0.8, 1.0, 2.0],
    )
    # The scheduler's config of the published checkpoints.
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    parts = {"text_encoder": qwen_vl(tokenizer), "tokenizer": tokenizer}
    if pipeline_class is not QwenImagePipeline:
        images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 84)
        parts["processor"] = PictureProcessor(images, tokenizer)
    return quiet(fitted(pipeline_class(transformer=transformer, scheduler=scheduler, vae=vae, **parts)))


def _guidance(scale):
    return {"true_cfg_scale": scale}


def _unpacked(model, tokens, size):
    """The stock pipeline's own unpacking of its latents."""
    pipeline = model.pipeline
    return pipeline._unpack_latents(tokens, size.height, size.width, pipeline.vae_scale_factor)[:, :, 0]


def _tiny(build, **options):
    return Tiny(build, max_sequence_length=64, guidance=_guidance, latents=_unpacked, negative_prompt=" ", **options)


CHECKPOINTS = {
    "qwen-image": _tiny(tiny_qwen_image),
    "qwen-image-edit": _tiny(lambda: tiny_qwen_image(QwenImageEditPipeline), num_images=1),
    "qwen-image-edit-plus": _tiny(lambda: tiny_qwen_image(QwenImageEditPlusPipeline, zero_cond_t=True), num_images=2),
}

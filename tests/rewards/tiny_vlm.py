# SPDX-License-Identifier: Apache-2.0
"""A folder with a random vision-language model of Qwen2.5-VL's architecture, small enough to be served on a CPU."""

import json

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from tests.tiny.parts import qwen_tokenizer


WIDTH = 64
ANSWERS = ("Yes", "No")  # one token each, as in the vocabularies of real models
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of_bytes():
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(list(ANSWERS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def vlm(tokenizer):
    """The model. Its weights are large enough for pictures and prompts to move its answers."""
    torch.manual_seed(0)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
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
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.15 if "lm_head" in name else 0.1)
        # Both answers are likely ones, as those of a model that was trained are: they lie along the last token of the
        # chat template, which the residual stream still has.
        last = model.get_input_embeddings().weight[tokenizer("\n").input_ids[0]]
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(list(ANSWERS))] += 3 * last / last.norm()
    return model


def save_tiny_vlm(folder):
    """
    Writes a checkpoint that `vllm serve` takes.

    Returns:
        (tokenizer, image processor, model) of it, for transformers.
    """
    tokenizer = tokenizer_of_bytes()
    model = vlm(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(**PIXELS)
    images.save_pretrained(folder)
    # The processor of videos cannot be made where torchvision is not installed; a server has it.
    videos = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    videos |= {"video_processor_type": "Qwen2VLVideoProcessor"}
    videos.pop("image_processor_type", None)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos), "utf-8")
    return tokenizer, images, model

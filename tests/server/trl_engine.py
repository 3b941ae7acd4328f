# SPDX-License-Identifier: Apache-2.0
"""
A run of GSPO on a language model with TRL's engine, vLLM in the trainer's process; started by `test_trl_engine.py`.

It runs in the servers' environment: `python -m tests.server.trl_engine FOLDER`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.omni import chats, tiny


HEAD = 32  # the smallest that vLLM's attention for CPUs has


def save_model(folder):
    """Writes a language model and its tokenizer."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD}
    ends = {"eos_token_id": 258, "pad_token_id": 256}
    config = Qwen3Config(vocab_size=256 + len(tiny.SPECIAL), tie_word_embeddings=False, **sizes, **heads, **ends)
    tiny.livened(Qwen3ForCausalLM(config)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


@torch.no_grad()
def log_probs(model, texts):
    """Of some tokens by a model, (B, T - 1)."""
    return model(texts).logits[:, :-1].log_softmax(-1).gather(2, texts[:, 1:, None])[..., 0]


def main(folder):
    """Writes how far the engine was from the trainer in each rollout, and the trainer from where it began."""
    save_model(folder / "model")
    trainer = chats.trainer(
        folder,
        "text",
        model=str(folder / "model"),
        processing_class=tiny.tokenizer(),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=128,
        vllm_gpu_memory_utilization=0.05,
        steps_per_generation=1,
        max_steps=3,
        learning_rate=0.02,
    )
    trainer.train()
    start = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    texts = torch.arange(256).reshape(8, 32)
    moved = log_probs(start, texts) - log_probs(trainer.accelerator.unwrap_model(trainer.model), texts)
    result = {
        "differences": chats.logged(trainer, "sampling/sampling_logp_difference/mean"),
        "ratios": chats.logged(trainer, "sampling/importance_sampling_ratio/mean"),
        "moved": moved.abs().mean().item(),
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""
What two processes do with DeepSpeed, started by `test_zero.py`.

Accelerate cannot prepare DeepSpeed on CPUs, so the engine is made here; what it wraps, the losses that it trains and
what is saved of it are the trainer's.
"""

import os

import torch
from peft import LoraConfig

from omnitrl.models import Policy
from omnitrl.trainer.adapters import attach_adapters
from omnitrl.trainer.saving import trained_weights
from tests.distributed.launch import main
from tests.tiny_models import tiny_model


def policy():
    """A fresh policy with adapters, and inputs that are the same on every process."""
    torch.manual_seed(0)
    model = tiny_model()
    attach_adapters(model, LoraConfig(r=4, init_lora_weights=False))
    return model, Policy(model), {**model.example_inputs(), "guidance_scale": 2.0}


def three_steps(stage):
    """Losses of three updates, and the adapter after them; with stage 0 by torch alone."""
    model, module, inputs = policy()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    losses, state = [], None
    if stage:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        module, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
    for _ in range(3):
        loss = module(**inputs).pow(2).mean()
        losses.append(loss.item())
        if stage:
            module.backward(loss)
            module.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if stage == 3:
        state = module._zero3_consolidated_16bit_state_dict()
        if state is None:
            return losses, None
    weights = trained_weights(model, state)["transformer"]
    return losses, {key: tensor.float().clone() for key, tensor in weights.items()}


SCENARIOS = {"zero2": lambda place: three_steps(2), "zero3": lambda place: three_steps(3)}

if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(SCENARIOS)

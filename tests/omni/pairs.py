# SPDX-License-Identifier: Apache-2.0
"""Preference pairs about tiny media, and a DPO trainer on a tiny model."""

import datasets
import torch
from peft import LoraConfig

from omnitrl.omni.thinker import ATTENTION, EXPERTS, TOWERS
from omnitrl.trainer.omni_dpo_config import OmniDPOConfig
from omnitrl.trainer.omni_dpo_trainer import OmniDPOTrainer
from tests.omni import chats, tiny


ANSWERS = [("yes, it is", "no"), ("a", "bcd"), ("red", "green, or blue"), ("low", "high")]


def rows(kind):
    """Two or four pairs about media of a kind, with answers of different lengths."""
    answers = zip(chats.ROWS[kind], ANSWERS, strict=False)
    return [{**row, "chosen": chosen, "rejected": rejected} for row, (chosen, rejected) in answers]


def dataset(kind):
    return datasets.Dataset.from_list(rows(kind))


def lora(**changed):
    """An adapter on attention and experts."""
    targets = {"target_modules": ATTENTION, "exclude_modules": TOWERS, "target_parameters": EXPERTS}
    return LoraConfig(**{"r": 4, "lora_alpha": 8, **targets, **changed})


def options(folder, **changed):
    """Full precision on the CPU, and no checkpoints."""
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "max_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
        **changed,
    }


def trainer(folder, data="mixed", model=None, peft_config="lora", **changed):
    """A trainer on pairs of a kind, or on a dataset; arguments that are no options go to the trainer."""
    given = {name: changed.pop(name) for name in ("ref_model", "processing_class", "eval_dataset") if name in changed}
    given.setdefault("processing_class", tiny.processor())
    return OmniDPOTrainer(
        model=tiny.thinker() if model is None else model,
        args=OmniDPOConfig(**options(folder, **changed)),
        train_dataset=dataset(data) if isinstance(data, str) else data,
        peft_config=lora() if peft_config == "lora" else peft_config,
        **given,
    )


def moved(model, seed=0, std=0.1):
    """The model with an adapter that changes what it says."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    return model


def batch_of(trained, numbers=None):
    """The batch of some rows of the training set."""
    data = trained.train_dataset
    return trained.data_collator([data[i] for i in (range(len(data)) if numbers is None else numbers)])


def logged(trained, name):
    """Values of a metric, one for each log line that has it."""
    return [row[name] for row in trained.state.log_history if name in row]

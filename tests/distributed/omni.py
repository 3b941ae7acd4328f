# SPDX-License-Identifier: Apache-2.0
"""What two processes do with a model that sees and hears, started by `test_omni.py`."""

import os

import datasets
import torch
from accelerate.utils import DistributedType

from omnitrl.errors import OmniTRLError
from omnitrl.rewards import RewardError
from tests.distributed.fsdp import SHARDED
from tests.distributed.launch import main
from tests.omni import chats, pairs
from tests.omni.test_gspo import recorded


RANK = int(os.environ.get("RANK", 0))

# The first process has two texts, the second a picture and a sound, with two answers each.
ROWS = [*chats.ROWS["text"], chats.ROWS["image"][1], chats.ROWS["audio"][1]]


def rows():
    return datasets.Dataset.from_list(ROWS)


def mixed(place, **changed):
    """Two updates, and everything that is needed to compute them again."""
    record = recorded(
        place, rows(), shuffle_dataset=False, learning_rate=3e-3, epsilon=0.1, epsilon_high=0.1, **changed
    )
    return {
        "wrapper": type(record.trainer.model_wrapped).__name__,
        "before": record.weights,
        "after": record.trainer.model.state_dict(),
        "gradients": record.gradients,
        "batches": record.batches,
        "logs": record.trainer.state.log_history,
    }


def checkpointed(place):
    return mixed(place, gradient_checkpointing=True)


TEXTS = [chats.chat(text) for text in ("What is it?", "Why?", "Who is there?", "So?")]


def sharded(place):
    """Two updates on texts, of weights that FSDP2 shards, layer by layer of the language model."""
    layers = {"fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3OmniMoeThinkerTextDecoderLayer"]}}
    data = datasets.Dataset.from_list(TEXTS)
    trained = chats.trainer(place, data, shuffle_dataset=False, max_grad_norm=1e9, **(SHARDED and SHARDED | layers))
    trained.accelerator.state.distributed_type = DistributedType.FSDP  # see `tests.distributed.fsdp`
    trained.train()
    return {
        "wrapper": type(trained.model_wrapped).__name__,
        "batches": [dict(batch) for batch in trained._buffered_inputs],
        "logs": trained.state.log_history,
    }


def broken_reward(place):
    """A reward that breaks its contract in the second process."""

    def reward(prompts, **kwargs):
        if RANK == 1:
            raise RewardError("no numbers here")
        return [0.0] * len(prompts)

    trained = chats.trainer(place, rows(), reward=reward)
    try:
        trained.train()
    except OmniTRLError as error:
        return type(error).__name__, str(error)


def failed_on_one(place):
    """A reward that fails in the second process, which is counted in both."""

    def reward(prompts, **kwargs):
        if RANK == 1:
            raise RuntimeError("away")
        return [float(i % 2) for i in range(len(prompts))]

    trained = chats.trainer(place, rows(), reward=reward, reward_max_retries=0, reward_max_failed_fraction=1.0)
    trained.train()
    return {name: chats.logged(trained, name) for name in ("rewards/reward/failed", "reward", "rewards/reward/mean")}


def preferences(place, **changed):
    """One update of DPO on pairs about the same rows, two on each process."""
    given = {"peft_config": None, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, **changed}
    data = datasets.Dataset.from_list(
        [{**row, "chosen": a, "rejected": b} for row, (a, b) in zip(ROWS, pairs.ANSWERS, strict=True)]
    )
    trained = pairs.trainer(place, data, train_sampling_strategy="sequential", **given)
    before = {name: weight.detach().clone() for name, weight in trained.model.named_parameters()}
    trained.train()
    moves = {name: weight.detach() - before[name] for name, weight in trained.model.named_parameters()}
    return {"moves": moves, "logs": trained.state.log_history}


SCENARIOS = {
    "preferences": preferences,
    "mixed": mixed,
    "checkpointed": checkpointed,
    "broken_reward": broken_reward,
    "failed_on_one": failed_on_one,
    "sharded": sharded,  # the last: the environment says so from then on
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(SCENARIOS)

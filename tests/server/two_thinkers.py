# SPDX-License-Identifier: Apache-2.0
"""What two processes do whose answers one server writes, started by `test_thinker.py`."""

import os

from omnitrl.omni.thinker import load_thinker
from omnitrl.trainer.text_rollouts import adapter_of
from tests.distributed.launch import main
from tests.omni import chats
from tests.server.thinkers import lora


def two_updates(place):
    """Each process has one prompt in each update, with two answers."""
    checkpoint, server = os.environ["CHECKPOINT"], os.environ["SERVER"]
    trainer = chats.trainer(
        place,
        "mixed",
        load_thinker(checkpoint),
        peft_config=lora(),
        learning_rate=0.05,
        steps_per_generation=1,
        rollout_engine="vllm_omni",
        vllm_server_base_url=server,
        vllm_server_timeout=60,
    )
    answers, single_turn = [], trainer._generate_single_turn

    def recorded(*args, **kwargs):
        ids, log_probs = single_turn(*args, **kwargs)
        answers.extend(ids)
        return ids, log_probs

    trainer._generate_single_turn = recorded
    trainer.train()
    return {
        "answers": answers,
        "adapter": adapter_of(trainer.accelerator.unwrap_model(trainer.model)),
        "differences": chats.logged(trainer, "sampling/sampling_logp_difference/max"),
    }


if __name__ == "__main__":
    main({"two_updates": two_updates})

# SPDX-License-Identifier: Apache-2.0
"""
GenEval and DeQA scores from the reward servers of Flow-GRPO (https://github.com/yifan123/reward-server).

Those servers have environments of their own with old versions of PyTorch and mmdetection. They listen at 127.0.0.1,
GenEval at port 18085 and DeQA at 18086. This file is the bridge: on the machine where they run,

    omnitrl serve-reward flow_grpo_servers:geneval --host 0.0.0.0 --port 8100

started in this folder, offers GenEval to trainers elsewhere as `reward_funcs="http://that-machine:8100"`. On one
machine `reward_funcs="flow_grpo_servers:geneval"` with `PYTHONPATH=examples/rewards` does without it.

**Their protocol is pickle, in both directions.** Whoever can reach such a server can run code on its machine: leave it
at 127.0.0.1, and let this bridge face the network. What it answers is read here without running anything: the answers
are dictionaries of lists of numbers, and a pickle that wants more than that is refused.
"""

import io
import os
import pickle
from collections.abc import Sequence
from typing import Any, NoReturn

import httpx

from omnitrl.rewards import RewardUnavailable, reward_traits, to_pil


GENEVAL_URL = os.environ.get("FLOW_GRPO_GENEVAL_URL", "http://127.0.0.1:18085")
DEQA_URL = os.environ.get("FLOW_GRPO_DEQA_URL", "http://127.0.0.1:18086")


@reward_traits(media="image", deterministic=True, batch_size=64)
def geneval(
    prompts: Sequence[str],
    completions: Sequence[Any],
    tag: Sequence[str],
    include: Sequence[list[dict[str, Any]]],
    log_extra: Any,
    exclude: Sequence[list[dict[str, Any]] | None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """
    The share of a prompt's demands (objects, their number, colours and positions) that a detector finds, in [0, 1].

    It is what Flow-GRPO trains on. Whether all demands are met is in the column `geneval_correct` of the samples.

    Args:
        prompts, tag, include, exclude (`list`):
            The fields of GenEval's `metadata.jsonl`, as columns of the dataset.
        completions (`list`):
            Images; they are sent as JPEG files of Pillow's default quality, as Flow-GRPO does.
    """
    excluded = exclude or [None] * len(prompts)
    demands = [
        {"prompt": prompts[i], "tag": tag[i], "include": _plain(include[i]), "exclude": _plain(excluded[i] or [])}
        for i in range(len(prompts))
    ]
    answer = _ask(GENEVAL_URL, {"images": _jpegs(completions), "meta_datas": demands, "only_strict": True})
    log_extra("geneval_correct", answer["strict_rewards"])
    return answer["scores"]


@reward_traits(media="image", deterministic=True, batch_size=64)
def deqa(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """DeQA-Score of the technical quality of images: its five grades as a number in [0.2, 1], 1 the best."""
    return _ask(DEQA_URL, {"images": _jpegs(completions)})["outputs"]


def _ask(url: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        response = httpx.post(url, content=pickle.dumps(request), timeout=120)
    except (httpx.ConnectError, httpx.RemoteProtocolError) as error:
        raise RewardUnavailable(f"the reward server of Flow-GRPO at {url} is away ({error})") from error
    if response.status_code != 200:  # their answer is a traceback
        raise RuntimeError(f"{url} answers {response.status_code}: {response.text.strip()[-300:]}")
    return NumbersOnly(io.BytesIO(response.content)).load()


class NumbersOnly(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries; a pickle must name whatever else it makes, and may not."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuses a function or class that a pickle asks for."""
        raise pickle.UnpicklingError(f"the answer asks for {module}.{name}, but it should be of numbers only")


def _jpegs(completions: Sequence[Any]) -> list[bytes]:
    files = [io.BytesIO() for _ in completions]
    for file, image in zip(files, completions, strict=True):
        to_pil(image).save(file, format="JPEG")
    return [file.getvalue() for file in files]


def _plain(clauses: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Clauses as GenEval writes them: `datasets` adds the keys that only others have, with `None`."""
    return [{key: value for key, value in clause.items() if value is not None} for clause in clauses]

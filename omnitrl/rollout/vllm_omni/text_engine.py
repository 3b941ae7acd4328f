# SPDX-License-Identifier: Apache-2.0
"""Answers of a model that writes text, from servers that `omnitrl vllm-serve` started."""

from __future__ import annotations

import math
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omnitrl.errors import OmniTRLError, RunError
from omnitrl.rollout.trajectory import WeightReport
from omnitrl.rollout.vllm_omni.checks import check_text_server
from omnitrl.rollout.vllm_omni.client import BadAnswer, Jobs, RolloutClient
from omnitrl.rollout.vllm_omni.replica import WeightUpdate
from omnitrl.rollout.vllm_omni.text_wire import (
    Completion,
    TextRequest,
    TextSampling,
    pack_text_request,
    unpack_completions,
)
from omnitrl.rollout.vllm_omni.transport import ADAPTER, HttpTransport
from omnitrl.rollout.vllm_omni.weights import adapter_message, whole_messages


@dataclass(frozen=True)
class TextPrompt:
    """
    A prompt and how many answers to it are wanted.

    Args:
        token_ids (`list[int]`):
            As the trainer's processor makes them.
        media (`dict[str, Tensor]`):
            What it makes of the media.
        seeds (`list[int]`):
            One for each answer.
    """

    token_ids: list[int]
    media: Mapping[str, Tensor]
    seeds: list[int]


class TextEngine:
    """
    Answers from one or several servers, which are given the trainer's adapter or its weights.

    The answers to a prompt come from one server. One that goes away is left out, and what it was asked for is asked of
    another.

    Args:
        urls (`list[str]`):
            Base URL of each server.
        model_class (`str`):
            Class of the trainer's model.
        sizes (`dict[str, int]`):
            Of its language model, as its config has them.
        concurrency (`int`, *optional*):
            Prompts that one server is asked for at once; an equal share of all by default.
        patience (`float`, defaults to 240):
            Seconds to wait for a server while there is none.
        timeout (`float`, defaults to 3600):
            Seconds that the answers to a prompt may take.
        rank, world_size (`int`):
            Of this process, and how many there are; the first one brings the weights to the servers.
        gather (`Callable[[list], list]`, *optional*):
            Gives the lists of all processes as one.

    Raises:
        [`~omnitrl.errors.InputError`]: a server is the wrong one.
        [`~omnitrl.errors.RunError`]: there is no server.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model_class: str,
        sizes: Mapping[str, int | None],
        concurrency: int | None = None,
        patience: float = 240.0,
        timeout: float = 3600.0,
        rank: int = 0,
        world_size: int = 1,
        gather: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        self._rank = rank
        self._gather = gather
        self._version = secrets.randbits(40) << 20  # no other trainer has had these
        self.client = RolloutClient(
            [HttpTransport(url) for url in urls],
            concurrency=concurrency,
            patience=patience,
            sample_timeout=timeout,
            check=partial(check_text_server, model_class=model_class, sizes=sizes),
            for_others=rank == 0 and world_size > 1,
        )
        weakref.finalize(self, self.client.close)
        self.infos = self.client.connect()

    def generate(self, prompts: Sequence[TextPrompt], sampling: TextSampling) -> list[list[Completion]]:
        """
        Answers to some prompts.

        Args:
            prompts (`list[TextPrompt]`):
                The prompts.
            sampling ([`TextSampling`]):
                How answers are drawn.

        Returns:
            `list[list[Completion]]`: those of each prompt, in the order of its seeds.

        Raises:
            [`~omnitrl.errors.InputError`]: a server says that a prompt can never be answered.
            [`~omnitrl.errors.RunError`]: there is no server any more, or none that can answer.
        """

        def pack(number: int) -> bytes:
            prompt = prompts[number]
            request = TextRequest(prompt.token_ids, prompt.media, prompt.seeds, sampling, self._version)
            return pack_text_request(request)

        jobs = Jobs(
            range(len(prompts)),
            pack,
            lambda number, message: self._accept(prompts[number], message),
            at_once=-(-len(prompts) // max(self.client.alive, 1)),
        )
        answers = dict(self.client.stream(jobs))
        return [answers[number] for number in range(len(prompts))]

    def _accept(self, prompt: TextPrompt, message: bytes) -> list[Completion]:
        try:
            completions, version = unpack_completions(message)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BadAnswer(f"an answer has no completions ({error})") from error
        if version != self._version or len(completions) != len(prompt.seeds):
            raise BadAnswer(f"{len(completions)} of {len(prompt.seeds)} completions came, of the weights {version}")
        if not all(completion.token_ids for completion in completions):
            raise BadAnswer("a completion is empty")
        if not all(math.isfinite(value) for completion in completions for value in completion.log_probs):
            raise RunError(
                "A server gave log-probs that are not finite: start it with --dtype bfloat16 or float32, or lower "
                "learning_rate."
            )
        return completions

    def update_weights(self, config: Any, weights: Mapping[str, Tensor]) -> WeightReport | None:
        """
        Brings an adapter or weights to all servers; every process calls it, and those of the first one are sent.

        Args:
            config ([`~peft.LoraConfig`], *optional*):
                Of the adapter; `None` for the weights themselves.
            weights (`dict[str, Tensor]`):
                Tensors by the names of a checkpoint; of an adapter, `lora_B` has the factor of LoRA in it.

        Raises:
            [`~omnitrl.errors.InputError`], [`~omnitrl.errors.RunError`]: a server cannot take it, or there is none.
        """
        version, report, error = self._version + 1, None, None
        if self._rank == 0:
            self._version = version  # of these weights alone, even if they do not get there
            try:
                report = self.client.update(WeightUpdate(version, self._messages(config, weights, version)))
            except OmniTRLError as caught:
                error = caught
        outcomes = self._gather([(version, report, error)])
        version, report, error = outcomes[0]
        if error is not None:
            raise error
        if self._rank != 0:
            self.client.update(WeightUpdate(version))
        self._version = version
        return None if report is None else replace(report, version=version)

    def _messages(self, config: Any, weights: Mapping[str, Tensor], version: int) -> list[tuple[str, bytes]]:
        named = {"thinker": weights}
        if config is not None:
            return [(ADAPTER, adapter_message(config, named, version))]
        return whole_messages(named, version, getattr(torch, self.infos[0].dtype))

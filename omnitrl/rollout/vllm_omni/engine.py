# SPDX-License-Identifier: Apache-2.0
"""Rollouts from vLLM-Omni servers, or from a vLLM-Omni engine in this process."""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from omnitrl.algorithms import SigmaTable
from omnitrl.errors import OmniTRLError, RunError
from omnitrl.models import FlowModel
from omnitrl.rollout.context import EngineContext
from omnitrl.rollout.stepping import sampling_table
from omnitrl.rollout.trajectory import SampleRequest, SamplingParams, Trajectory, WeightReport
from omnitrl.rollout.vllm_omni.checks import check_sample, check_server, warn_of_other_name
from omnitrl.rollout.vllm_omni.client import BadAnswer, Jobs, RolloutClient
from omnitrl.rollout.vllm_omni.comparison import Comparison
from omnitrl.rollout.vllm_omni.replica import WeightUpdate
from omnitrl.rollout.vllm_omni.transport import SLEEP, WAKE, HttpTransport, Transport
from omnitrl.rollout.vllm_omni.weights import check_trained, weight_messages
from omnitrl.rollout.vllm_omni.wire import WireRequest, pack_request, unpack_sample


logger = logging.getLogger(__name__)


class VLLMOmniEngine:
    """
    A [`RolloutEngine`] whose samples are made by vLLM-Omni.

    The server takes the sigma table, the seeds and the transition of each sample from the trainer and gives back the
    states and log-probs that were kept. Before it is trusted, the first sample is made here too and compared, and once
    more when training has changed the weights, or a server has been started.

    Args:
        context ([`EngineContext`]):
            What a trainer gives to its engine.
        transports (`Sequence[Transport]`):
            The way to each server.
        brings_weights (`bool`):
            Whether this process gives the servers their weights; with several processes and servers that they share,
            the first one does.
        sleeps (`bool`):
            Whether the servers free their memory while the trainer trains.

    Raises:
        [`~omnitrl.errors.InputError`]: a server is the wrong one, or cannot take what is trained.
        [`~omnitrl.errors.RunError`]: there is no server.
    """

    def __init__(
        self, context: EngineContext, transports: Sequence[Transport], brings_weights: bool, sleeps: bool
    ) -> None:
        args = context.args
        self.model = context.model
        self.forwards = 0
        self.weight_version = 0
        self._context = context
        self._brings_weights = brings_weights
        self._sleeps = sleeps
        self._asleep = False
        self._wire_version = secrets.randbits(40) << 20  # no other trainer has had these
        self._counted_retries = 0
        self._seen_starts = 0  # of servers
        self._share: list[tuple[float, float]] = []  # CPU seconds of the client, seconds
        check_trained(self.model)
        self.client = RolloutClient(
            transports,
            concurrency=args.vllm_max_concurrency,
            patience=args.vllm_server_timeout,
            sample_timeout=args.vllm_request_timeout,
            check=partial(check_server, pipeline_class=type(self.model.pipeline).__name__),
            on_wait=context.on_step,
            for_others=brings_weights and context.world_size > 1,
            collective_from=self.model.device if args.vllm_weight_transport == "collective" else None,
        )
        weakref.finalize(self, self.client.close)
        self.infos = self.client.connect()
        self._comparison = Comparison(context, args.vllm_check_tolerance, self._is_half)
        warning = warn_of_other_name(self.infos[0], self.model)
        if warning is not None and context.rank == 0:
            logger.warning(warning)

    @classmethod
    def from_trainer(cls, context: EngineContext) -> VLLMOmniEngine:
        """The engine that a trainer's options ask for."""
        args = context.args
        if args.vllm_mode == "colocate":
            from omnitrl.rollout.vllm_omni.colocate import colocated

            return cls(context, [colocated(context)], brings_weights=True, sleeps=True)
        transports = [HttpTransport(url) for url in args.server_urls]
        return cls(context, transports, brings_weights=context.rank == 0, sleeps=False)

    @property
    def _is_half(self) -> bool:
        """Whether trainer or server compute in less than float32."""
        exact = {"float32", "float64"}
        server = any(info.dtype.removeprefix("torch.") not in exact or info.quantization for info in self.infos)
        return server or self._context.half

    # Samples

    def generate(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Iterator[list[Trajectory]]:
        """Makes the samples, yielding those that are done in order; see [`RolloutEngine.generate`]."""
        if not requests:
            return
        way = self._way(params)
        self._compare(requests[0], params)
        jobs = Jobs(
            [request.group_id for request in requests],
            lambda number: way.pack(requests[number]),
            lambda number, message: way.accept(requests[number], message),
        )
        started, busy, cpu, before = time.perf_counter(), self.client.busy, 0.0, time.thread_time()
        done: dict[int, Trajectory] = {}
        following = 0
        for number, sample in self.client.stream(jobs):
            self.forwards += way.forwards
            done[number] = self._here(sample, way)
            batch = []
            while following in done:
                batch.append(done.pop(following))
                following += 1
            if batch:
                cpu += time.thread_time() - before
                yield batch
                before = time.thread_time()
        cpu += time.thread_time() - before + self.client.busy - busy
        self._share.append((cpu, time.perf_counter() - started))

    def _way(self, params: SamplingParams) -> _Way:
        model = self.model
        params = replace(params, size=params.size.filled(model.default_size))
        shape, table = model.latent_shape(params.size), sampling_table(model, params)
        return _Way(model, params, table, tuple(shape), self._wire_version)

    def _here(self, sample: Trajectory, way: _Way) -> Trajectory:
        """The sample on the trainer's device, with the trainer's own table and version."""
        device = self.model.device
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in sample.tensors().items()}
        if len(moved["latents"]) > 1 and torch.equal(moved["latents"][1:], moved["next_latents"][:-1]):
            states = torch.cat([moved["latents"], moved["next_latents"][-1:]])  # each state once
            moved |= {"latents": states[:-1], "next_latents": states[1:]}
        return replace(sample, table=way.table, weight_version=self.weight_version, **moved)

    # Weights

    def update_weights(self, version: int) -> WeightReport:
        """
        Brings the trained weights to all servers; every process calls it.

        Raises:
            [`~omnitrl.errors.InputError`], [`~omnitrl.errors.RunError`]: a server cannot take them, or there is none.
        """
        if self._brings_weights:
            self.client.forget_weights()  # before there are others beside them
        weights = self._context.weights()
        wire, report, error = self._wire_version + 1, None, None
        if self._brings_weights:
            self._wire_version = wire  # of these weights alone, even if they do not get there
            try:
                messages = weight_messages(self.model, weights, wire, self._sent_dtype)
                report = self.client.update(WeightUpdate(wire, messages))
            except OmniTRLError as caught:
                error = caught
        seen, self._seen_starts = self._seen_starts, self.client.starts
        outcomes = self._context.gather([(wire, report, error, self._seen_starts > seen)])
        failed = next((outcome[2] for outcome in outcomes if outcome[2] is not None), None)
        if failed is not None:
            raise failed
        if not self._brings_weights:
            wire, report, *_ = outcomes[0]
            self.client.update(WeightUpdate(wire))
        self._wire_version, self.weight_version = wire, version
        self._comparison.weights_changed(any(outcome[3] for outcome in outcomes))
        return WeightReport(version, 0, 0) if report is None else replace(report, version=version)

    @property
    def _sent_dtype(self) -> torch.dtype | None:
        """Whole networks are sent as the server has them, which rounds them as it would and takes half the time."""
        dtypes = {info.dtype.removeprefix("torch.") for info in self.infos}
        return getattr(torch, dtypes.pop()) if len(dtypes) == 1 else None

    def _compare(self, request: SampleRequest, params: SamplingParams) -> None:
        """Compares the servers' samples with the trainer's, where that is due; every process calls it."""
        if self._comparison.is_due:
            self._comparison.run(request, params, self._of_each)

    def check_weights(self) -> dict[str, float]:
        """
        Makes the first sample of the first rollout again, here and on each server, with the trainer's weights of now,
        which are brought to the servers; every process calls it.

        Returns:
            `dict[str, float]`: Relative difference of its final latents from the trainer's own, by server.

        Raises:
            [`~omnitrl.errors.RunError`]: it is too large.
        """
        asleep = self._asleep
        self.wake()
        self.update_weights(self.weight_version)
        found = self._comparison.again(self._of_each)
        if asleep:
            self.sleep()
        return found

    def _of_each(self, request: SampleRequest, params: SamplingParams) -> dict[str, Trajectory]:
        way = self._way(params)
        return self.client.of_each(way.pack(request), lambda message: way.accept(request, message))

    # State

    def sleep(self) -> None:
        """Frees the memory of an engine in this process; servers have their own devices."""
        if self._sleeps and not self._asleep:
            self.client.tell(SLEEP)
            self._asleep = True

    def wake(self) -> None:
        """Undoes `sleep`; the weights are those of the last `update_weights`."""
        if self._asleep:
            self.client.tell(WAKE)
            self._asleep = False

    def health(self) -> None:
        """
        Raises with the reason if no server is there.

        Raises:
            [`~omnitrl.errors.RunError`]: none is.
        """
        if not self.client.alive:
            raise RunError(f"No rollout server is there. {self.client.describe_outage()}.")

    def take_metrics(self) -> dict[str, float]:
        """What was counted since the last call: servers, repeated samples, the client's share of the time."""
        retries, self._counted_retries = self.client.retries - self._counted_retries, self.client.retries
        found = {"rollout/servers": float(self.client.alive), "rollout/retries": float(retries)}
        seconds = sum(wall for _, wall in self._share)
        if seconds:
            found["rollout/client_share"] = sum(cpu for cpu, _ in self._share) / seconds
        self._share = []
        return found

    def close(self) -> None:
        """Ends the connections, and an engine in this process."""
        self.client.close()


@dataclass(frozen=True)
class _Way:
    """How the samples of one rollout are asked for."""

    model: FlowModel
    params: SamplingParams
    table: SigmaTable
    shape: tuple[int, ...]
    wire_version: int

    @property
    def forwards(self) -> int:
        """Network evaluations of one sample; a server computes all steps of each."""
        return self.table.num_steps * self.model.evaluations(self.params.guidance_scale)

    def pack(self, request: SampleRequest) -> bytes:
        """The message that asks for a sample."""
        model, row = self.model, dict(request.row)
        guided = model.needs_negative(self.params.guidance_scale)
        row["negative_prompt"] = model.negative_row(request.row)["prompt"] if guided else None
        row["images"] = model.images(request.row) if model.num_images[1] else []
        return pack_request(
            WireRequest(
                row,
                request.seed,
                request.start_seed,
                self.params,
                self.table,
                self.shape,
                self.wire_version,
                model.max_sequence_length,
                model.guidance_scale_2,
            )
        )

    def accept(self, request: SampleRequest, message: bytes) -> Trajectory:
        """The sample in an answer, once it is known to be the one that was asked for."""
        try:
            sample = unpack_sample(message, request, self.params)
        except (ValueError, KeyError, TypeError) as error:
            raise BadAnswer(f"an answer is no sample ({error})") from error
        check_sample(sample, self.params, self.table, self.shape, self.wire_version)
        return sample

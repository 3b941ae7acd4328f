# SPDX-License-Identifier: Apache-2.0
"""
vLLM-Omni's native pipelines, turned into rollout pipelines.

All of them step through `self.scheduler`, or through the scheduler of a request. So a rollout pipeline is the native
one with another scheduler for requests that carry a rollout: it has the trainer's own table, keeps the latents in
float32 and steps as the local engine does. Other requests, such as ordinary ones for images, pass through untouched.

A class of this module is named as the diffusers pipeline is, and made when it is first asked for:
`omnitrl.rollout.vllm_omni.server.pipelines.QwenImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from omnitrl.rollout.noise import SampleNoise
from omnitrl.rollout.stepping import Record, Sampler, Walk
from omnitrl.rollout.trajectory import SampleRequest
from omnitrl.rollout.vllm_omni.server.families import FAMILIES, Family
from omnitrl.rollout.vllm_omni.wire import WireRequest, unpack_request


ROLLOUT = "omnitrl_rollout"
"""Entry of a request's `extra_args` that makes it a rollout: a message of `pack_request`."""


class Sample:
    """
    One rollout on its way.

    Args:
        request ([`WireRequest`]):
            What was asked for.
        family ([`Family`]):
            Of the pipeline.
        device (`torch.device`):
            Where the latents are.
    """

    def __init__(self, request: WireRequest, family: Family, device: torch.device) -> None:
        params = request.params
        noise = SampleNoise(request.seed, request.start_seed)
        self.request = request
        self.record = Record(params.keep_steps, 1, params.keep_means)
        self.latents = noise.start(request.latent_shape)[None].to(device)  # (1, ...) float32, as the trainer has them
        self._walk = Walk(Sampler(request.table, params, request.latent_shape), [noise], self.record)
        self.steps = 0
        """Steps that are made."""
        self.weight_version = -1
        self._family = family

    @property
    def native(self) -> Tensor:
        """The latents as the native pipeline has them, in float32."""
        return self._family.to_native(self.latents)

    @property
    def is_done(self) -> bool:
        """Whether all steps are made."""
        return self.steps == self.request.table.num_steps

    def advance(self, velocity: Tensor) -> None:
        """The next step, by a velocity (1, ...) as the native pipeline has it."""
        velocity = self._family.from_native(velocity, self.request.latent_shape).to(self.latents.dtype)
        self.latents = self._walk.advance(self.steps, self.latents, velocity)
        self.steps += 1

    def tensors(self) -> dict[str, Tensor]:
        """What the trainer wants back of it."""
        request = SampleRequest(self.request.row, 0, 0, self.request.seed, self.request.start_seed)
        clean = self.latents if self.request.params.keep_clean else None
        [kept] = self.record.trajectories([request], [None], self.request.table, 0, clean)
        return kept.tensors()


class TableScheduler:
    """
    Stands in for a native scheduler while it makes rollouts: steps by their tables, and each row by its own.

    Args:
        native (`SchedulerMixin`):
            The pipeline's own, for what else is asked of a scheduler.
        samples (`Sequence[Sample]`):
            One for each row.
        end_dtype (`torch.dtype`, *optional*):
            Of the final latents where they are decoded next; that of the others by default.

    Raises:
        `ValueError`: the rows have different timesteps, but the network is told one for all.
    """

    def __init__(
        self, native: Any, samples: Sequence[Sample], device: torch.device, end_dtype: torch.dtype | None = None
    ) -> None:
        self.samples = samples
        self._native = native
        self._end_dtype = end_dtype
        table = samples[0].request.table
        if any(not torch.equal(sample.request.table.timesteps, table.timesteps) for sample in samples[1:]):
            raise ValueError("Samples of different timesteps were batched together.")
        self.timesteps = table.timesteps.to(device)
        self.sigmas = table.sigmas.to(device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_native":
            raise AttributeError(name)
        return getattr(self._native, name)

    def __deepcopy__(self, memo: dict) -> TableScheduler:
        """Itself: native pipelines copy their scheduler for each request, and this one is made for one request."""
        return self

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Any = None,
        timesteps: Any = None,
        **kwargs: Any,
    ) -> None:
        """Does nothing: the table is the trainer's."""

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Does nothing: each sample counts its own steps."""

    @property
    def timestep(self) -> Tensor:
        """Of the step that comes next."""
        return self.timesteps[self.samples[0].steps]

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True, **kwargs: Any
    ) -> tuple[Tensor] | SimpleNamespace:
        """The next latents of each row; `sample` is a rounded copy of what the rows have themselves."""
        for one, velocity in zip(self.samples, model_output.split(1), strict=True):
            one.advance(velocity)
        following = torch.cat([one.native for one in self.samples])
        dtype = self._end_dtype if self.samples[0].is_done else None
        following = following.to(dtype or sample.dtype)
        return SimpleNamespace(prev_sample=following) if return_dict else (following,)


class RolloutPipeline:
    """What a native pipeline needs on top to make rollouts; the first base of each class of this module."""

    family: Family
    weight_version = -1
    """Of the weights that it has, set by whoever changes them."""
    largest_batch = 0
    """Most samples that were in one network call."""
    _rollout: TableScheduler | None = None
    _own_scheduler: Any = None
    _exact = False  # whether all rows of the network call are rollouts

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        self.family.adjust(self)

    # The scheduler, which some pipelines replace in the midst of a request

    @property
    def scheduler(self) -> Any:
        """The one of the rollout that is being made, else the native one."""
        return self._own_scheduler if self._rollout is None else self._rollout

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._own_scheduler = scheduler

    def _begin(self, samples: Sequence[Sample], end_dtype: torch.dtype | None = None) -> None:
        device = self.device  # type: ignore[attr-defined]
        self._rollout, self._exact = TableScheduler(self._own_scheduler, samples, device, end_dtype), True

    def _end(self) -> None:
        self._rollout, self._exact = None, False

    def _sample(self, sampling: Any) -> Sample | None:
        """The rollout that a request carries; its native parameters are completed."""
        message = (sampling.extra_args or {}).get(ROLLOUT)
        if message is None:
            return None
        sample = Sample(unpack_request(message), self.family, self.device)  # type: ignore[attr-defined]
        sample.weight_version = self.weight_version
        sampling.latents = sample.native
        return sample

    # Whole requests

    def forward(self, req: Any, **kwargs: Any) -> Any:
        """A batch of requests; the scheduler has put such together as have one table and one guidance."""
        samples = [self._sample(sampling) for sampling in req.sampling_params_list]
        rollouts = [sample for sample in samples if sample is not None]
        if not rollouts:
            return super().forward(req, **kwargs)  # type: ignore[misc]
        if len(rollouts) < len(samples):
            raise ValueError("Rollouts and other requests were batched together.")
        self._begin(rollouts, self.vae.dtype)  # type: ignore[attr-defined]
        try:
            outputs = super().forward(req, **kwargs)  # type: ignore[misc]
        finally:
            self._end()
        outputs = outputs if isinstance(outputs, list) else [outputs]
        return [self._finished(output, sample) for output, sample in zip(outputs, rollouts, strict=True)]

    # Step by step

    def prepare_encode(self, state: Any, **kwargs: Any) -> Any:
        """The first part of a request that shares its steps with others."""
        sample = self._sample(state.sampling)
        if sample is None:
            return super().prepare_encode(state, **kwargs)  # type: ignore[misc]
        self._begin([sample])
        try:
            state = super().prepare_encode(state, **kwargs)  # type: ignore[misc]
        finally:
            self._end()
        state.latents = sample.native.to(state.latents.dtype)
        state.extra[ROLLOUT] = sample
        return state

    def denoise_step(self, input_batch: Any, *, states: Any = None, **kwargs: Any) -> Any:
        """One network call for the requests that share it."""
        self._exact = states is not None and all(ROLLOUT in state.extra for state in states)
        try:
            return super().denoise_step(input_batch, states=states, **kwargs)  # type: ignore[misc]
        finally:
            self._exact = False

    def post_decode(self, state: Any, **kwargs: Any) -> Any:
        """The last part of such a request."""
        sample = state.extra.pop(ROLLOUT, None)
        if sample is None:
            return super().post_decode(state, **kwargs)  # type: ignore[misc]
        rounded, state.latents = state.latents, sample.native.to(self.vae.dtype)  # type: ignore[attr-defined]
        output = super().post_decode(state, **kwargs)  # type: ignore[misc]
        state.latents = rounded  # all states of a step are put together once more, in one precision
        return self._finished(output, sample)

    # Where the native pipeline computes in the network's precision and the trainer in float32

    def predict_noise(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the network, with the trainer's own timestep."""
        if self._rollout is not None and self.family.exact_timesteps:
            kwargs["timestep"] = self._rollout.timestep.expand(len(kwargs["timestep"]))
        return super().predict_noise(*args, **kwargs)  # type: ignore[misc]

    def predict_noise_maybe_with_cfg(self, *args: Any, **kwargs: Any) -> Any:
        """The velocity of all rows."""
        velocity = super().predict_noise_maybe_with_cfg(*args, **kwargs)  # type: ignore[misc]
        self.largest_batch = max(self.largest_batch, len(velocity))
        return velocity

    def combine_cfg_noise(self, positive_noise_pred: Any, negative_noise_pred: Any, *args: Any, **kwargs: Any) -> Any:
        """Guidance in float32."""
        parts = (positive_noise_pred, negative_noise_pred)
        if self._exact:
            parts = tuple(_float32(part) for part in parts)
        return super().combine_cfg_noise(*parts, *args, **kwargs)  # type: ignore[misc]

    def _finished(self, output: Any, sample: Sample) -> Any:
        """The output with the rollout in the place of the pixels, which its media are made of here."""
        pixels = output.output if output.media is None else output.media.video.tensor
        media = _media(pixels) if sample.request.params.decode else {}
        tensors = {name: tensor.cpu() for name, tensor in {**sample.tensors(), **media}.items()}
        output.trajectory_latents = {"weight_version": sample.weight_version, **tensors}
        # What is left to be post-processed as an ordinary picture or video, as small as there is one.
        output.media, output.output = None, torch.zeros(1, 3, *([1] if self.family.frame_rate else []), 8, 8)
        return output


def _float32(part: Any) -> Any:
    return tuple(_float32(one) for one in part) if isinstance(part, tuple) else part.float()


def _media(pixels: Tensor) -> dict[str, Tensor]:
    """8-bit pixels (H, W, 3) or (F, H, W, 3) of decoded ones (1, 3, ...) in [-1, 1]; nothing if one is not finite."""
    if not bool(pixels.isfinite().all()):
        return {}
    levels = (pixels[0].float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    return {"media": levels.movedim(0, -1).contiguous()}


def __getattr__(name: str) -> Any:
    if name not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family = FAMILIES[name]
    module, _, native = family.native.rpartition(".")
    made = type(name, (RolloutPipeline, getattr(import_module(module), native)), {"family": family})
    made.__module__ = __name__
    globals()[name] = made
    return made

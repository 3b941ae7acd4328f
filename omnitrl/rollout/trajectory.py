# SPDX-License-Identifier: Apache-2.0
"""What is asked of an engine, and what it gives back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from omnitrl.algorithms import SigmaTable
from omnitrl.models import CHECKPOINT_SIZE, MediaSize


@dataclass(frozen=True)
class SampleRequest:
    """
    One sample to be made.

    Args:
        row (`dict`):
            The dataset row; `prompt` and, where there is one, `negative_prompt` are read.
        group_id (`int`):
            Which group the sample belongs to; unique within a rollout.
        member (`int`):
            Its number within the group.
        seed (`int`):
            Seed of the sample's noise, unique within a rollout.
        start_seed (`int`, *optional*):
            Seed of the start latents when the group shares them.
    """

    row: dict[str, Any]
    group_id: int
    member: int
    seed: int
    start_seed: int | None = None


@dataclass(frozen=True)
class SamplingParams:
    """
    How samples are made; the same for all samples of a rollout.

    Args:
        num_inference_steps (`int`):
            Network evaluations T.
        guidance_scale (`float`):
            Classifier-free guidance, 1 or less for none.
        size ([`~omnitrl.models.MediaSize`]):
            Of the media; open parts are the checkpoint's own.
        ode_solver (`str`):
            Solver of the deterministic steps, a key of `omnitrl.algorithms.ODE_SOLVERS`.
        sde_type (`str`):
            Transition of the stochastic steps, a key of `omnitrl.algorithms.SDE_TYPES`.
        noise_level (`float`):
            The paper's `a` or `eta`.
        sde_steps (`tuple[int, ...]`):
            Stochastic steps; all others are ODE steps. Empty for evaluation.
        keep_steps (`tuple[int, ...]`):
            Stochastic steps whose latents and log-probs are kept for training.
        keep_means (`bool`):
            Whether the mean of each kept step is recorded too.
        keep_clean (`bool`):
            Whether the final latents are recorded.
        log_prob_form, log_prob_reduction (`str`):
            A key of `omnitrl.algorithms.LOG_PROB_FORMS`, and one of `LOG_PROB_REDUCTIONS`.
        modality_weights (`dict[str, float]`, *optional*):
            Weight of each modality's log-prob where latents have several; those of weight 0 take ODE steps.
        shared_prefix (`bool`):
            Compute the deterministic steps before the first stochastic one once for the samples of a group, which then
            branches. They must share their start noise.
        tail_ratio (`float`):
            Share of the steps after the last stochastic one that is kept, see `omnitrl.algorithms.thin_tail`.
        decode (`bool`):
            Whether media are made; otherwise they are `None`.
    """

    num_inference_steps: int
    guidance_scale: float = 1.0
    size: MediaSize = CHECKPOINT_SIZE
    ode_solver: str = "euler"
    sde_type: str = "flow_sde"
    noise_level: float = 0.7
    sde_steps: tuple[int, ...] = ()
    keep_steps: tuple[int, ...] = ()
    keep_means: bool = False
    keep_clean: bool = False
    log_prob_form: str = "gaussian"
    log_prob_reduction: str = "mean"
    modality_weights: dict[str, float] | None = None
    shared_prefix: bool = False
    tail_ratio: float = 1.0
    decode: bool = True

    def __post_init__(self) -> None:
        extra = sorted(set(self.keep_steps) - set(self.sde_steps))
        if extra:
            raise ValueError(f"keep_steps {extra} are no stochastic steps: sde_steps are {list(self.sde_steps)}.")


@dataclass
class Trajectory:
    """
    One sample and what its replay needs: exactly the tensors that were scored, in float32.

    Args:
        request ([`SampleRequest`]):
            What was asked for.
        media (`Any`):
            The decoded sample, a PIL image for image families.
        table ([`~omnitrl.algorithms.SigmaTable`]):
            The grid that was used, (T+1,) sigmas.
        steps (`tuple[int, ...]`):
            The K kept step indices, ascending.
        latents (`Tensor`):
            (K, ...) the state before each kept step.
        next_latents (`Tensor`):
            (K, ...) the state after it, the sample that `log_probs` score. For consecutive steps
            it shares memory with `latents`.
        log_probs (`Tensor`):
            (K,) under the policy that made the sample.
        weight_version (`int`):
            Optimizer steps that the policy had seen.
        means (`Tensor`, *optional*):
            (K, ...) mean of each kept step under the policy that made the sample.
        clean_latents (`Tensor`, *optional*):
            (...) the final latents.
    """

    request: SampleRequest
    media: Any
    table: SigmaTable
    steps: tuple[int, ...]
    latents: Tensor
    next_latents: Tensor
    log_probs: Tensor
    weight_version: int
    means: Tensor | None = None
    clean_latents: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What was recorded, by the names of the arguments."""
        recorded = {
            "latents": self.latents,
            "next_latents": self.next_latents,
            "log_probs": self.log_probs,
            "means": self.means,
            "clean_latents": self.clean_latents,
        }
        return {name: tensor for name, tensor in recorded.items() if tensor is not None}


@dataclass
class WeightReport:
    """How many modules took the new weights, of how many that should have."""

    version: int
    bound: int
    expected: int
    missing: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises if any module kept old weights."""
        if self.bound < self.expected:
            raise RuntimeError(
                f"The engine took {self.bound} of {self.expected} modules of weight version {self.version}; "
                f"missing are {self.missing[:5]}. Its rollouts would come from other weights than the trainer's."
            )


@runtime_checkable
class RolloutEngine(Protocol):
    """Where rollouts are made: in this process or on a server."""

    forwards: int
    """Network evaluations so far, in samples; a guided evaluation counts two."""

    def generate(self, requests: Sequence[SampleRequest], params: SamplingParams) -> Iterator[list[Trajectory]]:
        """Makes the samples, in order, yielding each batch as soon as it is decoded."""
        ...

    def update_weights(self, version: int) -> WeightReport:
        """Gives the engine the trainer's current weights."""
        ...

    def sleep(self) -> None:
        """Frees what the engine holds on the device until `wake`."""
        ...

    def wake(self) -> None:
        """Undoes `sleep`; the weights are those of the last `update_weights`."""
        ...

    def health(self) -> None:
        """Raises with a reason if the engine cannot generate."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What the engine has counted since the last call, by the name of the metric."""
        ...

    def close(self) -> None:
        """Ends the engine."""
        ...

# SPDX-License-Identifier: Apache-2.0
"""The options of trainers that replay the transitions of their rollouts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from math import lcm
from typing import ClassVar

import torch

from omnitrl.algorithms import (
    DEFAULT_NOISE_LEVEL,
    IMPORTANCE_MODES,
    KL_FORMS,
    LOG_PROB_FORMS,
    LOG_PROB_REDUCTIONS,
    SDE_TYPES,
    WINDOW_STRATEGIES,
    check_importance,
    sde_window,
    trained_steps,
    transition_table,
)
from omnitrl.errors import InputError
from omnitrl.trainer.base_config import check_choice, check_positive
from omnitrl.trainer.rollout_config import RolloutConfig


@dataclass
class ReplayConfig(RolloutConfig):
    """
    Options of trainers whose rollouts have stochastic steps, which are run through the network again in training.

    See [`RolloutConfig`] for the rest. Without `guidance_scale_train`, the replay is guided as the rollout was. With
    another value that policy is trained, guided or (at 1) unguided, on the samples; its old log-probs are computed
    before the first update, which costs one more network call for each trained step.
    """

    _VALID_DICT_FIELDS = [*RolloutConfig._VALID_DICT_FIELDS, "modality_weights"]

    _at_least: ClassVar[dict[str, float]] = {
        **RolloutConfig._at_least,
        "timesteps_per_forward": 1,
        "sde_window_interval": 1,
        "sde_window_min_interval": 1,
        "sde_window_stride": 1,
        "sde_window_decay_rate": 0,
        "sde_window_decay_start": 0,
    }

    # Which steps are stochastic, and which are trained
    sde_type: str = field(
        default="flow_sde", metadata={"help": "Transition of stochastic steps: 'flow_sde', 'dance_sde' or 'cps'."}
    )
    noise_level: float | None = field(
        default=None,
        metadata={"help": "The papers' `a` (flow_sde) or `eta`; 0.7, or what the recipes of the family have."},
    )
    log_prob_form: str = field(
        default="gaussian",
        metadata={"help": "'gaussian', or 'squared_error': without variance and normaliser, as CPS code bases use."},
    )
    log_prob_reduction: str = field(
        default="mean",
        metadata={
            "help": "'mean' over the latent elements, as all public code bases have it, or 'sum', the log-density; "
            "clip ranges do not carry over."
        },
    )
    modality_weights: dict | str | None = field(
        default=None,
        metadata={
            "help": "Weight of each modality's log-prob for models of several, such as "
            '\'{"video": 1, "audio": 0.5}\'; one of weight 0 takes ODE steps. By default one mean over all elements.'
        },
    )
    sde_window_strategy: str = field(
        default="all",
        metadata={
            "help": "How stochastic steps are chosen: 'all', 'first', 'random', 'scattered', 'progressive', 'decay', "
            "'exp_decay'."
        },
    )
    sde_window_size: int | None = field(default=None, metadata={"help": "Stochastic steps in a window."})
    sde_window_range: list[int] | None = field(
        default=None, metadata={"help": "Start (in) and end (out) of the steps that a window may cover."}
    )
    sde_window_interval: int = field(default=1, metadata={"help": "Rollouts that a window stays for (its longest)."})
    sde_window_stride: int = field(
        default=1, metadata={"help": "Steps that a 'progressive' or decaying window moves on by."}
    )
    sde_window_min_interval: int = field(
        default=1, metadata={"help": "Rollouts that a 'decay' window stays for at the end of its range."}
    )
    sde_window_decay_rate: float = field(
        default=0.1, metadata={"help": "Rate at which the stay of an 'exp_decay' window falls with its start."}
    )
    sde_window_decay_start: int = field(
        default=13, metadata={"help": "Start of an 'exp_decay' window from which on its stay falls."}
    )
    timestep_fraction: float = field(default=1.0, metadata={"help": "Share of the stochastic steps that is trained."})
    timesteps_per_forward: int = field(
        default=1, metadata={"help": "Trained steps of a micro-batch in one network call; more is faster, and larger."}
    )

    # Work that rollouts save
    shared_prefix: bool = field(
        default=False,
        metadata={
            "help": "Compute the deterministic steps before the first stochastic one once for a group, which then "
            "branches; needs `same_init_noise`."
        },
    )
    tail_ratio: float = field(
        default=1.0,
        metadata={
            "help": "Share of the steps after the last stochastic one that rollouts keep; 0.4 in MixGRPO-Flash."
        },
    )

    def _resolve_batches(self) -> None:
        super()._resolve_batches()
        if self.shared_prefix and self.prompts_per_rollout % self.world_size:
            whole = lcm(self.world_size, self._smallest_groups(self.per_device_train_batch_size * self.world_size))
            fits = -(-self.prompts_per_rollout // whole) * whole * self.num_generations
            raise InputError(
                f"shared_prefix=True needs whole groups on each of {self.world_size} devices, which then make as many "
                f"network calls, but generation_batch_size={self.generation_batch_size} makes "
                f"{self.prompts_per_rollout} group(s): use generation_batch_size={fits}."
            )

    # Derived

    @property
    def weights_of_modalities(self) -> dict[str, float] | None:
        """`modality_weights` as a dictionary."""
        return self.modality_weights or None  # type: ignore[return-value]  # a str is parsed by `__post_init__`

    def window(self, rollout: int) -> tuple[int, ...]:
        """The stochastic steps of a rollout, a function of the seed and its number only."""
        bounds = None if self.sde_window_range is None else (self.sde_window_range[0], self.sde_window_range[1])
        return sde_window(
            self.sde_window_strategy,
            self.num_inference_steps,
            self.sde_window_size,
            bounds,
            self.seed,
            rollout,
            interval=self.sde_window_interval,
            stride=self.sde_window_stride,
            min_interval=self.sde_window_min_interval,
            decay_rate=self.sde_window_decay_rate,
            decay_start=self.sde_window_decay_start,
        )

    @property
    def possible_steps(self) -> tuple[int, ...]:
        """The steps that the windows of all rollouts lie in."""
        if self.sde_window_strategy in ("all", "first"):
            return self.window(0)
        bounds = self.sde_window_range or (0, self.num_inference_steps - 1)
        return tuple(range(bounds[0], bounds[1]))

    def trained_steps(self, rollout: int) -> tuple[int, ...]:
        """Those of the rollout's stochastic steps that are trained."""
        return trained_steps(self.window(rollout), self.timestep_fraction, self.seed, rollout)

    # Checks

    def _check_choices(self) -> None:
        super()._check_choices()
        check_choice("sde_type", self.sde_type, [name for name in SDE_TYPES if name != "ode"])
        check_choice("log_prob_form", self.log_prob_form, LOG_PROB_FORMS)
        check_choice("log_prob_reduction", self.log_prob_reduction, LOG_PROB_REDUCTIONS)
        check_choice("sde_window_strategy", self.sde_window_strategy, WINDOW_STRATEGIES)
        if isinstance(self.modality_weights, str):  # one that was a JSON object is a dictionary by now
            raise InputError(
                f"modality_weights={self.modality_weights!r} is no JSON object with a weight for each modality: use "
                '\'{"video": 1, "audio": 0.5}\'.'
            )

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if self.sde_window_range is not None and len(self.sde_window_range) != 2:
            raise InputError(f"sde_window_range={self.sde_window_range} must be a start and an end: use 0 5.")
        for name in ("timestep_fraction", "tail_ratio"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise InputError(f"{name}={value} must be in (0, 1]: use 1.0 for all.")
        if self.noise_level is not None and not self.noise_level > 0:
            raise InputError(
                f"noise_level={self.noise_level} makes rollouts deterministic, so there is no log-prob to train: "
                "use a value above 0, such as 0.7."
            )
        if self.shared_prefix and not self.same_init_noise:
            raise InputError(
                "shared_prefix=True needs members that start from one noise: set same_init_noise=True too."
            )
        try:
            levels = torch.linspace(1, 0, self.num_inference_steps + 1)
            transition_table(levels, self.sde_type, self.noise_level or DEFAULT_NOISE_LEVEL, self.window(0))
            self.trained_steps(0)
        except ValueError as error:
            raise InputError(str(error)) from None
        steps = self.num_inference_steps
        if self.sde_window_range is not None and self.sde_window_range[1] > steps:
            raise InputError(
                f"sde_window_range={self.sde_window_range} goes beyond the {steps} sampler steps: use "
                f"[{self.sde_window_range[0]}, {steps - 1}], as the last step is an ODE step."
            )


def check_density(args: ReplayConfig, option: str, form: str) -> None:
    """
    Raises if a divergence of Gaussians is asked for where the transition is none.

    The last step of CPS has a std of 0: it ends at noise level 0, to which its std is in proportion.

    Args:
        args ([`ReplayConfig`]):
            The options.
        option, form (`str`):
            Name of an option, and its value: a key of `omnitrl.algorithms.KL_FORMS`.
    """
    asked = args.sde_window_range
    needs_std = "std" in inspect.signature(KL_FORMS[form]).parameters
    if args.sde_type == "cps" and needs_std and asked is not None and asked[1] >= args.num_inference_steps:
        raise InputError(
            f"{option}={form!r} needs the density of each step that sde_window_range={asked} names, which the last "
            f"step of sde_type='cps' does not have at noise level 0: use [{asked[0]}, {asked[1] - 1}], or "
            f"{option}='velocity'."
        )


@dataclass
class PolicyGradientConfig(ReplayConfig):
    """Options of trainers that weight the log-probs of their transitions by advantages; see [`ReplayConfig`]."""

    beta: float = field(default=0.0, metadata={"help": "Weight of the KL to the reference policy; 0 for none."})
    kl_form: str = field(
        default="flow_grpo",
        metadata={
            "help": "Form of the KL: 'flow_grpo' (the authors', without the step size), 'exact' (of the two "
            "Gaussians, per latent element) or 'velocity' (squared velocity difference). Weights do not carry over."
        },
    )

    # Samples that an engine of its own has drawn
    old_log_probs: str = field(
        default="auto",
        metadata={
            "help": "'recompute' the old log-probs with the trainer's networks, one more network call for each "
            "trained step, or take the 'engine''s; 'auto' recomputes what a server has sampled."
        },
    )
    logp_diff_bound: float = field(
        default=1e-3,
        metadata={
            "help": "Mean difference between the log-probs of the engine and the trainer's, from which on a warning "
            "says what may be wrong."
        },
    )
    vllm_importance_sampling_correction: bool = field(
        default=False,
        metadata={"help": "Weight the loss of a step by the ratio of the trainer's probability to the engine's."},
    )
    vllm_importance_sampling_mode: str = field(
        default="sequence_mask",
        metadata={
            "help": "Ratio of a 'step_' or of all steps of a sample ('sequence_'), '…truncate' to clamp and '…mask' "
            "to drop what is out of bounds."
        },
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=3.0, metadata={"help": "Upper bound of the importance ratio, None for none."}
    )
    vllm_importance_sampling_clip_min: float | None = field(
        default=None, metadata={"help": "Lower bound of the importance ratio, None for none."}
    )

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether old log-probs are the trainer's own, made after the rollout."""
        return self.old_log_probs == "recompute" or (self.old_log_probs == "auto" and self.rollout_engine != "local")

    def _check_choices(self) -> None:
        super()._check_choices()
        check_choice("kl_form", self.kl_form, KL_FORMS)
        check_choice("old_log_probs", self.old_log_probs, ("auto", "recompute", "engine"))
        check_choice("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, IMPORTANCE_MODES)

    def _check_ranges(self) -> None:
        super()._check_ranges()
        if self.beta < 0:
            raise InputError(f"beta={self.beta} must not be negative: use 0 for no KL.")
        if self.beta:
            check_density(self, "kl_form", self.kl_form)
        self._check_correction()

    def _check_correction(self) -> None:
        check_positive(self, "1e-3", "logp_diff_bound")
        try:
            check_importance(
                self.vllm_importance_sampling_mode,
                self.vllm_importance_sampling_clip_max,
                self.vllm_importance_sampling_clip_min,
            )
        except ValueError as error:
            raise InputError(f"vllm_importance_sampling_{error}") from None
        if self.vllm_importance_sampling_correction and not self.recomputes_log_probs:
            raise InputError(
                f"vllm_importance_sampling_correction=True compares the engine's log-probs with the trainer's, which "
                f"old_log_probs={self.old_log_probs!r} with rollout_engine={self.rollout_engine!r} does not compute: "
                "use old_log_probs='recompute'."
            )


@dataclass
class ClippedPolicyConfig(PolicyGradientConfig):
    """Options of trainers that clip the probability ratio; see [`PolicyGradientConfig`]."""

    epsilon: float = field(default=1e-4, metadata={"help": "Clip range of the ratio, on the mean log-prob."})
    epsilon_high: float | None = field(default=None, metadata={"help": "Upper clip range, `epsilon` by default."})

    def _check_ranges(self) -> None:
        super()._check_ranges()
        check_positive(self, "1e-4, or a large value for no clipping", "epsilon", "epsilon_high")

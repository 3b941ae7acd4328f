# SPDX-License-Identifier: Apache-2.0
"""The maths: sigmas, transitions, windows, advantages, losses. Pure functions on tensors that import torch only."""

from omnitrl.algorithms.advantages import (
    AGGREGATIONS,
    SCALES,
    combine_rewards,
    group_advantages,
    group_std_mean,
    normalize_then_sum_advantages,
    reward_advantages,
    sum_then_normalize_advantages,
    zero_std_fraction,
)
from omnitrl.algorithms.losses import (
    KL_FORMS,
    PolicyLoss,
    clipped_policy_loss,
    exact_kl,
    flow_grpo_kl,
    reference_kl,
    velocity_kl,
)
from omnitrl.algorithms.sigmas import SigmaTable, make_sigma_table, shifted_sigmas, time_shift
from omnitrl.algorithms.transitions import (
    LOG_PROB_FORMS,
    SDE_TYPES,
    TransitionTable,
    cps,
    dance_sde,
    flow_sde,
    gaussian_log_prob,
    ode,
    transition_mean,
    transition_std,
    transition_table,
)
from omnitrl.algorithms.windows import WINDOW_STRATEGIES, sde_window, trained_steps


__all__ = [
    "AGGREGATIONS",
    "KL_FORMS",
    "LOG_PROB_FORMS",
    "SCALES",
    "SDE_TYPES",
    "WINDOW_STRATEGIES",
    "PolicyLoss",
    "SigmaTable",
    "TransitionTable",
    "clipped_policy_loss",
    "combine_rewards",
    "cps",
    "dance_sde",
    "exact_kl",
    "flow_grpo_kl",
    "flow_sde",
    "gaussian_log_prob",
    "group_advantages",
    "group_std_mean",
    "make_sigma_table",
    "normalize_then_sum_advantages",
    "ode",
    "reference_kl",
    "reward_advantages",
    "sde_window",
    "shifted_sigmas",
    "sum_then_normalize_advantages",
    "time_shift",
    "trained_steps",
    "transition_mean",
    "transition_std",
    "transition_table",
    "velocity_kl",
    "zero_std_fraction",
]

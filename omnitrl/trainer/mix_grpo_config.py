# SPDX-License-Identifier: Apache-2.0
"""Options of MixGRPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnitrl.trainer.replay_config import ClippedPolicyConfig


@dataclass
class MixGRPOConfig(ClippedPolicyConfig):
    """
    Options of [`MixGRPOTrainer`]; see [`ReplayConfig`] for those of rollouts.

    Defaults are those of the paper (https://arxiv.org/abs/2507.21802) and its public code: 25 sampler steps, of which
    4 neighbours are stochastic and trained; the window moves on by one step every 25 rollouts. The 12 members of a
    group share their start noise, rewards are normalised one by one, and there is no KL.

    MixGRPO-Flash is `ode_solver="dpmpp_2m", tail_ratio=0.4` in addition; MixGRPO-Flash* keeps the window at the start
    of the range: `sde_window_strategy="first", ode_solver="dpmpp_2m", tail_ratio=0.2`.

    Example:

    ```python
    >>> args = MixGRPOConfig(output_dir="flux-mix", ode_solver="dpmpp_2m", tail_ratio=0.4)
    >>> args.window(0), args.window(25)
    ((0, 1, 2, 3), (1, 2, 3, 4))
    ```
    """

    num_inference_steps: int = field(default=25, metadata={"help": "Sampler steps T in rollouts."})
    same_init_noise: bool = field(default=True, metadata={"help": "One start noise for all members of a group."})
    num_generations: int = field(default=12, metadata={"help": "Samples per prompt, the group size G."})
    sde_window_strategy: str = field(
        default="progressive",
        metadata={
            "help": "How stochastic steps are chosen: 'progressive', 'first' (a frozen window), 'random', 'decay', "
            "'exp_decay', 'scattered' or 'all'."
        },
    )
    sde_window_size: int | None = field(default=4, metadata={"help": "Stochastic steps in a window."})
    sde_window_interval: int = field(default=25, metadata={"help": "Rollouts that a window stays for (its longest)."})
    multi_objective_aggregation: str = field(
        default="normalize_each",
        metadata={
            "help": "Several rewards: 'normalize_each' in its group and add them, 'normalize_then_sum' (GDPO: divided "
            "by the std of the batch too), or 'sum_then_normalize'."
        },
    )
    advantage_ddof: int = field(
        default=1, metadata={"help": "Std of rewards: 0 population (Flow-GRPO), 1 sample (MixGRPO, DanceGRPO, TRL)."}
    )
    advantage_eps: float = field(default=1e-8, metadata={"help": "Added to the std of rewards."})

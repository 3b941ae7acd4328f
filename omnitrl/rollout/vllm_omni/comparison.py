# SPDX-License-Identifier: Apache-2.0
"""The same sample from the trainer and from each server: whether both have the same weights and compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from omnitrl.errors import OmniTRLError, RunError
from omnitrl.rollout.context import EngineContext
from omnitrl.rollout.local import LocalEngine
from omnitrl.rollout.trajectory import SampleRequest, SamplingParams, Trajectory


logger = logging.getLogger(__name__)

EXACT, HALF = 1e-3, 0.1
"""Relative differences of final latents above which something is wrong, in float32 and in half precision."""
VISIBLE = {False: 1e-5, True: 1e-2}
"""Relative change of final latents that is no rounding, in float32 and in half precision."""

FromServers = Callable[[SampleRequest, SamplingParams], dict[str, Trajectory]]


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


class Comparison:
    """
    Compares one sample of the servers with the trainer's own, twice: with the first weights, and when a later update
    has visibly changed the trainer's; and once more when a server has been started since.

    A server that took an adapter and does not use it, or another checkpoint, is found out before anything is learnt
    from its samples. It costs one sample each time.

    Args:
        context ([`EngineContext`]):
            The trainer's side.
        tolerance (`float`, *optional*):
            Largest relative difference, above which the run ends; by default 1e-3 in float32, and in half precision a
            warning above 0.1.
        half (`bool`):
            Whether one of the sides computes in less than float32.
    """

    def __init__(self, context: EngineContext, tolerance: float | None, half: bool) -> None:
        self._context = context
        self._tolerance = tolerance
        self._half = half
        self._ours = LocalEngine(
            context.model, context.policy, batch_size=1, autocast=context.autocast, on_step=context.on_step
        )
        self._probe: tuple[SampleRequest, SamplingParams] | None = None
        self._before: tuple[Tensor, dict[str, Tensor]] | None = None  # final latents here and on each server
        self._updates = self._next = 0
        self._done = self._started = False

    def weights_changed(self, started: bool) -> None:
        """Notes an update of the weights, and whether a server has been started since the last one."""
        self._updates += 1
        self._started |= started

    @property
    def is_due(self) -> bool:
        """Whether the next rollout should begin with a comparison."""
        return self._started or (not self._done and self._updates > self._next)

    def run(self, request: SampleRequest, params: SamplingParams, of_each: FromServers) -> None:
        """The comparison that is due; the first one keeps `request` for the next ones."""
        if self._probe is None:
            self._probe = (request, replace(params, decode=False, keep_clean=True, shared_prefix=False))
        self._next = max(2 * self._next, self._updates)  # ever rarer, while the weights hardly change
        self._done = self._compare(of_each)[1] or self._done
        self._started = False

    def again(self, of_each: FromServers) -> dict[str, float]:
        """The comparison on demand."""
        if self._probe is None:
            raise RunError("There is nothing to compare yet: check_weights is for after the first rollout.")
        return self._compare(of_each)[0]

    def _compare(self, of_each: FromServers) -> tuple[dict[str, float], bool]:
        """Relative difference of each server, and whether a change of the weights has been seen there."""
        assert self._probe is not None
        request, params = self._probe
        [[ours]] = self._ours.generate([request], params)
        error: OmniTRLError | None = None
        found: dict[str, float] = {}
        seen = False
        try:
            found, seen = self._judge(_final(ours), {n: _final(s) for n, s in of_each(request, params).items()})
        except OmniTRLError as caught:
            error = caught
        outcomes = self._context.gather([(error, seen)])  # what one process finds, all of them must know
        for failed, _ in outcomes:
            if failed is not None:
                raise failed
        return found, all(seen for _, seen in outcomes)

    def _judge(self, ours: Tensor, theirs: dict[str, Tensor]) -> tuple[dict[str, float], bool]:
        found = {name: relative_difference(latents, ours) for name, latents in theirs.items()}
        for name, difference in found.items():
            self._check_difference(name, difference)
        seen = False
        if self._before is None:
            self._before = (ours, theirs)
        else:
            before, theirs_before = self._before
            change = relative_difference(ours, before)
            seen = change > VISIBLE[self._half]
            for name in theirs.keys() & theirs_before.keys():
                moved = relative_difference(theirs[name], theirs_before[name])
                if seen and moved < 0.1 * change:
                    raise RunError(
                        f"New weights changed the trainer's own sample by {change:.1e} of its norm, but that of "
                        f"{name} by {moved:.1e} only: it does not use the weights that it took. Start it again with "
                        "`omnitrl vllm-serve`, without --lora-path and other adapters of its own."
                    )
        return found, seen

    def _check_difference(self, name: str, difference: float) -> None:
        limit = self._tolerance or (HALF if self._half else EXACT)
        if difference <= limit:
            return
        sentence = (
            f"The same sample differs by {difference:.1e} of its norm between {name} and the trainer (at most "
            f"{limit:g} is expected, vllm_check_tolerance): serve the checkpoint that is trained"
        )
        if self._half and self._tolerance is None:
            logger.warning(
                "%s, in the same precision; as it is, samples come from another policy than the one that is trained.",
                sentence,
            )
        else:
            raise RunError(f"{sentence}, in the same precision.")


def _final(sample: Trajectory) -> Tensor:
    assert sample.clean_latents is not None  # it was asked for
    return sample.clean_latents.float().cpu()


__all__ = ["EXACT", "HALF", "Comparison", "relative_difference"]

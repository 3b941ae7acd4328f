# SPDX-License-Identifier: Apache-2.0
"""How often a reward is asked again, and what happens while it is away."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .contract import RewardError, RewardUnavailable


logger = logging.getLogger(__name__)

T = TypeVar("T")

# So many calls in a row that failed for good mean that it is the reward and not what it was called with.
TRIP_AFTER = 3

# Seconds between two questions to a reward that has been away for long.
LONGEST_WAIT = 30.0

# The first of them where retries do not wait.
_SHORTEST_WAIT = 0.1


class _Outage:
    """A stretch in which a reward is away: calls ask one at a time, with growing waits."""

    def __init__(self, wait: float, patience: float) -> None:
        self.turn = asyncio.Lock()
        self.over = asyncio.Event()
        self.began = time.monotonic()
        self._end = self.began + patience
        self._wait = wait
        self._not_before = 0.0

    @property
    def expired(self) -> bool:
        """Whether patience is at its end: a call that fails now is not repeated."""
        return time.monotonic() >= self._end

    def note(self, error: Exception) -> None:
        """Another failure; the service may have said when to come back."""
        if isinstance(error, RewardUnavailable) and error.retry_after is not None:
            self._not_before = time.monotonic() + error.retry_after

    async def pause(self) -> None:
        """Waits before the next question, until the reward is back or patience is at its end."""
        now = time.monotonic()
        wait = min(max(self._wait, self._not_before - now), self._end - now)
        self._wait = min(self._wait * 2, LONGEST_WAIT)
        if wait > 0:
            try:
                await asyncio.wait_for(self.over.wait(), wait)
            except TimeoutError:
                pass


class Breaker:
    """
    Repeats the calls of one reward, and holds them back while it is away.

    A call that fails is repeated `max_retries` times. A reward is taken to be away when it says so
    ([`RewardUnavailable`], or a `ConnectionError`) and there is patience (`max_wait`), or when the last `TRIP_AFTER`
    calls failed for good. Then all calls wait, and one after the other asks again, with growing waits, until one of
    them succeeds or patience is at its end. A call that none has answered by then has failed, but not before it was
    tried once.

    Args:
        name (`str`):
            The reward's, for the log.
        max_retries (`int`):
            Further attempts after a failure.
        retry_wait (`float`):
            Seconds before the first of them; doubled for each one after it.
        max_wait (`float`):
            Seconds of patience with a reward that is away, from when it was first missed.
    """

    def __init__(self, name: str, max_retries: int, retry_wait: float, max_wait: float) -> None:
        self._name = name
        self._max_retries = max_retries
        self._retry_wait = retry_wait
        self._max_wait = max_wait
        self._outage: _Outage | None = None
        self._failed_in_a_row = 0

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """
        What `attempt` returns, repeated as often as it takes.

        Raises:
            `Exception`: of the last attempt; a [`RewardError`] and an `ImportError` are not repeated.
        """
        failures = 0
        while True:
            outage = self._outage
            try:
                result = await (attempt() if outage is None else self._ask(outage, attempt))
            except (RewardError, ImportError):
                raise
            except Exception as error:
                failures += outage is None or outage.over.is_set()  # while it is away, it is asked and not tried
                if not await self._goes_on(error, failures):
                    raise
            else:
                self._came_back()
                return result

    async def _ask(self, outage: _Outage, attempt: Callable[[], Awaitable[T]]) -> T:
        """One attempt when it is this call's turn; at once when the reward is back."""
        async with outage.turn:
            if not outage.over.is_set():
                await outage.pause()
            if not outage.over.is_set():
                return await attempt()
        return await attempt()

    async def _goes_on(self, error: Exception, failures: int) -> bool:
        """Whether the call is repeated, after the wait that this takes."""
        if self._outage is not None:
            self._outage.note(error)
            return not self._outage.expired
        if self._max_wait > 0 and isinstance(error, RewardUnavailable | ConnectionError):
            self._begin_outage(error)
            return True
        if failures <= self._max_retries:
            wait = self._retry_wait * 2 ** (failures - 1)
            if isinstance(error, RewardUnavailable) and error.retry_after is not None:
                wait = max(wait, min(error.retry_after, LONGEST_WAIT))
            await asyncio.sleep(wait)
            return True
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= TRIP_AFTER:
            self._begin_outage(error)
        return self._outage is not None and not self._outage.expired

    def _begin_outage(self, error: Exception) -> None:
        self._outage = _Outage(self._retry_wait or _SHORTEST_WAIT, self._max_wait)
        self._outage.note(error)
        if self._max_wait > 0:
            what = f"{type(error).__name__}: {error}"
            logger.warning("reward %r is away, waiting for it for up to %g s (%s)", self._name, self._max_wait, what)

    def _came_back(self) -> None:
        self._failed_in_a_row = 0
        outage, self._outage = self._outage, None
        if outage is None:
            return
        outage.over.set()
        if self._max_wait > 0:
            logger.warning("reward %r is back after %.1f s", self._name, time.monotonic() - outage.began)

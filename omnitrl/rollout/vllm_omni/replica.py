# SPDX-License-Identifier: Apache-2.0
"""One server as the client sees it: whether it is there, which weights it has, and how it gets those that it lacks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from omnitrl.errors import InputError, RunError
from omnitrl.rollout.trajectory import WeightReport
from omnitrl.rollout.vllm_omni.collective import GroupBroken, WeightLink
from omnitrl.rollout.vllm_omni.transport import INFO, WEIGHTS, Away, Refused, TooSlow, Transport, checked_answer
from omnitrl.rollout.vllm_omni.wire import ServerInfo


logger = logging.getLogger(__name__)

INFO_TIMEOUT = 60.0
"""Seconds after which a server that does not even say who it is counts as dead; one that samples may be slow to."""
CONFIRM_INTERVAL = 5.0
"""Seconds between two looks at a server that is there."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two tries to reach one that is not."""


@dataclass(frozen=True)
class WeightUpdate:
    """
    Weights that every server is to have.

    Args:
        version (`int`):
            Their number on the wire.
        messages (`list[tuple[str, bytes]]`, *optional*):
            Path and body of the calls that bring them; `None` where another process brings them.
    """

    version: int
    messages: list[tuple[str, bytes]] | None = None


class Replica:
    """
    A server, and what is known of it.

    Args:
        transport ([`Transport`]):
            The way to it.
        check (`Callable[[ServerInfo, str], None]`):
            Raises [`~omnitrl.errors.InputError`] if a server that says this of itself, and has that name, is not the
            right one.
        patience (`float`):
            Seconds that a message with weights may take.
        device (`torch.device`, *optional*):
            From which whole networks go to it by a collective; otherwise they go as all else does.
    """

    def __init__(
        self,
        transport: Transport,
        check: Callable[[ServerInfo, str], None],
        patience: float,
        device: torch.device | None = None,
    ) -> None:
        self.transport = transport
        self.name = transport.name
        self.info: ServerInfo | None = None
        self.up = False
        self.reason = "it has not answered yet"
        self.wrong: InputError | None = None
        """Why it can never serve, if it is a wrong one."""
        self.awaited = True
        """Whether somebody waits for it, who is told what is wrong with it."""
        self.running = 0
        """Samples that it is making."""
        self.starts = 0
        """How often it came without the weights that it had, or for the first time: it had been started."""
        self._check = check
        self._patience = patience
        self._device = device
        self._link: WeightLink | None = None
        self._link_broke = False  # since it was there last
        self._version: int | None = None
        self._had: int | None = None  # the last version that it was known to have
        self._was_up = False
        self._lock = asyncio.Lock()
        self._left = asyncio.Event()  # set when it is found to be away

    async def call(self, path: str, body: bytes | None, timeout: float) -> bytes:
        """Body of a good answer; raises [`Away`], [`TooSlow`] or [`Refused`]."""
        return checked_answer(*await self.transport.call(path, body, timeout))

    # Whether it is there

    def drop(self, reason: str) -> None:
        """Takes it out of service until it is found to be well."""
        self.reason = reason
        self._version = None
        self._link, self._link_broke = None, False
        if self.up:
            self.up = False
            self._left.set()
            logger.warning("%s is left out: %s.", self.name, reason.rstrip("."))

    async def keep(self, wanted: Callable[[], WeightUpdate | None]) -> None:
        """Looks after it for ever: leaves it out when it goes away, and takes it back with the weights of now."""
        pause = FIRST_PAUSE
        while True:
            try:
                await self._look(wanted)
            except InputError as error:
                if not (self.awaited or self.up or self.wrong):
                    logger.warning("%s is not taken into service: %s", self.name, error)
                self.wrong = error
                self.drop(str(error))
            except (Away, TooSlow, Refused, RunError) as error:
                self.drop(str(error))
            except Exception as error:  # whatever it is, the server must not be forgotten for it
                self.drop(f"{type(error).__name__}: {error}")
            if not self.up:
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)
                continue
            pause = FIRST_PAUSE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONFIRM_INTERVAL):
                    await self._left.wait()

    async def _look(self, wanted: Callable[[], WeightUpdate | None]) -> None:
        async with self._lock:  # no weights on their way meanwhile
            info = await self.ask()
            self._version = info.weight_version
        self._check(info, self.name)
        self.wrong = None
        started = not self.up and info.weight_version != self._had
        update = wanted()
        # While it is in service, the process that brings the weights may have brought it the next ones.
        if update is not None and (update.messages is not None or not self.up):
            await self.give(wanted)
        if not self.up:
            self._left.clear()
            self.up = True
            self.starts += started
            if self._was_up:
                logger.warning("%s is back.", self.name)
            self._was_up = True

    async def ask(self) -> ServerInfo:
        """
        What it says of itself.

        Raises:
            [`~omnitrl.errors.InputError`]: it has no rollouts to give.
        """
        try:
            content = json.loads(await self.call(INFO, None, INFO_TIMEOUT))
            self.info = ServerInfo(**content)
        except Refused as error:
            if error.kind != "hooks":
                raise
            raise InputError(
                f"{self.name} is a server without omnitrl's routes for rollouts (GET {INFO} gave HTTP status "
                f"{error.status}): start it with `omnitrl vllm-serve MODEL`."
            ) from error
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{self.name} says of itself what this version of omnitrl does not understand ({error}): install the "
                "same version of omnitrl on both sides."
            ) from error
        return self.info

    # Its weights

    def has(self, version: int) -> None:
        """Notes that another process has brought it these weights."""
        self._version = self._had = version

    async def give(self, wanted: Callable[[], WeightUpdate | None]) -> WeightReport | None:
        """
        Brings it the weights of now, unless it has them; a report if it took some.

        Raises:
            [`~omnitrl.errors.RunError`]: some of the modules did not take them, or another process has to bring them.
        """
        async with self._lock:
            update = wanted()
            if update is None or self._version == update.version:
                return None
            if update.messages is None:
                raise RunError("it has not yet been given the weights of this step by the main process")
            report = WeightReport(**json.loads(await self._bring(update.messages)))
            if report.bound < report.expected:
                raise RunError(
                    f"{self.name} took {report.bound} of {report.expected} trained modules; it has no place for "
                    f"{', '.join(report.missing[:5])}: leave them out of target_modules, or use "
                    "rollout_engine='local'."
                )
            self._version = self._had = update.version
            return report

    async def _bring(self, messages: list[tuple[str, bytes]]) -> bytes:
        """The answer to the last of these calls; a group that breaks is not tried again until the server is back."""
        if self._device is not None and not self._link_broke and messages[0][0] == WEIGHTS:
            try:
                return await self._bring_by_group(messages, self._device)
            except GroupBroken as error:
                reason = str(error)
            except Refused as error:
                if error.kind != "internal":
                    raise
                reason = error.sentence
            self._link_broke = True
            logger.warning(
                "%s takes whole networks over HTTP from now on, for they did not get there by a collective "
                "(vllm_weight_transport): %s.",
                self.name,
                reason.rstrip("."),
            )
        answer = b""
        for path, body in messages:
            answer = await self.call(path, body, self._patience)
        return answer

    async def _bring_by_group(self, messages: list[tuple[str, bytes]], device: torch.device) -> bytes:
        async def call(path: str, body: bytes) -> bytes:
            return await self.call(path, body, self._patience)

        link, self._link = self._link, None  # a message that is broken off may still be on its way there
        if link is None:
            link = await WeightLink.open(self.name, await self.ask(), device, self._patience, call)
        answer = b""
        for path, body in messages:
            answer = await link.bring(path, body)
        self._link = link
        return answer

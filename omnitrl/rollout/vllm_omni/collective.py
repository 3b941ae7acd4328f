# SPDX-License-Identifier: Apache-2.0
"""
Weights by a collective: the main process of a trainer and the workers of one server are a process group of their own.

A message that would be the body of a call is broadcast, and the call says that it comes and how long it is. The group
is PyTorch's own and apart from all others, so neither side has to know what else the other one belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from omnitrl.devices import process_group
from omnitrl.messages import pack
from omnitrl.rollout.vllm_omni.transport import JOIN
from omnitrl.rollout.vllm_omni.wire import ServerInfo


GRACE = 5.0
"""Seconds that a server gets to say why a broadcast broke off."""


class GroupBroken(Exception):
    """The trainer and a server are not, or no longer, a process group."""


@dataclass(frozen=True)
class Invitation:
    """
    What a server is told of a group.

    Args:
        name (`str`):
            That no other group has.
        address (`str`), port (`int`):
            Of the trainer's store, where the members find each other.
        size (`int`):
            Members: the trainer and the server's workers.
        trainer_device (`str`):
            Kind of the trainer's device.
        timeout (`float`):
            Seconds to find each other, and of a broadcast.
    """

    name: str
    address: str
    port: int
    size: int
    trainer_device: str
    timeout: float


class Group:
    """
    One member's side of a group whose first member, the trainer, sends to all others.

    Args:
        invitation ([`Invitation`]):
            What the group is.
        rank (`int`):
            Number of this member, 0 for the trainer.
        device (`torch.device`):
            Of this member.
        other_device (`str`):
            Kind of the other side's device.
        store (`Store`):
            Where the members find each other.
    """

    def __init__(
        self, invitation: Invitation, rank: int, device: torch.device, other_device: str, store: TCPStore
    ) -> None:
        self.name = invitation.name
        self._timeout = timedelta(seconds=invitation.timeout)
        self._store = store
        self._group, self._device = process_group(
            device, other_device, PrefixStore(invitation.name, store), rank, invitation.size, self._timeout
        )

    @classmethod
    def join(cls, invitation: Invitation, rank: int, device: torch.device) -> Group:
        """A worker's side, once the trainer and all workers are there."""
        timeout = timedelta(seconds=invitation.timeout)
        store = TCPStore(invitation.address, invitation.port, is_master=False, timeout=timeout)
        return cls(invitation, rank, device, invitation.trainer_device, store)

    def send(self, message: bytes) -> None:
        """Gives a message to all others, which must be waiting for one of this length."""
        self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device))

    def receive(self, num_bytes: int) -> bytes:
        """The trainer's next message."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._broadcast(buffer)
        return buffer.cpu().numpy().tobytes()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._group.broadcast([buffer], options).wait(self._timeout)


class WeightLink:
    """
    The trainer's way to bring whole networks to one server by a group; see [`WeightLink.open`].

    Args:
        group ([`Group`]):
            With the server.
        call (`Callable`):
            Calls the server with path and body, and gives the body of its answer.
    """

    def __init__(self, group: Group, call: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        self._group, self._call = group, call

    @classmethod
    async def open(
        cls,
        url: str,
        info: ServerInfo,
        device: torch.device,
        timeout: float,
        call: Callable[[str, bytes], Awaitable[bytes]],
    ) -> WeightLink:
        """
        Makes a group with a server.

        Args:
            url (`str`):
                Of the server.
            info ([`~omnitrl.rollout.vllm_omni.wire.ServerInfo`]):
                What it says of itself.
            device (`torch.device`):
                Of this process.
            timeout (`float`):
                Seconds to find each other, and of a broadcast.
            call (`Callable`):
                Calls the server.

        Raises:
            [`GroupBroken`]: they do not find each other.
        """
        patience = timedelta(seconds=timeout)
        try:
            address = await in_thread(_own_address, url)
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=patience)
        except (OSError, RuntimeError) as error:
            raise GroupBroken(f"no store could be opened for it: {error}") from error
        size = 1 + info.workers
        invitation = Invitation(secrets.token_hex(8), address, store.port, size, device.type, timeout)
        joining = in_thread(Group, invitation, 0, device, info.device, store)
        body = json.dumps(asdict(invitation)).encode()
        await together(call(JOIN, body), joining)
        return cls(joining.result(), call)

    async def bring(self, path: str, message: bytes) -> bytes:
        """
        The answer to a call whose body is broadcast.

        Raises:
            [`GroupBroken`]: the broadcast broke off.
        """
        head = pack({"group": self._group.name, "num_bytes": len(message)}, {})
        return await together(self._call(path, head), in_thread(self._group.send, message))


def in_thread(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """Runs in a thread that does not keep the process from ending, for a collective may wait for long."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result, caught = None, None
        try:
            result = function(*args)
        except Exception as error:
            caught = error
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(settle, result, caught)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


async def together(call: Awaitable[bytes], work: asyncio.Future[Any]) -> bytes:
    """
    The answer to a call during which `work` goes on with the same server.

    Raises:
        [`GroupBroken`]: the work failed, and the server said nothing else of it.
    """
    calling = asyncio.ensure_future(call)
    try:
        await asyncio.wait({calling, work}, return_when=asyncio.FIRST_EXCEPTION)
        if not calling.done():  # what the server says of it is better
            await asyncio.wait({calling}, timeout=GRACE)
        if calling.done():
            answer = calling.result()
            if work.exception() is None:
                return answer
        error = work.exception()
        raise GroupBroken(str(error) or type(error).__name__)
    finally:
        calling.cancel()
        work.cancel()


def _own_address(url: str) -> str:
    """Under which address of this machine a server is reached, and so can reach back."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((str(parts.hostname), port), timeout=GRACE) as connection:
        return str(connection.getsockname()[0])

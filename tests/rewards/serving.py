# SPDX-License-Identifier: Apache-2.0
"""Reward servers for tests: in a thread, as a command, and one that answers as a script says; what is sent there."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn
from PIL import Image

from omnitrl.rewards import reward_app


ROOT = Path(__file__).parent.parent.parent


@contextlib.contextmanager
def serving(reward, **options):
    """The URL of a server in a thread of this process."""
    server = uvicorn.Server(uvicorn.Config(reward_app(reward, **options), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


class Command:
    """`omnitrl serve-reward` as a process of its own."""

    def __init__(self, spec, *options, folder=ROOT, port=0):
        self.command = [sys.executable, "-m", "omnitrl.cli.main", "serve-reward", spec, *options]
        self.folder, self.port, self.process = folder, port, None

    def start(self):
        """Starts it, on the port that it had before if there was one, and waits until it listens."""
        self.process = subprocess.Popen(
            [*self.command, "--port", str(self.port)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = self.process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)$", self.said.strip())
        assert address, self.process.communicate(timeout=10)[1]
        self.url, self.port = address[0], int(address[1])
        return self

    def kill(self):
        """Ends it at once, whatever it does."""
        self.process.kill()
        self.process.communicate(timeout=10)

    def stop(self):
        """Asks it to end; what it wrote to its log."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=20)[1]

    def __enter__(self):
        return self.start()

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.kill()


@contextlib.contextmanager
def scripted(*answers):
    """
    The URL of a server that sends bytes: each connection gets the next of `answers`, and then is closed.

    A number among them is a time to wait in seconds, `None` closes the connection at once. The last one is repeated.
    """
    left = list(answers)

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            script = left.pop(0) if len(left) > 1 else left[0]
            if script is None:
                return
            _read_request(connection)
            if isinstance(script, float):
                time.sleep(script)
            else:
                connection.sendall(script)
                connection.shutdown(socket.SHUT_WR)

    def work(listening):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=work, args=(listening,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.close()


def _read_request(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(2**16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    missing = (int(length[1]) if length else 0) - len(body)
    while missing > 0:
        missing -= len(connection.recv(2**16))


def response(status, body, *headers, length=None):
    """Bytes of an HTTP response; `length` may lie."""
    body = body.encode() if isinstance(body, str) else body
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pictures(count):
    return [Image.fromarray(noise(6 + i, 9, 3, seed=i)) for i in range(count)]


def mean(completions, **kwargs):
    return [float(np.asarray(medium, dtype=np.float64).mean()) for medium in completions]


def ask(remote, **arguments):
    """One call without a runner; a new event loop each time."""

    async def call():
        try:
            return await remote(**arguments)
        finally:
            await remote.aclose()

    return asyncio.run(call())

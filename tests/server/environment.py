# SPDX-License-Identifier: Apache-2.0
"""The environment of vLLM-Omni servers, which is another one than that of the tests, and servers started in it."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest


ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 300
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # with more, threads that spin starve the other processes of a small machine
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_SERVER_DEV_MODE": "1",  # for calls of the workers
}


def server_python():
    """
    The Python of the servers' environment, `None` if there is none.

    `make test-server` builds it in `.venv-server`; the variable `OMNITRL_SERVER_PYTHON` names another one.
    """
    named = os.environ.get("OMNITRL_SERVER_PYTHON")
    path = Path(named or ROOT / ".venv-server" / "bin" / "python")
    assert path.exists() or not named, f"OMNITRL_SERVER_PYTHON={named} is not there"
    return path if path.exists() else None


needs_server = pytest.mark.skipif(server_python() is None, reason="`make test-server` builds the servers' environment")


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """
    A server process, started by a command that is given a port.

    Args:
        command (`list[str]`): What is run in the servers' environment: arguments of its Python; `{port}` is replaced.
        log (`Path`): Where its output goes.
        variables (`dict`): Further environment variables.
        start_seconds (`float`): How long it may take until it is healthy.
    """

    def __init__(self, command, log, variables=None, start_seconds=START_SECONDS):
        python = server_python()
        assert python is not None, "there is no environment for servers: `make test-server` builds it"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log)
        self.process = None
        self.start_seconds = start_seconds
        self._command = [str(python), *(part.replace("{port}", str(self.port)) for part in command)]
        self._variables = {**os.environ, **ENVIRONMENT, **(variables or {})}

    def start(self):
        """Starts it, and waits until it is healthy."""
        assert self.process is None
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                self._command,
                env=self._variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                start_new_session=True,
            )
        deadline = time.monotonic() + self.start_seconds
        while not self.is_healthy():
            running = self.process.poll() is None
            if not running or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"the server did not start{'' if running else ' and ended'}:\n{self.tail()}")
            time.sleep(0.2)
        return self

    def is_healthy(self):
        """Whether it answers on /health."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, how=signal.SIGKILL):
        """Ends it and all that it has started, at once."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, how)
            except ProcessLookupError:
                pass
            self.process.wait(timeout=30)
            self.process = None

    def kill_workers(self):
        """Ends the processes of its engine, where there are any, and not its own."""
        workers = [p for p in psutil.Process(self.process.pid).children() if "Worker" in " ".join(p.cmdline())]
        assert workers, "its engine is in its own process"
        for worker in workers:
            worker.kill()

    def pause(self):
        """Holds it until `resume`: an engine that has nothing to do asks for work some hundred times a second."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self):
        """Lets it go on."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGCONT)

    def restart(self):
        """Ends it and starts it again, on the same port."""
        self.stop()
        return self.start()

    def tail(self, lines=60):
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def show_logs(request, servers):
    """Shows the ends of the servers' logs if the test has failed."""
    report = getattr(request.node, "report_of_call", None)
    if report is not None and report.failed:
        for server in servers:
            report.sections.append((f"log of {server.url}", server.tail()))


def rollout_server(checkpoint, log, *flags, variables=None):
    """A server of rollouts with the model in the folder `checkpoint`, not yet started."""
    command = ["-m", "omnitrl.cli.main", "vllm-serve", str(checkpoint), "--port", "{port}", "--host", "127.0.0.1"]
    return Server([*command, "--dtype", "float32", "--enforce-eager", *flags], log, variables)

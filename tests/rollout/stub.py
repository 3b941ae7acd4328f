# SPDX-License-Identifier: Apache-2.0
"""Rollout servers for tests of the client: one that does what it is told, and one that makes real samples."""

import asyncio
import copy
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

from omnitrl.messages import unpack
from omnitrl.rollout import LocalEngine, SampleRequest
from omnitrl.rollout.vllm_omni.wire import PROTOCOL, ServerInfo, pack_sample, unpack_request
from omnitrl.version import __version__


INFO = ServerInfo(PROTOCOL, __version__, "0.30.0", "tiny", "StableDiffusion3Pipeline", "float32", "serial", 2)


def info(**changes):
    return {**vars(INFO), **changes}


def refusal(status, kind, sentence):
    return status, json.dumps({"kind": kind, "error": sentence}).encode()


class HangUp(Exception):
    """The server ends the connection without an answer."""


class Stub:
    """
    An HTTP server whose answers `answer(path, body)` gives, as status and body; it may raise [`HangUp`].

    `calls` has path and body of each call in order, `most` the most samples that were asked for at the same time.
    """

    def __init__(self, answer=None, port=0):
        self.calls, self.most, self._now = [], 0, 0
        self.answer = answer or self.plain
        self.version = -1
        self._lock = threading.Lock()
        self.start(port)

    def start(self, port=0):
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                stub.handle(self, None)

            def do_POST(self):
                stub.handle(self, self.rfile.read(int(self.headers["Content-Length"])))

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._connections = set()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def handle(self, handler, body):
        with self._lock:
            self._connections.add(handler.connection)
            self.calls.append((handler.path, body))
            self._now += handler.path.endswith("generate")
            self.most = max(self.most, self._now)
        try:
            status, answer = self.answer(handler.path, body)
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(answer)))
            handler.end_headers()
            handler.wfile.write(answer)
        except (HangUp, OSError):
            handler.close_connection = True
        finally:
            with self._lock:
                self._now -= handler.path.endswith("generate")

    def stop(self):
        """Ends as a process that is killed does: at once, and all connections with it."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            try:
                connection.shutdown(2)
            except OSError:
                continue

    def restart(self):
        """Comes back without the weights that it had."""
        self.version = -1
        self.start(self.port)

    def plain(self, path, body):
        """What a server that is well says; a sample is the message that asked for it."""
        if path.endswith("info"):
            return 200, json.dumps(info(weight_version=self.version)).encode()
        if path.endswith("adapter"):
            self.version = int(body)
            return 200, json.dumps({"version": self.version, "bound": 3, "expected": 3, "missing": []}).encode()
        return 200, body

    def asked(self):
        """Which samples it was asked for, in order."""
        return [int(body) for path, body in self.calls if path.endswith("generate")]


class LocalService:
    """
    Answers the calls of the wire with a copy of a model in this process: real samples and real weights.

    Args:
        model ([`FlowModel`]):
            Without adapters.
    """

    def __init__(self, model):
        self.model = copy.copy(model)
        self.model.networks = copy.deepcopy(model.networks)
        self.model._cache = type(model._cache)()
        self.version, self.asleep, self.calls = -1, False, []
        self.ignores_weights = False
        self._lock = threading.Lock()

    async def handle(self, path, body):
        name = path.rpartition("/")[2]
        self.calls.append(name)
        if name == "info":
            given = info(pipeline_class=type(self.model.pipeline).__name__, weight_version=self.version)
            return 200, json.dumps(given).encode()
        with self._lock, torch.no_grad():
            return getattr(self, f"_{name}")(body)

    def answer(self, path, body):
        """The same for a [`Stub`]."""
        return asyncio.run(self.handle(path, body))

    def lose_weights(self):
        """As a server that is started again, when no sample is being made."""
        with self._lock:
            self.version = -1

    def _generate(self, body):
        request = unpack_request(body)
        if request.weight_version != self.version:
            return refusal(409, "stale", f"There are the weights {self.version}.")
        assert not self.asleep
        assert request.latent_shape == tuple(self.model.latent_shape(request.params.size))
        self.model.guidance_scale_2 = request.guidance_scale_2
        asked = SampleRequest(request.row, 0, 0, request.seed, request.start_seed)
        [[made]] = LocalEngine(self.model, batch_size=1).generate([asked], request.params)
        return 200, pack_sample(made.tensors(), made.media, made.table, self.version)

    def _adapter(self, body):
        head, tensors = unpack(body, "rollout")
        bound = 0
        for name in {key.partition(".")[0] for key in tensors}:
            network = self.model.networks[name]
            if not hasattr(network, "peft_config"):
                kept = ("r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern")
                network = get_peft_model(network, LoraConfig(**{key: head["config"][key] for key in kept}))
                self.model.networks[name] = network.eval()
            mine = {
                f"base_model.model.{key.removeprefix(f'{name}.')}": tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            if not self.ignores_weights:
                assert not set_peft_model_state_dict(network, mine).unexpected_keys
            bound += len(mine) // 2
        return self._took(head["version"], bound, len(head["expected"]))

    def _weights(self, body):
        head, tensors = unpack(body, "rollout")
        for key, tensor in tensors.items():
            name, _, rest = key.partition(".")
            if hasattr(self.model.networks[name], "peft_config"):
                self.model.networks[name] = self.model.networks[name].unload().eval()
            self.model.networks[name].state_dict()[rest].copy_(tensor)
        count = len(tensors)
        return self._took(head["version"] if head["index"] + 1 == head["count"] else -2, count, count)

    def _took(self, version, bound, expected):
        self.version = version
        return 200, json.dumps({"version": version, "bound": bound, "expected": expected, "missing": []}).encode()

    def _sleep(self, body):
        self.asleep = True
        return 200, b"{}"

    def _wake(self, body):
        self.asleep = False
        return 200, b"{}"


def until(condition, timeout=10.0):
    """Waits for what another thread does."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)

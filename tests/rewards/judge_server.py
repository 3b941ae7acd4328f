# SPDX-License-Identifier: Apache-2.0
"""A server that answers as a script says, in the form of OpenAI's API, and counts what it is asked."""

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """One answer to a request: a message by default, an error of the API with `status`."""

    text: str | None = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    first_token: dict[str, float] | None = None
    finish_reason: str = "stop"
    seconds: float = 0.0
    cut_after: int | None = None
    """Bytes of the body after which the connection breaks."""
    body: bytes | None = None
    """Sent as it is, in the place of what the fields above make."""

    def encoded(self) -> bytes:
        if self.body is not None:
            return self.body
        if self.status != 200:
            return json.dumps({"error": {"message": self.text, "type": "error", "code": self.status}}).encode()
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": self.finish_reason,
        }
        if self.first_token is not None:
            top = [{"token": token, "logprob": value, "bytes": None} for token, value in self.first_token.items()]
            choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        known = {"id": "1", "object": "chat.completion", "created": 0, "model": "stub"}
        return json.dumps({**known, "choices": [choice], "usage": usage}).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # of 5, some that come at once are turned away for a second


class JudgeServer:
    """`script` is called with each chat request and its number, and returns a `Reply`."""

    def __init__(self, script, models=("stub",)):
        self.script = script
        self.models = models
        self.requests: list[dict] = []
        self.times: list[float] = []
        self.authorizations: list[str | None] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()

    def texts(self, request):
        """The texts of a request's last message."""
        return [part["text"] for part in request["messages"][-1]["content"] if part["type"] == "text"]

    def _answer(self, request, authorization):
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self.times.append(time.monotonic())
            self.authorizations.append(authorization)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            reply = self.script(request, number)
            time.sleep(reply.seconds)
            return reply
        finally:
            with self._lock:
                self._in_flight -= 1

    def _handler(server):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                models = server.models() if callable(server.models) else server.models
                self._send(Reply(body=json.dumps({"object": "list", "data": [_model(m) for m in models]}).encode()))

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self._send(server._answer(request, self.headers.get("authorization")))

            def _send(self, reply):
                body = reply.encoded()
                with contextlib.suppress(ConnectionError):  # of a client that gave up
                    self.send_response(reply.status)
                    for name, value in {"content-type": "application/json", **reply.headers}.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body[: reply.cut_after])
                    if reply.cut_after is not None:
                        self.wfile.flush()
                        self.connection.shutdown(socket.SHUT_RDWR)
                        self.close_connection = True

            def log_message(self, *args):
                pass

        return Handler


def _model(name):
    return {"id": name, "object": "model", "created": 0, "owned_by": "stub"}

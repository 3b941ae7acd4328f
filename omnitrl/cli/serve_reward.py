# SPDX-License-Identifier: Apache-2.0
"""`omnitrl serve-reward`: puts a reward behind HTTP, for trainers on other machines."""

import argparse
import logging
import os
import socket
import sys
from typing import Any

from omnitrl.errors import InputError


def main(argv: list[str]) -> int:
    """
    Serves a reward until it is stopped.

    Args:
        argv (`list[str]`):
            The arguments after `omnitrl serve-reward`.

    Returns:
        `int`: 0.
    """
    args = _parser().parse_args(argv)
    uvicorn = _uvicorn()
    _listen(args.host, args.port).close()  # a port that is taken is said before a model is loaded, which takes a while
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line for each call of a judge, say
    app, name = _app(args)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,  # longer than clients keep theirs, so that none is closed while it is taken up again
        timeout_graceful_shutdown=args.shutdown_timeout,
    )
    with _listen(args.host, args.port) as listening:
        host, port = listening.getsockname()[:2]
        print(f"serving {name!r} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnitrl serve-reward",
        description="Serve a reward over HTTP. A trainer uses it with reward_funcs='http://HOST:PORT'.",
        allow_abbrev=False,
    )
    parser.add_argument("reward", help="name of a built-in reward, or 'package.module:function'")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all (default: this host)"
    )
    parser.add_argument("--port", type=int, default=8100, help="port, 0 for a free one (default: 8100)")
    parser.add_argument("--name", help="name in the trainer's metrics (default: that of the function)")
    parser.add_argument("--device", help="where a reward that is a model goes, such as cuda:1")
    parser.add_argument("--batch_size", type=int, help="most rows of one call (default: what the reward says)")
    parser.add_argument(
        "--timeout", type=float, help="seconds that one call of the reward may take (default: no limit)"
    )
    parser.add_argument("--max_requests", type=int, default=64, help="requests held at once (default: 64)")
    parser.add_argument("--max_concurrency", type=int, default=8, help="calls at once of an async reward (default: 8)")
    parser.add_argument("--max_body_mb", type=float, default=1024, help="largest request in MB (default: 1024)")
    parser.add_argument("--shutdown_timeout", type=int, default=30, help="seconds to finish at the end (default: 30)")
    parser.add_argument("--token", help="what clients must know (default: $OMNITRL_REWARD_TOKEN, else none)")
    return parser


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise InputError(f'serve-reward needs the package {error.name}: pip install "omnitrl[serve]"') from error
    return uvicorn


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot listen at {host} port {port} ({error}): choose another with --port, or 0 for a free one."
        ) from error


def _app(args: argparse.Namespace) -> tuple[Any, str]:
    """The application, and the name of its reward."""
    from omnitrl.rewards import get_reward
    from omnitrl.rewards.contract import callable_name
    from omnitrl.rewards.remote.client import TOKEN_VARIABLE
    from omnitrl.rewards.remote.server import reward_app

    sys.path.insert(0, os.getcwd())  # as `python -m` does: the reward may be a file in this folder
    try:
        reward = get_reward(args.reward)
    except TypeError as error:  # a class, or no callable
        raise InputError(str(error)) from error
    name = args.name or callable_name(reward)
    token = args.token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and args.host not in ("127.0.0.1", "localhost", "::1"):
        logging.getLogger("omnitrl.rewards.remote").warning(
            "Everybody who reaches %s may ask for scores: set %s here and for the trainer to have it otherwise.",
            args.host,
            TOKEN_VARIABLE,
        )
    app = reward_app(
        reward,
        name,
        token,
        args.batch_size,
        args.timeout,
        args.max_requests,
        args.max_concurrency,
        int(args.max_body_mb * 10**6),
        args.device,
    )
    return app, name

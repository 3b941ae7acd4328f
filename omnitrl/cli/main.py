# SPDX-License-Identifier: Apache-2.0
"""`omnitrl COMMAND …`: finds the command and hands it the rest of the line.

A command is a module with a function `main(argv: list[str]) -> int | None`. It is imported only when it is called, so
that `omnitrl --help` is quick.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from omnitrl.cli.exits import one_line_errors
from omnitrl.errors import InputError, did_you_mean
from omnitrl.version import __version__


# name: (module, what it does)
COMMANDS = {
    "quickstart": ("omnitrl.cli.quickstart", "train a small model that ships with the package to spell, on a CPU"),
    "serve-reward": ("omnitrl.cli.serve_reward", "put a reward behind HTTP, for trainers on other machines"),
    "vllm-serve": ("omnitrl.cli.vllm_serve", "serve a model with vLLM-Omni, for trainers that want rollouts of it"),
    "env": ("omnitrl.cli.env", "print versions and devices, for bug reports"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs a command.

    Args:
        argv (`Sequence[str]`, *optional*, defaults to the arguments of the process):
            The command and its arguments.

    Returns:
        `int`: the exit code, 0 for success. Errors that the user can put right exit with 2 and one line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    with one_line_errors():
        if not argv:
            _parser().print_help()
            return 0
        if argv[0].startswith("-"):
            _parser().parse_args(argv)  # --help and --version exit in here, anything else is an error
            return 0
        if argv[0] not in COMMANDS:
            raise InputError(
                f"Unknown command {argv[0]!r}; there are {', '.join(COMMANDS)}.{did_you_mean(argv[0], COMMANDS)}"
            )
        module, _ = COMMANDS[argv[0]]
        return import_module(module).main(argv[1:]) or 0


def _parser() -> argparse.ArgumentParser:
    """The parser for what stands before a command, and the source of the help."""
    commands = "\n".join(f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="omnitrl",
        usage="omnitrl [--version] COMMAND …",
        description="RL post-training of diffusion models.",
        epilog=f"commands:\n{commands}\n\n`omnitrl COMMAND --help` tells the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"omnitrl {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())

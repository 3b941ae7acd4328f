# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of a few hundred thousand weights for every family, built in code with their tokenizers."""

from importlib import import_module
from pkgutil import iter_modules

from tests.tiny.checkpoint import Tiny


# Name of a checkpoint -> how it is built. Every module here that has a CHECKPOINTS adds to them, and tests of all
# families run over them.
CHECKPOINTS: dict[str, Tiny] = {}
for _module in sorted(module.name for module in iter_modules(__path__)):
    CHECKPOINTS |= vars(import_module(f"{__name__}.{_module}")).get("CHECKPOINTS", {})

__all__ = ["CHECKPOINTS", "Tiny"]

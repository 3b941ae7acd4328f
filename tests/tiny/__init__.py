# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of a few hundred thousand weights for every family, built in code with their tokenizers."""

from importlib import import_module
from pkgutil import iter_modules

from tests.tiny.checkpoint import Tiny


# Name of a checkpoint -> how it is built. Every module here that has a CHECKPOINTS adds to them, and tests of all
# families run over them.
CHECKPOINTS: dict[str, Tiny] = {}

# The first checkpoint of each module, for what takes long and is the same in its other ones.
FIRST: dict[str, Tiny] = {}
for _module in sorted(module.name for module in iter_modules(__path__)):
    _found = vars(import_module(f"{__name__}.{_module}")).get("CHECKPOINTS", {})
    CHECKPOINTS |= _found
    FIRST |= dict(list(_found.items())[:1])

__all__ = ["CHECKPOINTS", "FIRST", "Tiny"]

# SPDX-License-Identifier: Apache-2.0
"""
Lets the torchvision and torchaudio of PyPI, which are built for CUDA, be imported beside a PyTorch for the CPU.

A `.pth` file imports this module in every process, so it imports no PyTorch itself: it waits for the two packages.

- torchvision fails for two operators that its compiled part would have declared. They are declared here; its
  transforms, which are all that is needed, are Python.
- torchaudio raises where its compiled part cannot be loaded, instead of going on without as it does where there is
  none.
"""

import sys
from importlib.machinery import PathFinder


OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _has_no_gpu_build():
    import torch

    return torch.version.cuda is None and torch.version.hip is None


class _Finder:
    """Finds nothing itself; does what is needed before the two packages are found."""

    def __init__(self):
        self.declared = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.declared is None and _has_no_gpu_build():
            self._declare_operators()
        elif name == "torchaudio._extension.utils" and _has_no_gpu_build():
            return self._forgiving(PathFinder.find_spec(name, path))
        return None

    def _declare_operators(self):
        import torch

        self.declared = torch.library.Library("torchvision", "FRAGMENT")  # the operators live as long as this does
        for operator in OPERATORS:
            self.declared.define(operator + SIGNATURE)

    @staticmethod
    def _forgiving(spec):
        """The module, with a `_load_lib` that says False for what cannot be loaded."""
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            load = module._load_lib

            def load_or_not(name):
                try:
                    return load(name)
                except OSError:
                    return False

            module._load_lib = load_or_not

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())

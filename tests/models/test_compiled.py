# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks of every family; not with the oldest libraries too, since compiling is PyTorch's."""

import pytest
import torch

from tests.models.test_families import gradients, relative
from tests.tiny import FIRST


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", FIRST)
def test_compiled_gradients_are_equal(checkpoint):
    """Of graphs that are captured and differentiated as for any backend, and run by PyTorch's own kernels."""

    def compiled(policy, model):
        torch.compiler.reset()
        assert policy.compile_blocks("aot_eager") > 0

    tiny = FIRST[checkpoint]
    plain, traced = gradients(tiny, lambda *_: None), gradients(tiny, compiled)
    assert relative(plain, traced) <= 1e-5
    assert all("_orig_mod" not in name for name in traced)

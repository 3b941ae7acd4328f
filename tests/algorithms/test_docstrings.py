# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings are run as they stand."""

import doctest
import inspect

import pytest
import torch

from omnitrl import algorithms


WITH_EXAMPLES = [name for name in algorithms.__all__ if ">>>" in (inspect.getdoc(getattr(algorithms, name)) or "")]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_example(name):
    text = inspect.getdoc(getattr(algorithms, name)).replace("```python", "").replace("```", "")
    names = {"torch": torch, **{other: getattr(algorithms, other) for other in algorithms.__all__}}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    failures = []
    doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_public_functions_have_examples():
    assert len(WITH_EXAMPLES) >= 11

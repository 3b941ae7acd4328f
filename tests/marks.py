# SPDX-License-Identifier: Apache-2.0
"""Marks by which `make test-fast` takes some cases of a test and `make test` takes all."""

import pytest


def first_fast(cases, fast=1):
    """
    Cases for `parametrize` of which all but the first are slow: one shows that a thing works, the others where.

    Args:
        cases: Values, or tuples of values for several names.
        fast: How many stay.
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[] if i < fast else pytest.mark.slow) for i, case in enumerate(cases)]

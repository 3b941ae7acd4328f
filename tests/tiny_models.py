# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints of `tests/tiny`, by their pipeline."""

import functools

from omnitrl.models import family_of
from tests.tiny import CHECKPOINTS
from tests.tiny.parts import WIDTH
from tests.tiny.sd3 import tiny_sd3


SD3 = "StableDiffusion3Pipeline"


@functools.cache
def by_pipeline():
    """The first checkpoint of each pipeline class. Each is built once to see what it is."""
    found = {SD3: CHECKPOINTS["sd3"]}
    for tiny in CHECKPOINTS.values():
        found.setdefault(type(tiny.build()).__name__, tiny)
    return found


def tiny_of(pipeline_class=SD3):
    """The first checkpoint of a pipeline class."""
    return CHECKPOINTS["sd3"] if pipeline_class == SD3 else by_pipeline()[pipeline_class]


def tiny_model(pipeline_class=SD3, max_sequence_length=12, **options):
    """A [`FlowModel`] of a tiny pipeline."""
    pipeline = tiny_of(pipeline_class).build(**options)
    return family_of(pipeline_class)(pipeline, max_sequence_length=max_sequence_length)


__all__ = ["SD3", "WIDTH", "by_pipeline", "tiny_model", "tiny_of", "tiny_sd3"]

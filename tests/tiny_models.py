# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints of `tests/tiny`, by their pipeline."""

from omnitrl.models import family_of
from tests.tiny import CHECKPOINTS
from tests.tiny.parts import WIDTH
from tests.tiny.sd3 import tiny_sd3


def _by_pipeline():
    """The first checkpoint of each pipeline class."""
    found = {}
    for tiny in CHECKPOINTS.values():
        found.setdefault(type(tiny.build()).__name__, tiny)
    return found


BY_PIPELINE = _by_pipeline()
PIPELINES = {name: tiny.build for name, tiny in BY_PIPELINE.items()}


def tiny_model(pipeline_class="StableDiffusion3Pipeline", max_sequence_length=12, **options):
    """A [`FlowModel`] of a tiny pipeline."""
    return family_of(pipeline_class)(PIPELINES[pipeline_class](**options), max_sequence_length=max_sequence_length)


__all__ = ["BY_PIPELINE", "PIPELINES", "WIDTH", "tiny_model", "tiny_sd3"]

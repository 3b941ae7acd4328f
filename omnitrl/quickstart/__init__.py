# SPDX-License-Identifier: Apache-2.0
"""
The model and the words of the quickstart: a `StableDiffusion3Pipeline` of 5 MB that draws three-letter words, sharp
but often misspelt, which is what reinforcement learning then puts right.

The model has no third text encoder, and both of diffusers and omnitrl append `max_sequence_length` zeros in its place,
256 by default. `max_sequence_length=1` draws as well at an eighth of the cost.

Example:

```python
>>> from diffusers import StableDiffusion3Pipeline
>>> from omnitrl.quickstart import GLYPHS

>>> pipeline = StableDiffusion3Pipeline.from_pretrained(GLYPHS, text_encoder_3=None, tokenizer_3=None)
>>> options = {"height": 32, "width": 64, "num_inference_steps": 6, "guidance_scale": 1.0}
>>> output = pipeline("CAT", **options, max_sequence_length=1)
>>> output.images[0].size
(64, 32)
```
"""

from pathlib import Path

from . import words
from .pairs import preference_pairs
from .words import rows


GLYPHS = str(Path(__file__).parent / "glyphs")
"""Folder of the shipped model, written by `examples/scripts/pretrain_glyphs.py`."""

__all__ = ["GLYPHS", "preference_pairs", "rows", "words"]

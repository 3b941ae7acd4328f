# SPDX-License-Identifier: Apache-2.0
"""Clean latents of preference pairs: encoded once, and kept on the CPU as far as they fit."""

from __future__ import annotations

import logging
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from omnitrl.data import PreferenceRows
from omnitrl.data.preferences import SIDES
from omnitrl.data.rows import CHECKED_ROWS
from omnitrl.errors import InputError
from omnitrl.media import as_array, read_picture
from omnitrl.models import FlowModel, MediaSize


logger = logging.getLogger(__name__)

# As for prompts, so that memory does not grow with the dataset: 2048 pairs at 1024 × 1024 pixels and 16 channels.
LATENT_CACHE_BYTES = 4 * 2**30


class PairLatents:
    """
    The clean latents of the two pictures of a row.

    Pictures are encoded one at a time: in a batch the last bits would depend on the other pictures, and a run that is
    resumed, or has other ranks, on how they happened to be batched. Beyond `LATENT_CACHE_BYTES` those that were not
    used for longest are forgotten, and encoded again when they are needed.

    Args:
        model ([`FlowModel`]):
            Encodes pictures.
        size ([`~omnitrl.models.MediaSize`]):
            Size that pictures are brought to.
    """

    def __init__(self, model: FlowModel, size: MediaSize) -> None:
        self._model, self._size = model, size
        self.shape = model.latent_shape(size)
        self._cache: OrderedDict[tuple[PreferenceRows, int], Tensor] = OrderedDict()
        self._cache_bytes = 0

    def check(self, rows: PreferenceRows) -> None:
        """Raises for latents of another shape, and for arrays that are neither latents nor a picture."""
        for index in range(min(len(rows), CHECKED_ROWS)):
            row = rows[index]
            for side in SIDES:
                array = as_array(row[side])
                if array is not None and self._given(array, where := _where(rows, index, side)) is None:
                    read_picture(array, where)
        needed = len(rows) * 2 * 4 * int(np.prod(self.shape))
        if needed > LATENT_CACHE_BYTES:
            logger.warning(
                "The latents of %d pairs take %.1f GiB, of which %.1f are kept in memory: pictures are encoded again "
                "in each epoch. A dataset of latents, made once with `FlowModel.encode_images`, saves that.",
                len(rows),
                needed / 2**30,
                LATENT_CACHE_BYTES / 2**30,
            )

    def of(self, rows: PreferenceRows, index: int) -> Tensor:
        """Latents (2, ...) of a row on the CPU, float32, the chosen ones first."""
        key = (rows, index)
        if key not in self._cache:
            row = rows.checked(index)
            pair = torch.stack([self._encode(row[side], _where(rows, index, side)) for side in SIDES])
            self._cache[key] = pair
            self._cache_bytes += pair.nbytes
        self._cache.move_to_end(key)
        pair = self._cache[key]
        while self._cache_bytes > LATENT_CACHE_BYTES:
            self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes
        return pair

    def _encode(self, value: object, where: str) -> Tensor:
        array = as_array(value)
        latents = None if array is None else self._given(array, where)
        if latents is not None:
            return latents
        picture = read_picture(value, where)
        return self._model.encode_images([picture], self._size)[0].cpu()

    def _given(self, array: np.ndarray, where: str) -> Tensor | None:
        """Latents that the dataset holds; `None` for the pixels of a picture."""
        if array.shape == self.shape and np.issubdtype(array.dtype, np.floating):
            if not np.isfinite(array).all():
                raise InputError(f"{where} are latents with NaN or infinity: encode the picture anew.")
            return torch.from_numpy(array.copy())
        if array.ndim == 3 and array.shape[-1] == 3:
            return None
        raise InputError(
            f"{where} is of shape {array.shape}, but the model's latents are of shape {self.shape} at this size, and "
            "a picture is (height, width, 3): set height and width to the size that was encoded, or give pictures."
        )


def _where(rows: PreferenceRows, index: int, side: str) -> str:
    return f"{side!r} of row {rows.number(index)} of {rows.name}"

# SPDX-License-Identifier: Apache-2.0
"""What the trainers of omni-modality models share: chat rows with media, their processing, and the Thinker."""

from .decoding import VideoLimits, read_sound, read_video
from .pairs import OmniPair, PairCollator, PairInputs, PairProcessor, read_pair
from .processing import OmniProcessor, RowInputs, collate, pad_token_fields
from .rows import Decoded, OmniRow, place_media, read_row


__all__ = [
    "Decoded",
    "OmniPair",
    "OmniProcessor",
    "OmniRow",
    "PairCollator",
    "PairInputs",
    "PairProcessor",
    "RowInputs",
    "VideoLimits",
    "collate",
    "pad_token_fields",
    "place_media",
    "read_pair",
    "read_row",
    "read_sound",
    "read_video",
]

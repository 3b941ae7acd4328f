# SPDX-License-Identifier: Apache-2.0
"""Prompts and preference pairs: where they come from, and which of them an update takes."""

from omnitrl.data.feed import PromptFeed, StoredFeed, StreamFeed
from omnitrl.data.preferences import PreferenceRows, load_preferences
from omnitrl.data.prompts import load_prompts
from omnitrl.data.rows import CHECKED_ROWS, StoredRows, naming
from omnitrl.data.stream import BucketStream, PromptStream, shard
from omnitrl.data.streamed import StreamedPrompts


__all__ = [
    "CHECKED_ROWS",
    "BucketStream",
    "PreferenceRows",
    "PromptFeed",
    "PromptStream",
    "StoredFeed",
    "StoredRows",
    "StreamFeed",
    "StreamedPrompts",
    "load_preferences",
    "load_prompts",
    "naming",
    "shard",
]

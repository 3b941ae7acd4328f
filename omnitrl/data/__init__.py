# SPDX-License-Identifier: Apache-2.0
"""Prompts and preference pairs: where they come from, and which of them an update takes."""

from omnitrl.data.preferences import PreferenceRows, load_preferences
from omnitrl.data.prompts import load_prompts
from omnitrl.data.stream import PromptStream, shard


__all__ = ["PreferenceRows", "PromptStream", "load_preferences", "load_prompts", "shard"]

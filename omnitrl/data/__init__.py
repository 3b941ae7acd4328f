# SPDX-License-Identifier: Apache-2.0
"""Prompts: where they come from, and which of them a rollout takes."""

from omnitrl.data.prompts import load_prompts
from omnitrl.data.stream import PromptStream, shard


__all__ = ["PromptStream", "load_prompts", "shard"]

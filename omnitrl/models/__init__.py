# SPDX-License-Identifier: Apache-2.0
"""Model families: one file each, and the registry that picks one from a checkpoint."""

from omnitrl.models.audio import AudioModel
from omnitrl.models.base import FlowModel, stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.policy import Policy
from omnitrl.models.registry import FAMILIES, family_of, load_flow_model, register_family
from omnitrl.models.size import CHECKPOINT_SIZE, SIZE_COLUMNS, MediaSize
from omnitrl.models.video import VideoModel


__all__ = [
    "CHECKPOINT_SIZE",
    "FAMILIES",
    "SIZE_COLUMNS",
    "AudioModel",
    "Conditions",
    "FlowModel",
    "MediaSize",
    "Policy",
    "VideoModel",
    "family_of",
    "load_flow_model",
    "register_family",
    "stock_sigma_table",
]

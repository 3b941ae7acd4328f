# SPDX-License-Identifier: Apache-2.0
"""Model families: one file each, and the registry that picks one from a checkpoint."""

from omnitrl.models.base import FlowModel, Policy, stock_sigma_table
from omnitrl.models.conditions import Conditions
from omnitrl.models.registry import FAMILIES, family_of, load_flow_model


__all__ = ["FAMILIES", "Conditions", "FlowModel", "Policy", "family_of", "load_flow_model", "stock_sigma_table"]

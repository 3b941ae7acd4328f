# SPDX-License-Identifier: Apache-2.0
"""The page of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import os

from omnitrl.report.records import RunSummary


def write_report(path: str | os.PathLike[str], run: RunSummary) -> None:
    """Write `report.html`."""

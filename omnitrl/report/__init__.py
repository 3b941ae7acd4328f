# SPDX-License-Identifier: Apache-2.0
"""What a person looks at during and after a run: pictures, curves, the run page, the model card, the progress bar.

Nothing here knows a trainer, a model or a reward: it takes numbers and pictures and shows them. Names are imported
when they are first used, since Matplotlib, Rich and Transformers are slow to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


_WHERE = {
    "EvaluationRecord": "records",
    "RunSummary": "records",
    "Sample": "records",
    "package_versions": "records",
    "image_grid": "grid",
    "before_after": "grid",
    "timeline": "grid",
    "MetricsWriter": "metrics",
    "read_metrics": "metrics",
    "reward_curve": "curves",
    "small_multiples": "curves",
    "write_report": "page",
    "model_card": "card",
    "Progress": "progress",
    "ReportCallback": "callback",
}

__all__ = [
    "EvaluationRecord",
    "MetricsWriter",
    "Progress",
    "ReportCallback",
    "RunSummary",
    "Sample",
    "before_after",
    "image_grid",
    "model_card",
    "package_versions",
    "read_metrics",
    "reward_curve",
    "small_multiples",
    "timeline",
    "write_report",
]

if TYPE_CHECKING:
    from omnitrl.report.callback import ReportCallback
    from omnitrl.report.card import model_card
    from omnitrl.report.curves import reward_curve, small_multiples
    from omnitrl.report.grid import before_after, image_grid, timeline
    from omnitrl.report.metrics import MetricsWriter, read_metrics
    from omnitrl.report.page import write_report
    from omnitrl.report.progress import Progress
    from omnitrl.report.records import EvaluationRecord, RunSummary, Sample, package_versions


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__

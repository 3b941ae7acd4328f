# SPDX-License-Identifier: Apache-2.0
import gc
import os

import datasets  # noqa: F401
import diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3  # noqa: F401
import transformers.models.t5.modeling_t5  # noqa: F401

import omnitrl.trainer.flow_grpo_trainer  # noqa: F401


# Accelerate collects garbage when training begins, and most of that time goes by over the modules of large libraries,
# which stay anyway: 0.2 of the half second that a small run takes.
gc.collect()
gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Writes the table of the documentation when `make test-matrix` asks for it and every combination has passed."""
    if os.environ.get("WRITE_MATRIX") and not any(terminalreporter.stats.get(kind) for kind in ("failed", "error")):
        from tests.trainer.matrix import write_table

        properties = [dict(report.user_properties) for report in terminalreporter.stats["passed"]]
        measured = {tuple(found["case"]): found["figure"] for found in properties if "case" in found}
        write_table(measured)
        terminalreporter.write_line(f"wrote the table of {len(measured)} combinations")

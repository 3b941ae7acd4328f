# SPDX-License-Identifier: Apache-2.0
import gc

import datasets  # noqa: F401
import diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3  # noqa: F401
import transformers.models.t5.modeling_t5  # noqa: F401

import omnitrl.trainer.flow_grpo_trainer  # noqa: F401


# Accelerate collects garbage when training begins, and most of that time goes by over the modules of large libraries,
# which stay anyway: 0.2 of the half second that a small run takes.
gc.collect()
gc.freeze()

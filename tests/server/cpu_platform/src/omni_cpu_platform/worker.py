# SPDX-License-Identifier: Apache-2.0
"""The worker of diffusion stages, with a sleep and output packing that need no GPU."""

from contextlib import nullcontext

import torch
from vllm_omni.diffusion.worker import diffusion_worker
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker


class CPUDiffusionWorker(DiffusionWorker):
    _aside = None

    def __init__(self, *args, **kwargs):
        diffusion_worker.WorkerProc._async_output_loop = _pack_outputs
        super().__init__(*args, **kwargs)

    def _maybe_get_memory_pool_context(self, tag):
        return nullcontext()

    def sleep(self, level=1):
        """Takes the weights out of the parameters, which are empty until `wake_up`; level 2 forgets them."""
        parameters = dict(self.model_runner.pipeline.named_parameters())
        self._aside = {n: p.data if level == 1 else torch.zeros_like(p.data) for n, p in parameters.items()}
        for parameter in parameters.values():
            parameter.data = parameter.data.new_empty(0)
        return sum(tensor.nbytes for tensor in self._aside.values())

    def wake_up(self, tags=None):
        if self._aside is not None and (tags is None or "weights" in tags):
            for name, parameter in self.model_runner.pipeline.named_parameters():
                parameter.data = self._aside[name]
            self._aside = None
        return True


def _pack_outputs(self):
    """`WorkerProc._async_output_loop` without the side stream that it opens on the accelerator."""
    from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
    from vllm_omni.diffusion.ipc import pack_diffusion_output_shm

    while (item := self._async_output_queue.get()) is not None:
        output, number, _ = item
        try:
            pack_diffusion_output_shm(output)
            packed = {"output": output}
        except Exception as error:
            packed = {"error": f"Packing the output failed: {error!r}"}
        try:
            kind = AsyncOutputKind.OUTPUT_READY
            self._enqueue_result(AsyncDiffusionOutput(kind=kind, async_output_id=number, **packed))
        finally:
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()

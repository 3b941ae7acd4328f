# SPDX-License-Identifier: Apache-2.0
"""Workers of autoregressive stages: vLLM-Omni's runners on top of vLLM's for the CPU."""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from omni_cpu_platform.platform import keep_weights


class _OnCPU:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._postprocess_tensors()
        self.compilation_config.max_cudagraph_capture_size = self.compilation_config.max_cudagraph_capture_size or 0


class CPUARRunner(_OnCPU, GPUARModelRunner, CPUModelRunner):
    pass


class CPUGenerationRunner(_OnCPU, GPUGenerationModelRunner, CPUModelRunner):
    pass


class CPUARWorker(OmniWorkerMixin, CPUWorker):
    runner = CPUARRunner

    def init_device(self):
        keep_weights()
        self.use_v2_model_runner = False
        super().init_device()
        self.model_runner = self.runner(self.vllm_config, self.device)


class CPUGenerationWorker(CPUARWorker):
    runner = CPUGenerationRunner

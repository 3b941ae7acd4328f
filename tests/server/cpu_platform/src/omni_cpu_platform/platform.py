# SPDX-License-Identifier: Apache-2.0
"""What vLLM-Omni asks of a platform, answered for a CPU."""

import os
import platform

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def _resident(*_):
    return psutil.Process().memory_info().rss


def _nothing(*_):
    return None


def keep_weights():
    """
    Linear layers that keep their weight as a parameter.

    vLLM's packs it for oneDNN after loading and empties the parameter, so that no weights could be loaded again.
    """
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


class CPUPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT

    # vLLM looks for these in `torch.cpu`, which has none of them, and would then call None.
    reset_peak_memory_stats = synchronize = empty_cache = set_device = staticmethod(_nothing)
    max_memory_allocated = max_memory_reserved = staticmethod(_resident)
    memory_allocated = memory_reserved = staticmethod(_resident)

    @classmethod
    def get_current_memory_usage(cls, device=None):
        return float(_resident())

    # Classes

    @classmethod
    def get_diffusion_worker_cls(cls):
        return "omni_cpu_platform.worker.CPUDiffusionWorker"

    @classmethod
    def get_omni_ar_worker_cls(cls):
        return "omni_cpu_platform.ar_worker.CPUARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls):
        return "omni_cpu_platform.ar_worker.CPUGenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls):
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
        if selected_backend and selected_backend.upper() != "TORCH_SDPA":
            raise ValueError(f"{selected_backend} is no attention of a CPU; use TORCH_SDPA.")
        return "omni_cpu_platform.attention.CPUAttentionBackend"

    # What it can do

    @classmethod
    def supports_diffusion_dense_flash_attention(cls):
        return False

    @classmethod
    def supports_torch_inductor(cls):
        return False

    @classmethod
    def supports_cpu_offload(cls):
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls):
        return False

    @classmethod
    def is_available(cls):
        return True

    @classmethod
    def init_diffusion_worker_vllm_config(cls, vllm_config):
        keep_weights()

    # The device

    @classmethod
    def get_torch_device(cls, local_rank=None):
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls):
        return int(os.environ.get("OMNI_CPU_DEVICE_COUNT", "1"))

    @classmethod
    def get_device_version(cls):
        return None

    @classmethod
    def get_device_capability(cls, device_id=0):
        return None

    @classmethod
    def get_device_name(cls, device_id=0):
        return platform.processor() or "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return psutil.virtual_memory().total

    @classmethod
    def get_free_memory(cls, device=None):
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device=None):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

# SPDX-License-Identifier: Apache-2.0
"""Attention by PyTorch, whose vendor is not asked for: vLLM-Omni's own dispatch knows GPUs only."""

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CPUAttention(SDPAImpl):
    def forward(self, query, key, value, attn_metadata=None):
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")


class CPUAttentionBackend(SDPABackend):
    @staticmethod
    def get_impl_cls():
        return CPUAttention

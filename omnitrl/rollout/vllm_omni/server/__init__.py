# SPDX-License-Identifier: Apache-2.0
"""
What runs within a vLLM-Omni server.

[`families`] says what differs between models, [`pipelines`] makes rollout pipelines of vLLM-Omni's own, [`extension`]
takes weights in its workers, [`service`] answers the calls of [`~omnitrl.rollout.vllm_omni.wire`], and [`middleware`]
is its door to HTTP. For models that write text it is [`thinker_extension`] and [`thinker_service`]. Only `omnitrl
vllm-serve` and its tests import what needs vLLM-Omni.
"""

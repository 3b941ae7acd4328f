# SPDX-License-Identifier: Apache-2.0
"""Rollouts from vLLM-Omni servers: the wire, the client, and what runs within the server."""

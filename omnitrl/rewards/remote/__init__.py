# SPDX-License-Identifier: Apache-2.0
"""Rewards on another machine: the client that a trainer calls, the server, and what goes between them."""

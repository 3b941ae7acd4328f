# SPDX-License-Identifier: Apache-2.0
"""Rewards whose value a trained network gives. The classes are imported from `omnitrl.rewards`."""

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts: gated MLPs of which every token visits a few, with the routing weights applied."""

from deltalatent.kernels.experts.api import experts_obstacle, grouped_experts
from deltalatent.kernels.experts.reference import GatedUnit, grouped_experts_reference

__all__ = ["GatedUnit", "experts_obstacle", "grouped_experts", "grouped_experts_reference"]

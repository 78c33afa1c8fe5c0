# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Router of a mixture of experts: exact logits, the choice of K experts, and what quantile balancing counts."""

from deltalatent.kernels.router.api import choose_experts, count_required_biases, router_logits
from deltalatent.kernels.router.reference import Choice, bin_range, choose_experts_reference

__all__ = [
    "Choice",
    "bin_range",
    "choose_experts",
    "choose_experts_reference",
    "count_required_biases",
    "router_logits",
]

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Training: load balancing of the routed experts."""

from deltalatent.training.balancing import (
    BalancedRouter,
    BalanceReport,
    QuantileBalancingCallback,
    balanced_routers,
    freeze_selection_bias,
    register_quantile_balancing,
    update_selection_bias,
)

__all__ = [
    "BalanceReport",
    "BalancedRouter",
    "QuantileBalancingCallback",
    "balanced_routers",
    "freeze_selection_bias",
    "register_quantile_balancing",
    "update_selection_bias",
]

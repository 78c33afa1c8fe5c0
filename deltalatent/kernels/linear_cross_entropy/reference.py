# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss as it is defined, with all logits, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cross_entropy_reference(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    num_items: Tensor | float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Scalar loss; see `linear_cross_entropy`. Logits are made in the dtype of the inputs, the rest is float32."""
    logits = torch.nn.functional.linear(hidden_states, weight).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    reduction = "mean" if num_items is None else "sum"
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items is None else loss / num_items

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Contract of `choose_experts`, shared by every implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def validate_choose_experts(logits: Tensor, bias: Tensor, top_k: int, num_groups: int, top_groups: int) -> None:
    """Check shapes, dtypes, device and options; raises `ValueError` or `TypeError` naming the argument."""
    if logits.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"`logits` must be float32 or float64, got {logits.dtype}: run the router in float32.")
    if bias.dtype != logits.dtype:
        raise TypeError(f"`bias` must have the dtype of `logits`, {logits.dtype}, got {bias.dtype}: cast it.")
    if bias.device != logits.device:
        raise ValueError(f"`bias` must be on the device of `logits`, {logits.device}, got {bias.device}: move it.")
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"`logits` must have shape [T, E], got {list(logits.shape)}: flatten batch and sequence.")
    num_experts = logits.shape[1]
    if list(bias.shape) != [num_experts]:
        raise ValueError(f"`bias` must have shape [E] = [{num_experts}], got {list(bias.shape)}.")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"`top_k` must lie in [1, E={num_experts}], got {top_k}: lower it.")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"`num_groups` must divide E={num_experts}, got {num_groups}.")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"`top_groups` must lie in [1, num_groups={num_groups}], got {top_groups}.")

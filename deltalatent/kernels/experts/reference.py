# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch form of the routed experts: one expert after the other, differentiable, any floating dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

GatedUnit = Callable[[Tensor, Tensor], Tensor]
"""Function of the gate and up branches [..., I] of an MLP to [..., I]."""


def grouped_experts_reference(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gated_unit: GatedUnit,
) -> Tensor:
    """Weighted sum of each token's experts; see `grouped_experts`.

    Args:
        hidden_states: [T, Z].
        gate_up_proj: [E, 2I, Z], gate rows first.
        down_proj: [E, Z, I].
        top_k_index: int64 [T, K]. Ids outside [0, E) contribute nothing.
        top_k_weights: [T, K].
        gated_unit: the two branches [., I] -> [., I].

    Returns:
        [T, Z] in the dtype of `hidden_states`; products with the weights and the sum are float32 where these are.
    """
    output = torch.zeros_like(hidden_states, dtype=torch.promote_types(hidden_states.dtype, top_k_weights.dtype))
    for expert in top_k_index.unique().tolist():
        if not 0 <= expert < gate_up_proj.shape[0]:
            continue
        token, slot = torch.where(top_k_index == expert)
        gate, up = F.linear(hidden_states[token], gate_up_proj[expert]).chunk(2, dim=-1)
        hidden = F.linear(gated_unit(gate, up), down_proj[expert])
        output = output.index_add(0, token, (hidden * top_k_weights[token, slot, None]).to(output.dtype))
    return output.to(hidden_states.dtype)

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public function of the routed experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle
from deltalatent.kernels.experts import autograd
from deltalatent.kernels.experts.reference import grouped_experts_reference
from deltalatent.kernels.experts.validation import validate_grouped_experts
from deltalatent.kernels.situ import situ_glu_reference

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def grouped_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    activation: str = "situ",
    beta: float = 4.0,
    linear_beta: float = 25.0,
    impl: str = "auto",
) -> Tensor:
    r"""Weighted sum of the gated MLPs that each token visits.

    .. math::
        y_t = \sum_{j=1}^{K} w_{tj}\, W^{down}_e\, \mathrm{act}(W^{gate}_e x_t, W^{up}_e x_t), \quad e = e_{tj}

    (Kimi K3 report, arXiv 2607.24653, "Stable LatentMoE", between the latent projections.) T tokens, K experts per
    token, E experts, Z width in which they work, I their inner width.

    Args:
        hidden_states: x, [T, Z]; float32, float16, bfloat16 or float64. T may be 0.
        gate_up_proj: [E, 2I, Z], gate rows first, dtype of `hidden_states`.
        down_proj: [E, Z, I], dtype of `hidden_states`.
        top_k_index: e, int64 or int32 [T, K]. An id outside [0, E) contributes nothing and gets no gradient (expert
            parallelism marks experts of other ranks by E).
        top_k_weights: w, [T, K], any float dtype.
        activation: `"situ"` (see `situ_glu`) or `"silu"` (SwiGLU).
        beta: cap of the gate branch of `"situ"`, > 0.
        linear_beta: cap of the linear branch of `"situ"`, > 0.
        impl: `"auto"`, `"triton"` or `"torch"` (a loop over experts, which waits for the device).

    Returns:
        [T, Z] in the dtype of `hidden_states`. Products accumulate in float32 (float64 for float64), the sum over K is
        taken in float32 in the order of the columns. Differentiable, once, in all four floating tensors.

    Raises:
        ValueError: wrong shape, device, option, or an `impl` that cannot run.
        TypeError: wrong dtype.
    """
    validate_grouped_experts(
        hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, activation, beta, linear_beta
    )
    obstacle = experts_obstacle(hidden_states.device, hidden_states.dtype)
    reasons = {"triton": obstacle, "torch": None}
    if resolve_impl("grouped_experts", impl, device=hidden_states.device, reasons=reasons) == "triton":
        return autograd.grouped_experts(
            hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, activation == "situ", beta, linear_beta
        )

    def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
        return situ_glu_reference(gate, up, beta, linear_beta) if activation == "situ" else F.silu(gate) * up

    return grouped_experts_reference(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, gated_unit)


def experts_obstacle(device: torch.device, dtype: torch.dtype) -> Obstacle | None:
    """Say why the Triton kernels cannot take tensors of this device and dtype; `None` if they can."""
    if dtype not in TRITON_DTYPES:
        reason = f"the Triton kernels take float32, float16 or bfloat16, got {dtype}: use 'torch'"
        return Obstacle(reason, TypeError)
    return triton_obstacle(device)

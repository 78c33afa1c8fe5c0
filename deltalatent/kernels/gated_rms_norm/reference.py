# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch form of the gated RMS norm: readable, differentiable, any floating dtype."""

import torch


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight * sigmoid(gate)` over the last axis; see `gated_rms_norm`.

    Args:
        x: [..., V], any floating dtype.
        gate: [..., V], gate logits (before the sigmoid).
        weight: [V].
        eps: added to the mean square.

    Returns:
        [..., V] in the dtype of `gate`, computed in float32 (float64 if an input is float64).
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
    values = x.to(dtype)
    inverse_rms = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * inverse_rms * weight.to(dtype) * torch.sigmoid(gate.to(dtype))).to(gate.dtype)

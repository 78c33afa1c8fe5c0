# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public function of the gated RMS norm."""

import torch

from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle
from deltalatent.kernels.gated_rms_norm import autograd
from deltalatent.kernels.gated_rms_norm.reference import gated_rms_norm_reference
from deltalatent.kernels.gated_rms_norm.validation import validate_gated_rms_norm

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A row must fit the registers of one program.
TRITON_CHANNELS = 4096


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: str = "auto"
) -> torch.Tensor:
    """RMS norm over the last axis, scaled by a weight that all heads share, times the sigmoid of a gate.

    `y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)` (Kimi Linear, arXiv 2510.26692, section 4: output gate).

    Args:
        x: [..., V] read-out of the recurrence; float32, float16, bfloat16 or float64.
        gate: [..., V] gate logits, before the sigmoid; may differ from `x` in dtype.
        weight: [V], float32 as released.
        eps: added to the mean square, at least 0.
        impl: `"auto"`, `"triton"` (V up to 4096) or `"torch"`.

    Returns:
        [..., V] in the dtype of `gate`. Computed in float32 (float64 if `x` or `gate` is float64). Differentiable in
        `x`, `gate` and `weight`.

    Raises:
        ValueError: wrong shape, device, `eps`, or an `impl` that cannot run.
        TypeError: an input is not a floating tensor.
    """
    validate_gated_rms_norm(x, gate, weight, eps)
    reasons = {"triton": _triton_obstacle(x, gate), "torch": None}
    if resolve_impl("gated_rms_norm", impl, device=x.device, reasons=reasons) == "triton":
        return autograd.gated_rms_norm(x, gate, weight, eps)
    return gated_rms_norm_reference(x, gate, weight, eps)


def _triton_obstacle(x: torch.Tensor, gate: torch.Tensor) -> Obstacle | None:
    for tensor in (x, gate):
        if tensor.dtype not in TRITON_DTYPES:
            reason = f"the Triton kernels take float32, float16 or bfloat16, got {tensor.dtype}: use 'torch'"
            return Obstacle(reason, TypeError)
    if x.shape[-1] > TRITON_CHANNELS:
        return Obstacle(f"the Triton kernels take up to {TRITON_CHANNELS} channels, got {x.shape[-1]}: use 'torch'")
    return triton_obstacle(x.device)

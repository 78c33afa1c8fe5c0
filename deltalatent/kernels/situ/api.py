# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public function of SiTU-GLU."""

from __future__ import annotations

import torch
from torch import Tensor

from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle
from deltalatent.kernels.situ import autograd
from deltalatent.kernels.situ.reference import situ_glu_reference

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float, *, impl: str = "auto") -> Tensor:
    r"""Gated unit whose two branches are softly capped: no activation exceeds `beta * linear_beta`.

    .. math:: \mathrm{SiTU}(g, u) = b_1 \tanh(g / b_1)\, \sigma(g) \cdot b_2 \tanh(u / b_2)

    (Kimi K3 report, arXiv 2607.24653.)

    Args:
        gate: g, [..., I]; float32, float16, bfloat16 or float64. The sigmoid takes it uncapped.
        up: u, [..., I], same dtype.
        beta: b1 > 0, cap of the gate branch.
        linear_beta: b2 > 0, cap of the linear branch.
        impl: `"auto"`, `"triton"` (one pass forwards, one backwards) or `"torch"`.

    Returns:
        [..., I] in the dtype of `gate`; computed in float32 (float64 for float64), since two saturating functions
        multiply. Differentiable in `gate` and `up`.

    Raises:
        ValueError: shapes or devices that differ, a cap that is not positive, or an `impl` that cannot run.
        TypeError: dtypes that differ or are not floating.
    """
    if not gate.is_floating_point() or up.dtype != gate.dtype:
        raise TypeError(f"`gate` and `up` must have one floating dtype, got {gate.dtype} and {up.dtype}: cast one.")
    if up.shape != gate.shape or up.device != gate.device:
        raise ValueError(
            f"`up` must have the shape {list(gate.shape)} and the device {gate.device} of `gate`, got "
            f"{list(up.shape)} on {up.device}."
        )
    if not (beta > 0 and linear_beta > 0):
        raise ValueError(f"`beta` and `linear_beta` must be positive, got {beta} and {linear_beta}.")
    if gate.dtype in TRITON_DTYPES:
        obstacle = triton_obstacle(gate.device)
    else:
        reason = f"the Triton kernels take float32, float16 or bfloat16, got {gate.dtype}: use 'torch'"
        obstacle = Obstacle(reason, TypeError)
    if resolve_impl("situ_glu", impl, device=gate.device, reasons={"triton": obstacle, "torch": None}) == "triton":
        return autograd.situ_glu(gate, up, beta, linear_beta)
    return situ_glu_reference(gate, up, beta, linear_beta)

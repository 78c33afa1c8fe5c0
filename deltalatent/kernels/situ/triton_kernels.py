# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of SiTU-GLU, and the gated units as functions for other kernels."""

import torch
import triton
import triton.language as tl

from deltalatent.kernels.tiles import cdiv, on_its_device


@triton.jit
def tanh_fraction(x):
    """Numerator and denominator of tanh: exponentials, or, near zero where these would cancel, its series. About 4e-7.

    Kept apart because divisions and exponentials, which share a slow unit, are what the gated units wait for.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    far = tl.where(x < 0, e - 1.0, 1.0 - e)
    return tl.where(square < 0.01, near, far), tl.where(square < 0.01, 1.0, 1.0 + e)


@triton.jit
def gated_unit(gate, up, beta, linear_beta, SITU: tl.constexpr):
    """SiTU-GLU, or SwiGLU, of float32 branches."""
    below_sigmoid = 1.0 + tl.exp(-gate)
    if SITU:
        t, below_t = tanh_fraction(gate * (1.0 / beta))
        u, below_u = tanh_fraction(up * (1.0 / linear_beta))
        value = (beta * linear_beta) * (t * u) / (below_t * below_u * below_sigmoid)
    else:
        value = gate * up / below_sigmoid
    return value


@triton.jit
def gated_unit_gradients(gate, up, beta, linear_beta, SITU: tl.constexpr):
    """Value of the gated unit, and its derivatives by `gate` and by `up`."""
    sigmoid = tl.sigmoid(gate)
    if SITU:
        t, below_t = tanh_fraction(gate * (1.0 / beta))
        u, below_u = tanh_fraction(up * (1.0 / linear_beta))
        t /= below_t
        u /= below_u
        left = beta * t * sigmoid
        right = linear_beta * u
        dleft = sigmoid * (1.0 - t * t + beta * t * (1.0 - sigmoid))
        dright = 1.0 - u * u
    else:
        left = gate * sigmoid
        right = up
        dleft = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        dright = 1.0
    return left * right, dleft * right, left * dright


@triton.jit
def situ_glu_forward_kernel(gate, up, y, size, beta, linear_beta, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + place, gated_unit(g, u, beta, linear_beta, True).to(y.dtype.element_ty), mask=mask)


@triton.jit
def situ_glu_backward_kernel(gate, up, dy, dgate, dup, size, beta, linear_beta, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    upstream = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
    _, by_gate, by_up = gated_unit_gradients(g, u, beta, linear_beta, True)
    tl.store(dgate + place, (upstream * by_gate).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + place, (upstream * by_up).to(dup.dtype.element_ty), mask=mask)


BLOCK = 2048


@on_its_device
def situ_glu_forward(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """All inputs contiguous."""
    y = torch.empty_like(gate)
    grid = (cdiv(gate.numel(), BLOCK),)
    situ_glu_forward_kernel[grid](gate, up, y, gate.numel(), beta, linear_beta, BLOCK=BLOCK, num_warps=8)
    return y


@on_its_device
def situ_glu_backward(
    gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, beta: float, linear_beta: float
) -> list[torch.Tensor]:
    """Gradients of `gate` and `up`; all inputs contiguous."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    grid = (cdiv(gate.numel(), BLOCK),)
    situ_glu_backward_kernel[grid](gate, up, dy, dgate, dup, gate.numel(), beta, linear_beta, BLOCK=BLOCK, num_warps=8)
    return [dgate, dup]

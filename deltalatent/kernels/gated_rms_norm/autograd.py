# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton gated RMS norm with its gradients, for eager calls and for `torch.compile`.

Eager calls go through an `autograd.Function`, which costs the host a fraction of what a custom operator with autograd
does. Under `torch.compile` the same launches are the opaque operators `deltalatent::gated_rms_norm(x, gate, weight,
eps) -> y` and `deltalatent::gated_rms_norm_backward(x, gate, weight, dy, eps) -> [dx, dgate, dweight]`. Saved for
backward: `x` and `gate` [..., V] and `weight` [V]; the norm is recomputed.
"""

import torch
from torch.autograd.function import once_differentiable


def _forward(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from deltalatent.kernels.gated_rms_norm.triton_kernels import gated_rms_norm_forward

    return gated_rms_norm_forward(x.contiguous(), gate.contiguous(), weight.contiguous(), eps)


def _backward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float
) -> list[torch.Tensor]:
    from deltalatent.kernels.gated_rms_norm.triton_kernels import gated_rms_norm_backward

    return gated_rms_norm_backward(x.contiguous(), gate.contiguous(), weight.contiguous(), dy.contiguous(), eps)


class GatedRMSNormFunction(torch.autograd.Function):
    """Saved: x, gate [..., V], weight [V]."""

    @staticmethod
    def forward(ctx, x, gate, weight, eps):
        ctx.eps = eps
        ctx.save_for_backward(x, gate, weight)
        return _forward(x, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *_backward(*ctx.saved_tensors, dy, ctx.eps), None


gated_rms_norm_op = torch.library.custom_op("deltalatent::gated_rms_norm", _forward, mutates_args=())
gated_rms_norm_backward_op = torch.library.custom_op(
    "deltalatent::gated_rms_norm_backward", _backward, mutates_args=()
)


@gated_rms_norm_op.register_fake
def _(x, gate, weight, eps):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@gated_rms_norm_backward_op.register_fake
def _(x, gate, weight, dy, eps):
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (x, gate, weight)]


def _op_setup_context(ctx, inputs, output):
    x, gate, weight, ctx.eps = inputs
    ctx.save_for_backward(x, gate, weight)


def _op_backward(ctx, dy):
    return *gated_rms_norm_backward_op(*ctx.saved_tensors, dy, ctx.eps), None


gated_rms_norm_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight * sigmoid(gate)` [..., V] in the dtype of `gate`; differentiable in the tensors."""
    if torch.compiler.is_compiling():
        return gated_rms_norm_op(x, gate, weight, eps)
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad or weight.requires_grad):
        return GatedRMSNormFunction.apply(x, gate, weight, eps)
    return _forward(x, gate, weight, eps)

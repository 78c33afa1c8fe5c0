# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton SiTU-GLU with its gradients, for eager calls and for `torch.compile`.

Eager calls go through an `autograd.Function`; under `torch.compile` the same launches are the opaque operators
`deltalatent::situ_glu` and `deltalatent::situ_glu_backward`. Saved for backward: `gate` and `up` [..., I], which the
matrix products before have in memory anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    from deltalatent.kernels.situ.triton_kernels import situ_glu_forward

    return situ_glu_forward(gate.contiguous(), up.contiguous(), beta, linear_beta)


def _backward(gate: Tensor, up: Tensor, dy: Tensor, beta: float, linear_beta: float) -> list[Tensor]:
    from deltalatent.kernels.situ.triton_kernels import situ_glu_backward

    return situ_glu_backward(gate.contiguous(), up.contiguous(), dy.contiguous(), beta, linear_beta)


class SituGluFunction(torch.autograd.Function):
    """Saved: gate, up [..., I]."""

    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):
        ctx.options = (beta, linear_beta)
        ctx.save_for_backward(gate, up)
        return _forward(gate, up, beta, linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *_backward(*ctx.saved_tensors, dy, *ctx.options), None, None


situ_glu_op = torch.library.custom_op("deltalatent::situ_glu", _forward, mutates_args=())
situ_glu_backward_op = torch.library.custom_op("deltalatent::situ_glu_backward", _backward, mutates_args=())


@situ_glu_op.register_fake
def _(gate, up, beta, linear_beta):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@situ_glu_backward_op.register_fake
def _(gate, up, dy, beta, linear_beta):
    return [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2)]


def _op_setup_context(ctx, inputs, output):
    gate, up, *ctx.options = inputs
    ctx.save_for_backward(gate, up)


def _op_backward(ctx, dy):
    return *situ_glu_backward_op(*ctx.saved_tensors, dy, *ctx.options), None, None


situ_glu_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """[..., I] in the dtype of `gate`; differentiable in both tensors."""
    if torch.compiler.is_compiling():
        return situ_glu_op(gate, up, beta, linear_beta)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return SituGluFunction.apply(gate, up, beta, linear_beta)
    return _forward(gate, up, beta, linear_beta)

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton gated RMS norm as PyTorch operators: opaque to `torch.compile`, with shapes and gradients registered.

| operator | saved for backward |
| --- | --- |
| `deltalatent::gated_rms_norm(x, gate, weight, eps) -> y` | `x`, `gate`, `weight`; the norm is recomputed |
| `deltalatent::gated_rms_norm_backward(x, gate, weight, dy, eps) -> dx, dgate, dweight` | - |
"""

import torch


@torch.library.custom_op("deltalatent::gated_rms_norm", mutates_args=())
def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from deltalatent.kernels.gated_rms_norm.triton_kernels import gated_rms_norm_forward

    return gated_rms_norm_forward(x.contiguous(), gate.contiguous(), weight.contiguous(), eps)


@gated_rms_norm.register_fake
def _(x, gate, weight, eps):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@torch.library.custom_op("deltalatent::gated_rms_norm_backward", mutates_args=())
def gated_rms_norm_backward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float
) -> list[torch.Tensor]:
    from deltalatent.kernels.gated_rms_norm import triton_kernels

    return triton_kernels.gated_rms_norm_backward(
        x.contiguous(), gate.contiguous(), weight.contiguous(), dy.contiguous(), eps
    )


@gated_rms_norm_backward.register_fake
def _(x, gate, weight, dy, eps):
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (x, gate, weight)]


def _setup_context(ctx, inputs, output):
    x, gate, weight, ctx.eps = inputs
    ctx.save_for_backward(x, gate, weight)


def _backward(ctx, dy):
    dx, dgate, dweight = gated_rms_norm_backward(*ctx.saved_tensors, dy, ctx.eps)
    return dx, dgate, dweight, None


gated_rms_norm.register_autograd(_backward, setup_context=_setup_context)

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The router's operators with their gradients, for eager calls and for `torch.compile`.

| operator | saved for backward |
| --- | --- |
| `deltalatent::router_logits` | tokens [T, D] and weight [E, D], both bfloat16 |
| `deltalatent::choose_experts` | scores [T, E], index and weights [T, K] |
| `deltalatent::count_required_biases` | no gradient; adds to its first argument |
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@torch.library.custom_op("deltalatent::router_logits", mutates_args=())
def logits_op(x: Tensor, weight: Tensor) -> Tensor:
    from deltalatent.kernels.router.triton_kernels import logits

    return logits(x.contiguous(), weight.contiguous())


@logits_op.register_fake
def _(x, weight):
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)


class LogitsFunction(torch.autograd.Function):
    """`x W^T` in float32 of bfloat16 [T, D] and [E, D]: products of two bfloat16 are exact in float32.

    The gradient of the logits is float32; as a sum of two bfloat16 it keeps 16 bits, on the same fast products.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return logits_op(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        high = grad.to(x.dtype)
        low = (grad - high).to(x.dtype)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(high, weight, out_dtype=torch.float32)
            dx = torch.addmm(dx, low, weight, out_dtype=torch.float32).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = torch.mm(high.t(), x, out_dtype=torch.float32)
            dweight = torch.addmm(dweight, low.t(), x, out_dtype=torch.float32).to(weight.dtype)
        return dx, dweight


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [T, E] of bfloat16 tokens [T, D] and weight [E, D] on a GPU."""
    return LogitsFunction.apply(x, weight)


def _forward(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling_factor: float) -> list[Tensor]:
    from deltalatent.kernels.router.triton_kernels import choose_forward

    return choose_forward(logits.contiguous(), bias.contiguous(), top_k, renormalize, scaling_factor)


def _backward(
    scores: Tensor,
    index: Tensor,
    weights: Tensor,
    dscores: Tensor | None,
    dweights: Tensor,
    renormalize: bool,
    scaling_factor: float,
) -> Tensor:
    from deltalatent.kernels.router.triton_kernels import choose_backward

    dscores = None if dscores is None else dscores.contiguous()
    return choose_backward(scores, index, weights, dscores, dweights.contiguous(), renormalize, scaling_factor)


class ChooseFunction(torch.autograd.Function):
    """Saved: scores [T, E], index and weights [T, K]."""

    @staticmethod
    def forward(ctx, logits, bias, top_k, renormalize, scaling_factor):
        scores, index, weights, cutoff = _forward(logits, bias, top_k, renormalize, scaling_factor)
        ctx.mark_non_differentiable(index, cutoff)
        ctx.set_materialize_grads(False)
        ctx.options = (renormalize, scaling_factor)
        ctx.save_for_backward(scores, index, weights)
        return scores, index, weights, cutoff

    @staticmethod
    @once_differentiable
    def backward(ctx, dscores, _dindex, dweights, _dcutoff):
        return _logit_gradient(ctx, _backward, dscores, dweights), None, None, None, None


def _logit_gradient(ctx, run, dscores, dweights):
    scores, index, weights = ctx.saved_tensors
    if dweights is None:
        return None if dscores is None else dscores * scores * (1 - scores)
    return run(scores, index, weights, dscores, dweights, *ctx.options)


choose_op = torch.library.custom_op("deltalatent::choose_experts", _forward, mutates_args=())
choose_backward_op = torch.library.custom_op("deltalatent::choose_experts_backward", _backward, mutates_args=())


@choose_op.register_fake
def _(logits, bias, top_k, renormalize, scaling_factor):
    scores = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    chosen = (logits.shape[0], top_k)
    index = torch.empty(chosen, dtype=torch.int64, device=logits.device)
    return [scores, index, scores.new_empty(chosen), scores.new_empty(logits.shape[0])]


@choose_backward_op.register_fake
def _(scores, index, weights, dscores, dweights, renormalize, scaling_factor):
    return torch.empty_like(scores)


def _op_setup_context(ctx, inputs, output):
    *_, renormalize, scaling_factor = inputs
    ctx.set_materialize_grads(False)
    ctx.options = (renormalize, scaling_factor)
    ctx.save_for_backward(*output[:3])


def _op_backward(ctx, grads):
    return _logit_gradient(ctx, choose_backward_op, grads[0], grads[2]), None, None, None, None


choose_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def choose(
    logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling_factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores [T, E], index [T, K], weights [T, K], cutoff [T]; differentiable in the logits."""
    arguments = (logits, bias, top_k, renormalize, scaling_factor)
    if torch.compiler.is_compiling():
        scores, index, weights, cutoff = choose_op(*arguments)
        return scores, index, weights, cutoff.detach()
    if torch.is_grad_enabled() and logits.requires_grad:
        return ChooseFunction.apply(*arguments)
    scores, index, weights, cutoff = _forward(*arguments)
    return scores, index, weights, cutoff


@torch.library.custom_op("deltalatent::count_required_biases", mutates_args=("flat",))
def count_op(
    flat: Tensor, scores: Tensor, cutoff: Tensor, bias: Tensor, mask: Tensor | None, selected: Tensor, num_bins: int
) -> None:
    from deltalatent.kernels.router.triton_kernels import count

    mask = None if mask is None else mask.contiguous()
    count(flat, scores.contiguous(), cutoff.contiguous(), bias.contiguous(), mask, selected.contiguous(), num_bins)

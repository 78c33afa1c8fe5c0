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


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    from deltalatent.kernels.router.triton_kernels import logits

    return logits(x.contiguous(), weight.contiguous())


def _logits_backward(x: Tensor, weight: Tensor, grad: Tensor, needed: list[bool]) -> list[Tensor]:
    """Gradients of both, empty where not needed.

    The float32 gradient, as a sum of two bfloat16, keeps 16 bits on the same fast products. The long sides of both
    terms are joined, so that float32 sums of the size of x are neither stored nor read again.
    """
    high = grad.to(x.dtype)
    low = (grad - high).to(x.dtype)
    dx, dweight = x.new_empty(0), weight.new_empty(0)
    if needed[0]:
        dx = torch.cat([high, low], dim=1) @ torch.cat([weight, weight])
    if needed[1]:
        partial = torch.mm(high.t(), x, out_dtype=torch.float32)
        dweight = torch.addmm(partial, low.t(), x, out_dtype=torch.float32).to(weight.dtype)
    return [dx, dweight]


class LogitsFunction(torch.autograd.Function):
    """`x W^T` in float32 of bfloat16 [T, D] and [E, D]: products of two bfloat16 are exact in float32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _logits(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs = list(ctx.needs_input_grad)
        grads = _logits_backward(*ctx.saved_tensors, grad, needs)
        return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


logits_op = torch.library.custom_op("deltalatent::router_logits", _logits, mutates_args=())
logits_backward_op = torch.library.custom_op("deltalatent::router_logits_backward", _logits_backward, mutates_args=())


@logits_op.register_fake
def _(x, weight):
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)


@logits_backward_op.register_fake
def _(x, weight, grad, needed):
    return [
        torch.empty(tensor.shape if need else (0,), dtype=tensor.dtype, device=tensor.device)
        for tensor, need in zip((x, weight), needed, strict=True)
    ]


def _logits_setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _logits_op_backward(ctx, grad):
    needs = list(ctx.needs_input_grad)
    grads = logits_backward_op(*ctx.saved_tensors, grad, needs)
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


logits_op.register_autograd(_logits_op_backward, setup_context=_logits_setup_context)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [T, E] of bfloat16 tokens [T, D] and weight [E, D] on a GPU."""
    if torch.compiler.is_compiling():
        return logits_op(x, weight)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return LogitsFunction.apply(x, weight)
    return _logits(x, weight)


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


def _count(
    flat: Tensor, scores: Tensor, cutoff: Tensor, bias: Tensor, mask: Tensor | None, selected: Tensor, num_bins: int
) -> None:
    from deltalatent.kernels.router.triton_kernels import count

    mask = None if mask is None else mask.contiguous()
    count(flat, scores.contiguous(), cutoff.contiguous(), bias.contiguous(), mask, selected.contiguous(), num_bins)


count_op = torch.library.custom_op("deltalatent::count_required_biases", _count, mutates_args=("flat",))


def count_required_biases(
    flat: Tensor, scores: Tensor, cutoff: Tensor, bias: Tensor, mask: Tensor | None, selected: Tensor, num_bins: int
) -> None:
    """Add one micro-batch to `flat`; no gradient. See `api.count_required_biases`."""
    run = count_op if torch.compiler.is_compiling() else _count
    run(flat, scores, cutoff, bias, mask, selected, num_bins)

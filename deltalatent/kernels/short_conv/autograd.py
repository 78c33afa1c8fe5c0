# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton short convolution with its gradients, for eager calls and for `torch.compile`.

Eager calls go through an `autograd.Function`, which costs the host a fraction of what a custom operator with autograd
does. Under `torch.compile` the same launches are opaque operators with shapes and gradients registered:

| operator | results | gradient |
| --- | --- | --- |
| `deltalatent::short_conv(xs, weights, states, cu_seqlens, silu, final)` | ys + finals | yes |
| `deltalatent::short_conv_backward(..., dys, dfinals, silu)` | dxs + dweights + dstates | no |
| `deltalatent::short_conv_step(xs, weights, states, silu)` | ys + finals | no |
| `deltalatent::short_conv_step_(xs, weights, states, ys, silu)` | writes states and ys | no |

Lists have one entry for each stream (xs [B, T, D], weights [D, 1, W], states and finals [N, D, W-1]); `states` and
`dfinals` may be empty. Saved for backward: all inputs and no output, the convolution is recomputed.
"""

import torch
from torch.autograd.function import once_differentiable

Tensors = list[torch.Tensor]


def _ready(xs: Tensors) -> Tensors:
    # Any batch and time stride will do (slices of a fused projection), but channels must be adjacent.
    return [x if x.stride(2) == 1 else x.contiguous() for x in xs]


def _contiguous(tensors: Tensors) -> Tensors:
    return [tensor.contiguous() for tensor in tensors]


def _forward(
    xs: Tensors, weights: Tensors, states: Tensors, cu_seqlens: torch.Tensor | None, silu: bool, final: bool
) -> Tensors:
    from deltalatent.kernels.short_conv.triton_fwd import short_conv_final_state, short_conv_forward

    xs, weights, states = _ready(xs), _contiguous(weights), _contiguous(states)
    outputs = short_conv_forward(xs, weights, states, cu_seqlens, silu)
    if final:
        outputs += short_conv_final_state(xs, states, weights[0].shape[2], cu_seqlens)
    return outputs


def _backward(
    xs: Tensors,
    weights: Tensors,
    states: Tensors,
    cu_seqlens: torch.Tensor | None,
    dys: Tensors,
    dfinals: Tensors,
    silu: bool,
) -> Tensors:
    from deltalatent.kernels.short_conv.triton_bwd import short_conv_backward

    xs, weights, states, dys, dfinals = _ready(xs), *map(_contiguous, (weights, states, dys, dfinals))
    dxs, dweights, dstates = short_conv_backward(xs, weights, states, cu_seqlens, dys, dfinals, silu)
    return dxs + dweights + dstates


def _step(xs: Tensors, weights: Tensors, states: Tensors, silu: bool) -> Tensors:
    from deltalatent.kernels.short_conv.triton_fwd import short_conv_update

    ys, finals = _fresh_step(xs, states)
    short_conv_update(_ready(xs), _contiguous(weights), _contiguous(states), finals, ys, silu)
    return ys + finals


def _step_inplace(xs: Tensors, weights: Tensors, states: Tensors, ys: Tensors, silu: bool) -> None:
    from deltalatent.kernels.short_conv.triton_fwd import short_conv_update

    short_conv_update(_ready(xs), _contiguous(weights), states, states, ys, silu)


def _fresh_step(xs: Tensors, states: Tensors) -> tuple[Tensors, Tensors]:
    return _fresh(xs), [x.new_empty(state.shape) for x, state in zip(xs, states, strict=True)]


def _fresh(tensors: Tensors) -> Tensors:
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]


def _upstream(
    xs: Tensors, weights: Tensors, num_documents: int, grads: list[torch.Tensor | None]
) -> tuple[Tensors, Tensors]:
    """Gradients of outputs and final states with absent ones filled in; no final states if none has a gradient."""
    count = len(xs)
    dys = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(xs, grads[:count], strict=True)]
    if all(grad is None for grad in grads[count:]):
        return dys, []
    dfinals = []
    for x, weight, grad in zip(xs, weights, grads[count:], strict=True):
        shape = (num_documents, x.shape[2], weight.shape[2] - 1)
        dfinals.append(x.new_zeros(shape) if grad is None else grad)
    return dys, dfinals


def _num_documents(xs: Tensors, cu_seqlens: torch.Tensor | None) -> int:
    return xs[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


class ShortConvolutionFunction(torch.autograd.Function):
    """Saved: xs [B, T, D], weights [D, 1, W], states [N, D, W-1] of all streams, `cu_seqlens` [N+1] or None."""

    @staticmethod
    def forward(ctx, count, cu_seqlens, silu, final, *tensors):
        ctx.count, ctx.silu = count, silu
        # Absent gradients arrive as None, so that an unused final state costs nothing.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, cu_seqlens)
        streams = [list(tensors[i : i + count]) for i in (0, count)]
        return tuple(_forward(*streams, list(tensors[2 * count :]), cu_seqlens, silu, final))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        *tensors, cu_seqlens = ctx.saved_tensors
        xs, weights, states = (tensors[: ctx.count], tensors[ctx.count : 2 * ctx.count], tensors[2 * ctx.count :])
        dys, dfinals = _upstream(xs, weights, _num_documents(xs, cu_seqlens), list(grads))
        return None, None, None, None, *_backward(xs, weights, states, cu_seqlens, dys, dfinals, ctx.silu)


short_conv_op = torch.library.custom_op("deltalatent::short_conv", _forward, mutates_args=())
short_conv_backward_op = torch.library.custom_op("deltalatent::short_conv_backward", _backward, mutates_args=())
short_conv_step_op = torch.library.custom_op("deltalatent::short_conv_step", _step, mutates_args=())
short_conv_step_inplace_op = torch.library.custom_op(
    "deltalatent::short_conv_step_", _step_inplace, mutates_args=("states", "ys")
)


@short_conv_op.register_fake
def _(xs, weights, states, cu_seqlens, silu, final):
    if not final:
        return _fresh(xs)
    num_documents = _num_documents(xs, cu_seqlens)
    pairs = zip(xs, weights, strict=True)
    return _fresh(xs) + [x.new_empty(num_documents, x.shape[2], weight.shape[2] - 1) for x, weight in pairs]


@short_conv_backward_op.register_fake
def _(xs, weights, states, cu_seqlens, dys, dfinals, silu):
    return _fresh(xs) + _fresh(weights) + _fresh(states)


@short_conv_step_op.register_fake
def _(xs, weights, states, silu):
    ys, finals = _fresh_step(xs, states)
    return ys + finals


def _op_setup_context(ctx, inputs, output):
    xs, weights, states, cu_seqlens, ctx.silu, _ = inputs
    ctx.count = len(xs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*xs, *weights, *states, cu_seqlens)


def _op_backward(ctx, grads):
    *tensors, cu_seqlens = ctx.saved_tensors
    count = ctx.count
    xs, weights, states = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    dys, dfinals = _upstream(xs, weights, _num_documents(xs, cu_seqlens), grads)
    results = short_conv_backward_op(xs, weights, states, cu_seqlens, dys, dfinals, ctx.silu)
    return results[:count], results[count : 2 * count], results[2 * count :], None, None, None


short_conv_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def short_conv(
    xs: Tensors, weights: Tensors, states: Tensors, cu_seqlens: torch.Tensor | None, silu: bool, final: bool
) -> Tensors:
    """Outputs, then (if `final`) final states, of all streams; differentiable in every list."""
    if torch.compiler.is_compiling():
        return short_conv_op(xs, weights, states, cu_seqlens, silu, final)
    tensors = (*xs, *weights, *states)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(ShortConvolutionFunction.apply(len(xs), cu_seqlens, silu, final, *tensors))
    return _forward(xs, weights, states, cu_seqlens, silu, final)


def short_conv_step(xs: Tensors, weights: Tensors, states: Tensors, silu: bool) -> Tensors:
    """Outputs, then new states, after a few tokens; no gradient."""
    run = short_conv_step_op if torch.compiler.is_compiling() else _step
    return run(xs, weights, states, silu)


def short_conv_step_(xs: Tensors, weights: Tensors, states: Tensors, silu: bool) -> Tensors:
    """Outputs after a few tokens; writes the new states to `states`, which must be contiguous. No gradient."""
    run = short_conv_step_inplace_op if torch.compiler.is_compiling() else _step_inplace
    ys = _fresh(xs)
    run(xs, weights, states, ys, silu)
    return ys

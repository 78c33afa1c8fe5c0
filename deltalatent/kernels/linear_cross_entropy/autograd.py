# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of one chunk of tokens after the other, each with its gradients, for eager calls and for `torch.compile`.

The loss is a sum, so its gradient is known up to a factor when the loss is: a chunk's logits become their own gradient
in place, and are multiplied into the gradients of both inputs before the next chunk's logits take their place.

Eager calls go through an `autograd.Function`; under `torch.compile` the loop is the opaque operator
`deltalatent::linear_cross_entropy(...) -> [total, dhidden, dweight]` (empty where no gradient is wanted).

Shapes: N tokens, D channels, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalatent.kernels.autocast import float32_autocast_disabled


def _softmax_torch(logits: Tensor, targets: Tensor, ignore_index: int, with_gradient: bool) -> Tensor:
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    present = targets != ignore_index
    places = torch.where(present, targets, 0)[:, None]
    log_sums = values.logsumexp(-1, keepdim=True)
    losses = torch.where(present, (log_sums - values.gather(1, places)).squeeze(1), 0.0)
    if with_gradient:
        probabilities = torch.exp(values - log_sums)
        probabilities.scatter_add_(1, places, torch.full_like(log_sums, -1.0))
        logits.copy_(torch.where(present[:, None], probabilities, 0.0))
    return losses


def _softmax_triton(logits: Tensor, targets: Tensor, ignore_index: int, with_gradient: bool) -> Tensor:
    from deltalatent.kernels.linear_cross_entropy.triton_kernels import softmax_cross_entropy

    return softmax_cross_entropy(logits, targets, ignore_index, with_gradient)


# The losses [N] of a chunk in float32; `logits` [N, V] become their gradient.
SOFTMAX = {"torch": _softmax_torch, "triton": _softmax_triton}


def _loss_and_gradients(
    impl: str,
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_size: int,
    needs_dhidden: bool,
    needs_dweight: bool,
) -> list[Tensor]:
    """Sum of the losses; its gradients [N, D] in the dtype of the inputs, and [V, D] in that of the sum."""
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=hidden_states.device)
    dhidden = torch.empty_like(hidden_states) if needs_dhidden else total.new_empty(0)
    dweight = total.new_zeros(weight.shape if needs_dweight else 0)
    with float32_autocast_disabled(hidden_states.device):
        for start in range(0, hidden_states.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = hidden_states[chunk] @ weight.T
            losses = SOFTMAX[impl](logits, targets[chunk], ignore_index, needs_dhidden or needs_dweight)
            total += losses.sum()
            if needs_dhidden:
                torch.mm(logits, weight, out=dhidden[chunk])
            if needs_dweight:
                _add_product(dweight, logits.T, hidden_states[chunk])
    return [total, dhidden, dweight]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b` in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Saved: the gradients of the sum, [N, D] and [V, D]; absent ones are empty."""

    @staticmethod
    def forward(ctx, impl, hidden_states, weight, targets, ignore_index, chunk_size):
        needs = ctx.needs_input_grad[1:3]
        with torch.no_grad():
            total, *grads = _loss_and_gradients(impl, hidden_states, weight, targets, ignore_index, chunk_size, *needs)
        ctx.save_for_backward(*grads)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal):
        dhidden, dweight = _scaled(ctx.saved_tensors, dtotal, ctx.dtype, ctx.needs_input_grad[1:3])
        return None, dhidden, dweight, None, None, None


def _scaled(grads, factor: Tensor, dtype: torch.dtype, needs) -> list[Tensor | None]:
    """Gradients times a number, each rounded once more; out of place, because the graph may be walked again."""
    scaled: list[Tensor | None] = []
    for grad, is_needed in zip(grads, needs, strict=True):
        if is_needed:
            scaled.append(torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype)))
        else:
            scaled.append(None)
    return scaled


linear_cross_entropy_op = torch.library.custom_op(
    "deltalatent::linear_cross_entropy", _loss_and_gradients, mutates_args=()
)


@linear_cross_entropy_op.register_fake
def _(impl, hidden_states, weight, targets, ignore_index, chunk_size, needs_dhidden, needs_dweight):
    total = hidden_states.new_empty((), dtype=torch.promote_types(hidden_states.dtype, torch.float32))
    dhidden = torch.empty_like(hidden_states) if needs_dhidden else total.new_empty(0)
    return [total, dhidden, total.new_empty(weight.shape if needs_dweight else 0)]


def _op_setup_context(ctx, inputs, output):
    ctx.needs = inputs[-2:]
    ctx.dtype = inputs[2].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _op_backward(ctx, grads):
    dhidden, dweight = (
        (grad * grads[0]).to(ctx.dtype) if is_needed else None
        for grad, is_needed in zip(ctx.saved_tensors, ctx.needs, strict=True)
    )
    return None, dhidden, dweight, None, None, None, None, None


linear_cross_entropy_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def chunked_loss(
    impl: str, hidden_states: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_size: int
) -> Tensor:
    """Sum of the losses of N tokens; differentiable in `hidden_states` [N, D] and `weight` [V, D], once."""
    if torch.compiler.is_compiling():
        is_enabled = torch.is_grad_enabled()
        needs = (is_enabled and hidden_states.requires_grad, is_enabled and weight.requires_grad)
        return linear_cross_entropy_op(impl, hidden_states, weight, targets, ignore_index, chunk_size, *needs)[0]
    if torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad):
        return LinearCrossEntropyFunction.apply(impl, hidden_states, weight, targets, ignore_index, chunk_size)
    return _loss_and_gradients(impl, hidden_states, weight, targets, ignore_index, chunk_size, False, False)[0]

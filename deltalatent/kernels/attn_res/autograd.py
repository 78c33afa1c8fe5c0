# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Depth mixing with its gradients: one function for both implementations, and operators for `torch.compile`.

Saved for backward: the sources [..., D], which the residual network keeps alive anyway, the weights [D], and two
float32 numbers per token and source. Mix and norm are made again.

Eager calls go through an `autograd.Function`, which costs the host a fraction of what a custom operator with autograd
does. It can also return the sources, for later mixes to read: what these contribute to the gradient of a source then
arrives here and is added by the kernel that makes this mix's share, where autograd would pass over memory once more
for every reader. Under `torch.compile` sources are not passed on, and the Triton launches are the opaque operators

| operator | results |
| --- | --- |
| `deltalatent::attn_res(sources, query, key_weight, norm_weight, eps, norm_eps)` | output, stats |
| `deltalatent::attn_res_backward(..., stats, doutput, norm_eps)` | dsources + dquery (+ dkey, dnorm) |

and the PyTorch form is traced and differentiated by PyTorch. (Version 2.11 traces the function to wrong gradients.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalatent.kernels.attn_res.reference import (
    attention_residual_mix_backward_reference,
    attention_residual_mix_reference,
)
from deltalatent.kernels.autocast import float32_autocast_disabled


def _triton_forward(
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
) -> list[Tensor]:
    from deltalatent.kernels.attn_res.triton_kernels import attn_res_forward

    sources, weights = _contiguous(sources), _contiguous([query, key_weight, norm_weight])
    return attn_res_forward(sources, *weights, eps, norm_eps, save)


def _triton_backward(
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    stats: Tensor,
    doutput: Tensor,
    arriving: list[Tensor | None],
    norm_eps: float,
) -> list[Tensor]:
    from deltalatent.kernels.attn_res.triton_kernels import attn_res_backward

    sources, weights = _contiguous(sources), _contiguous([query, key_weight, norm_weight])
    return attn_res_backward(sources, *weights, stats, doutput.contiguous(), _contiguous(arriving), norm_eps)


def _contiguous(tensors: list) -> list:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _torch_forward(
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
) -> list[Tensor]:
    with float32_autocast_disabled(query.device):
        output, stats = attention_residual_mix_reference(sources, query, key_weight, norm_weight, eps, norm_eps)
    return [output, stats] if save else [output]


def _torch_backward(
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    stats: Tensor,
    doutput: Tensor,
    arriving: list[Tensor | None],
    norm_eps: float,
) -> list[Tensor]:
    with float32_autocast_disabled(query.device):
        return attention_residual_mix_backward_reference(
            sources, query, key_weight, norm_weight, stats, doutput, arriving, norm_eps
        )


FORWARD = {"triton": _triton_forward, "torch": _torch_forward}
BACKWARD = {"triton": _triton_backward, "torch": _torch_backward}


class AttentionResidualFunction(torch.autograd.Function):
    """Saved: sources [..., D], query and the other weights [D], stats [2 S + 1, ...]."""

    @staticmethod
    def forward(ctx, impl, eps, norm_eps, pass_on, query, key_weight, norm_weight, *sources):
        output, stats = FORWARD[impl](list(sources), query, key_weight, norm_weight, eps, norm_eps, True)
        ctx.impl, ctx.norm_eps = impl, norm_eps
        ctx.save_for_backward(query, key_weight, norm_weight, stats, *sources)
        ctx.set_materialize_grads(False)
        return (output, *sources) if pass_on else output

    @staticmethod
    @once_differentiable
    def backward(ctx, doutput, *arriving):
        query, key_weight, norm_weight, stats, *sources = ctx.saved_tensors
        later = list(arriving) or [None] * len(sources)
        if doutput is None:  # nothing depends on the mix
            return None, None, None, None, None, None, None, *later
        grads = BACKWARD[ctx.impl](sources, query, key_weight, norm_weight, stats, doutput, later, ctx.norm_eps)
        return None, None, None, None, *_in_order(grads, len(sources), key_weight, norm_weight)


def _in_order(grads: list[Tensor], count: int, key_weight: Tensor | None, norm_weight: Tensor | None) -> list:
    """Gradients of query, key_weight, norm_weight (None for an absent one) and of the sources."""
    weights = iter(grads[count:])
    present = (True, key_weight is not None, norm_weight is not None)
    return [next(weights) if is_present else None for is_present in present] + grads[:count]


@torch.library.custom_op("deltalatent::attn_res", mutates_args=())
def attn_res_op(
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
) -> list[Tensor]:
    return _triton_forward(sources, query, key_weight, norm_weight, eps, norm_eps, True)


@torch.library.custom_op("deltalatent::attn_res_backward", mutates_args=())
def attn_res_backward_op(
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    stats: Tensor,
    doutput: Tensor,
    norm_eps: float,
) -> list[Tensor]:
    nothing = [None] * len(sources)
    return _triton_backward(sources, query, key_weight, norm_weight, stats, doutput, nothing, norm_eps)


@attn_res_op.register_fake
def _(sources, query, key_weight, norm_weight, eps, norm_eps):
    rows = sources[0].numel() // query.shape[0]
    return [_fresh(sources[0]), sources[0].new_empty(2 * len(sources) + 1, rows, dtype=torch.float32)]


@attn_res_backward_op.register_fake
def _(sources, query, key_weight, norm_weight, stats, doutput, norm_eps):
    weights = [weight for weight in (query, key_weight, norm_weight) if weight is not None]
    return [_fresh(tensor) for tensor in (*sources, *weights)]


def _fresh(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _op_setup_context(ctx, inputs, output):
    sources, query, key_weight, norm_weight, _, ctx.norm_eps = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key_weight, norm_weight, output[1], *sources)


def _op_backward(ctx, grads):
    query, key_weight, norm_weight, stats, *sources = ctx.saved_tensors
    results = attn_res_backward_op(sources, query, key_weight, norm_weight, stats, grads[0], ctx.norm_eps)
    weights = _in_order(results, len(sources), key_weight, norm_weight)[:3]
    return results[: len(sources)], *weights, None, None


attn_res_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def attn_res(
    impl: str,
    sources: list[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    pass_on: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The mix [..., D] by the named implementation, and the sources for later mixes; differentiable, once."""
    if torch.compiler.is_compiling():
        if impl == "triton":
            return attn_res_op(sources, query, key_weight, norm_weight, eps, norm_eps)[0], sources
        return _torch_forward(sources, query, key_weight, norm_weight, eps, norm_eps, False)[0], sources
    tensors = (query, key_weight, norm_weight, *sources)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        results = AttentionResidualFunction.apply(
            impl, eps, norm_eps, pass_on, query, key_weight, norm_weight, *sources
        )
        if not pass_on:
            return results, sources
        output, *passed = results
        return output, [new if old.requires_grad else old for old, new in zip(sources, passed, strict=True)]
    return FORWARD[impl](sources, query, key_weight, norm_weight, eps, norm_eps, False)[0], sources

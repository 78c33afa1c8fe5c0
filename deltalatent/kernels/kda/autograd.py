# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked KDA in Triton with its gradients, for eager calls and for `torch.compile`.

Eager calls go through an `autograd.Function`, which costs the host a fraction of what a custom operator with autograd
does. Under `torch.compile` the same launches are opaque operators with shapes and gradients registered:

| operator | result |
| --- | --- |
| `deltalatent::kda_chunk` | o [B, T, HV, V], and the final states [N, HV, K, V] if asked for |
| `deltalatent::kda_chunk_backward` | one gradient per tensor input, that of `initial_state` if there is one |

Saved for backward: the raw inputs and o; everything else is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate_lower_bound: float | None,
    scale: float,
    output_final_state: bool,
) -> list[Tensor]:
    from deltalatent.kernels.kda.triton_fwd import chunk_forward

    inputs = _contiguous(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    o, final_state = chunk_forward(*inputs, gate_lower_bound, scale, output_final_state)
    return [o] if final_state is None else [o, final_state]


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate_lower_bound: float | None,
    scale: float,
    o: Tensor,
    do: Tensor,
    final_state_grad: Tensor | None,
) -> list[Tensor]:
    from deltalatent.kernels.kda.triton_bwd import chunk_backward

    inputs = _contiguous(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    grads = chunk_backward(*inputs, gate_lower_bound, scale, *_contiguous(o, do, final_state_grad))
    return [x for x in grads if x is not None]


def _input_gradients(ctx, run, do: Tensor | None, final_state_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Gradients of all twelve arguments of `_forward`, by `_backward` or its operator."""
    *tensors, o = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    grads = run(*tensors, *ctx.options, o, do, final_state_grad)
    return *grads, *[None] * (12 - len(grads))  # none for the initial state if there is none; it is the eighth


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, gate_lower_bound, scale, _ = inputs
    ctx.options = (gate_lower_bound, scale)
    # Absent gradients arrive as None, so that an unused final state costs nothing.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[0])


class KDAChunkFunction(torch.autograd.Function):
    """Saved: q, k [B, T, H, K], v and o [B, T, HV, V], g [B, T, HV, K], beta, A_log, dt_bias, state, `cu_seqlens`."""

    @staticmethod
    def forward(ctx, *inputs):
        outputs = _forward(*inputs)
        _save_for_backward(ctx, inputs, outputs)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _input_gradients(ctx, _backward, *grads)


kda_chunk_op = torch.library.custom_op("deltalatent::kda_chunk", _forward, mutates_args=())
kda_chunk_backward_op = torch.library.custom_op("deltalatent::kda_chunk_backward", _backward, mutates_args=())


@kda_chunk_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, gate_lower_bound, scale, output_final_state):
    num_documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_shape = (num_documents, v.shape[2], k.shape[3], v.shape[3])
    final = [torch.empty(state_shape, dtype=torch.float32, device=v.device)] if output_final_state else []
    return [_empty(v), *final]


@kda_chunk_backward_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, gate_lower_bound, scale, o, do, final_state_grad):
    return [_empty(x) for x in (q, k, v, g, beta, A_log, dt_bias, initial_state) if x is not None]


def _op_backward(ctx, grads):
    return _input_gradients(ctx, kda_chunk_backward_op, *grads)


kda_chunk_op.register_autograd(_op_backward, setup_context=_save_for_backward)


def kda_chunk(
    tensors: tuple[Tensor | None, ...], gate_lower_bound: float | None, scale: float, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] and the final states [N, HV, K, V] or None; see `api.kda_chunk`.

    `tensors`: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens; differentiable in all but the last.
    """
    run: Callable[..., Any]
    if torch.compiler.is_compiling():
        run = kda_chunk_op
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        run = KDAChunkFunction.apply
    else:
        run = _forward
    o, *final_state = run(*tensors, gate_lower_bound, scale, output_final_state)
    return o, final_state[0] if final_state else None

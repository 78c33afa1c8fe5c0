# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked KDA in Triton as PyTorch operators: opaque to `torch.compile`, with shapes and gradients registered.

| operator | result | saved for backward |
| --- | --- | --- |
| `deltalatent::kda_chunk` | o [B, T, HV, V], and the final states [N, HV, K, V] if asked for | the raw inputs only |
| `deltalatent::kda_chunk_backward` | one gradient per tensor input, that of `initial_state` if there is one | - |
"""

from __future__ import annotations

import torch


def _contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("deltalatent::kda_chunk", mutates_args=())
def kda_chunk_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    gate_lower_bound: float,
    scale: float,
    output_final_state: bool,
) -> list[torch.Tensor]:
    from deltalatent.kernels.kda.triton_fwd import chunk_forward

    inputs = _contiguous(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    o, final_state = chunk_forward(*inputs, gate_lower_bound, scale, output_final_state)
    return [o] if final_state is None else [o, final_state]


@kda_chunk_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, gate_lower_bound, scale, output_final_state):
    num_documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_shape = (num_documents, v.shape[2], k.shape[3], v.shape[3])
    final = [torch.empty(state_shape, dtype=torch.float32, device=v.device)] if output_final_state else []
    return [_empty(v), *final]


@torch.library.custom_op("deltalatent::kda_chunk_backward", mutates_args=())
def kda_chunk_backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    gate_lower_bound: float,
    scale: float,
    o: torch.Tensor,
    do: torch.Tensor,
    final_state_grad: torch.Tensor | None,
) -> list[torch.Tensor]:
    from deltalatent.kernels.kda.triton_bwd import chunk_backward

    inputs = _contiguous(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    grads = chunk_backward(*inputs, gate_lower_bound, scale, *_contiguous(o, do, final_state_grad))
    return [x for x in grads if x is not None]


@kda_chunk_backward_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, gate_lower_bound, scale, o, do, final_state_grad):
    return [_empty(x) for x in (q, k, v, g, beta, A_log, dt_bias, initial_state) if x is not None]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.gate_lower_bound, ctx.scale, _ = inputs
    # Absent gradients arrive as None, so that an unused final state costs nothing.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[0])


def _backward(ctx, grads):
    do, final_state_grad = grads[0], (grads[1] if len(grads) > 1 else None)
    if do is None:
        do = torch.zeros_like(ctx.saved_tensors[2])
    *tensors, o = ctx.saved_tensors
    *inputs, initial_state, _ = tensors
    results = kda_chunk_backward_op(*tensors, ctx.gate_lower_bound, ctx.scale, o, do, final_state_grad)
    state_grad = None if initial_state is None else results[len(inputs)]
    return *results[: len(inputs)], state_grad, None, None, None, None


kda_chunk_op.register_autograd(_backward, setup_context=_setup_context)

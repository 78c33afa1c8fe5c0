# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Backward kernels of chunked KDA with the bounded gate, and their launcher.

Nothing but the raw inputs is kept from the forward. With u the corrected values, M = (I + A)^-1 diag(b), S the state
before a chunk and dS' the gradient of the state behind it:

1. `prepare` and `scan` of `triton_fwd.py` again, the latter for S and u of every chunk.
2. `reverse_scan`, one program per document, head and block of value columns, walks backwards over the chunks:

       du = qk^T do + k_out dS';      dS = diag(2^G_end) dS' + q_in^T do - w^T du

3. `grad`, one program per chunk and head, turns these into the gradients of the raw inputs. As u = M (v - k_in S),

       dv = M^T du;   dk_in = -dv S^T;   d(kk)_ij = -dv_i . u_j (j < i);   d(beta)_i = (1 - b_i) / b_i dv_i . u_i

   and the decay enters only as x_i 2^(G_i) and y_j 2^(-G_j), whose derivatives by G are x dx and -y dy.

Every gradient is written by one program, sums over programs are made by a reduction of fixed order: results are
deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltalatent.kernels.kda.triton_fwd import (
    LOG2E,
    Chunks,
    Config,
    choose_config,
    chunk_span,
    document_span,
    l2_scale,
    list_chunks,
    prepare,
    scan,
    shared_memory_of,
    sigmoid,
    tile_decay,
    zero_slack,
)


@triton.jit
def reverse_scan_kernel(
    w_ptr,
    q_in_ptr,
    k_out_ptr,
    qk_ptr,
    decay_ptr,
    do_ptr,
    final_grad_ptr,
    initial_grad_ptr,
    du_ptr,
    state_grad_ptr,
    cu_ptr,
    first_ptr,
    T,
    per_row,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_FINAL_GRAD: tl.constexpr,
    STORE_INITIAL_GRAD: tl.constexpr,
    PACKED: tl.constexpr,
):
    """du [T, HV, V] and the gradients [chunk, HV, VP, BK] of the states behind the chunks of one document."""
    i_v = tl.program_id(0)
    i_n = tl.program_id(1) // HV
    i_h = tl.program_id(1) % HV
    start, end, num_chunks, first = document_span(i_n, cu_ptr, first_ptr, T, per_row, C, PACKED)
    dtype = w_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = tl.arange(0, BK)
    v_cols = i_v * BV + tl.arange(0, BV)
    state_at = (i_n * HV + i_h).to(tl.int64) * K * V + cols[None, :] * V + v_cols[:, None]
    state_mask = (cols < K)[None, :] & (v_cols < V)[:, None]
    dS = tl.zeros((BV, BK), dtype=tl.float32)
    if HAS_FINAL_GRAD:
        dS += tl.load(final_grad_ptr + state_at, mask=state_mask, other=0.0).to(tl.float32)

    for step in range(num_chunks):
        i = num_chunks - 1 - step
        at = (first + i) * HV + i_h
        wide = at * C * BK + rows[:, None] * BK + cols[None, :]
        token = start + i * C + rows
        do_at = (token * HV + i_h)[:, None] * V + v_cols[None, :]
        do_mask = (token < end)[:, None] & (v_cols < V)[None, :]
        do = tl.trans(tl.load(do_ptr + do_at, mask=do_mask, other=0.0).to(dtype))
        qk = tl.load(qk_ptr + at * C * C + rows[:, None] * C + rows[None, :])
        k_out = tl.load(k_out_ptr + wide)
        q_in = tl.load(q_in_ptr + wide)
        w = tl.load(w_ptr + wide)
        decay = tl.load(decay_ptr + at * BK + cols)
        dS_low = dS.to(dtype)
        tl.store(state_grad_ptr + at * VP * BK + v_cols[:, None] * BK + cols[None, :], dS_low)
        du = tl.dot(do, qk, input_precision=PRECISION)
        du = tl.dot(dS_low, tl.trans(k_out), du, input_precision=PRECISION)
        tl.store(du_ptr + (token * HV + i_h)[None, :] * V + v_cols[:, None], du, mask=tl.trans(do_mask))
        dS = tl.dot(do, q_in, dS * decay[None, :], input_precision=PRECISION)
        dS = tl.dot((-du).to(dtype), w, dS, input_precision=PRECISION)

    if STORE_INITIAL_GRAD:
        tl.store(initial_grad_ptr + state_at, dS, mask=state_mask)


@triton.jit
def grad_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    u_ptr,
    inverse_ptr,
    state_ptr,
    state_grad_ptr,
    do_ptr,
    dv_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    dt_bias_grad_ptr,
    A_log_grad_ptr,
    cu_ptr,
    document_ptr,
    position_ptr,
    T,
    per_row,
    lower_bits,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    BK: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of the raw inputs of one chunk and head; `dv_ptr` holds du and receives dv.

    dq, dk: [T, HV, K], one per value head. Sums over the chunk go to dt_bias_grad [chunk, HV, BK] and
    A_log_grad [chunk, HV].
    """
    i_c = tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    start, end = chunk_span(i_c, cu_ptr, document_ptr, position_ptr, T, per_row, C, PACKED)
    if start >= end:
        return
    dtype = u_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = tl.arange(0, BK)
    token = start + rows
    inside = token < end
    at = (i_c * HV + i_h).to(tl.int64)
    i = rows[:, None]
    j = rows[None, :]

    M_t = tl.trans(tl.load(inverse_ptr + at * C * C + i * C + j))
    dq = tl.zeros((C, BK), dtype=tl.float32)
    dk_in = tl.zeros((C, BK), dtype=tl.float32)
    dk_out = tl.zeros((C, BK), dtype=tl.float32)
    dqk = tl.zeros((C, C), dtype=tl.float32)
    dkk = tl.zeros((C, C), dtype=tl.float32)
    dbeta = tl.zeros((C,), dtype=tl.float32)
    dtotal = tl.zeros((BK,), dtype=tl.float32)
    for first_v in range(0, VP, BV):
        v_cols = first_v + tl.arange(0, BV)
        v_at = (token * HV + i_h)[:, None] * V + v_cols[None, :]
        v_mask = inside[:, None] & (v_cols < V)[None, :]
        do = tl.load(do_ptr + v_at, mask=v_mask, other=0.0).to(dtype)
        du = tl.load(dv_ptr + v_at, mask=v_mask, other=0.0).to(dtype)
        u = tl.load(u_ptr + at * C * VP + rows[:, None] * VP + v_cols[None, :])
        S = tl.load(state_ptr + at * VP * BK + v_cols[:, None] * BK + cols[None, :])
        dS = tl.load(state_grad_ptr + at * VP * BK + v_cols[:, None] * BK + cols[None, :])
        dv = tl.dot(M_t, du, input_precision=PRECISION)
        tl.store(dv_ptr + v_at, dv, mask=v_mask)
        dbeta += tl.sum(dv * u.to(tl.float32), 1)
        dtotal += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        minus_dv = (-dv).to(dtype)
        dq = tl.dot(do, S, dq, input_precision=PRECISION)
        dk_in = tl.dot(minus_dv, S, dk_in, input_precision=PRECISION)
        dk_out = tl.dot(u, dS, dk_out, input_precision=PRECISION)
        dqk = tl.dot(do, tl.trans(u), dqk, input_precision=PRECISION)
        dkk = tl.dot(minus_dv, tl.trans(u), dkk, input_precision=PRECISION)

    b = sigmoid(tl.load(beta_ptr + token * HV + i_h, mask=inside, other=0.0).to(tl.float32))
    # dv carries the factor b; where b underflows to zero so does the gradient.
    tl.store(dbeta_ptr + token * HV + i_h, tl.where(b > 0, dbeta * (1.0 - b) / b, 0.0), mask=inside)

    mask = inside[:, None] & (cols < K)[None, :]
    key_at = (token * H + i_h // (HV // H))[:, None] * K + cols[None, :]
    gate_at = (token * HV + i_h)[:, None] * K + cols[None, :]
    raw = tl.load(g_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias_ptr + i_h * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + i_h).to(tl.float32))
    z = rate * (raw + bias[None, :])
    g = tl.where(mask, lower_bits * sigmoid(z), 0.0)
    up, down, across, into, out_of, total = tile_decay(g, rows, C, L, BK, CENTRE)
    q_raw = tl.load(q_ptr + key_at, mask=mask, other=0.0).to(tl.float32)
    q_scale = l2_scale(q_raw)
    q = q_raw * (q_scale * scale)[:, None]
    k_raw = tl.load(k_ptr + key_at, mask=mask, other=0.0).to(tl.float32)
    k_scale = l2_scale(k_raw)
    k = k_raw * k_scale[:, None]
    k_down = (k * down).to(dtype)
    k_across = (k * across).to(dtype)
    q_up = (q * up).to(dtype)
    k_up = (k * up).to(dtype)

    # Factors inside a tile reach 2^(CENTRE + 1): scale the gradients of the products to at most 1 before they meet.
    dqk = tl.where(i >= j, dqk, 0.0)
    dkk = tl.where(i > j, dkk, 0.0)
    largest = tl.maximum(tl.max(tl.abs(dqk)), tl.max(tl.abs(dkk)))
    shrink = tl.where(largest > 1.0, 1.0 / largest, 1.0)
    grow = tl.where(largest > 1.0, largest, 1.0)
    same = (i // L) == (j // L)
    dqk_in = tl.where(same, dqk * shrink, 0.0).to(dtype)
    dqk_x = tl.where(same, 0.0, dqk * shrink).to(dtype)
    dkk_in = tl.where(same, dkk * shrink, 0.0).to(dtype)
    dkk_x = tl.where(same, 0.0, dkk * shrink).to(dtype)

    near = tl.dot(dqk_in, k_down, input_precision=PRECISION)
    near = tl.dot(dqk_x, k_across, near, input_precision=PRECISION)
    dq = dq * into + near * up * grow
    near = tl.dot(dkk_in, k_down, input_precision=PRECISION)
    near = tl.dot(dkk_x, k_across, near, input_precision=PRECISION)
    dk_row = dk_in * into + near * up * grow
    near = tl.dot(tl.trans(dqk_in), q_up, input_precision=PRECISION)
    near = tl.dot(tl.trans(dkk_in), k_up, near, input_precision=PRECISION)
    far = tl.dot(tl.trans(dqk_x), q_up, input_precision=PRECISION)
    far = tl.dot(tl.trans(dkk_x), k_up, far, input_precision=PRECISION)
    dk_out = dk_out * out_of
    dk_col = dk_out + (near * down + far * across) * grow

    dG = q * dq + k * (dk_row - dk_col)
    dtotal = dtotal * total + tl.sum(k * dk_out, 0)
    dg = tl.cumsum(dG, 0, reverse=True) + dtotal[None, :]
    # 1 - sigmoid(z) as sigmoid(-z), exact where the gate saturates; g is in bits, its gradient in natural units.
    dz = tl.where(mask, dg * (g * 0.6931471805599453) * sigmoid(-z), 0.0)
    tl.store(dg_ptr + gate_at, dz * rate, mask=mask)
    tl.store(dt_bias_grad_ptr + at * BK + cols, tl.sum(dz, 0) * rate)
    tl.store(A_log_grad_ptr + at, tl.sum(tl.sum(dz * z, 1), 0))

    dq *= scale
    q = q_raw * q_scale[:, None]
    dq = (dq - q * tl.sum(q * dq, 1)[:, None]) * q_scale[:, None]
    dk = dk_row + dk_col
    dk = (dk - k * tl.sum(k * dk, 1)[:, None]) * k_scale[:, None]
    tl.store(dq_ptr + gate_at, dq, mask=mask)
    tl.store(dk_ptr + gate_at, dk, mask=mask)


def reverse_scan(
    buffers: dict[str, torch.Tensor],
    do: torch.Tensor,
    final_state_grad: torch.Tensor | None,
    initial_state_grad: torch.Tensor | None,
    du: torch.Tensor,
    state_grads: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    config: Config,
    K: int,
) -> None:
    """Launch `reverse_scan_kernel`."""
    T, HV, V = do.shape[1:]
    if chunks.num_documents == 0:
        return
    reverse_scan_kernel[(triton.cdiv(V, config.BV), chunks.num_documents * HV)](
        buffers["w"],
        buffers["q_in"],
        buffers["k_out"],
        buffers["qk"],
        buffers["decay"],
        do,
        final_state_grad,
        initial_state_grad,
        du,
        state_grads,
        cu_seqlens,
        chunks.first,
        T,
        chunks.per_row,
        HV=HV,
        K=K,
        V=V,
        C=config.C,
        BK=config.BK,
        VP=config.VP,
        BV=config.BV,
        PRECISION=config.precision,
        HAS_FINAL_GRAD=final_state_grad is not None,
        STORE_INITIAL_GRAD=initial_state_grad is not None,
        PACKED=cu_seqlens is not None,
        num_warps=config.scan_warps,
        num_stages=config.scan_stages,
    )


def chunk_backward(
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
    do: torch.Tensor,
    final_state_grad: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of (q, k, v, g, beta, A_log, dt_bias, initial_state), each in the dtype of its input.

    All tensors are contiguous. do: [B, T, HV, V] in the dtype of v; final_state_grad: [N, HV, K, V] fp32 or None for zero.
    """
    B, T, HV, V = v.shape
    H, K = q.shape[2:]
    config = choose_config(K, V, v.dtype, gate_lower_bound, shared_memory_of(q.device))
    chunks = list_chunks(B, T, config.C, cu_seqlens)
    buffers = prepare(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, chunks, config, gate_lower_bound, scale, store_inverse=True
    )
    states = torch.empty(chunks.num, HV, config.VP, config.BK, device=q.device, dtype=config.compute)
    scan(buffers, initial_state, None, None, states, cu_seqlens, chunks, config, T, K, V)
    state_grads = torch.empty_like(states)
    dv = torch.empty_like(v)
    initial_state_grad = None if initial_state is None else torch.empty_like(initial_state)
    reverse_scan(buffers, do, final_state_grad, initial_state_grad, dv, state_grads, cu_seqlens, chunks, config, K)
    u, inverse = buffers["u"], buffers["inverse"]
    buffers.clear()  # their memory is that of the gradients below

    # With several value heads per key head the sum over these is taken in float32.
    shared = HV > H
    key_grad_dtype = torch.float32 if shared else q.dtype
    dq, dk = (torch.empty(B, T, HV, K, device=q.device, dtype=key_grad_dtype) for _ in range(2))
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    # Unused chunks of a packed row write nothing.
    partial = torch.empty if cu_seqlens is None else torch.zeros
    dt_bias_grad = partial(chunks.num, HV, config.BK, device=q.device, dtype=torch.float32)
    A_log_grad = partial(chunks.num, HV, device=q.device, dtype=torch.float32)
    if chunks.num:
        grad_kernel[(chunks.num * HV,)](
            q,
            k,
            g,
            beta,
            A_log,
            dt_bias,
            u,
            inverse,
            states,
            state_grads,
            do,
            dv,
            dq,
            dk,
            dg,
            dbeta,
            dt_bias_grad,
            A_log_grad,
            cu_seqlens,
            chunks.documents,
            chunks.positions,
            T,
            chunks.per_row,
            gate_lower_bound * LOG2E,
            scale,
            H=H,
            HV=HV,
            K=K,
            V=V,
            C=config.C,
            L=config.L,
            BK=config.BK,
            VP=config.VP,
            BV=config.BV,
            CENTRE=config.centre,
            PRECISION=config.precision,
            PACKED=cu_seqlens is not None,
            num_warps=config.grad_warps,
            num_stages=1,
        )
    if cu_seqlens is not None:
        for x in (dq, dk, dv, dg, dbeta):
            zero_slack(x, cu_seqlens)
    if shared:
        dq, dk = (x.unflatten(2, (H, HV // H)).sum(3).to(q.dtype) for x in (dq, dk))
    dA_log = A_log_grad.sum(0).to(A_log.dtype).view(A_log.shape)
    ddt_bias = dt_bias_grad[:, :, :K].sum(0).to(dt_bias.dtype).reshape(dt_bias.shape)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, initial_state_grad

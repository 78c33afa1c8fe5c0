# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Backward kernels of chunked KDA with the bounded gate, and their launcher.

Nothing but the raw inputs is kept from the forward. With u the corrected values, M = (I + A)^-1 diag(b), S the state
before a chunk and dS' the gradient of the state behind it:

1. `prepare` and `scan` of `triton_fwd.py` again, the latter for S and u of every chunk.
2. `reverse_scan`, one program per document, head and block of value columns, walks backwards over the chunks:

       du = qk^T do + k_out dS';      dS = diag(2^G_end) dS' + q_in^T do - w^T du

3. `state_grad` and `input_grad`, one program per chunk and head, turn these into the gradients of the raw inputs. As
   u = M (v - k_in S),

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
    register_limit,
    scan,
    shared_memory_of,
    sigmoid,
    sum_tokens,
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
    STAGES: tl.constexpr,
):
    """du [T, HV, V] and the gradients [chunk, HV, VP, BK] of the states behind the chunks of one document."""
    # Programs of one head are neighbours: they read the same keys. One axis, because only the first is long.
    value_blocks: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % value_blocks
    i_n = tl.program_id(0) // value_blocks // HV
    i_h = tl.program_id(0) // value_blocks % HV
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

    for step in tl.range(0, num_chunks, num_stages=STAGES):
        i = num_chunks - 1 - step
        at = (first + i) * HV + i_h
        wide = at * BK * C + cols[:, None] * C + rows[None, :]
        token = start + i * C + rows
        do_at = (token * HV + i_h)[:, None] * V + v_cols[None, :]
        do_mask = (token < end)[:, None] & (v_cols < V)[None, :]
        do_t = tl.trans(tl.load(do_ptr + do_at, mask=do_mask, other=0.0).to(dtype))
        qk_t = tl.load(qk_ptr + at * C * C + rows[:, None] * C + rows[None, :])
        k_out_t = tl.load(k_out_ptr + wide)
        q_in_t = tl.load(q_in_ptr + wide)
        w_t = tl.load(w_ptr + wide)
        decay = tl.load(decay_ptr + at * BK + cols)
        dS_low = dS.to(dtype)
        tl.store(state_grad_ptr + at * VP * BK + v_cols[:, None] * BK + cols[None, :], dS_low)
        du_t = tl.dot(do_t, tl.trans(qk_t), input_precision=PRECISION)
        du_t = tl.dot(dS_low, k_out_t, du_t, input_precision=PRECISION)
        tl.store(du_ptr + (token * HV + i_h)[None, :] * V + v_cols[:, None], du_t, mask=tl.trans(do_mask))
        dS = tl.dot(do_t, tl.trans(q_in_t), dS * decay[None, :], input_precision=PRECISION)
        dS = tl.dot((-du_t).to(dtype), tl.trans(w_t), dS, input_precision=PRECISION)

    if STORE_INITIAL_GRAD:
        tl.store(initial_grad_ptr + state_at, dS, mask=state_mask)


@triton.jit
def state_grad_kernel(
    beta_ptr,
    u_ptr,
    inverse_ptr,
    state_ptr,
    state_grad_ptr,
    do_ptr,
    dv_ptr,
    dq_in_ptr,
    dk_in_ptr,
    dk_out_ptr,
    dqk_ptr,
    dkk_ptr,
    dtotal_ptr,
    dbeta_ptr,
    cu_ptr,
    document_ptr,
    position_ptr,
    T,
    per_row,
    value_blocks,
    scale,
    HV: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """What a chunk and head owes to its values and states: dv (`dv_ptr` holds du and receives it) and dbeta; and, for
    `input_grad_kernel`, dq_in, dk_in, dk_out [chunk, HV, BK, C], dqk[j, i], dkk[j, i] [chunk, HV, C, C] and
    dtotal [chunk, HV, BK].
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

    M = tl.load(inverse_ptr + at * C * C + i * C + j)
    dq_t = tl.zeros((BK, C), dtype=tl.float32)
    dk_in_t = tl.zeros((BK, C), dtype=tl.float32)
    dk_out_t = tl.zeros((BK, C), dtype=tl.float32)
    dqk_t = tl.zeros((C, C), dtype=tl.float32)
    dkk_t = tl.zeros((C, C), dtype=tl.float32)
    dbeta = tl.zeros((C,), dtype=tl.float32)
    dtotal = tl.zeros((BK,), dtype=tl.float32)
    # The number of blocks is a run-time value to keep the loop a loop: unrolled, its loads would fill the registers.
    for block in range(value_blocks):
        v_cols = block * BV + tl.arange(0, BV)
        v_at = (token * HV + i_h)[:, None] * V + v_cols[None, :]
        v_mask = inside[:, None] & (v_cols < V)[None, :]
        do_t = tl.trans(tl.load(do_ptr + v_at, mask=v_mask, other=0.0).to(dtype))
        du_t = tl.trans(tl.load(dv_ptr + v_at, mask=v_mask, other=0.0).to(dtype))
        u_t = tl.load(u_ptr + at * VP * C + v_cols[:, None] * C + rows[None, :])
        S = tl.load(state_ptr + at * VP * BK + v_cols[:, None] * BK + cols[None, :])
        dS = tl.load(state_grad_ptr + at * VP * BK + v_cols[:, None] * BK + cols[None, :])
        dtotal += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
        dv_t = tl.dot(du_t, M, input_precision=PRECISION)
        tl.store(dv_ptr + tl.trans(v_at), dv_t, mask=tl.trans(v_mask))
        dbeta += tl.sum(dv_t * u_t.to(tl.float32), 0)
        minus_dv_t = (-dv_t).to(dtype)
        dq_t = tl.dot(tl.trans(S), do_t, dq_t, input_precision=PRECISION)
        dk_in_t = tl.dot(tl.trans(S), minus_dv_t, dk_in_t, input_precision=PRECISION)
        dk_out_t = tl.dot(tl.trans(dS), u_t, dk_out_t, input_precision=PRECISION)
        dqk_t = tl.dot(tl.trans(u_t), do_t, dqk_t, input_precision=PRECISION)
        dkk_t = tl.dot(tl.trans(u_t), minus_dv_t, dkk_t, input_precision=PRECISION)

    wide = at * BK * C + cols[:, None] * C + rows[None, :]
    tl.store(dq_in_ptr + wide, (dq_t * scale).to(dtype))
    tl.store(dk_in_ptr + wide, dk_in_t.to(dtype))
    tl.store(dk_out_ptr + wide, dk_out_t.to(dtype))
    square = at * C * C + i * C + j
    tl.store(dqk_ptr + square, tl.where(i <= j, dqk_t * scale, 0.0).to(dtype))
    tl.store(dkk_ptr + square, tl.where(i < j, dkk_t, 0.0).to(dtype))
    tl.store(dtotal_ptr + at * BK + cols, dtotal)
    b = sigmoid(tl.load(beta_ptr + token * HV + i_h, mask=inside, other=0.0).to(tl.float32))
    # dv carries the factor b; where b underflows to zero so does the gradient.
    tl.store(dbeta_ptr + token * HV + i_h, tl.where(b > 0, dbeta * (1.0 - b) / b, 0.0), mask=inside)


@triton.jit
def input_grad_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    A_log_ptr,
    dt_bias_ptr,
    dq_in_ptr,
    dk_in_ptr,
    dk_out_ptr,
    dqk_ptr,
    dkk_ptr,
    dtotal_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dt_bias_grad_ptr,
    A_log_grad_ptr,
    cu_ptr,
    document_ptr,
    position_ptr,
    T,
    per_row,
    lower_bits,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of the raw queries, keys and gates of one chunk and head: dq, dk and dg [T, HV, K].

    Sums over the chunk go to dt_bias_grad and A_log_grad, both [chunk, HV, BK].
    """
    i_c = tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    start, end = chunk_span(i_c, cu_ptr, document_ptr, position_ptr, T, per_row, C, PACKED)
    if start >= end:
        return
    dtype = dq_in_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = tl.arange(0, BK)
    token = start + rows
    inside = token < end
    at = (i_c * HV + i_h).to(tl.int64)
    i = rows[:, None]
    j = rows[None, :]
    mask = inside[:, None] & (cols < K)[None, :]
    key_at = (token * H + i_h // (HV // H))[:, None] * K + cols[None, :]
    gate_at = (token * HV + i_h)[:, None] * K + cols[None, :]
    wide = at * BK * C + cols[:, None] * C + rows[None, :]
    square = at * C * C + i * C + j

    bias = tl.load(dt_bias_ptr + i_h * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + i_h).to(tl.float32))
    z_t = rate * (tl.trans(tl.load(g_ptr + gate_at, mask=mask, other=0.0)).to(tl.float32) + bias[:, None])
    # e stays finite, so that sigmoid(-z) = e sigmoid(z) is exact where the gate saturates.
    e_t = tl.exp2(tl.minimum(-1.4426950408889634 * z_t, 126.0))
    root_t = tl.rsqrt(1.0 + e_t)
    g_t = tl.where((cols < K)[:, None] & inside[None, :], lower_bits * (root_t * root_t), 0.0)
    # Derivative of the log decay by z; g is in bits, its gradient in natural units.
    slope_t = g_t * (e_t * root_t * root_t * 0.6931471805599453)
    upto_t = sum_tokens(g_t, i <= j, EXACT)
    total = tl.sum(g_t, 1)
    up_t = tl.exp2(upto_t + CENTRE)
    down_t = tl.exp2(-upto_t - CENTRE)
    q = tl.load(q_ptr + key_at, mask=mask, other=0.0)
    q_norm = l2_scale(q.to(tl.float32))
    q_t = tl.trans(q).to(tl.float32) * q_norm[None, :]
    k = tl.load(k_ptr + key_at, mask=mask, other=0.0)
    k_norm = l2_scale(k.to(tl.float32))
    k_t = tl.trans(k).to(tl.float32) * k_norm[None, :]

    # Factors reach 2^(CENTRE + 1): scale the gradients of the products to at most 1 before they meet.
    dqk_t = tl.load(dqk_ptr + square).to(tl.float32)
    dkk_t = tl.load(dkk_ptr + square).to(tl.float32)
    largest = tl.maximum(tl.max(tl.max(tl.maximum(tl.abs(dqk_t), tl.abs(dkk_t)), 1), 0), 1.0)
    dqk_t = (dqk_t / largest).to(dtype)
    dkk_t = (dkk_t / largest).to(dtype)

    # A pair of tokens i >= j adds to the decay of i what it takes from that of j. The two cancel for tokens up to j,
    # but only if both are made of the same rounded factors; the rest would add up over a whole chunk.
    k_down_t = (k_t * down_t).to(dtype)
    q_up_t = (q_t * up_t).to(dtype)
    k_up_t = (k_t * up_t).to(dtype)
    near_t = tl.dot(k_down_t, dqk_t, input_precision=PRECISION) * largest
    far_t = up_t * (tl.load(dq_in_ptr + wide).to(tl.float32) * (2.0**-CENTRE))
    dq_t = far_t + up_t * near_t
    pairs_t = q_up_t.to(tl.float32) * near_t + q_t * far_t
    near_t = tl.dot(k_down_t, dkk_t, input_precision=PRECISION) * largest
    far_t = up_t * (tl.load(dk_in_ptr + wide).to(tl.float32) * (2.0**-CENTRE))
    dk_t = far_t + up_t * near_t
    pairs_t += k_up_t.to(tl.float32) * near_t + k_t * far_t
    near_t = tl.dot(q_up_t, tl.trans(dqk_t), input_precision=PRECISION)
    near_t = tl.dot(k_up_t, tl.trans(dkk_t), near_t, input_precision=PRECISION) * largest
    far_t = tl.load(dk_out_ptr + wide).to(tl.float32) * tl.exp2(total[:, None] - upto_t)
    dk_t += far_t + down_t * near_t
    pairs_t -= k_down_t.to(tl.float32) * near_t

    # x_i 2^G_i counts for the decay of every token up to i, y_j 2^-G_j against it, and y_j 2^(G_end - G_j) for every
    # token behind j.
    dg_t = sum_tokens(pairs_t, i >= j, EXACT)
    dg_t += sum_tokens(k_t * far_t, i < j, EXACT)
    dg_t += (tl.load(dtotal_ptr + at * BK + cols) * tl.exp2(total))[:, None]
    dz_t = dg_t * slope_t
    tl.store(dg_ptr + gate_at, tl.trans((dz_t * rate).to(dg_ptr.dtype.element_ty)), mask=mask)
    tl.store(dt_bias_grad_ptr + at * BK + cols, tl.sum(dz_t, 1) * rate)
    z_t = rate * (tl.trans(tl.load(g_ptr + gate_at, mask=mask, other=0.0)).to(tl.float32) + bias[:, None])
    tl.store(A_log_grad_ptr + at * BK + cols, tl.sum(dz_t * z_t, 1))

    dq_t = (dq_t - q_t * tl.sum(q_t * dq_t, 0)[None, :]) * q_norm[None, :]
    dk_t = (dk_t - k_t * tl.sum(k_t * dk_t, 0)[None, :]) * k_norm[None, :]
    tl.store(dq_ptr + gate_at, tl.trans(dq_t.to(dq_ptr.dtype.element_ty)), mask=mask)
    tl.store(dk_ptr + gate_at, tl.trans(dk_t.to(dk_ptr.dtype.element_ty)), mask=mask)


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
    reverse_scan_kernel[(chunks.num_documents * HV * triton.cdiv(V, config.BV),)](
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
        STAGES=config.scan_stages,
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

    All tensors are contiguous. do: [B, T, HV, V]; final_state_grad: [N, HV, K, V] fp32, or None for zero.
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

    # The buffers of the scans are free now and have the shapes of what the last two kernels exchange.
    dq_in, dk_in, dk_out, dqk = buffers["q_in"], buffers["w"], buffers["k_out"], buffers["qk"]
    dkk = torch.empty_like(dqk)
    dtotal = torch.empty_like(buffers["decay"])
    dbeta = torch.empty_like(beta)
    packing = (cu_seqlens, chunks.documents, chunks.positions, T, chunks.per_row)
    grid = (chunks.num * HV,)
    if chunks.num:
        state_grad_kernel[grid](
            beta,
            buffers["u"],
            buffers["inverse"],
            states,
            state_grads,
            do,
            dv,
            dq_in,
            dk_in,
            dk_out,
            dqk,
            dkk,
            dtotal,
            dbeta,
            *packing,
            config.VP // config.BV,
            scale,
            HV=HV,
            V=V,
            C=config.C,
            BK=config.BK,
            VP=config.VP,
            BV=config.BV,
            PRECISION=config.precision,
            PACKED=cu_seqlens is not None,
            num_warps=config.state_grad_warps,
            num_stages=1,
            **register_limit(config.state_grad_registers),
        )
    del states, state_grads
    buffers.clear()

    # With several value heads per key head the sum over these is taken in float32.
    shared = HV > H
    key_grad_dtype = torch.float32 if shared else q.dtype
    dq, dk = (torch.empty(B, T, HV, K, device=q.device, dtype=key_grad_dtype) for _ in range(2))
    dg = torch.empty_like(g)
    # Unused chunks of a packed row write nothing.
    partial = torch.empty if cu_seqlens is None else torch.zeros
    dt_bias_grad = partial(chunks.num, HV, config.BK, device=q.device, dtype=torch.float32)
    A_log_grad = partial(chunks.num, HV, config.BK, device=q.device, dtype=torch.float32)
    if chunks.num:
        input_grad_kernel[grid](
            q,
            k,
            g,
            A_log,
            dt_bias,
            dq_in,
            dk_in,
            dk_out,
            dqk,
            dkk,
            dtotal,
            dq,
            dk,
            dg,
            dt_bias_grad,
            A_log_grad,
            *packing,
            gate_lower_bound * LOG2E,
            H=H,
            HV=HV,
            K=K,
            C=config.C,
            BK=config.BK,
            CENTRE=config.centre,
            PRECISION=config.precision,
            EXACT=config.compute == torch.float32,
            PACKED=cu_seqlens is not None,
            num_warps=config.input_grad_warps,
            num_stages=1,
            **register_limit(config.input_grad_registers),
        )
    if cu_seqlens is not None:
        for x in (dq, dk, dv, dg, dbeta):
            zero_slack(x, cu_seqlens)
    if shared:
        dq, dk = (x.unflatten(2, (H, HV // H)).sum(3).to(q.dtype) for x in (dq, dk))
    dA_log = A_log_grad.sum((0, 2)).to(A_log.dtype).view(A_log.shape)
    ddt_bias = dt_bias_grad[:, :, :K].sum(0).to(dt_bias.dtype).reshape(dt_bias.shape)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, initial_state_grad

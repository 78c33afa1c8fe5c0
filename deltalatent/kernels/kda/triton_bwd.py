# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Backward kernels of chunked KDA, and their launcher.

Of the forward pass the raw inputs and the outputs are kept. With u the corrected values, M = (I + A)^-1 diag(b), S the
state before a chunk and dS' the gradient of the state behind it:

1. `prepare` and `scan` of `triton_fwd.py` again, the latter for S and u of every chunk.
2. `reverse_scan`, one program per document, head and block of value columns, walks backwards over the chunks:

       du = qk^T do + k_out dS';      dv = M^T du;      dS = diag(2^G_end) dS' + q_in^T do - k_in^T dv

   Documents are split as in the forward pass; the transitions are the transposed ones.
3. `pair_grad`, one program per chunk and head, takes products of values alone:

       d(qk)_ij = do_i . u_j (j <= i);   d(kk)_ij = -dv_i . u_j (j < i);   d(beta)_i = (1 - b_i) / b_i dv_i . u_i

4. `input_grad`, one program per chunk, head and block of channels, adds what comes through the states,

       dq_in = do S^T;   dk_in = -dv S^T;   dk_out = u dS'^T

   and turns all into the gradients of the raw inputs. The decay enters only as x_i 2^(G_i) and y_j 2^(-G_j), whose
   derivatives by G are x dx and -y dy. The normalisation needs the products q dq and k dk of whole rows; these are
   known without dq and dk, so that channels can be treated block by block: q_i dq_i = o_i do_i, because o is linear
   in q, and likewise k_i dk_i = 2 dv_i . u_i / b_i - dv_i . v_i, because a key is read for the prediction
   v_i - u_i / b_i and written with u_i.

Steps 2 to 4 take the chunks from last to first, some at a time, so that the gradients of the states stay small.
Every gradient is written by one program, sums over programs are made by a reduction of fixed order: results are
deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltalatent.kernels.kda.triton_fwd import (
    LOG2E,
    NO_DECAY,
    Chunks,
    Config,
    Segments,
    channels_first,
    choose_config,
    chunk_span,
    compose,
    cumulative_decay,
    list_chunks,
    list_segments,
    lowest_log_decay,
    prepare,
    scan,
    segment_span,
    sigmoid,
    softplus_gate,
    split_states,
    zero_slack,
)
from deltalatent.kernels.tiles import device_limits, on_its_device, register_limit


@triton.jit
def sum_tokens(x_t, chosen, EXACT: tl.constexpr):
    """Sums of x_t [channels, C] over the tokens j with chosen[j, i], for each token i; chosen [C, C].

    Two bfloat16 parts keep 16 bits of x, which is what bfloat16 inputs need; EXACT keeps float32.
    """
    if EXACT:
        sums = tl.dot(x_t, chosen.to(tl.float32), input_precision="ieee")
    else:
        ones = chosen.to(tl.bfloat16)
        high = (x_t.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        sums = tl.dot(high.to(tl.bfloat16), ones, tl.dot((x_t - high).to(tl.bfloat16), ones))
    return sums


@triton.jit(do_not_specialize=["first_chunk", "end_chunk"])
def reverse_scan_kernel(
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    qk_ptr,
    inverse_ptr,
    decay_ptr,
    do_ptr,
    final_grad_ptr,
    initial_grad_ptr,
    dv_ptr,
    state_grad_ptr,
    cu_ptr,
    first_ptr,
    segment_document_ptr,
    segment_first_ptr,
    T,
    per_row,
    length,
    segments_per_row,
    first_chunk,
    end_chunk,
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
    STORE: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dv [T, HV, V] and the gradients [chunk, HV, VP, BK] of the states behind the chunks of one
    segment, as far as they are between `first_chunk` and `end_chunk`, with which the latter begin.

    Without STORE only the gradient of the state before the segment."""
    # Programs of one head are neighbours: they read the same keys. One axis, because only the first is long.
    value_blocks: tl.constexpr = VP // BV
    i_v = tl.program_id(0) % value_blocks
    i_n = tl.program_id(0) // value_blocks // HV
    i_h = tl.program_id(0) // value_blocks % HV
    start, end, num_chunks, first = segment_span(
        i_n,
        cu_ptr,
        first_ptr,
        segment_document_ptr,
        segment_first_ptr,
        T,
        per_row,
        length,
        segments_per_row,
        C,
        PACKED,
        SPLIT,
    )
    last = tl.minimum(num_chunks, end_chunk - first).to(tl.int32)
    num_chunks = last - tl.maximum(first_chunk - first, 0).to(tl.int32)
    dtype = q_in_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = tl.arange(0, BK)
    v_cols = i_v * BV + tl.arange(0, BV)
    state_at = (i_n * HV + i_h).to(tl.int64) * K * V + cols[None, :] * V + v_cols[:, None]
    state_mask = (cols < K)[None, :] & (v_cols < V)[:, None]
    wide = cols[:, None] * C + rows[None, :]
    square = rows[:, None] * C + rows[None, :]
    do_at = rows[:, None] * (HV * V) + v_cols[None, :]
    dS = tl.zeros((BV, BK), dtype=tl.float32)
    if HAS_FINAL_GRAD:
        dS += tl.load(final_grad_ptr + state_at, mask=state_mask, other=0.0).to(tl.float32)

    for step in tl.range(0, num_chunks, num_stages=STAGES):
        i = last - 1 - step
        at = (first + i) * HV + i_h
        wide_start = at * BK * C
        square_start = at * C * C
        token = start + i * C
        do_start = (token * HV + i_h) * V
        do_mask = (token + rows < end)[:, None] & (v_cols < V)[None, :]
        do_t = tl.trans(tl.load(do_ptr + do_start + do_at, mask=do_mask, other=0.0).to(dtype))
        qk_t = tl.load(qk_ptr + square_start + square)
        k_out_t = tl.load(k_out_ptr + wide_start + wide)
        M = tl.load(inverse_ptr + square_start + square)
        q_in_t = tl.load(q_in_ptr + wide_start + wide)
        k_in_t = tl.load(k_in_ptr + wide_start + wide)
        decay = tl.load(decay_ptr + at * BK + cols)
        dS_low = dS.to(dtype)
        if STORE:
            grad_at = ((first + i - first_chunk) * HV + i_h) * VP * BK
            tl.store(state_grad_ptr + grad_at + (v_cols[:, None] * BK + cols[None, :]), dS_low)
        du_t = tl.dot(do_t, tl.trans(qk_t), input_precision=PRECISION)
        du_t = tl.dot(dS_low, k_out_t, du_t, input_precision=PRECISION).to(dtype)
        dS = tl.dot(do_t, tl.trans(q_in_t), dS * decay[None, :], input_precision=PRECISION)
        dv_t = tl.dot(du_t, M, input_precision=PRECISION).to(dtype)
        if STORE:
            tl.store(dv_ptr + do_start + tl.trans(do_at), dv_t, mask=tl.trans(do_mask))
        dS = tl.dot(dv_t, tl.trans(k_in_t), dS, input_precision=PRECISION)

    if STORE_INITIAL_GRAD:
        tl.store(initial_grad_ptr + state_at, dS, mask=state_mask)


@triton.jit(do_not_specialize=["first_chunk"])
def pair_grad_kernel(
    beta_ptr,
    u_ptr,
    v_ptr,
    o_ptr,
    do_ptr,
    dv_ptr,
    dqk_ptr,
    dkk_ptr,
    radial_ptr,
    unit_ptr,
    dbeta_ptr,
    cu_ptr,
    document_ptr,
    first_ptr,
    T,
    per_row,
    first_chunk,
    HV: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    VP: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """What needs the values of one chunk and head, but no state: dbeta, and, for `input_grad_kernel`, dqk[j, i] and
    dkk[j, i] [chunk, HV, C, C], and radial [chunk, HV, 2, C], the products q dq and k dk of each token.

    All gradients for that kernel are in units of a power of two, `unit` [chunk, HV], in which those of the pairs are
    about 1: there they meet factors of up to 2^+-116.
    """
    i_c = first_chunk + tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    start, end = chunk_span(i_c, cu_ptr, document_ptr, first_ptr, T, per_row, C, PACKED)
    if start >= end:
        return
    dtype = dqk_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    v_cols = tl.arange(0, VP)
    inside = start + rows < end
    at = (i_c * HV + i_h).to(tl.int64)
    i = rows[:, None]
    j = rows[None, :]
    v_start = (start * HV + i_h) * V
    v_at = rows[:, None] * (HV * V) + v_cols[None, :]
    v_mask = inside[:, None] & (v_cols < V)[None, :]
    do = tl.load(do_ptr + v_start + v_at, mask=v_mask, other=0.0)
    dv = tl.load(dv_ptr + v_start + v_at, mask=v_mask, other=0.0)
    v = tl.load(v_ptr + v_start + v_at, mask=v_mask, other=0.0)
    o = tl.load(o_ptr + v_start + v_at, mask=v_mask, other=0.0)
    u_t = tl.load(u_ptr + at * VP * C + (v_cols[:, None] * C + rows[None, :]))
    b = sigmoid(tl.load(beta_ptr + start * HV + i_h + rows * HV, mask=inside, other=0.0).to(tl.float32))

    dq_q = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    dv_v = tl.sum(dv.to(tl.float32) * v.to(tl.float32), 1)
    dqk = tl.dot(do.to(dtype), u_t, input_precision=PRECISION)
    dkk = tl.dot(dv.to(dtype), u_t, input_precision=PRECISION)
    # u and dv carry the factor b as rounded on the diagonal of M; where it underflows to zero so do they.
    b_low = b.to(dtype).to(tl.float32)
    dv_u = tl.sum(tl.where(i == j, dkk, 0.0), 1)
    dv_u = tl.where(b_low > 0, dv_u / b_low, 0.0)
    dbeta = tl.where(b_low > 0, dv_u * (b / b_low) * (1.0 - b), 0.0)
    tl.store(dbeta_ptr + start * HV + i_h + rows * HV, dbeta, mask=inside)
    # A token's key is read for its prediction v - u / b and written with u, whose whole gradient is dv / b.
    dqk = tl.where(i >= j, dqk, 0.0)
    dkk = tl.where(i > j, -dkk, 0.0)
    largest = tl.max(tl.max(tl.maximum(tl.abs(dqk), tl.abs(dkk)), 1), 0)
    unit = (tl.maximum(largest, 2.0**-60).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(unit_ptr + at, unit)
    inverse = 1.0 / unit
    square = j * C + i
    tl.store(dqk_ptr + at * C * C + square, (dqk * inverse).to(dtype))
    tl.store(dkk_ptr + at * C * C + square, (dkk * inverse).to(dtype))
    tl.store(radial_ptr + at * 2 * C + rows, dq_q * inverse)
    tl.store(radial_ptr + at * 2 * C + C + rows, (2.0 * dv_u - dv_v) * inverse)


# As a constant, a single block would not be a loop, and `ptxas` 12.8 makes a wrong descriptor of that code.
@triton.jit(do_not_specialize=["value_blocks", "first_chunk"])
def input_grad_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    state_ptr,
    state_grad_ptr,
    u_ptr,
    do_ptr,
    dv_ptr,
    dqk_ptr,
    dkk_ptr,
    radial_ptr,
    unit_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dt_bias_grad_ptr,
    A_log_grad_ptr,
    cu_ptr,
    document_ptr,
    first_ptr,
    T,
    per_row,
    first_chunk,
    value_blocks,
    lower_bound,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of BD channels of the raw queries, keys and gates of one chunk and head: dq, dk and dg [T, HV, K].

    Sums over the chunk go to dt_bias_grad and A_log_grad, both [chunk, HV, BK].
    """
    key_blocks: tl.constexpr = BK // BD
    i_k = tl.program_id(0) % key_blocks
    i_c = first_chunk + tl.program_id(0) // key_blocks // HV
    i_h = tl.program_id(0) // key_blocks % HV
    start, end = chunk_span(i_c, cu_ptr, document_ptr, first_ptr, T, per_row, C, PACKED)
    if start >= end:
        return
    dtype = u_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = i_k * BD + tl.arange(0, BD)
    inside = start + rows < end
    at = (i_c * HV + i_h).to(tl.int64)
    i = rows[:, None]
    j = rows[None, :]
    mask = inside[:, None] & (cols < K)[None, :]
    key_start = (start * H + i_h // (HV // H)) * K
    key_at = rows[:, None] * (H * K) + cols[None, :]
    gate_start = (start * HV + i_h) * K
    gate_at = rows[:, None] * (HV * K) + cols[None, :]

    # Through the states: d(q_in), -d(k_in), d(k_out), and on the diagonal of dtotal that of the decay of the chunk.
    dq_in_t = tl.zeros((BD, C), dtype=tl.float32)
    dk_in_t = tl.zeros((BD, C), dtype=tl.float32)
    dk_out_t = tl.zeros((BD, C), dtype=tl.float32)
    dtotal = tl.zeros((BD, BD), dtype=tl.float32)
    for block in tl.range(value_blocks, num_stages=STAGES):
        v_cols = block * BV + tl.arange(0, BV)
        v_start = (start * HV + i_h) * V
        v_at = rows[:, None] * (HV * V) + v_cols[None, :]
        v_mask = inside[:, None] & (v_cols < V)[None, :]
        state_at = v_cols[:, None] * BK + cols[None, :]
        S = tl.load(state_ptr + at * VP * BK + state_at)
        dS = tl.load(state_grad_ptr + (at - first_chunk.to(tl.int64) * HV) * VP * BK + state_at)
        do = tl.load(do_ptr + v_start + v_at, mask=v_mask, other=0.0).to(dtype)
        dv = tl.load(dv_ptr + v_start + v_at, mask=v_mask, other=0.0).to(dtype)
        u_t = tl.load(u_ptr + at * VP * C + (v_cols[:, None] * C + rows[None, :]))
        dtotal = tl.dot(tl.trans(S), dS, dtotal, input_precision=PRECISION)
        dq_in_t = tl.dot(tl.trans(S), tl.trans(do), dq_in_t, input_precision=PRECISION)
        dk_in_t = tl.dot(tl.trans(S), tl.trans(dv), dk_in_t, input_precision=PRECISION)
        dk_out_t = tl.dot(tl.trans(dS), u_t, dk_out_t, input_precision=PRECISION)
    channel = tl.arange(0, BD)
    dtotal = tl.sum(tl.where(channel[:, None] == channel[None, :], dtotal, 0.0), 1)

    g = tl.load(g_ptr + gate_start + gate_at, mask=mask, other=0.0)
    q = tl.load(q_ptr + key_start + key_at, mask=mask, other=0.0)
    k = tl.load(k_ptr + key_start + key_at, mask=mask, other=0.0)
    square = i * C + j
    dqk_t = tl.load(dqk_ptr + at * C * C + square)
    dkk_t = tl.load(dkk_ptr + at * C * C + square)
    q_norm = tl.load(norm_ptr + at * 2 * C + rows)
    k_norm = tl.load(norm_ptr + at * 2 * C + C + rows)
    dq_q = tl.load(radial_ptr + at * 2 * C + rows)
    dk_k = tl.load(radial_ptr + at * 2 * C + C + rows)
    unit = tl.load(unit_ptr + at)
    inverse = 1.0 / unit

    slope = tl.exp(tl.load(A_log_ptr + i_h).to(tl.float32)) * -1.4426950408889634
    bias = tl.load(dt_bias_ptr + i_h * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    # slope_t: derivative of the log decay by z = exp(A_log) (g + bias); g_t is in units of bits, its gradient in
    # natural ones.
    if SOFTPLUS:
        x_t = tl.where(inside[None, :], channels_first(g, i, j, EXACT) + bias[:, None], NO_DECAY)
        g_t, slope_t, growth_t = softplus_gate(x_t, slope, lower_bound, EXACT)
    else:
        # Finite, so that sigmoid(-z) = e sigmoid(z) is exact where the gate saturates.
        bits_t = tl.minimum(channels_first(g, i, j, EXACT) * slope + (bias * slope)[:, None], 126.0)
        e_t = tl.exp2(bits_t)
        sigmoid_t = tl.rsqrt(1.0 + e_t)
        sigmoid_t *= sigmoid_t
        g_t = sigmoid_t * tl.where(inside, lower_bound, 0.0)[None, :]
        slope_t = g_t * (e_t * sigmoid_t)
    G_t, G_end = cumulative_decay(g_t, i <= j, EXACT)
    up_t = tl.exp2(G_t + CENTRE)
    down_t = tl.exp2(-G_t - CENTRE)
    in_t = up_t * (inverse * 2.0**-CENTRE)

    # A pair of tokens i >= j adds to the decay of i what it takes from that of j. The two cancel for tokens up to j,
    # but only if both are made of the same rounded factors; the rest would add up over a whole chunk.
    k_t = channels_first(k, i, j, EXACT) * k_norm[None, :]
    k_down_t = (k_t * down_t).to(dtype)
    k_up_t = (k_t * up_t).to(dtype)
    far_t = in_t * dk_in_t
    dk_t = -far_t - k_t * dk_k[None, :]
    pairs_t = -k_t * far_t
    far_t = dk_out_t * tl.exp2(G_end[:, None] - G_t) * inverse
    dk_t += far_t
    far_t *= k_t
    behind = tl.sum(far_t, 1)
    pairs_t -= far_t
    q_t = channels_first(q, i, j, EXACT) * (q_norm * scale)[None, :]
    q_up_t = (q_t * up_t).to(dtype)
    dq_t = in_t * dq_in_t
    pairs_t += q_t * dq_t
    dq_t -= q_t * (dq_q / (scale * scale))[None, :]
    near_t = tl.dot(k_down_t, dqk_t, input_precision=PRECISION)
    pairs_t += q_up_t.to(tl.float32) * near_t
    dq_t = (dq_t + up_t * near_t) * (q_norm * unit * scale)[None, :]
    tl.store(dq_ptr + gate_start + gate_at, tl.trans(dq_t.to(dq_ptr.dtype.element_ty)), mask=mask)
    near_t = tl.dot(k_down_t, dkk_t, input_precision=PRECISION)
    pairs_t += k_up_t.to(tl.float32) * near_t
    dk_t += up_t * near_t
    near_t = tl.dot(q_up_t, tl.trans(dqk_t), input_precision=PRECISION)
    near_t = tl.dot(k_up_t, tl.trans(dkk_t), near_t, input_precision=PRECISION)
    pairs_t -= k_down_t.to(tl.float32) * near_t
    dk_t = (dk_t + down_t * near_t) * (k_norm * unit)[None, :]
    tl.store(dk_ptr + gate_start + gate_at, tl.trans(dk_t.to(dk_ptr.dtype.element_ty)), mask=mask)

    # x_i 2^G_i counts for the decay of every token up to i, y_j 2^-G_j against it, and y_j 2^(G_end - G_j) for every
    # token behind j: for all but those up to j.
    dg_t = sum_tokens(pairs_t, i >= j, EXACT)
    dg_t += (behind + dtotal * (inverse * tl.exp2(G_end)))[:, None]
    natural: tl.constexpr = 0.6931471805599453 if EXACT else 0.6931471805599453 / 256.0
    dz_t = dg_t * slope_t * (natural * unit)
    rate = slope * -0.6931471805599453
    tl.store(dg_ptr + gate_start + gate_at, tl.trans((dz_t * rate).to(dg_ptr.dtype.element_ty)), mask=mask)
    tl.store(dt_bias_grad_ptr + at * BK + cols, tl.sum(dz_t, 1) * rate)
    if SOFTPLUS:
        dA_log = tl.sum(dg_t * growth_t, 1) * (natural * unit)
    else:
        dA_log = tl.sum(dz_t * bits_t, 1) * -0.6931471805599453
    tl.store(A_log_grad_ptr + at * BK + cols, dA_log)


def reverse_scan(
    buffers: dict[str, torch.Tensor],
    do: torch.Tensor,
    final_state_grad: torch.Tensor | None,
    initial_state_grad: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    segments: Segments,
    config: Config,
    K: int,
    span: tuple[int, int],
    dv: torch.Tensor | None = None,
    state_grads: torch.Tensor | None = None,
) -> None:
    """Launch `reverse_scan_kernel` for the chunks of `span`; the gradients of states are those of segments.

    `state_grads` holds the chunks of `span` only; without `dv` and it, just `initial_state_grad` is computed.
    """
    T, HV, V = do.shape[1:]
    if segments.num == 0:
        return
    reverse_scan_kernel[(segments.num * HV * (config.VP // config.BV),)](
        *(buffers[name] for name in ("q_in", "k_in", "k_out", "qk", "inverse", "decay")),
        do,
        final_state_grad,
        initial_state_grad,
        dv,
        state_grads,
        cu_seqlens,
        chunks.first,
        segments.documents,
        segments.first,
        T,
        chunks.per_row,
        segments.length,
        segments.per_row,
        *span,
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
        STORE=dv is not None,
        PACKED=cu_seqlens is not None,
        SPLIT=segments.split,
        STAGES=config.scan_stages,
        **config.scan_options,
    )


MAX_STATE_GRADS = 2**28
"""Bytes of state gradients held at a time."""


@on_its_device
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
    gate_lower_bound: float | None,
    scale: float,
    o: torch.Tensor,
    do: torch.Tensor,
    final_state_grad: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of (q, k, v, g, beta, A_log, dt_bias, initial_state), each in the dtype of its input.

    All tensors are contiguous. o, the outputs, and do: [B, T, HV, V]; final_state_grad: [N, HV, K, V] fp32, or None
    for zero.
    """
    B, T, HV, V = v.shape
    H, K = q.shape[2:]
    limits = device_limits(q.device)
    config = choose_config(K, V, v.dtype, gate_lower_bound, limits.shared_memory)
    chunks = list_chunks(B, T, config.C, cu_seqlens)
    buffers = prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens, chunks, config, gate_lower_bound, scale)
    columns = HV * (config.VP // config.BV)
    segments = list_segments(B, T, columns, config, chunks, cu_seqlens, limits.processors)
    scans = (cu_seqlens, chunks, segments, config, K)
    # `carried` is the gradient of the states behind the segments. Without a split it moves to the start of the
    # documents with the chunks, in place.
    state_dtype = None if initial_state is None else initial_state.dtype
    if segments.split:
        initial_state_grad = None if initial_state is None else torch.empty_like(initial_state)
        initial_state, transition = split_states(buffers, v, initial_state, None, *scans)
        change = torch.empty_like(initial_state)
        reverse_scan(buffers, do, None, change, *scans, (0, chunks.num))
        ends = (final_state_grad, initial_state_grad)
        carried = compose(transition, change, *ends, cu_seqlens, chunks, segments, config, reverse=True)
        del transition, change
    else:
        shape = (chunks.num_documents, HV, K, V)
        if final_state_grad is None:
            carried = torch.zeros(shape, device=q.device, dtype=torch.float32)
        else:
            carried = final_state_grad.clone()
        initial_state_grad = None if initial_state is None else carried
    states = torch.empty(chunks.num, HV, config.VP, config.BK, device=q.device, dtype=config.compute)
    u = torch.empty(chunks.num, HV, config.VP, config.C, device=q.device, dtype=config.compute)
    scan("states", buffers, v, initial_state, None, *scans, u=u, states=states)

    # From the last chunks to the first, so many at a time that the gradients of their states stay small. What the
    # scans have read is overwritten: dqk and dkk have the shape of the products and inverses before them, and the
    # gradients of the inputs take the place of the buffers of the same chunks where their layouts agree.
    chunk_bytes = HV * config.VP * config.BK * states.element_size()
    per_span = max(1, MAX_STATE_GRADS // chunk_bytes) if not segments.split else max(chunks.num, 1)
    state_grads = states.new_empty(min(per_span, chunks.num), *states.shape[1:])
    # With several value heads per key head the sum over these is taken in float32.
    shared = HV > H
    key_grad_dtype = torch.float32 if shared else q.dtype
    agree = cu_seqlens is None and T % config.C == 0 and config.BK == K

    def gradient(name: str, dtype: torch.dtype) -> torch.Tensor:
        if agree and dtype == config.compute:
            return buffers[name].view(B, T, HV, K)
        return torch.empty(B, T, HV, K, device=q.device, dtype=dtype)

    dq, dk, dg = gradient("q_in", key_grad_dtype), gradient("k_in", key_grad_dtype), gradient("k_out", g.dtype)
    dv, dbeta = torch.empty_like(v), torch.empty_like(beta)
    radial, unit = torch.empty_like(buffers["norm"]), buffers["decay"].new_empty(chunks.num, HV)
    # Unused chunks of a packed row write nothing.
    partial = torch.empty if cu_seqlens is None else torch.zeros
    dt_bias_grad = partial(chunks.num, HV, config.BK, device=q.device, dtype=torch.float32)
    A_log_grad = partial(chunks.num, HV, config.BK, device=q.device, dtype=torch.float32)
    shapes = {"HV": HV, "V": V, "C": config.C, "VP": config.VP, "PRECISION": config.precision}
    shapes["PACKED"] = cu_seqlens is not None
    for end in range(chunks.num, 0, -per_span):
        first = max(end - per_span, 0)
        moved = None if segments.split else carried
        reverse_scan(buffers, do, carried, moved, *scans, (first, end), dv, state_grads)
        place = (cu_seqlens, chunks.documents, chunks.first, T, chunks.per_row, first)
        exchanged = (buffers["qk"], buffers["inverse"], radial, unit)
        pair_grad_kernel[((end - first) * HV,)](
            beta, u, v, o, do, dv, *exchanged, dbeta, *place, **shapes, num_warps=4, num_stages=1
        )
        input_grad_kernel[((end - first) * HV * (config.BK // config.BD),)](
            q,
            k,
            g,
            A_log,
            dt_bias,
            buffers["norm"],
            states,
            state_grads,
            u,
            do,
            dv,
            *exchanged,
            dq,
            dk,
            dg,
            dt_bias_grad,
            A_log_grad,
            *place,
            config.VP // config.BV,
            lowest_log_decay(gate_lower_bound) * LOG2E * config.gate_units,
            scale,
            **shapes,
            H=H,
            K=K,
            BK=config.BK,
            BV=config.BV,
            BD=config.BD,
            STAGES=2,
            CENTRE=config.centre,
            EXACT=config.compute == torch.float32,
            SOFTPLUS=gate_lower_bound is None,
            num_warps=4,
            num_stages=1,
            **register_limit(255),
        )
    if cu_seqlens is not None:
        for x in (dq, dk, dv, dg, dbeta):
            zero_slack(x, cu_seqlens)
    if shared:
        dq, dk = (x.unflatten(2, (H, HV // H)).sum(3).to(q.dtype) for x in (dq, dk))
    dA_log = A_log_grad.sum((0, 2)).to(A_log.dtype).view(A_log.shape)
    ddt_bias = dt_bias_grad[:, :, :K].sum(0).to(dt_bias.dtype).reshape(dt_bias.shape)
    if initial_state_grad is not None:
        initial_state_grad = initial_state_grad.to(state_dtype)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, initial_state_grad

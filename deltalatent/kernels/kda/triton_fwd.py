# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward kernels of chunked KDA with the bounded gate, and their launcher.

Two kernels, in the notation of `reference.py`, log decay in base 2:

1. `prepare`, one program per chunk of C tokens and head: everything that does not need the state. From the raw inputs
   it makes w, u (the solved triangular system), the decayed queries and keys, and the causal products. The bound on
   the gate makes the whole chunk one dense tile: 2^(G_i - G_j) is factored into 2^(G_i + centre) 2^(-G_j - centre),
   both of which float32 and bfloat16 hold.
2. `scan`, one program per document, head and block of value columns: walks over the chunks with the state in
   registers.

Tensors of channels and tokens are held and stored transposed, channels first ([K, C], [V, C], and the state
S^T [V, K]): the many channels then are the rows of every matrix product, which is what tensor cores want, and every
left operand of the walk comes from registers. Names end in `_t`. Buffers between kernels have widths padded to powers
of two and zeros in the padding, so that no kernel masks them. Arithmetic between matrix products is float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deltalatent.kernels.packing import chunk_index

LOG2E = 1.4426950408889634
L2_EPS = tl.constexpr(1e-6)


class Config(NamedTuple):
    """Tile sizes and launch parameters of one call, chosen from shapes, dtype and the device alone."""

    C: int  # tokens per chunk
    BK: int  # padded key width
    VP: int  # padded value width
    BV: int  # value columns per program of the scans
    centre: int  # exponent that centres the decay factors of a chunk: C / 2 * |bound| in bits
    compute: torch.dtype  # dtype of the operands of matrix products and of the buffers
    precision: str  # how float32 operands are multiplied
    prepare_warps: int
    prepare_registers: int
    scan_warps: int
    scan_stages: int
    state_grad_warps: int
    state_grad_registers: int
    input_grad_warps: int
    input_grad_registers: int


def gate_centre(chunk_size: int, gate_lower_bound: float) -> int:
    """Half the largest cumulative decay of a chunk, in bits, rounded to a whole power of two."""
    return round(chunk_size / 2 * -gate_lower_bound * LOG2E)


MAX_CENTRE = 116
"""Factors reach 2^+-(centre + 1); float32 and bfloat16 end at 2^127, and sums over a tile need some room."""


def choose_config(K: int, V: int, dtype: torch.dtype, gate_lower_bound: float, shared_memory: int) -> Config:
    """Tile sizes for one call. `shared_memory`: bytes one program may use."""
    BK, VP = (max(triton.next_power_of_2(x), 16) for x in (K, V))
    half = dtype == torch.bfloat16
    C = 32 if gate_centre(32, gate_lower_bound) <= MAX_CENTRE else 16
    BV = min(VP, 64)
    itemsize = 2 if half else 4
    stage = itemsize * (3 * C * BK + C * C + C * BV)
    stages = max(1, min(3, (shared_memory - 16384) // stage))
    # tf32 alone truncates operands to the mantissa of fp16, with a bias: good enough only for the inverse of bf16.
    precision = "tf32" if half else "tf32x3"
    if torch.version.hip is not None:
        precision = "ieee"
    return Config(
        C=C,
        BK=BK,
        VP=VP,
        BV=BV,
        centre=gate_centre(C, gate_lower_bound),
        compute=torch.bfloat16 if half else torch.float32,
        precision=precision,
        prepare_warps=4,
        prepare_registers=168,
        scan_warps=4 if BK <= 128 else 8,
        scan_stages=stages,
        state_grad_warps=4,
        state_grad_registers=255,
        input_grad_warps=8,
        input_grad_registers=255,
    )


def register_limit(registers: int) -> dict[str, int]:
    """Launch option that caps the registers per thread, without which `ptxas` sometimes picks far too few."""
    return {"maxnreg": registers} if torch.version.hip is None else {}


class Chunks(NamedTuple):
    """The chunks of all documents: `num` of them at most, `per_row` in each row of an unpacked batch."""

    num: int
    per_row: int
    num_documents: int
    documents: torch.Tensor | None  # [num], document of a chunk, -1 when unused; None when unpacked
    positions: torch.Tensor | None  # [num], position of the chunk in its document
    first: torch.Tensor | None  # [N], first chunk of a document


def list_chunks(B: int, T: int, C: int, cu_seqlens: torch.Tensor | None) -> Chunks:
    """Without synchronisation; chunks of a document are consecutive."""
    if cu_seqlens is None:
        per_row = triton.cdiv(T, C)
        return Chunks(B * per_row, per_row, B, None, None, None)
    documents, positions = chunk_index(cu_seqlens, T, C)
    ends = ((cu_seqlens.diff().long() + C - 1) // C).cumsum(0)
    first = torch.nn.functional.pad(ends[:-1], (1, 0)) if ends.numel() else ends
    return Chunks(documents.numel(), 0, cu_seqlens.numel() - 1, documents, positions, first)


@triton.jit
def chunk_span(i_c, cu_ptr, document_ptr, position_ptr, T, per_row, C: tl.constexpr, PACKED: tl.constexpr):
    """First row of a chunk, and the row behind its document, in the flattened tokens; start = end if unused."""
    if PACKED:
        n = tl.load(document_ptr + i_c)
        used = n >= 0
        n = tl.where(used, n, 0)
        start = tl.load(cu_ptr + n).to(tl.int64) + tl.load(position_ptr + i_c) * C
        end = tl.load(cu_ptr + n + 1).to(tl.int64)
        start = tl.where(used, start, end)
    else:
        b = (i_c // per_row).to(tl.int64)
        start = b * T + (i_c % per_row) * C
        end = b * T + T
    return start, end


@triton.jit
def document_span(n, cu_ptr, first_ptr, T, per_row, C: tl.constexpr, PACKED: tl.constexpr):
    """First row, row behind the last, number of chunks and first chunk of a document."""
    if PACKED:
        start = tl.load(cu_ptr + n).to(tl.int64)
        end = tl.load(cu_ptr + n + 1).to(tl.int64)
        num_chunks = tl.cdiv(end - start, C).to(tl.int32)
        first = tl.load(first_ptr + n).to(tl.int64)
    else:
        start = n.to(tl.int64) * T
        end = start + T
        num_chunks = per_row
        first = n.to(tl.int64) * per_row
    return start, end, num_chunks, first


@triton.jit
def l2_scale(x):
    """1 / norm of each row of x [C, BK]."""
    return tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)


@triton.jit
def sigmoid(x):
    # The square of a reciprocal root is far cheaper than a division, and as exact as the exponential.
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
    return root * root


@triton.jit
def sum_tokens(x_t, chosen, EXACT: tl.constexpr):
    """Sums of x_t [channels, C] over the tokens j with chosen[j, i], for each token i; chosen [C, C].

    As a product this is far cheaper than a scan across threads. Two bfloat16 parts keep 16 bits of x, which is what
    bfloat16 inputs need; EXACT keeps float32.
    """
    if EXACT:
        sums = tl.dot(x_t, chosen.to(tl.float32), input_precision="ieee")
    else:
        ones = chosen.to(tl.bfloat16)
        high = (x_t.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        sums = tl.dot(high.to(tl.bfloat16), ones, tl.dot((x_t - high).to(tl.bfloat16), ones))
    return sums


@triton.jit
def unit_lower_inverse(A, i, j, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower triangular A [C, C], by merging inverses of diagonal blocks of 1, 2, 4, ... rows.

    [[P, 0], [X, Q]]^-1 = [[P^-1, 0], [-Q^-1 X P^-1, Q^-1]] has no power of A in it, so nothing grows and cancels when
    keys are nearly equal.
    """
    T = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), A, 0.0)
    for level in tl.static_range(2, 6):
        if (1 << level) <= C:
            below = (i >> level == j >> level) & (i >> (level - 1) > j >> (level - 1))
            X = tl.where(below, A, 0.0)
            T -= tl.dot(T, tl.dot(X, T, input_precision=PRECISION), input_precision=PRECISION)
    return T


@triton.jit
def prepare_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    w_ptr,
    u_ptr,
    q_in_ptr,
    k_out_ptr,
    qk_ptr,
    inverse_ptr,
    decay_ptr,
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
    BK: tl.constexpr,
    VP: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    STORE_INVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Buffers of one chunk and head: w, q_in, k_out [chunk, HV, BK, C], u [chunk, HV, VP, C], qk[j, i] and inverse
    [chunk, HV, C, C], decay [chunk, HV, BK].

    w = M k_in and u = M v with M = (I + A)^-1 diag(b); `inverse` is M.
    """
    i_c = tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    start, end = chunk_span(i_c, cu_ptr, document_ptr, position_ptr, T, per_row, C, PACKED)
    if start >= end:
        return
    dtype = w_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = tl.arange(0, BK)
    i = rows[:, None]
    j = rows[None, :]
    token = start + rows
    inside = token < end
    mask = inside[:, None] & (cols < K)[None, :]
    key_at = (token * H + i_h // (HV // H))[:, None] * K + cols[None, :]
    gate_at = (token * HV + i_h)[:, None] * K + cols[None, :]
    at = (i_c * HV + i_h).to(tl.int64)
    wide = at * BK * C + cols[:, None] * C + rows[None, :]

    g_t = tl.trans(tl.load(g_ptr + gate_at, mask=mask, other=0.0)).to(tl.float32)
    bias = tl.load(dt_bias_ptr + i_h * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + i_h).to(tl.float32))
    g_t = lower_bits * sigmoid(rate * (g_t + bias[:, None]))
    g_t = tl.where((cols < K)[:, None] & inside[None, :], g_t, 0.0)
    tl.store(decay_ptr + at * BK + cols, tl.exp2(tl.sum(g_t, 1)))
    upto_t = sum_tokens(g_t, i <= j, EXACT)
    behind_t = sum_tokens(g_t, i > j, EXACT)
    up_t = tl.exp2(upto_t + CENTRE)

    q = tl.load(q_ptr + key_at, mask=mask, other=0.0)
    q_up_t = tl.trans(q).to(tl.float32) * (l2_scale(q.to(tl.float32)) * scale)[None, :] * up_t
    tl.store(q_in_ptr + wide, (q_up_t * (2.0**-CENTRE)).to(dtype))
    k = tl.load(k_ptr + key_at, mask=mask, other=0.0)
    k_t = tl.trans(k).to(tl.float32) * l2_scale(k.to(tl.float32))[None, :]
    tl.store(k_out_ptr + wide, (k_t * tl.exp2(behind_t)).to(dtype))
    k_up_t = k_t * up_t
    k_in_t = (k_up_t * (2.0**-CENTRE)).to(dtype)
    k_down_t = (k_t * tl.exp2(-upto_t - CENTRE)).to(dtype)

    square = at * C * C + i * C + j
    qk_t = tl.dot(tl.trans(k_down_t), q_up_t.to(dtype), input_precision=PRECISION)
    tl.store(qk_ptr + square, tl.where(i <= j, qk_t, 0.0).to(dtype))
    kk = tl.dot(tl.trans(k_up_t.to(dtype)), k_down_t, input_precision=PRECISION)
    b = sigmoid(tl.load(beta_ptr + (token * HV + i_h)[:, None], mask=inside[:, None], other=0.0).to(tl.float32))
    A = tl.where((i > j) & inside[:, None], kk * b, 0.0)
    M = unit_lower_inverse(A, i, j, C, PRECISION)
    # The columns of M carry b, which is read again along the other axis.
    b = sigmoid(tl.load(beta_ptr + (token * HV + i_h)[None, :], mask=inside[None, :], other=0.0).to(tl.float32))
    M = (M * tl.where(inside[None, :], b, 0.0)).to(dtype)
    if STORE_INVERSE:
        tl.store(inverse_ptr + square, M)
    M_t = tl.trans(M)
    tl.store(w_ptr + wide, tl.dot(k_in_t, M_t, input_precision=PRECISION).to(dtype))
    v_cols = tl.arange(0, VP)
    v_at = (token * HV + i_h)[:, None] * V + v_cols[None, :]
    v = tl.load(v_ptr + v_at, mask=inside[:, None] & (v_cols < V)[None, :], other=0.0).to(dtype)
    u_t = tl.dot(tl.trans(v), M_t, input_precision=PRECISION)
    tl.store(u_ptr + at * VP * C + v_cols[:, None] * C + rows[None, :], u_t.to(dtype))


@triton.jit
def scan_kernel(
    w_ptr,
    u_ptr,
    q_in_ptr,
    k_out_ptr,
    qk_ptr,
    decay_ptr,
    initial_ptr,
    final_ptr,
    o_ptr,
    state_ptr,
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
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    OUTPUT: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walk over the chunks of one document: outputs o, or, for the backward, the states [chunk, HV, VP, BK].

    The states are those before the chunks; with them u is overwritten with the corrected values u - w S.
    """
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
    S = tl.zeros((BV, BK), dtype=tl.float32)
    if HAS_INITIAL:
        S += tl.load(initial_ptr + state_at, mask=state_mask, other=0.0).to(tl.float32)

    for i in tl.range(0, num_chunks, num_stages=STAGES):
        at = (first + i) * HV + i_h
        wide = at * BK * C + cols[:, None] * C + rows[None, :]
        w_t = tl.load(w_ptr + wide)
        u_at = at * VP * C + v_cols[:, None] * C + rows[None, :]
        u_t = tl.load(u_ptr + u_at).to(tl.float32)
        k_out_t = tl.load(k_out_ptr + wide)
        decay = tl.load(decay_ptr + at * BK + cols)
        S_low = S.to(dtype)
        u_low = (u_t - tl.dot(S_low, w_t, input_precision=PRECISION)).to(dtype)
        if OUTPUT:
            q_in_t = tl.load(q_in_ptr + wide)
            qk_t = tl.load(qk_ptr + at * C * C + rows[:, None] * C + rows[None, :])
            o_t = tl.dot(S_low, q_in_t, input_precision=PRECISION)
            o_t = tl.dot(u_low, qk_t, o_t, input_precision=PRECISION)
            token = start + i * C + rows
            o_mask = (token < end)[None, :] & (v_cols < V)[:, None]
            tl.store(o_ptr + (token * HV + i_h)[None, :] * V + v_cols[:, None], o_t, mask=o_mask)
        else:
            tl.store(state_ptr + at * VP * BK + v_cols[:, None] * BK + cols[None, :], S_low)
            tl.store(u_ptr + u_at, u_low)
        S = tl.dot(u_low, tl.trans(k_out_t), S * decay[None, :], input_precision=PRECISION)

    if STORE_FINAL:
        tl.store(final_ptr + state_at, S, mask=state_mask)


@triton.jit
def zero_slack_kernel(x_ptr, cu_ptr, num_documents, T, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the rows of x [T, width] from the end of the last document on."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    end = tl.load(cu_ptr + num_documents).to(tl.int64)
    zero = tl.zeros((ROWS, BLOCK), x_ptr.dtype.element_ty)
    tl.store(x_ptr + row * width + col, zero, mask=(row >= end) & (row < T) & (col < width))


def zero_slack(x: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Zero the rows of x [1, T, ...] that belong to no document, without synchronisation."""
    T = x.shape[1]
    width = x[0, 0].numel() if T else 0
    if T and width:
        zero_slack_kernel[(triton.cdiv(T, 16), triton.cdiv(width, 512))](
            x, cu_seqlens, cu_seqlens.numel() - 1, T, width, ROWS=16, BLOCK=512
        )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    config: Config,
    gate_lower_bound: float,
    scale: float,
    store_inverse: bool,
) -> dict[str, torch.Tensor]:
    """Launch `prepare_kernel`; the inputs are contiguous. Returns its buffers by name."""
    T, H, K = q.shape[1:]
    HV, V = v.shape[2:]
    C, BK, VP = config.C, config.BK, config.VP

    def buffer(*shape: int, dtype: torch.dtype = config.compute) -> torch.Tensor:
        return torch.empty((chunks.num, HV, *shape), device=q.device, dtype=dtype)

    buffers = {"w": buffer(BK, C), "u": buffer(VP, C), "q_in": buffer(BK, C), "k_out": buffer(BK, C)}
    buffers |= {"qk": buffer(C, C), "decay": buffer(BK, dtype=torch.float32)}
    if store_inverse:
        buffers["inverse"] = buffer(C, C)
    if chunks.num:
        prepare_kernel[(chunks.num * HV,)](
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            buffers["w"],
            buffers["u"],
            buffers["q_in"],
            buffers["k_out"],
            buffers["qk"],
            buffers.get("inverse"),
            buffers["decay"],
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
            C=C,
            BK=BK,
            VP=VP,
            CENTRE=config.centre,
            PRECISION=config.precision,
            EXACT=config.compute == torch.float32,
            STORE_INVERSE=store_inverse,
            PACKED=cu_seqlens is not None,
            num_warps=config.prepare_warps,
            num_stages=1,
            **register_limit(config.prepare_registers),
        )
    return buffers


def scan(
    buffers: dict[str, torch.Tensor],
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    o: torch.Tensor | None,
    states: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    config: Config,
    T: int,
    K: int,
    V: int,
) -> None:
    """Launch `scan_kernel` for the outputs `o`, or for `states` (then `buffers["u"]` becomes the corrected values)."""
    HV = buffers["w"].shape[1]
    if chunks.num_documents == 0:
        return
    scan_kernel[(chunks.num_documents * HV * triton.cdiv(V, config.BV),)](
        buffers["w"],
        buffers["u"],
        buffers["q_in"],
        buffers["k_out"],
        buffers["qk"],
        buffers["decay"],
        initial_state,
        final_state,
        o,
        states,
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
        HAS_INITIAL=initial_state is not None,
        STORE_FINAL=final_state is not None,
        OUTPUT=o is not None,
        PACKED=cu_seqlens is not None,
        num_warps=config.scan_warps,
        STAGES=config.scan_stages,
    )


def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory one program may use; the interpreter has no limit."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def chunk_forward(
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o [B, T, HV, V] and the final states [N, HV, K, V] fp32 (or None) from contiguous raw inputs."""
    B, T, HV, V = v.shape
    K = q.shape[-1]
    config = choose_config(K, V, v.dtype, gate_lower_bound, shared_memory_of(q.device))
    chunks = list_chunks(B, T, config.C, cu_seqlens)
    o = torch.empty_like(v)
    final_state = None
    if output_final_state:
        final_state = torch.empty(chunks.num_documents, HV, K, V, device=q.device, dtype=torch.float32)
    buffers = prepare(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, chunks, config, gate_lower_bound, scale, store_inverse=False
    )
    scan(buffers, initial_state, final_state, o, None, cu_seqlens, chunks, config, T, K, V)
    if cu_seqlens is not None:
        zero_slack(o, cu_seqlens)
    return o, final_state

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward kernels of chunked KDA, and their launcher.

Two kernels, in the notation of `reference.py`, log decay in base 2:

1. `prepare`, one program per chunk of C tokens and head: everything that needs neither state nor values. From the raw
   inputs it makes the decayed queries and keys, the causal products, and the inverse of the triangular system. The
   bound on the gate makes the whole chunk one dense tile: 2^(G_i - G_j) is factored into
   2^(G_i + centre) 2^(-G_j - centre), both of which float32 and bfloat16 hold. The unbounded gate is cut off for that,
   see `SOFTPLUS_FLOOR`.
2. `scan`, one program per document, head and block of value columns: walks over the chunks with the state in
   registers.

Where few heads and long documents would leave most of the chip idle, the documents are split: `scan` first walks over
all segments side by side, from a zero state and from the columns of the identity, `compose` joins the ends and
transitions that this gives to the states between the segments, and `scan` walks over all of them again from there.

Tensors of channels and tokens are held and stored transposed, channels first ([K, C], [V, C], and the state
S^T [V, K]): the many channels then are the rows of every matrix product, which is what tensor cores want, and every
left operand of the walk comes from registers. Names end in `_t`. Buffers between kernels have widths padded to powers
of two and zeros in the padding, so that no kernel masks them. Arithmetic between matrix products is float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deltalatent.kernels.kda.validation import TRITON_LOWER_BOUND
from deltalatent.kernels.packing import chunk_index
from deltalatent.kernels.tiles import cdiv, device_limits, next_power_of_2, on_its_device, register_limit

LOG2E = 1.4426950408889634
L2_EPS = tl.constexpr(1e-6)
NO_DECAY = tl.constexpr(-1e30)  # a logit of the unbounded gate that lets neither decay nor gradients through


class Config(NamedTuple):
    """Tile sizes and launch parameters of one call, chosen from shapes, dtype and the device alone."""

    C: int  # tokens per chunk
    BK: int  # padded key width
    VP: int  # padded value width
    BV: int  # value columns per program of the scans
    centre: int  # exponent that centres the decay factors of a chunk: C / 2 * |bound| in bits
    compute: torch.dtype  # dtype of the operands of matrix products and of the buffers
    precision: str  # how float32 operands are multiplied
    gate_units: float  # units of the log decay of a token in one bit, see `cumulative_decay`
    prepare_registers: int
    scan_options: dict[str, int]
    scan_stages: int
    BD: int  # channels per program of the last backward kernel


def gate_centre(chunk_size: int, gate_lower_bound: float) -> int:
    """Half the largest cumulative decay of a chunk, in bits, rounded to a whole power of two."""
    return round(chunk_size / 2 * -gate_lower_bound * LOG2E)


MAX_CENTRE = 116
"""Factors reach 2^+-(centre + 1); float32 and bfloat16 end at 2^127, and sums over a tile need some room."""

SOFTPLUS_FLOOR = TRITON_LOWER_BOUND
"""Log decay of a token at which the unbounded gate is cut off.

Below it the decay of a channel counts as e^-10 instead of something smaller, so that a token is off by at most
4.5e-5 of what the state held before it. What follows, diag(exp(g)) and I - b k k^T, has norms of at most 1: no
later token enlarges that. A rounding is 3.9e-3 in bfloat16 and 4.9e-4 in float16, but 6e-8 in float32. For the
states' gradients, which the transposed matrices carry back, it is the same. The gate's own gradient is that without
the cut: the decay enters linearly, so it is e^(g + 10) of the one at the floor.
"""


def lowest_log_decay(gate_lower_bound: float | None) -> float:
    """The least log decay of a token that the kernels see; None is the unbounded gate."""
    return SOFTPLUS_FLOOR if gate_lower_bound is None else gate_lower_bound


@functools.cache
def choose_config(K: int, V: int, dtype: torch.dtype, gate_lower_bound: float | None, shared_memory: int) -> Config:
    """Tile sizes for one call. `shared_memory`: bytes one program may use."""
    lowest = lowest_log_decay(gate_lower_bound)
    BK, VP = (max(next_power_of_2(x), 16) for x in (K, V))
    half = dtype == torch.bfloat16
    # In float32 `prepare` passes four tiles of a chunk through shared memory at a time.
    fits = half or 4 * 4 * 32 * BK <= shared_memory
    C = 32 if fits and gate_centre(32, lowest) <= MAX_CENTRE else 16
    scan_options = {"num_warps": 4 if BK <= 128 else 8}
    BV, stages = min(VP, 64), 1
    if half or BK <= 128:
        itemsize = 2 if half else 4
        stage = itemsize * (3 * C * BK + 2 * C * C + C * BV)
        # Eight warps are more than the 64 rows of a state keep busy side by side: they exchange it.
        exchanged = 16384 + (itemsize * BV * BK if BK > 128 else 0)
        stages = max(1, min(3, (shared_memory - exchanged) // stage))
    elif C == 16:
        # Here `ptxas` 12.8 runs out of registers and makes addresses of Hopper's matrix products, which take 64 rows,
        # from data. 32 rows take those of older chips.
        BV = min(VP, 32)
        scan_options |= register_limit(255)
    # tf32 alone truncates operands to the mantissa of fp16, with a bias: good enough only for the inverse of bf16.
    precision = "tf32" if half else "tf32x3"
    if torch.version.hip is not None:
        precision = "ieee"
    return Config(
        C=C,
        BK=BK,
        VP=VP,
        BV=BV,
        centre=gate_centre(C, lowest),
        compute=torch.bfloat16 if half else torch.float32,
        precision=precision,
        gate_units=256.0 if half else 1.0,
        prepare_registers=255 if BK > 128 else 128 if half else 168,
        scan_options=scan_options,
        scan_stages=stages,
        BD=min(BK, 64),
    )


class Chunks(NamedTuple):
    """The chunks of all documents: `num` of them at most, `per_row` in each row of an unpacked batch."""

    num: int
    per_row: int
    num_documents: int
    documents: torch.Tensor | None  # [num], document of a chunk, see `chunk_index`; None when unpacked
    first: torch.Tensor | None  # [N], first chunk of a document


def list_chunks(B: int, T: int, C: int, cu_seqlens: torch.Tensor | None) -> Chunks:
    """Without synchronisation; chunks of a document are consecutive."""
    if cu_seqlens is None:
        per_row = cdiv(T, C)
        return Chunks(B * per_row, per_row, B, None, None)
    documents, first = chunk_index(cu_seqlens, T, C)
    return Chunks(documents.numel(), 0, first.numel(), documents, first)


class Segments(NamedTuple):
    """Stretches of documents that the scans walk over side by side; without a split, the documents themselves."""

    num: int
    length: int  # chunks in a full segment
    per_row: int  # segments in each row of an unpacked batch
    split: bool
    documents: torch.Tensor | None  # [num], document of a segment; None unless packed and split
    first: torch.Tensor | None  # [N], first segment of a document; None like `documents`


MIN_SEGMENT = 16
"""Chunks below which another segment costs more than it saves."""


def list_segments(
    B: int, T: int, columns: int, config: Config, chunks: Chunks, cu_seqlens: torch.Tensor | None, processors: int
) -> Segments:
    """Split documents if they are long and there are few of them. `columns`: programs of the scans per document.

    A split costs three walks instead of one, over segments: it pays where the documents alone keep at most a quarter
    of the processors busy. Each processor then gets two programs.
    """
    documents = max(chunks.num_documents, 1)
    wanted = 2 * processors // (documents * columns)
    length = max(cdiv(cdiv(chunks.num, documents), max(wanted, 1)), MIN_SEGMENT)
    if wanted < 8 or chunks.num // documents < 4 * length:
        return Segments(chunks.num_documents, max(chunks.per_row, 1), 1, False, None, None)
    if cu_seqlens is None:
        per_row = cdiv(chunks.per_row, length)
        return Segments(B * per_row, length, per_row, True, None, None)
    listed = list_chunks(B, T, config.C * length, cu_seqlens)
    return Segments(listed.num, length, 0, True, listed.documents, listed.first)


@triton.jit
def chunk_span(i_c, cu_ptr, document_ptr, first_ptr, T, per_row, C: tl.constexpr, PACKED: tl.constexpr):
    """First row of a chunk, and the row behind its document, in the flattened tokens; start >= end if unused."""
    if PACKED:
        n = tl.load(document_ptr + i_c)
        start = tl.load(cu_ptr + n).to(tl.int64) + (i_c - tl.load(first_ptr + n)) * C
        end = tl.load(cu_ptr + n + 1).to(tl.int64)
    else:
        b = (i_c // per_row).to(tl.int64)
        start = b * T + (i_c % per_row) * C
        end = b * T + T
    return start, end


@triton.jit
def segment_span(
    n,
    cu_ptr,
    first_ptr,
    segment_document_ptr,
    segment_first_ptr,
    T,
    per_row,
    length,
    segments_per_row,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """First row of a segment, row behind its document, its number of chunks (0 if unused) and its first chunk."""
    if PACKED:
        document = n
        if SPLIT:
            document = tl.load(segment_document_ptr + n)
        start = tl.load(cu_ptr + document).to(tl.int64)
        end = tl.load(cu_ptr + document + 1).to(tl.int64)
        first = tl.load(first_ptr + document).to(tl.int64)
        if SPLIT:
            position = n - tl.load(segment_first_ptr + document)
            start += position * length * C
            first += position * length
        num_chunks = tl.cdiv(end - start, C).to(tl.int32)
        if SPLIT:
            num_chunks = tl.maximum(tl.minimum(num_chunks, length), 0)
    else:
        row = (n // segments_per_row).to(tl.int64)
        position = n % segments_per_row
        start = row * T + position * length * C
        end = row * T + T
        first = row * per_row + position * length
        num_chunks = tl.minimum(length, per_row - position * length)
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
def channels_first(x, i, j, EXACT: tl.constexpr):
    """x [C, channels] as float32 [channels, C].

    As a product with the identity, which costs less than converting and moving the elements; exact for half precision.
    """
    if EXACT or x.dtype == tl.float32:
        x_t = tl.trans(x).to(tl.float32)
    else:
        x_t = tl.dot(tl.trans(x), (i == j).to(x.dtype))
    return x_t


@triton.jit
def cumulative_decay(g_t, upto, EXACT: tl.constexpr):
    """Sums G of g_t [channels, C] over the tokens up to each one, in bits, and G_end [channels] of the whole chunk;
    upto[j, i] = (j <= i), [C, C].

    As a product this is far cheaper than a scan across threads. Without EXACT, g is rounded to 11 bits first, and all
    factors are made of these sums: a gate that is off by less than its input's rounding, the same one everywhere. It
    comes in units of 2^-8 then, so that float16 holds these bits down to 2^-22, for memories of a million tokens.
    """
    if EXACT:
        G_t = tl.dot(g_t, upto.to(tl.float32), input_precision="ieee")
    else:
        G_t = tl.dot(g_t.to(tl.float16), tl.where(upto, 0.00390625, 0.0).to(tl.float16))
    # Sums of negative numbers: the smallest is the last.
    return G_t, tl.min(G_t, 1)


@triton.jit
def softplus_gate(x_t, slope, floor, EXACT: tl.constexpr):
    """Log decay -exp(A_log) softplus(x_t), at least `floor`, and its derivatives by exp(A_log) x_t and by A_log.

    In units of `cumulative_decay`. x_t: logits and bias, float32; slope: -exp(A_log) in bits.
    """
    units: tl.constexpr = 1.0 if EXACT else 256.0
    e_t = tl.exp2(-1.4426950408889634 * tl.abs(x_t))
    more_t = 1.0 + e_t
    # What the sum lost of e is all there is of it where x is far below zero.
    bits_t = (tl.maximum(x_t, 0.0) + tl.log(more_t) + (e_t - (more_t - 1.0))) * slope
    g_t = tl.maximum(bits_t * units, floor)
    # Of the derivatives, what the decay without the cut has left of that with it: 1 but where the gate is cut.
    left_t = tl.exp2(bits_t - g_t * (1.0 / units))
    sigmoid_t = tl.rsqrt(more_t)
    sigmoid_t *= sigmoid_t * tl.where(x_t > 0, 1.0, e_t)
    left_t *= units
    return g_t, sigmoid_t * left_t * -1.4426950408889634, bits_t * left_t


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower triangular A [C, C], by merging inverses of diagonal blocks of 1, 2, 4, ... rows.

    [[P, 0], [X, Q]]^-1 = [[P^-1, 0], [-Q^-1 X P^-1, Q^-1]] has no power of A in it, so nothing grows and cancels when
    keys are nearly equal. Up to 16 rows, the blocks on the diagonal are a batch.
    """
    BLOCKS: tl.constexpr = C // 16
    A = tl.reshape(A, (BLOCKS, 16, BLOCKS, 16))
    block_i = tl.arange(0, BLOCKS)[:, None, None, None]
    block_j = tl.arange(0, BLOCKS)[None, None, :, None]
    diagonal = tl.sum(tl.where(block_i == block_j, A, 0.0), 2)
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    T = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), diagonal, 0.0)
    for level in tl.static_range(2, 5):
        below = (i >> level == j >> level) & (i >> (level - 1) > j >> (level - 1))
        X = tl.where(below, diagonal, 0.0)
        T -= tl.dot(T, tl.dot(X, T, input_precision=PRECISION), input_precision=PRECISION)
    T = tl.reshape(tl.where(block_i == block_j, T[:, :, None, :], 0.0), (C, C))
    if BLOCKS == 2:
        X = tl.reshape(tl.where(block_i > block_j, A, 0.0), (C, C))
        T -= tl.dot(T, tl.dot(X, T, input_precision=PRECISION), input_precision=PRECISION)
    return T


@triton.jit
def prepare_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    qk_ptr,
    inverse_ptr,
    decay_ptr,
    norm_ptr,
    cu_ptr,
    document_ptr,
    first_ptr,
    T,
    per_row,
    lower_bound,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Buffers of one chunk and head: q_in, -k_in, k_out [chunk, HV, BK, C], qk[j, i] and the inverse M[i, j]
    [chunk, HV, C, C], decay [chunk, HV, BK], norm [chunk, HV, 2, C] (1 / norm of the queries and keys).
    """
    i_c = tl.program_id(0) // HV
    i_h = tl.program_id(0) % HV
    start, end = chunk_span(i_c, cu_ptr, document_ptr, first_ptr, T, per_row, C, PACKED)
    if start >= end:
        return
    dtype = q_in_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = tl.arange(0, BK)
    i = rows[:, None]
    j = rows[None, :]
    inside = start + rows < end
    mask = inside[:, None] & (cols < K)[None, :]
    # Tiles have a 64-bit start and 32-bit offsets.
    key_start = (start * H + i_h // (HV // H)) * K
    key_at = rows[:, None] * (H * K) + cols[None, :]
    gate_start = (start * HV + i_h) * K
    gate_at = rows[:, None] * (HV * K) + cols[None, :]
    at = (i_c * HV + i_h).to(tl.int64)
    wide_start = at * BK * C
    wide = cols[:, None] * C + rows[None, :]

    # All loads first: later ones would wait behind the barriers of the products.
    g = tl.load(g_ptr + gate_start + gate_at, mask=mask, other=0.0)
    k = tl.load(k_ptr + key_start + key_at, mask=mask, other=0.0)
    q = tl.load(q_ptr + key_start + key_at, mask=mask, other=0.0)
    b = tl.load(beta_ptr + start * HV + i_h + rows * HV, mask=inside, other=0.0).to(tl.float32)
    b = tl.where(inside, sigmoid(b), 0.0)
    slope = tl.exp(tl.load(A_log_ptr + i_h).to(tl.float32)) * -1.4426950408889634
    bias = tl.load(dt_bias_ptr + i_h * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    if SOFTPLUS:
        x_t = tl.where(inside[None, :], channels_first(g, i, j, EXACT) + bias[:, None], NO_DECAY)
        g_t, _, _ = softplus_gate(x_t, slope, lower_bound, EXACT)
    else:
        root_t = tl.rsqrt(1.0 + tl.exp2(channels_first(g, i, j, EXACT) * slope + (bias * slope)[:, None]))
        g_t = root_t * root_t * tl.where(inside, lower_bound, 0.0)[None, :]
    G_t, G_end = cumulative_decay(g_t, i <= j, EXACT)
    tl.store(decay_ptr + at * BK + cols, tl.exp2(G_end))
    q_norm = l2_scale(q.to(tl.float32))
    k_norm = l2_scale(k.to(tl.float32))
    tl.store(norm_ptr + at * 2 * C + rows, q_norm)
    tl.store(norm_ptr + at * 2 * C + C + rows, k_norm)

    # One tile after the other, so that few are held at a time.
    up_t = tl.exp2(G_t + CENTRE)
    q_t = channels_first(q, i, j, EXACT) * (q_norm * scale)[None, :]
    q_up_t = q_t * up_t
    q_in_t = q_t * tl.exp2(G_t) if EXACT else q_up_t * (2.0**-CENTRE)
    tl.store(q_in_ptr + wide_start + wide, q_in_t.to(dtype))
    q_up_t = q_up_t.to(dtype)
    k_t = channels_first(k, i, j, EXACT) * k_norm[None, :]
    k_up_t = k_t * up_t
    k_in_t = k_t * tl.exp2(G_t) if EXACT else k_up_t * (2.0**-CENTRE)
    tl.store(k_in_ptr + wide_start + wide, (-k_in_t).to(dtype))
    k_up_t = k_up_t.to(dtype)
    k_down_t = k_t * tl.exp2(-G_t - CENTRE)
    k_out_t = k_t * tl.exp2(G_end[:, None] - G_t) if EXACT else k_down_t * tl.exp2(G_end + CENTRE)[:, None]
    tl.store(k_out_ptr + wide_start + wide, k_out_t.to(dtype))
    k_down_t = k_down_t.to(dtype)

    square = i * C + j
    qk_t = tl.dot(tl.trans(k_down_t), q_up_t, input_precision=PRECISION)
    tl.store(qk_ptr + at * C * C + square, tl.where(i <= j, qk_t, 0.0).to(dtype))
    kk = tl.dot(tl.trans(k_up_t), k_down_t, input_precision=PRECISION)
    M = unit_lower_inverse(tl.where(i > j, kk * b[:, None], 0.0), C, PRECISION)
    tl.store(inverse_ptr + at * C * C + square, (M * b[None, :]).to(dtype))


@triton.jit
def scan_kernel(
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    qk_ptr,
    inverse_ptr,
    decay_ptr,
    v_ptr,
    initial_ptr,
    final_ptr,
    o_ptr,
    u_ptr,
    state_ptr,
    transition_ptr,
    cu_ptr,
    first_ptr,
    segment_document_ptr,
    segment_first_ptr,
    T,
    per_row,
    length,
    segments_per_row,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    MODE: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walk over the chunks of one segment. MODE says what for:

    "outputs": o [T, HV, V]. "states", for the backward: the states [chunk, HV, VP, BK] before the chunks and the
    corrected values u [chunk, HV, VP, C]. "transition": the final states alone, and, by further programs that start
    from columns of the identity and see no values, the transition [segment, HV, BK, BK] of the state, transposed.
    """
    # Programs of one head are neighbours: they read the same keys. One axis, because only the first is long.
    value_blocks: tl.constexpr = VP // BV
    blocks: tl.constexpr = value_blocks + ((BK + BV - 1) // BV if MODE == "transition" else 0)
    i_v = tl.program_id(0) % blocks
    i_n = tl.program_id(0) // blocks // HV
    i_h = tl.program_id(0) // blocks % HV
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
    dtype = q_in_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    cols = tl.arange(0, BK)
    v_cols = i_v * BV + tl.arange(0, BV)
    state_at = (i_n * HV + i_h).to(tl.int64) * K * V + cols[None, :] * V + v_cols[:, None]
    state_mask = (cols < K)[None, :] & (v_cols < V)[:, None]
    wide = cols[:, None] * C + rows[None, :]
    square = rows[:, None] * C + rows[None, :]
    v_at = rows[:, None] * (HV * V) + v_cols[None, :]
    S = tl.zeros((BV, BK), dtype=tl.float32)
    if HAS_INITIAL:
        S += tl.load(initial_ptr + state_at, mask=state_mask, other=0.0).to(tl.float32)
    if MODE == "transition":
        # Negative for the programs that hold values.
        key_cols = v_cols - value_blocks * BV
        S += tl.where(key_cols[:, None] == cols[None, :], 1.0, 0.0)

    for i in tl.range(0, num_chunks, num_stages=STAGES):
        at = (first + i) * HV + i_h
        wide_start = at * BK * C
        square_start = at * C * C
        token = start + i * C
        v_start = (token * HV + i_h) * V
        v_mask = (token + rows < end)[:, None] & (v_cols < V)[None, :]
        k_in_t = tl.load(k_in_ptr + wide_start + wide)
        v = tl.load(v_ptr + v_start + v_at, mask=v_mask, other=0.0)
        M = tl.load(inverse_ptr + square_start + square)
        k_out_t = tl.load(k_out_ptr + wide_start + wide)
        decay = tl.load(decay_ptr + at * BK + cols)
        S_low = S.to(dtype)
        u_t = channels_first(v, rows[:, None], rows[None, :], EXACT)
        u_t = tl.dot(S_low, k_in_t, u_t, input_precision=PRECISION).to(dtype)
        u_t = tl.dot(u_t, tl.trans(M), input_precision=PRECISION).to(dtype)
        if MODE == "outputs":
            q_in_t = tl.load(q_in_ptr + wide_start + wide)
            qk_t = tl.load(qk_ptr + square_start + square)
            o_t = tl.dot(S_low, q_in_t, input_precision=PRECISION)
            o_t = tl.dot(u_t, qk_t, o_t, input_precision=PRECISION)
            tl.store(o_ptr + v_start + tl.trans(v_at), o_t, mask=tl.trans(v_mask))
        elif MODE == "states":
            tl.store(state_ptr + at * VP * BK + (v_cols[:, None] * BK + cols[None, :]), S_low)
            tl.store(u_ptr + at * VP * C + (v_cols[:, None] * C + rows[None, :]), u_t)
        S = tl.dot(u_t, tl.trans(k_out_t), S * decay[None, :], input_precision=PRECISION)

    if STORE_FINAL:
        tl.store(final_ptr + state_at, S, mask=state_mask)
    if MODE == "transition":
        at = (i_n * HV + i_h).to(tl.int64) * BK * BK
        inside = (key_cols >= 0) & (key_cols < BK)
        tl.store(transition_ptr + at + (key_cols[:, None] * BK + cols[None, :]), S, mask=inside[:, None])


@triton.jit
def compose_kernel(
    transition_ptr,
    change_ptr,
    start_ptr,
    finish_ptr,
    result_ptr,
    cu_ptr,
    segment_first_ptr,
    length,
    segments_per_row,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_START: tl.constexpr,
    STORE_FINISH: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """States between the segments of one document, or with REVERSE their gradients.

    `result` [segment, HV, K, V] is what each segment starts from, S <- transition S + change leads to the next;
    `start` and `finish` [N, HV, K, V] lie at the ends of the document.
    """
    value_blocks: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % value_blocks
    i_n = tl.program_id(0) // value_blocks // HV
    i_h = tl.program_id(0) // value_blocks % HV
    if PACKED:
        tokens = (tl.load(cu_ptr + i_n + 1) - tl.load(cu_ptr + i_n)).to(tl.int32)
        segments = tl.cdiv(tl.cdiv(tokens, C), length)
        first = tl.load(segment_first_ptr + i_n).to(tl.int64)
    else:
        segments = segments_per_row
        first = i_n.to(tl.int64) * segments_per_row
    cols = tl.arange(0, BK)
    v_cols = i_v * BV + tl.arange(0, BV)
    tile = cols[None, :] * V + v_cols[:, None]
    mask = (cols < K)[None, :] & (v_cols < V)[:, None]
    document_at = (i_n * HV + i_h).to(tl.int64) * K * V
    S = tl.zeros((BV, BK), dtype=tl.float32)
    if HAS_START:
        S += tl.load(start_ptr + document_at + tile, mask=mask, other=0.0).to(tl.float32)
    for step in range(segments):
        at = (first + (segments - 1 - step if REVERSE else step)) * HV + i_h
        tl.store(result_ptr + at * K * V + tile, S, mask=mask)
        transition = tl.load(transition_ptr + at * BK * BK + (cols[:, None] * BK + cols[None, :]))
        change = tl.load(change_ptr + at * K * V + tile, mask=mask, other=0.0)
        if REVERSE:
            transition = tl.trans(transition)
        S = tl.dot(S, transition, change, input_precision=PRECISION)
    if STORE_FINISH:
        tl.store(finish_ptr + document_at + tile, S, mask=mask)


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
        zero_slack_kernel[(cdiv(T, 16), cdiv(width, 512))](
            x, cu_seqlens, cu_seqlens.numel() - 1, T, width, ROWS=16, BLOCK=512
        )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    config: Config,
    gate_lower_bound: float | None,
    scale: float,
) -> dict[str, torch.Tensor]:
    """Launch `prepare_kernel`; the inputs are contiguous. Returns its buffers by name."""
    T, H, K = q.shape[1:]
    HV = g.shape[2]
    C, BK = config.C, config.BK

    def buffer(*shape: int, dtype: torch.dtype = config.compute) -> torch.Tensor:
        return torch.empty((chunks.num, HV, *shape), device=q.device, dtype=dtype)

    buffers = {"q_in": buffer(BK, C), "k_in": buffer(BK, C), "k_out": buffer(BK, C)}
    buffers |= {"qk": buffer(C, C), "inverse": buffer(C, C)}
    buffers |= {"decay": buffer(BK, dtype=torch.float32), "norm": buffer(2, C, dtype=torch.float32)}
    if chunks.num:
        prepare_kernel[(chunks.num * HV,)](
            q,
            k,
            g,
            beta,
            A_log,
            dt_bias,
            *buffers.values(),
            cu_seqlens,
            chunks.documents,
            chunks.first,
            T,
            chunks.per_row,
            lowest_log_decay(gate_lower_bound) * LOG2E * config.gate_units,
            scale,
            H=H,
            HV=HV,
            K=K,
            C=C,
            BK=BK,
            CENTRE=config.centre,
            PRECISION=config.precision,
            EXACT=config.compute == torch.float32,
            SOFTPLUS=gate_lower_bound is None,
            PACKED=cu_seqlens is not None,
            num_warps=4,
            num_stages=1,
            **register_limit(config.prepare_registers),  # left alone, `ptxas` sometimes picks far too few
        )
    return buffers


def scan(
    mode: str,
    buffers: dict[str, torch.Tensor],
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    segments: Segments,
    config: Config,
    K: int,
    *,
    o: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    transition: torch.Tensor | None = None,
) -> None:
    """Launch `scan_kernel` in one of its modes; the states are those of segments."""
    T, HV, V = v.shape[1:]
    blocks = config.VP // config.BV + (cdiv(config.BK, config.BV) if mode == "transition" else 0)
    if segments.num == 0:
        return
    scan_kernel[(segments.num * HV * blocks,)](
        *(buffers[name] for name in ("q_in", "k_in", "k_out", "qk", "inverse", "decay")),
        v,
        initial_state,
        final_state,
        o,
        u,
        states,
        transition,
        cu_seqlens,
        chunks.first,
        segments.documents,
        segments.first,
        T,
        chunks.per_row,
        segments.length,
        segments.per_row,
        HV=HV,
        K=K,
        V=V,
        C=config.C,
        BK=config.BK,
        VP=config.VP,
        BV=config.BV,
        PRECISION=config.precision,
        EXACT=config.compute == torch.float32,
        HAS_INITIAL=initial_state is not None,
        STORE_FINAL=final_state is not None,
        MODE=mode,
        PACKED=cu_seqlens is not None,
        SPLIT=segments.split,
        STAGES=config.scan_stages,
        **config.scan_options,
    )


def compose(
    transition: torch.Tensor,
    change: torch.Tensor,
    start: torch.Tensor | None,
    finish: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    segments: Segments,
    config: Config,
    *,
    reverse: bool,
) -> torch.Tensor:
    """Launch `compose_kernel`. Returns what each segment starts from (in reverse: ends with), shaped as `change`."""
    HV, K, V = change.shape[1:]
    result = torch.empty_like(change)
    BV = min(config.VP, 16)
    compose_kernel[(chunks.num_documents * HV * cdiv(V, BV),)](
        transition,
        change,
        start,
        finish,
        result,
        cu_seqlens,
        segments.first,
        segments.length,
        segments.per_row,
        HV=HV,
        K=K,
        V=V,
        C=config.C,
        BK=config.BK,
        BV=BV,
        PRECISION="tf32x3" if config.precision != "ieee" else "ieee",
        HAS_START=start is not None,
        STORE_FINISH=finish is not None,
        REVERSE=reverse,
        PACKED=cu_seqlens is not None,
        num_warps=max(4, config.BK // 16),
        num_stages=2,
    )
    return result


def split_states(
    buffers: dict[str, torch.Tensor],
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    segments: Segments,
    config: Config,
    K: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before every segment [num, HV, K, V] fp32, and the transitions [num, HV, BK, BK] fp32 of all.

    Every segment is walked over from a zero state; its end and its transition then compose exactly.
    """
    HV, V = v.shape[2:]
    ends = torch.empty(segments.num, HV, K, V, device=v.device, dtype=torch.float32)
    transition = torch.empty(segments.num, HV, config.BK, config.BK, device=v.device, dtype=torch.float32)
    scan("transition", buffers, v, None, ends, cu_seqlens, chunks, segments, config, K, transition=transition)
    arguments = (cu_seqlens, chunks, segments, config)
    return compose(transition, ends, initial_state, final_state, *arguments, reverse=False), transition


@on_its_device
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
    gate_lower_bound: float | None,
    scale: float,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o [B, T, HV, V] and the final states [N, HV, K, V] fp32 (or None) from contiguous raw inputs."""
    B, T, HV, V = v.shape
    K = q.shape[-1]
    limits = device_limits(q.device)
    config = choose_config(K, V, v.dtype, gate_lower_bound, limits.shared_memory)
    chunks = list_chunks(B, T, config.C, cu_seqlens)
    o = torch.empty_like(v)
    final_state = None
    if output_final_state:
        final_state = torch.empty(chunks.num_documents, HV, K, V, device=q.device, dtype=torch.float32)
    buffers = prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens, chunks, config, gate_lower_bound, scale)
    columns = HV * (config.VP // config.BV)
    segments = list_segments(B, T, columns, config, chunks, cu_seqlens, limits.processors)
    arguments = (cu_seqlens, chunks, segments, config, K)
    if segments.split:
        initial_state, _ = split_states(buffers, v, initial_state, final_state, *arguments)
        final_state, last_state = None, final_state
    else:
        last_state = final_state
    scan("outputs", buffers, v, initial_state, final_state, *arguments, o=o)
    if cu_seqlens is not None:
        zero_slack(o, cu_seqlens)
    return o, last_state

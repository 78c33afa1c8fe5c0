# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of the experts' weights: products of two operands that are summed over the rows of an expert.

Alphabet as in `triton_products.py`; the weight is [E, M, N]. One operand has a row per token and is gathered, the
other one a row per pair in sorted order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltalatent.kernels.experts.triton_products import find_rows, load_rows


@triton.jit
def store_gradient(
    values, dw, expert, m, n, M, N, BM: tl.constexpr, BN: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr
):
    """Store a tile [BM, BN] into dw [E, M, N] at (m, n)."""
    rows = m + tl.arange(0, BM)
    columns = n + tl.arange(0, BN)
    place = dw + expert.to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    values = values.to(dw.dtype.element_ty)
    if EVEN_M and EVEN_N:
        tl.store(place, values)
    else:
        tl.store(place, values, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def gradient_tile(
    left, right, order, dw, expert, start, end, m, n, M, N, K: tl.constexpr, GATHER_LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of any number of rows."""
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(start, end, BK):
        row = first + tl.arange(0, BK)
        mask = row < end
        token = find_rows(order, row, mask, K, True)
        ls = load_rows(left, token if GATHER_LEFT else row, mask, m, M, BM, EVEN_M)
        rs = load_rows(right, row if GATHER_LEFT else token, mask, n, N, BN, EVEN_N)
        total = tl.dot(tl.trans(ls), rs, total, input_precision=PRECISION)
    store_gradient(total, dw, expert, m, n, M, N, BM, BN, EVEN_M, EVEN_N)


@triton.jit
def gradient_panel(
    left, right, order, dw, expert, start, end, n, M, N, K: tl.constexpr, GATHER_LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All tiles of BN columns of an expert of up to FIRST + SECOND rows, whose block of `right` stays where it is."""
    row1 = start + tl.arange(0, FIRST)
    mask1 = row1 < end
    right1 = load_rows(right, find_rows(order, row1, mask1, K, not GATHER_LEFT), mask1, n, N, BN, EVEN_N)
    row1 = find_rows(order, row1, mask1, K, GATHER_LEFT)
    if SECOND > 0:
        row2 = start + FIRST + tl.arange(0, SECOND)
        mask2 = row2 < end
        right2 = load_rows(right, find_rows(order, row2, mask2, K, not GATHER_LEFT), mask2, n, N, BN, EVEN_N)
        row2 = find_rows(order, row2, mask2, K, GATHER_LEFT)
    for m in tl.range(0, M, BM, num_stages=STAGES):
        total = tl.dot(tl.trans(load_rows(left, row1, mask1, m, M, BM, EVEN_M)), right1)
        if SECOND > 0:
            total = tl.dot(tl.trans(load_rows(left, row2, mask2, m, M, BM, EVEN_M)), right2, total)
        store_gradient(total, dw, expert, m, n, M, N, BM, BN, EVEN_M, EVEN_N)


@triton.jit
def weight_gradient_kernel(
    left, right, order, offsets, dw, M, N, K: tl.constexpr, GATHER_LEFT: tl.constexpr, PANEL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dw [E, M, N]: sum over the rows of an expert of left [., M] times right [., N]; zeros without rows.

    A program owns one tile of an expert or, if PANEL, all tiles of a block of columns: where rows are few, loading
    both operands anew for every tile takes longer than multiplying them. Half precision only; its stages leave room
    for a second program on the same multiprocessor. Blocks of N are neighbours, so that they share `left` in the L2
    cache.
    """
    blocks_n = tl.cdiv(N, BN)
    blocks = blocks_n if PANEL else tl.cdiv(M, BM) * blocks_n
    expert = tl.program_id(0) // blocks
    within = tl.program_id(0) % blocks
    m = (within // blocks_n) * BM
    n = (within % blocks_n) * BN
    start = tl.load(offsets + expert).to(tl.int64)
    end = tl.load(offsets + expert + 1).to(tl.int64)
    if not PANEL:
        gradient_tile(
            left, right, order, dw, expert, start, end, m, n, M, N, K, GATHER_LEFT, BM, BN, BK, EVEN_M, EVEN_N,
            PRECISION,
        )  # fmt: skip
    elif end - start <= 128:
        gradient_panel(
            left, right, order, dw, expert, start, end, n, M, N, K, GATHER_LEFT, BM, BN, 128, 0, EVEN_M, EVEN_N, 3
        )
    elif end - start <= 160:
        gradient_panel(
            left, right, order, dw, expert, start, end, n, M, N, K, GATHER_LEFT, BM, BN, 128, 32, EVEN_M, EVEN_N, 3
        )
    elif end - start <= 192:
        gradient_panel(
            left, right, order, dw, expert, start, end, n, M, N, K, GATHER_LEFT, BM, BN, 128, 64, EVEN_M, EVEN_N, 2
        )
    else:
        for m in range(0, M, BM):
            gradient_tile(
                left, right, order, dw, expert, start, end, m, n, M, N, K, GATHER_LEFT, BM, BN, BK, EVEN_M, EVEN_N,
                PRECISION,
            )  # fmt: skip

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products: rows sorted by expert times the weight of their expert, and the weights' gradients.

Alphabet: T tokens, K experts per token, S = T K pairs (pair s belongs to token s // K), E experts, Z width in which
they work, F their inner width. "Row" p is a place among the pairs sorted by expert.

A product with an expert's weight is computed transposed: rows of the weight are the rows of a matrix product, tokens
its columns. Tensor cores want many rows (64) and take as few as 8 columns, and an expert more often has few tokens
than few channels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_weight(
    w, expert, row, column, R, C, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr
):
    """Tile [BR, BC] of one expert's weight [R, C] at (row, column); zeros outside.

    `w` is a descriptor of the tensor [E, R, C] with blocks [1, BR, BC] if TMA, a pointer to it otherwise.
    """
    if TMA:
        tile = w.load([expert, row, column]).reshape(BR, BC)
    else:
        rows = row + tl.arange(0, BR)
        columns = column + tl.arange(0, BC)
        place = w + expert.to(tl.int64) * R * C + rows.to(tl.int64)[:, None] * C + columns[None, :]
        if EVEN:
            tile = tl.load(place)
        else:
            tile = tl.load(place, mask=(rows < R)[:, None] & (columns < C)[None, :], other=0.0)
    return tile


@triton.jit
def load_rows(x, row, mask, column, C, BC: tl.constexpr, EVEN: tl.constexpr):
    """Rows `row` [BT] (int64) of x [., C], columns from `column` on: [BT, BC], zeros where `mask` is false."""
    columns = column + tl.arange(0, BC)
    place = x + row[:, None] * C + columns[None, :]
    if EVEN:
        tile = tl.load(place, mask=mask[:, None], other=0.0)
    else:
        tile = tl.load(place, mask=mask[:, None] & (columns < C)[None, :], other=0.0)
    return tile


@triton.jit
def find_rows(order, start, column, mask, top_k, GATHER: tl.constexpr):
    """Rows of x that the columns of a tile stand for: their tokens if GATHER, themselves otherwise; int64."""
    if GATHER:
        row = tl.load(order + start + column, mask=mask, other=0).to(tl.int64) // top_k
    else:
        row = start.to(tl.int64) + column
    return row


@triton.jit
def store_tile(values, y, start, column, mask, channel, R):
    """Store a tile [BM, BT] transposed into y [S, R]."""
    place = y + (start.to(tl.int64) + column)[:, None] * R + channel[None, :]
    tl.store(place, tl.trans(values).to(y.dtype.element_ty), mask=mask[:, None] & (channel < R)[None, :])


@triton.jit
def product_tile(
    x, w, order, y, expert, start, rows, block, top_k, OUT, IN, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, EVEN_M: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BT)
    mask = column < rows
    row = find_rows(order, start, column, mask, top_k, GATHER)
    result = tl.zeros([BM, BT], tl.float32)
    if TAIL > 0:
        tail_column = BT + tl.arange(0, TAIL)
        tail_mask = tail_column < rows
        tail_row = find_rows(order, start, tail_column, tail_mask, top_k, GATHER)
        tail_result = tl.zeros([BM, TAIL], tl.float32)
    for k in range(0, IN, BK):
        if TRANSPOSED:
            left = tl.trans(load_weight(w, expert, k, block, IN, OUT, BK, BM, TMA, EVEN_M and EVEN_K))
        else:
            left = load_weight(w, expert, block, k, OUT, IN, BM, BK, TMA, EVEN_M and EVEN_K)
        right = tl.trans(load_rows(x, row, mask, k, IN, BK, EVEN_K))
        result = tl.dot(left, right, result, input_precision=PRECISION)
        if TAIL > 0:
            right = tl.trans(load_rows(x, tail_row, tail_mask, k, IN, BK, EVEN_K))
            tail_result = tl.dot(left, right, tail_result, input_precision=PRECISION)
    channel = block + tl.arange(0, BM)
    store_tile(result, y, start, column, mask, channel, OUT)
    if TAIL > 0:
        store_tile(tail_result, y, start, tail_column, tail_mask, channel, OUT)


@triton.jit(do_not_specialize=["num_tiles", "top_k"])
def product_kernel(
    x, w, order, tiles, y, num_tiles, top_k, OUT, IN, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, EVEN_M: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [S, IN] (GATHER: [T, IN]), w [E, OUT, IN] (TRANSPOSED: [E, IN, OUT]) -> y [S, OUT].

    A program owns one tile of rows of one expert and one block of the output's channels. A tile has up to BT rows;
    where TAIL > 0, the last tile of an expert has up to BT + TAIL, so that an expert of 146 rows is one tile of
    128 + 32 columns: its weight is loaded once, and few columns are wasted.
    """
    blocks = tl.cdiv(OUT, BM)
    tile = tl.program_id(0) // blocks
    block = (tl.program_id(0) % blocks) * BM
    rows = tl.load(tiles + 2 * num_tiles + tile)
    if rows > 0:
        expert = tl.load(tiles + tile)
        start = tl.load(tiles + num_tiles + tile)
        if TAIL == 0 or rows <= BT:
            product_tile(
                x, w, order, y, expert, start, rows, block, top_k, OUT, IN,
                GATHER, TRANSPOSED, BM, BT, 0, BK, TMA, EVEN_M, EVEN_K, PRECISION,
            )  # fmt: skip
        else:
            product_tile(
                x, w, order, y, expert, start, rows, block, top_k, OUT, IN,
                GATHER, TRANSPOSED, BM, BT, TAIL, BK, TMA, EVEN_M, EVEN_K, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=["top_k"])
def weight_gradient_kernel(
    left, right, order, offsets, dw, top_k, M, N, GATHER_LEFT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw [E, M, N]: sum over the rows of an expert of left [., M] times right [., N]; zeros without rows.

    One of the two has a row per token and is gathered, the other one a row per pair in sorted order. Blocks of N are
    neighbours, so that they share the tile of `left` in the L2 cache.
    """
    blocks_n = tl.cdiv(N, BN)
    blocks = tl.cdiv(M, BM) * blocks_n
    expert = tl.program_id(0) // blocks
    within = tl.program_id(0) % blocks
    m = (within // blocks_n) * BM
    n = (within % blocks_n) * BN
    start = tl.load(offsets + expert).to(tl.int64)
    end = tl.load(offsets + expert + 1).to(tl.int64)
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(start, end, BK):
        row = first + tl.arange(0, BK)
        mask = row < end
        token = tl.load(order + row, mask=mask, other=0).to(tl.int64) // top_k
        ls = load_rows(left, token if GATHER_LEFT else row, mask, m, M, BM, EVEN_M)
        rs = load_rows(right, row if GATHER_LEFT else token, mask, n, N, BN, EVEN_N)
        total = tl.dot(tl.trans(ls), rs, total, input_precision=PRECISION)
    rows = m + tl.arange(0, BM)
    columns = n + tl.arange(0, BN)
    place = dw + expert.to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(place, total.to(dw.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])

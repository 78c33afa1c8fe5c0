# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products: rows sorted by expert times the weight of their expert.

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
def load_weight(w, expert, row, column, R, C, BR: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Tile [BR, BC] of one expert's weight, of w [E, R, C], at (row, column); zeros outside."""
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
def find_rows(order, row, mask, K: tl.constexpr, GATHER: tl.constexpr):
    """Rows of an operand that stand for sorted rows (int64): those of their tokens if GATHER, themselves otherwise."""
    if GATHER:
        row = (tl.load(order + row, mask=mask, other=0) // K).to(tl.int64)
    return row


@triton.jit
def store_tile(values, y, start, column, mask, channel, R):
    """Store a tile [BM, BT] transposed into y [S, R]."""
    place = y + (start.to(tl.int64) + column)[:, None] * R + channel[None, :]
    tl.store(place, tl.trans(values).to(y.dtype.element_ty), mask=mask[:, None] & (channel < R)[None, :])


@triton.jit
def product_tile(
    x, w, order, y, expert, start, rows, block, OUT, IN, K: tl.constexpr, GATHER: tl.constexpr,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BT)
    mask = column < rows
    row = find_rows(order, start.to(tl.int64) + column, mask, K, GATHER)
    result = tl.zeros([BM, BT], tl.float32)
    if TAIL > 0:
        tail_column = BT + tl.arange(0, TAIL)
        tail_mask = tail_column < rows
        tail_row = find_rows(order, start.to(tl.int64) + tail_column, tail_mask, K, GATHER)
        tail_result = tl.zeros([BM, TAIL], tl.float32)
    for k in range(0, IN, BK):
        if TRANSPOSED:
            left = tl.trans(load_weight(w, expert, k, block, IN, OUT, BK, BM, EVEN_M and EVEN_K))
        else:
            left = load_weight(w, expert, block, k, OUT, IN, BM, BK, EVEN_M and EVEN_K)
        right = tl.trans(load_rows(x, row, mask, k, IN, BK, EVEN_K))
        result = tl.dot(left, right, result, input_precision=PRECISION)
        if TAIL > 0:
            right = tl.trans(load_rows(x, tail_row, tail_mask, k, IN, BK, EVEN_K))
            tail_result = tl.dot(left, right, tail_result, input_precision=PRECISION)
    channel = block + tl.arange(0, BM)
    store_tile(result, y, start, column, mask, channel, OUT)
    if TAIL > 0:
        store_tile(tail_result, y, start, tail_column, tail_mask, channel, OUT)


@triton.jit(do_not_specialize=["num_tiles"])
def product_kernel(
    x, w, order, tiles, y, num_tiles, OUT, IN, K: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, EVEN_M: tl.constexpr,
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
                x, w, order, y, expert, start, rows, block, OUT, IN, K,
                GATHER, TRANSPOSED, BM, BT, 0, BK, EVEN_M, EVEN_K, PRECISION,
            )  # fmt: skip
        else:
            product_tile(
                x, w, order, y, expert, start, rows, block, OUT, IN, K,
                GATHER, TRANSPOSED, BM, BT, TAIL, BK, EVEN_M, EVEN_K, PRECISION,
            )  # fmt: skip

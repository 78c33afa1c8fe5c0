# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows belong to which expert: a stable counting sort of the pairs, and the tiles of rows to be multiplied.

Nothing here waits for the device: the number of tiles is bounded by the shapes, and tiles beyond the last are empty.
Alphabet as in `triton_products.py`; an id that is no expert, negative or E and more, counts as E, "not here".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltalatent.kernels.experts.plan_layout import Plan, counts_all_pairs, plan_size, plan_views
from deltalatent.kernels.tiles import cdiv, next_power_of_2

CHUNK = 256
"""Pairs that one program of the counting sort takes."""


@triton.jit
def load_experts(expert_of, pair, S, E):
    """Experts of pairs; E for those that are not here."""
    expert = tl.load(expert_of + pair, mask=pair < S, other=0)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["S", "E", "num_tiles"])
def few_pairs_kernel(
    expert_of, order, inverse, offsets, tiles, S, E, num_tiles, BT: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The whole plan of a few pairs, each compared with all others. The place of a tile is its first row."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = load_experts(expert_of, i, S, E)
    smaller = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    equal_before = tl.zeros([BLOCK], tl.int32)
    below = tl.zeros([BLOCK], tl.int32)  # pairs of experts below number i: the offset of expert i
    for first in range(0, S, STEP):
        j = first + tl.arange(0, STEP)
        real = (j < S)[None, :]
        other = load_experts(expert_of, j, S, E)
        same = real & (other[None, :] == mine[:, None])
        smaller += tl.sum((real & (other[None, :] < mine[:, None])).to(tl.int32), axis=1)
        equal += tl.sum(same.to(tl.int32), axis=1)
        equal_before += tl.sum((same & (j[None, :] < i[:, None])).to(tl.int32), axis=1)
        below += tl.sum((real & (other[None, :] < i[:, None])).to(tl.int32), axis=1)
    tl.store(offsets + i, below, mask=i <= E)
    row = smaller + equal_before
    here = mine < E
    tl.store(order + row, i, mask=i < S)
    tl.store(inverse + i, tl.where(here, row, -1), mask=i < S)
    rows = tl.where(here & (equal_before % BT == 0), tl.minimum(equal - equal_before, BT), 0)
    tl.store(tiles + row, mine, mask=i < S)
    tl.store(tiles + num_tiles + row, row, mask=i < S)
    tl.store(tiles + 2 * num_tiles + row, rows, mask=i < S)


@triton.jit(do_not_specialize=["S", "E"])
def histogram_kernel(expert_of, counts, S, E, EP: tl.constexpr, CHUNK: tl.constexpr):
    """counts [chunks, EP]: pairs of each expert in a chunk; those not here at E < EP."""
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = load_experts(expert_of, i, S, E)
    expert = tl.where(i < S, expert, EP - 1)  # may be E itself: nobody reads how many are not here
    tl.store(counts + tl.program_id(0) * EP + tl.arange(0, EP), tl.histogram(expert, EP))


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(counts, chunks, EP: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr):
    """Replace counts [chunks + 1, EP] by those of earlier chunks, in place; the last row becomes those of all."""
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros([BE], tl.int32)
    for first in range(0, chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)
        place = counts + chunk[:, None] * EP + expert[None, :]
        mask = (chunk < chunks)[:, None]
        values = tl.load(place, mask=mask, other=0)
        before = tl.cumsum(values, axis=0) - values
        tl.store(place, before + total[None, :], mask=mask)
        total += tl.sum(values, axis=0)
    tl.store(counts + chunks * EP + expert, total)


@triton.jit
def tiles_of(rows, BT: tl.constexpr, TAIL: tl.constexpr):
    """Tiles that `rows` rows of one expert take: only the last one may have more than BT, and up to BT + TAIL."""
    return tl.where(rows > 0, tl.maximum(1, tl.cdiv(rows - TAIL, BT)), 0)


@triton.jit(do_not_specialize=["S", "E", "chunks", "num_tiles"])
def place_kernel(
    expert_of, counts, order, inverse, offsets, tiles, S, E, chunks, num_tiles, EP: tl.constexpr, BT: tl.constexpr,
    TAIL: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Programs below `chunks` place the pairs of a chunk; one more per expert, and a last one, list the tiles."""
    every = tl.arange(0, EP)
    size = tl.load(counts + chunks * EP + every)
    begin = tl.cumsum(size, axis=0) - size
    if tl.program_id(0) < chunks:
        i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        mine = load_experts(expert_of, i, S, E)
        earlier = tl.zeros([CHUNK, STEP], tl.int32)
        for first in tl.static_range(0, CHUNK, STEP):
            j = tl.program_id(0) * CHUNK + first + tl.arange(0, STEP)
            other = load_experts(expert_of, j, S, E)
            earlier += ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])).to(tl.int32)
        row = tl.gather(begin, mine, 0) + tl.load(counts + tl.program_id(0) * EP + mine) + tl.sum(earlier, axis=1)
        tl.store(order + row, i, mask=i < S)
        tl.store(inverse + i, tl.where(mine < E, row, -1), mask=i < S)
    else:
        expert = tl.program_id(0) - chunks
        before = tl.sum(tl.where(every < expert, tiles_of(size, BT, TAIL), 0))
        if expert < E:
            start = tl.sum(tl.where(every < expert, size, 0))
            rows = tl.load(counts + chunks * EP + expert)
            count = tiles_of(rows, BT, TAIL)
            for done in range(0, count, STEP):
                i = done + tl.arange(0, STEP)
                place = tiles + before + i
                tl.store(place, expert, mask=i < count)
                tl.store(place + num_tiles, start + i * BT, mask=i < count)
                tl.store(place + 2 * num_tiles, tl.where(i == count - 1, rows - i * BT, BT), mask=i < count)
        else:
            tl.store(offsets + every, begin, mask=every <= E)
            for done in range(before, num_tiles, STEP):
                i = done + tl.arange(0, STEP)
                tl.store(tiles + 2 * num_tiles + i, 0, mask=i < num_tiles)


def make_plan(top_k_index: torch.Tensor, num_experts: int, block_tokens: int, tail: int) -> tuple[torch.Tensor, Plan]:
    """The plan of expert ids [T, K] (contiguous) for tiles of `block_tokens` tokens, and `tail` more in the last.

    Returns:
        The int32 tensor that holds it all, and its parts.
    """
    S, E = top_k_index.numel(), num_experts
    integers = torch.empty(plan_size(S, E), dtype=torch.int32, device=top_k_index.device)
    plan = plan_views(integers, S, E, block_tokens, tail)
    if counts_all_pairs(S, tail):
        BLOCK = 16
        few_pairs_kernel[(cdiv(max(S, E + 1), BLOCK),)](
            top_k_index, *plan, S, E, plan.num_tiles, BT=block_tokens, BLOCK=BLOCK, STEP=256, num_warps=4
        )
        return integers, plan
    EP = next_power_of_2(E + 1)
    chunks = cdiv(S, CHUNK)
    counts = torch.empty(chunks + 1, EP, dtype=torch.int32, device=top_k_index.device)
    histogram_kernel[(chunks,)](top_k_index, counts, S, E, EP=EP, CHUNK=CHUNK, num_warps=4)
    BE = min(EP, 32)
    scan_kernel[(EP // BE,)](counts, chunks, EP=EP, BE=BE, ROWS=256, num_warps=8)
    place_kernel[(chunks + E + 1,)](
        top_k_index, counts, *plan, S, E, chunks, plan.num_tiles,
        EP=EP, BT=block_tokens, TAIL=tail, CHUNK=CHUNK, STEP=16, num_warps=8,
    )  # fmt: skip
    return integers, plan

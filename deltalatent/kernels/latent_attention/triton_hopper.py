# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Absorbed latent attention on Hopper's matrix units: what `absorbed_split_kernel` does, for many query vectors.

Alphabet as in `triton_absorbed`. A result of 64 x 512 takes the registers of two groups of four warps. Triton runs
both in step, each with all scores of a tile, and the matrix units wait while softmax weights are computed and while a
tile is read. Gluon, Triton's language of explicit layouts, leaves that to the kernel. Here, as in FlashMLA
(github.com/deepseek-ai/FlashMLA), either group goes its own way and owns half of the columns of the result. They take
turns with the tiles of tokens: the scores of a tile are one group's, which leaves weights, maxima and sums for the
other in shared memory, so that one multiplies while the other takes exponentials. A third group does nothing but copy,
into whichever tile both have left.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

ALIGNMENT = 16
"""Strides and addresses are multiples of so many elements and bytes: copies are 16 bytes wide."""


def takes(query: torch.Tensor, shared_query: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor) -> bool:
    """Whether the kernel can read these tensors: 16 bits, widths that are powers of two, aligned rows."""
    rank, shared_width = query.shape[3], shared_query.shape[3]
    return (
        query.element_size() == 2
        and rank in (128, 256, 512)
        and shared_width in (16, 32, 64)
        and all(
            x.data_ptr() % ALIGNMENT == 0 and x.stride(-1) == 1 and all(s % ALIGNMENT == 0 for s in x.stride()[:-1])
            for x in (query, shared_query, latent, shared_key)
        )
    )


@gluon.constexpr_function
def copy_layout(columns, num_warps):
    """Threads over a tile of rows, 16 bytes each."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def copy_queries(tile, pointer, stride_t, stride_h, first, M, H):
    """Begin to copy query vectors `first` and following; zeros beyond M."""
    layout: gl.constexpr = copy_layout(tile.shape[1], gl.num_warps())
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    row = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    # Long prompts times wide heads are more elements than 32 bits count.
    place = (row // H).to(gl.int64) * stride_t + (row % H).to(gl.int64) * stride_h
    async_copy.async_copy_global_to_shared(tile, pointer + place[:, None] + column[None, :], (row < M)[:, None])


@gluon.jit
def in_view(seen, s, stop, HAS_MASK: gl.constexpr):
    """Which of the tokens s some query may see; what none sees is not read: it may be anything, and 0 * NaN is NaN."""
    inside = s < stop
    if HAS_MASK:
        inside = inside & (gl.load(seen + s, mask=inside, other=0) != 0)
    return inside


@gluon.jit
def token_rows(tile, start):
    """The tokens from `start` on, laid out for `copy_tokens` into a tile."""
    layout: gl.constexpr = copy_layout(tile.shape[1], gl.num_warps())
    return start + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))


@gluon.jit
def copy_tokens(tile, pointer, stride, s, inside):
    """Begin to copy tokens s, as laid out by `token_rows`; zeros where not `inside`."""
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, copy_layout(tile.shape[1], gl.num_warps())))
    rows = pointer + s.to(gl.int64)[:, None] * stride
    async_copy.async_copy_global_to_shared(tile, rows + column[None, :], inside[:, None])


@gluon.jit
def produce(tiles, barriers, cache, HAS_MASK: gl.constexpr):
    """The copying group: tiles of tokens in turn into either buffer, as soon as both consumers have left it."""
    _, _, latents, shared_keys, _, _, _ = tiles
    _, full, _, empty = barriers
    latent, latent_s, shared_key, shared_key_s, seen, first, stop = cache
    buffer = 0
    phase = 1  # a barrier that nobody has arrived at counts as passed
    for start in range(first, stop, latents.shape[1]):
        c = latents.index(buffer)
        k = shared_keys.index(buffer)
        c_token = token_rows(c, start)
        k_token = token_rows(k, start)
        c_inside = in_view(seen, c_token, stop, HAS_MASK)
        k_inside = in_view(seen, k_token, stop, HAS_MASK)
        mbarrier.wait(empty.index(buffer), phase)
        copy_tokens(c, latent, latent_s, c_token, c_inside)
        copy_tokens(k, shared_key, shared_key_s, k_token, k_inside)
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)
        phase ^= buffer
        buffer = 1 - buffer
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def fade(top, new_top):
    """The factor from results relative to a maximum `top` to those relative to a greater one, and that one, finite."""
    finite_top = gl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf is NaN
    return gl.exp2(top - finite_top), finite_top


@gluon.jit
def consume(
    tiles, barriers, work, H: gl.constexpr, HAS_MASK: gl.constexpr, MASK_PER_TOKEN: gl.constexpr, HALF: gl.constexpr
):
    """A computing group: the scores of every other tile, and half of the columns of the result of all tiles."""
    queries, shared_queries, latents, shared_keys, weights, tops, totals = tiles
    asked, full, ready, empty = barriers
    seen, mask, mask_t, o, lse, splits, scale_log2, first_row, num_rows, last, first, stop = work
    BM: gl.constexpr = queries.shape[0]
    BN: gl.constexpr = latents.shape[1]
    R: gl.constexpr = queries.shape[1]
    COLUMNS: gl.constexpr = R // 2
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    score_row: gl.constexpr = gl.SliceLayout(1, score)
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    out_row: gl.constexpr = gl.SliceLayout(1, out)
    row = gl.arange(0, BM, score_row)
    in_rows = row < num_rows
    token = (first_row + row) // H
    last += token  # the last cached token that a query vector may see: its own
    n = gl.arange(0, BN, gl.SliceLayout(0, score))

    top = gl.full([BM], -float("inf"), gl.float32, score_row)
    total = gl.full([BM], 0.0, gl.float32, score_row)
    acc = gl.full([BM, COLUMNS], 0.0, gl.float32, out)
    buffer = 0
    phase = 0
    mbarrier.wait(asked, 0)
    for start in range(first, stop, BN):
        values = latents.index(buffer).slice(HALF * COLUMNS, COLUMNS, dim=1)
        if buffer == HALF:
            s = start + n
            inside = in_view(seen, s, stop, HAS_MASK)  # a mask is read while the tile is copied
            mbarrier.wait(full.index(buffer), phase)
            fence_async_shared()
            scores = gl.full([BM, BN], 0.0, gl.float32, score)
            right = latents.index(buffer).permute((1, 0))
            scores = warpgroup_mma(queries, right, scores, use_acc=False, is_async=True)
            right = shared_keys.index(buffer).permute((1, 0))
            scores = warpgroup_mma(shared_queries, right, scores)
            visible = inside[None, :] & (s[None, :] <= last[:, None])
            if MASK_PER_TOKEN:
                places = mask + token.to(gl.int64)[:, None] * mask_t + s[None, :]
                visible = visible & (gl.load(places, mask=in_rows[:, None] & inside[None, :], other=0) != 0)
            scores = gl.where(visible, scores * scale_log2, -float("inf"))
            new_top = gl.maximum(top, gl.max(scores, axis=1))
            faded, finite_top = fade(top, new_top)
            tile = gl.exp2(scores - finite_top[:, None])
            total = total * faded + gl.sum(tile, axis=1)
            top = new_top
            tile = tile.to(queries.dtype)
            # What stood there, the other group's, has been used: its tile was the last one here.
            weights.store(tile)
            tops.store(top)
            totals.store(total)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(buffer), count=1)
            acc = acc * gl.convert_layout(faded, out_row)[:, None]
            acc = warpgroup_mma(gl.convert_layout(tile, gl.DotOperandLayout(0, out, 2)), values, acc)
        else:
            mbarrier.wait(full.index(buffer), phase)
            mbarrier.wait(ready.index(buffer), phase)
            fence_async_shared()
            new_top = tops.load(score_row)
            total = totals.load(score_row)
            faded, _ = fade(top, new_top)
            top = new_top
            acc = acc * gl.convert_layout(faded, out_row)[:, None]
            acc = warpgroup_mma(weights, values, acc)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(buffer), count=1)
        phase ^= buffer
        buffer = 1 - buffer

    place = row * splits
    if HALF == 0:
        gl.store(lse + place, top + gl.log2(total), mask=in_rows)
    share = gl.convert_layout(1.0 / gl.where(total > 0.0, total, 1.0), out_row)
    o_row = gl.convert_layout(place, out_row).to(gl.int64) * R
    r = HALF * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, out))
    o_tile = (acc * share[:, None]).to(o.dtype.element_ty)
    gl.store(o + o_row[:, None] + r[None, :], o_tile, mask=gl.convert_layout(in_rows, out_row)[:, None])


# A cache grows by one token per step: kernels made anew for lengths that are multiples of 16 would stall a generation.
@gluon.jit(
    do_not_specialize=["T", "S", "splits", "seen_b", "mask_b", "mask_t"],
    do_not_specialize_on_alignment=["seen", "mask", "end"],
)
def hopper_split_kernel(
    query,
    shared_query,
    latent,
    shared_key,
    seen,
    mask,
    end,
    o,
    lse,
    T,
    S,
    splits,
    scale_log2,
    query_b,
    query_t,
    query_h,
    shared_query_b,
    shared_query_t,
    shared_query_h,
    latent_b,
    latent_s,
    shared_key_b,
    shared_key_s,
    seen_b,
    mask_b,
    mask_t,
    end_b,
    H: gl.constexpr,
    R: gl.constexpr,
    Q: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    HAS_MASK: gl.constexpr,
    MASK_PER_TOKEN: gl.constexpr,
    HAS_END: gl.constexpr,
):
    """Grid (B * blocks of query vectors, N). Writes a normalised partial output and its log2-sum-exp."""
    dtype: gl.constexpr = latent.dtype.element_ty
    M = T * H
    blocks = (M + BM - 1) // BM
    b = (gl.program_id(0) // blocks).to(gl.int64)
    split = gl.program_id(1)
    first_row = (gl.program_id(0) % blocks) * BM
    tokens = S
    if HAS_END:
        tokens = gl.minimum(gl.load(end + b * end_b).to(gl.int32), S)
    per_split = ((tokens + BN - 1) // BN + splits - 1) // splits * BN
    first = split * per_split
    stop = gl.minimum(tokens, first + per_split)

    queries = gl.allocate_shared_memory(dtype, [BM, R], gl.NVMMASharedLayout.get_default_for([BM, R], dtype))
    shared_queries = gl.allocate_shared_memory(dtype, [BM, Q], gl.NVMMASharedLayout.get_default_for([BM, Q], dtype))
    latents = gl.allocate_shared_memory(dtype, [2, BN, R], gl.NVMMASharedLayout.get_default_for([BN, R], dtype))
    shared_keys = gl.allocate_shared_memory(dtype, [2, BN, Q], gl.NVMMASharedLayout.get_default_for([BN, Q], dtype))
    weights = gl.allocate_shared_memory(dtype, [BM, BN], gl.NVMMASharedLayout.get_default_for([BM, BN], dtype))
    tops = gl.allocate_shared_memory(gl.float32, [BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    totals = gl.allocate_shared_memory(gl.float32, [BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # queries are there
    # Of either buffer: it is copied, its weights are there, both consumers have left it.
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(asked, count=128)  # threads that copy
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.thread_barrier()
    copy_queries(queries, query + b * query_b, query_t, query_h, first_row, M, H)
    copy_queries(shared_queries, shared_query + b * shared_query_b, shared_query_t, shared_query_h, first_row, M, H)
    async_copy.mbarrier_arrive(asked, increment_count=False)
    place = (b * M + first_row) * splits + split
    seen += b * seen_b
    mask += b * mask_b
    o += place * R
    lse += place
    num_rows = M - first_row
    last = tokens - T
    latent += b * latent_b
    shared_key += b * shared_key_b
    tiles = (queries, shared_queries, latents, shared_keys, weights, tops, totals)
    barriers = (asked, full, ready, empty)
    work = (seen, mask, mask_t, o, lse, splits, scale_log2, first_row, num_rows, last, first, stop)
    cache = (latent, latent_s, shared_key, shared_key_s, seen, first, stop)
    # Of the second consumer and of the producer, which needs more for a mask; the first consumer gets as many as the
    # second.
    registers: gl.constexpr = (224, 56) if HAS_MASK else (232, 40)
    gl.warp_specialize(
        [
            (consume, (tiles, barriers, work, H, HAS_MASK, MASK_PER_TOKEN, 0)),
            (consume, (tiles, barriers, work, H, HAS_MASK, MASK_PER_TOKEN, 1)),
            (produce, (tiles, barriers, cache, HAS_MASK)),
        ],
        [4, 4],
        registers,
    )

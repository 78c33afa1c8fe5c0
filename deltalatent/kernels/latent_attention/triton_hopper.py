# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Absorbed latent attention on Hopper's matrix units: what `absorbed_split_kernel` does, for many query vectors.

Alphabet as in `triton_absorbed`. There, each of the two groups of four warps that a result of 64 x 512 needs computes
all scores of a tile, because Triton keeps rows of scores within a warp, and the next tile is not read before both
products of the last one are done. Gluon, Triton's language of explicit layouts, leaves neither to the compiler: here
the groups share the scores by token and the result by column (as in FlashMLA, github.com/deepseek-ai/FlashMLA), the
product of weights and latents runs on while the scores of the next tile are computed, and the tile after that is read
into the room which it leaves.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
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
def copy_tokens(tile, pointer, stride, start, stop):
    """Begin to copy tokens `start` and following; zeros from `stop` on."""
    layout: gl.constexpr = copy_layout(tile.shape[1], gl.num_warps())
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    s = start + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    rows = pointer + s.to(gl.int64)[:, None] * stride
    async_copy.async_copy_global_to_shared(tile, rows + column[None, :], (s < stop)[:, None])


@gluon.jit
def begin_scores(queries, shared_queries, c, k, layout: gl.constexpr):
    """Begin the products of a tile of query vectors with a tile of tokens."""
    zeros = gl.full([queries.shape[0], c.shape[0]], 0.0, gl.float32, layout)
    scores = warpgroup_mma(queries, c.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(shared_queries, k.permute((1, 0)), scores, is_async=True)


@gluon.jit
def visible_tokens(s, stop, last, mask, mask_t, token, in_rows, HAS_MASK: gl.constexpr, MASK_PER_TOKEN: gl.constexpr):
    """bool [BM, BN]: what query vectors may see of tokens s."""
    in_split = s < stop
    visible = in_split[None, :] & (s[None, :] <= last[:, None])
    if HAS_MASK:
        if MASK_PER_TOKEN:
            allowed = gl.load(
                mask + token.to(gl.int64)[:, None] * mask_t + s[None, :],
                mask=in_rows[:, None] & in_split[None, :],
                other=0,
            )
            visible = visible & (allowed != 0)
        else:
            visible = visible & (gl.load(mask + s, mask=in_split, other=0) != 0)[None, :]
    return visible


@gluon.jit
def online_softmax(scores, visible, scale_log2, top, total):
    """Weights of a tile, the factor by which earlier results fade, and the new maximum and sums."""
    scores = gl.where(visible, scores * scale_log2, -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    finite_top = gl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf is NaN
    weights = gl.exp2(scores - finite_top[:, None])
    faded = gl.exp2(top - finite_top)
    return weights, faded, new_top, total * faded[:, None] + weights


# A cache grows by one token per step: kernels made anew for lengths that are multiples of 16 would stall a generation.
@gluon.jit(do_not_specialize=["T", "S", "splits", "mask_b", "mask_t"], do_not_specialize_on_alignment=["mask", "end"])
def hopper_split_kernel(
    query,
    shared_query,
    latent,
    shared_key,
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
    groups: gl.constexpr = gl.num_warps() // 4
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, BN // groups, 16])
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, R // groups, 16])
    out_row: gl.constexpr = gl.SliceLayout(1, out)

    M = T * H
    blocks = (M + BM - 1) // BM
    b = (gl.program_id(0) // blocks).to(gl.int64)
    split = gl.program_id(1)
    first_row = (gl.program_id(0) % blocks) * BM
    row = first_row + gl.arange(0, BM, gl.SliceLayout(1, score))
    in_rows = row < M
    token = row // H

    stop = S
    if HAS_END:
        stop = gl.minimum(gl.load(end + b * end_b).to(gl.int32), S)
    last = stop - T + token  # the last cached token that a query vector may see: its own
    per_split = ((stop + BN - 1) // BN + splits - 1) // splits * BN
    first = split * per_split
    stop = gl.minimum(stop, first + per_split)
    n = gl.arange(0, BN, gl.SliceLayout(0, score))

    queries = gl.allocate_shared_memory(dtype, [BM, R], gl.NVMMASharedLayout.get_default_for([BM, R], dtype))
    shared_queries = gl.allocate_shared_memory(dtype, [BM, Q], gl.NVMMASharedLayout.get_default_for([BM, Q], dtype))
    latents = gl.allocate_shared_memory(dtype, [2, BN, R], gl.NVMMASharedLayout.get_default_for([BN, R], dtype))
    shared_keys = gl.allocate_shared_memory(dtype, [2, BN, Q], gl.NVMMASharedLayout.get_default_for([BN, Q], dtype))
    weights = gl.allocate_shared_memory(dtype, [BM, BN], gl.NVMMASharedLayout.get_default_for([BM, BN], dtype))

    latent += b * latent_b
    shared_key += b * shared_key_b
    mask += b * mask_b
    top = gl.full([BM], -float("inf"), gl.float32, gl.SliceLayout(1, score))
    total = gl.full([BM, BN], 0.0, gl.float32, score)  # added up over tokens at the end, not between warps in the loop
    acc = gl.full([BM, R], 0.0, gl.float32, out)
    if first < stop:
        copy_queries(queries, query + b * query_b, query_t, query_h, first_row, M, H)
        copy_queries(
            shared_queries, shared_query + b * shared_query_b, shared_query_t, shared_query_h, first_row, M, H
        )
        for i in gl.static_range(2):
            copy_tokens(latents.index(i), latent, latent_s, first + i * BN, stop)
            copy_tokens(shared_keys.index(i), shared_key, shared_key_s, first + i * BN, stop)
            async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        scores = begin_scores(queries, shared_queries, latents.index(0), shared_keys.index(0), score)
        visible = visible_tokens(first + n, stop, last, mask, mask_t, token, in_rows, HAS_MASK, MASK_PER_TOKEN)
        scores = warpgroup_mma_wait(0, [scores])
        tile_weights, _, top, total = online_softmax(scores, visible, scale_log2, top, total)
        weights.store(tile_weights.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        buffer = 1
        for start in range(first + BN, stop, BN):
            # The last tile's product, which only waits for the scores of this tile's to be queued behind it.
            running = warpgroup_mma(weights, latents.index(1 - buffer), acc, is_async=True)
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            scores = begin_scores(queries, shared_queries, latents.index(buffer), shared_keys.index(buffer), score)
            visible = visible_tokens(start + n, stop, last, mask, mask_t, token, in_rows, HAS_MASK, MASK_PER_TOKEN)
            acc = warpgroup_mma_wait(2, [running])
            gl.thread_barrier()  # both groups have left the last tile
            copy_tokens(latents.index(1 - buffer), latent, latent_s, start + BN, stop)
            copy_tokens(shared_keys.index(1 - buffer), shared_key, shared_key_s, start + BN, stop)
            async_copy.commit_group()
            scores = warpgroup_mma_wait(0, [scores])
            tile_weights, faded, top, total = online_softmax(scores, visible, scale_log2, top, total)
            weights.store(tile_weights.to(dtype))
            acc = acc * gl.convert_layout(faded, out_row)[:, None]
            fence_async_shared()
            gl.thread_barrier()
            buffer = 1 - buffer
        acc = warpgroup_mma(weights, latents.index(1 - buffer), acc)
        async_copy.wait_group(0)

    sums = gl.sum(total, axis=1)
    place = (b * M + row) * splits + split
    gl.store(lse + place, top + gl.log2(sums), mask=in_rows)
    share = gl.convert_layout(1.0 / gl.where(sums > 0.0, sums, 1.0), out_row)
    o_row = gl.convert_layout(place, out_row) * R
    r = gl.arange(0, R, gl.SliceLayout(0, out))
    o_tile = (acc * share[:, None]).to(o.dtype.element_ty)
    gl.store(o + o_row[:, None] + r[None, :], o_tile, mask=gl.convert_layout(in_rows, out_row)[:, None])

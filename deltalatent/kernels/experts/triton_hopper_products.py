# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped products on Hopper: what `product_kernel` does, by warps that load and others that multiply.

Alphabet and layout of a product as in `triton_products`. There all warps of a program ask for the tiles of a later
step, wait for those of this one, multiply, and at the end store, all together. Here, in Gluon, Triton's language of
explicit layouts, four warps do nothing but load, around a ring of buffers and on into the next tile of rows, while two
groups of four multiply 128 channels each with the rows that both share.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

BLOCK = gl.constexpr(256)
"""Output channels of a program, half of them for each group."""

ROWS, TAIL = gl.constexpr(128), gl.constexpr(32)
"""Rows of a tile, and those that the last tile of an expert may have besides."""

DEPTH, STAGES = gl.constexpr(64), gl.constexpr(4)
"""Depth of a step, and steps that the ring of buffers holds."""

MULTIPLYING_REGISTERS = gl.constexpr(208)
"""Registers of a thread that multiplies: 160 of them are sums. The threads that load have what is left, 88."""


def takes(x: torch.Tensor, w: torch.Tensor, transposed: bool) -> bool:
    """Whether the kernel can multiply these (contiguous) tensors: 16 bits, whole blocks of channels, aligned."""
    IN, OUT = w.shape[1:] if transposed else (w.shape[2], w.shape[1])
    return (
        w.element_size() == 2
        and OUT % BLOCK.value == 0
        and IN % DEPTH.value == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, w))
    )


@gluon.constexpr_function
def copy_layout(columns):
    """Four warps over a tile of rows, 16 bytes a thread."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def find_tile(order, tiles, num_tiles, tile, K: gl.constexpr, GATHER: gl.constexpr):
    """Expert, number of rows (0 past the last tile), and the rows of x that a tile consists of, the tail apart."""
    inside = tile < num_tiles
    count = gl.load(tiles + 2 * num_tiles + tile, mask=inside, other=0)
    expert = gl.load(tiles + tile, mask=inside, other=0)
    start = gl.load(tiles + num_tiles + tile, mask=inside, other=0)
    layout: gl.constexpr = gl.SliceLayout(1, copy_layout(DEPTH))
    row = gl.arange(0, ROWS, layout)
    tail = ROWS + gl.arange(0, TAIL, layout)
    if GATHER:
        return (
            expert,
            count,
            gl.load(order + start + row, mask=row < count, other=0) // K,
            gl.load(order + start + tail, mask=tail < count, other=0) // K,
        )
    return expert, count, start + row, start + tail


@gluon.jit
def load_partition(
    x, w, order, tiles, num_tiles, full, empty, first, second, rows, tails,
    OUT: gl.constexpr, IN: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Fill the ring, step after step of one tile of rows and block of channels after the other."""
    blocks: gl.constexpr = OUT // BLOCK
    weight_layout: gl.constexpr = copy_layout(first.shape[2])
    r = gl.arange(0, first.shape[1], gl.SliceLayout(1, weight_layout))
    c = gl.arange(0, first.shape[2], gl.SliceLayout(0, weight_layout))
    within = r[:, None] * (OUT if TRANSPOSED else IN) + c[None, :]
    layout: gl.constexpr = copy_layout(DEPTH)
    column = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    local = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    tail_local = ROWS + gl.arange(0, TAIL, gl.SliceLayout(1, layout))
    step = 0
    expert, count, row, tail = find_tile(order, tiles, num_tiles, gl.program_id(0) // blocks, K, GATHER)
    for job in range(gl.program_id(0), num_tiles * blocks, gl.num_programs(0)):
        # Asked for here, so that nobody waits for the rows of a tile when it begins.
        following = find_tile(order, tiles, num_tiles, (job + gl.num_programs(0)) // blocks, K, GATHER)
        if count > 0:
            of_rows = x + row.to(gl.int64)[:, None] * IN + column[None, :]
            of_tail = x + tail.to(gl.int64)[:, None] * IN + column[None, :]
            of_weight = w + expert.to(gl.int64) * (OUT * IN) + job % blocks * (BLOCK if TRANSPOSED else BLOCK * IN)
            for k in range(0, IN, DEPTH):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                place = of_weight + k * (OUT if TRANSPOSED else 1)
                half: gl.constexpr = BLOCK // 2 * (1 if TRANSPOSED else IN)
                async_copy.async_copy_global_to_shared(first.index(stage), place + within)
                async_copy.async_copy_global_to_shared(second.index(stage), place + half + within)
                async_copy.async_copy_global_to_shared(rows.index(stage), of_rows + k, (local < count)[:, None])
                if count > ROWS:
                    async_copy.async_copy_global_to_shared(
                        tails.index(stage), of_tail + k, (tail_local < count)[:, None]
                    )
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                step += 1
        expert, count, row, tail = following


@gluon.jit
def store_tile(values, y, start, local, count, channel, OUT: gl.constexpr):
    """Store sums [channels, rows] into y [S, OUT], rows `local` and following of a tile that has `count`."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
    values = gl.convert_layout(values.to(y.dtype.element_ty), layout)
    local += gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    channel += gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    place = y + (start + local).to(gl.int64)[None, :] * OUT + channel[:, None]
    gl.store(place, values, mask=(local < count)[None, :])


@gluon.jit
def multiply_tile(
    y, start, count, channel, step, full, empty, weights, rows, tails,
    OUT: gl.constexpr, IN: gl.constexpr, TRANSPOSED: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    """All steps of one tile, of which `step` is the first; one behind the other on the matrix units."""
    sums = warpgroup_mma_init(
        gl.zeros([BLOCK // 2, ROWS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    )
    if HAS_TAIL:
        tail_sums = warpgroup_mma_init(
            gl.zeros([BLOCK // 2, TAIL], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16]))
        )
    for k in range(0, IN, DEPTH):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        fence_async_shared()
        left = weights.index(stage)
        if TRANSPOSED:
            left = left.permute((1, 0))
        sums = warpgroup_mma(left, rows.index(stage).permute((1, 0)), sums, is_async=True)
        if HAS_TAIL:
            tail_sums = warpgroup_mma(left, tails.index(stage).permute((1, 0)), tail_sums, is_async=True)
            done, tail_done = warpgroup_mma_wait(2, [sums, tail_sums])  # for those of the step before
            tail_sums = warpgroup_mma_init(tail_done)
        else:
            done = warpgroup_mma_wait(1, [sums])
        sums = warpgroup_mma_init(done)
        if k > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    if HAS_TAIL:
        done, tail_done = warpgroup_mma_wait(0, [sums, tail_sums])
    else:
        done = warpgroup_mma_wait(0, [sums])
    mbarrier.arrive(empty.index((step - 1) % STAGES))
    store_tile(done, y, start, 0, count, channel, OUT)
    if HAS_TAIL:
        store_tile(tail_done, y, start, ROWS, count, channel, OUT)


@gluon.jit
def multiply_partition(
    y, tiles, num_tiles, full, empty, weights, rows, tails,
    OUT: gl.constexpr, IN: gl.constexpr, TRANSPOSED: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Empty the ring, for one half of the channels of each block."""
    blocks: gl.constexpr = OUT // BLOCK
    step = 0
    for job in range(gl.program_id(0), num_tiles * blocks, gl.num_programs(0)):
        tile = job // blocks
        channel = job % blocks * BLOCK + SECOND * (BLOCK // 2)
        count = gl.load(tiles + 2 * num_tiles + tile)
        start = gl.load(tiles + num_tiles + tile)
        if count > ROWS:
            multiply_tile(
                y, start, count, channel, step, full, empty, weights, rows, tails, OUT, IN, TRANSPOSED, True
            )  # fmt: skip
            step += IN // DEPTH
        elif count > 0:
            multiply_tile(
                y, start, count, channel, step, full, empty, weights, rows, tails, OUT, IN, TRANSPOSED, False
            )  # fmt: skip
            step += IN // DEPTH


@gluon.jit(do_not_specialize=["num_tiles"])
def hopper_product_kernel(
    x, w, order, tiles, y, num_tiles,
    OUT: gl.constexpr, IN: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """x [S, IN] (GATHER: [T, IN]), w [E, OUT, IN] (TRANSPOSED: [E, IN, OUT]) -> y [S, OUT].

    As many programs as multiprocessors: each takes one tile of rows and block of channels after the other, neighbours
    at the same time, so that a tile's rows and an expert's weight are found in the L2 cache.
    """
    dtype: gl.constexpr = w.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    half: gl.constexpr = [STAGES, DEPTH, BLOCK // 2] if TRANSPOSED else [STAGES, BLOCK // 2, DEPTH]
    first = gl.allocate_shared_memory(dtype, half, shared)
    second = gl.allocate_shared_memory(dtype, half, shared)
    rows = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], shared)
    tails = gl.allocate_shared_memory(dtype, [STAGES, TAIL, DEPTH], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)  # every thread that loads
        mbarrier.init(empty.index(i), count=2)  # both groups
    gl.warp_specialize(
        [
            (
                load_partition,
                (
                    x, w, order, tiles, num_tiles, full, empty, first, second, rows, tails,
                    OUT, IN, K, GATHER, TRANSPOSED,
                ),
            ),
            (multiply_partition, (y, tiles, num_tiles, full, empty, first, rows, tails, OUT, IN, TRANSPOSED, 0)),
            (multiply_partition, (y, tiles, num_tiles, full, empty, second, rows, tails, OUT, IN, TRANSPOSED, 1)),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, MULTIPLYING_REGISTERS],
    )  # fmt: skip

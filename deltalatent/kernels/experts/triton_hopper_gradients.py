# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of the experts' weights on Hopper: the panels of `triton_gradients`, by warps that load and others that
multiply.

A panel is the rows of an expert in a block of columns of `right`; it stays on chip while tiles of `left` stream past.
As in `triton_hopper_products`, four warps do nothing but load. Two groups of four multiply the panel with every other
tile each, so that one stores its part of the gradient while the other one multiplies.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltalatent.kernels.experts.triton_hopper_products import copy_layout

BM, BN = gl.constexpr(64), gl.constexpr(128)
"""Tile of the gradient: channels of `left` times those of `right`."""

ROWS, TAIL = gl.constexpr(128), gl.constexpr(64)
"""Rows of a panel, in two parts, of which the second is often empty. More rows than both hold are summed in turns."""

STAGES, PANELS = gl.constexpr(4), gl.constexpr(2)
"""Tiles of `left` and panels on chip. The tiles are an even number, so that a buffer always serves the same group."""

MULTIPLYING_REGISTERS = gl.constexpr(160)
"""Registers of a thread that multiplies; 64 of them are sums. The threads that load have what is left."""


def takes(left: torch.Tensor, right: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether the kernel can make the gradient of w [E, M, N]: 16 bits, whole tiles, (contiguous) operands aligned."""
    return (
        w.element_size() == 2
        and w.shape[1] % (2 * BM.value) == 0
        and w.shape[2] % BN.value == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (left, right))
    )


@gluon.jit
def find_rows(
    order, first, end, N: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr
):  # fmt: skip
    """Rows of an operand that stand for sorted rows `first` and following: those of their tokens, or themselves."""
    row = first + gl.arange(0, N, gl.SliceLayout(1, copy_layout(COLUMNS)))
    if GATHER:
        row = gl.load(order + row, mask=row < end, other=0) // K
    return row


@gluon.jit
def copy_rows(buffer, matrix, rows, first, end, column, WIDTH: gl.constexpr):
    """Begin to copy rows of matrix [., WIDTH], from `column` on; zeros for sorted rows from `end` on."""
    layout: gl.constexpr = copy_layout(buffer.shape[1])
    real = first + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, layout)) < end
    column += gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout))
    place = matrix + rows.to(gl.int64)[:, None] * WIDTH + column[None, :]
    async_copy.async_copy_global_to_shared(buffer, place, real[:, None])


@gluon.jit
def load_partition(
    left, right, order, offsets, E, buffers, barriers,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATHER_LEFT: gl.constexpr,
):  # fmt: skip
    """Load each panel, once if its expert has no more rows than it holds, and behind it all tiles of `left`."""
    tiles, tile_tails, panels, panel_tails = buffers
    full, empty, panel_full, panel_empty = barriers
    blocks: gl.constexpr = N // BN
    step = 0
    panel = 0
    for job in range(gl.program_id(0), E * blocks, gl.num_programs(0)):
        start = gl.load(offsets + job // blocks)
        end = gl.load(offsets + job // blocks + 1)
        turns = gl.cdiv(end - start, ROWS + TAIL)
        rows = find_rows(order, start, end, ROWS, BM, K, GATHER_LEFT)
        tail = find_rows(order, start + ROWS, end, TAIL, BM, K, GATHER_LEFT)
        for m in range(0, M, 2 * BM):
            for turn in range(turns):
                first = start + turn * (ROWS + TAIL)
                if (m == 0) | (turns > 1):
                    column = job % blocks * BN
                    slot = panel % PANELS
                    right_rows = find_rows(order, first, end, ROWS, BN, K, not GATHER_LEFT)
                    right_tail = find_rows(order, first + ROWS, end, TAIL, BN, K, not GATHER_LEFT)
                    mbarrier.wait(panel_empty.index(slot), (panel // PANELS & 1) ^ 1)
                    copy_rows(panels.index(slot), right, right_rows, first, end, column, N)
                    if first + ROWS < end:
                        copy_rows(panel_tails.index(slot), right, right_tail, first + ROWS, end, column, N)
                    async_copy.mbarrier_arrive(panel_full.index(slot), increment_count=False)
                    panel += 1
                if turns > 1:
                    rows = find_rows(order, first, end, ROWS, BM, K, GATHER_LEFT)
                    tail = find_rows(order, first + ROWS, end, TAIL, BM, K, GATHER_LEFT)
                for second in gl.static_range(2):
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                    copy_rows(tiles.index(stage), left, rows, first, end, m + second * BM, M)
                    if first + ROWS < end:
                        copy_rows(tile_tails.index(stage), left, tail, first + ROWS, end, m + second * BM, M)
                    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                    step += 1


@gluon.jit
def multiply_partition(
    dw, offsets, E, buffers, barriers, M: gl.constexpr, N: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """Multiply and store every other tile."""
    tiles, tile_tails, panels, panel_tails = buffers
    full, empty, panel_full, panel_empty = barriers
    blocks: gl.constexpr = N // BN
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = SECOND * BM + gl.arange(0, BM, gl.SliceLayout(1, layout))
    column = gl.arange(0, BN, gl.SliceLayout(0, layout))
    step = SECOND
    panel = 0
    for job in range(gl.program_id(0), E * blocks, gl.num_programs(0)):
        expert = job // blocks
        count = gl.load(offsets + expert + 1) - gl.load(offsets + expert)
        turns = gl.cdiv(count, ROWS + TAIL)
        of_job = dw + expert.to(gl.int64) * (M * N) + job % blocks * BN
        for m in range(0, M, 2 * BM):
            sums = gl.zeros([BM, BN], gl.float32, sums_layout)
            for turn in range(turns):
                slot = panel % PANELS
                stage = step % STAGES
                mbarrier.wait(panel_full.index(slot), panel // PANELS & 1)
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                fence_async_shared()
                running = warpgroup_mma(
                    tiles.index(stage).permute((1, 0)), panels.index(slot), sums, is_async=True
                )  # fmt: skip
                more = count - turn * (ROWS + TAIL) - ROWS
                left = tile_tails.index(stage).permute((1, 0))
                right = panel_tails.index(slot)
                half: gl.constexpr = TAIL // 2
                if more > half:
                    running = warpgroup_mma(left, right, running, is_async=True)
                    sums = warpgroup_mma_wait(0, [running])
                elif more > 0:
                    running = warpgroup_mma(left.slice(0, half, 1), right.slice(0, half, 0), running, is_async=True)
                    sums = warpgroup_mma_wait(0, [running])
                else:
                    sums = warpgroup_mma_wait(0, [running])
                mbarrier.arrive(empty.index(stage))
                if (m == M - 2 * BM) | (turns > 1):
                    mbarrier.arrive(panel_empty.index(slot))
                    panel += 1
                step += 2
            values = gl.convert_layout(sums.to(dw.dtype.element_ty), layout)
            gl.store(of_job + (m + row)[:, None] * N + column[None, :], values)


@gluon.jit(do_not_specialize=["E"])
def hopper_gradient_kernel(
    left, right, order, offsets, dw, E, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATHER_LEFT: gl.constexpr
):  # fmt: skip
    """dw [E, M, N]: sum over the rows of an expert of left [., M] times right [., N]; zeros without rows.

    As many programs as multiprocessors; neighbours take panels of the same expert, for which they load the same tiles.
    """
    dtype: gl.constexpr = dw.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    buffers = (
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, BM], shared),
        gl.allocate_shared_memory(dtype, [STAGES, TAIL, BM], shared),
        gl.allocate_shared_memory(dtype, [PANELS, ROWS, BN], shared),
        gl.allocate_shared_memory(dtype, [PANELS, TAIL, BN], shared),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    panel_full = gl.allocate_shared_memory(gl.int64, [PANELS, 1], mbarrier.MBarrierLayout())
    panel_empty = gl.allocate_shared_memory(gl.int64, [PANELS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)  # every thread that loads
        mbarrier.init(empty.index(i), count=1)  # the group whose buffer it is
    for i in gl.static_range(PANELS):
        mbarrier.init(panel_full.index(i), count=128)
        mbarrier.init(panel_empty.index(i), count=2)  # both groups
    barriers = (full, empty, panel_full, panel_empty)
    gl.warp_specialize(
        [
            (load_partition, (left, right, order, offsets, E, buffers, barriers, M, N, K, GATHER_LEFT)),
            (multiply_partition, (dw, offsets, E, buffers, barriers, M, N, 0)),
            (multiply_partition, (dw, offsets, E, buffers, barriers, M, N, 1)),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, MULTIPLYING_REGISTERS],
    )

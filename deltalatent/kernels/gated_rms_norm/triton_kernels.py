# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the gated RMS norm, forward and backward.

Alphabet: R rows (all leading axes), V channels. A program holds BR rows; V fits one block.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def gated_rms_norm_forward_kernel(x, gate, weight, y, R, V, eps, BR: tl.constexpr, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BV)
    mask = (row < R)[:, None] & (column < V)[None, :]
    offset = row[:, None] * V + column[None, :]
    values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    logits = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(values * values, axis=1) / V + eps)
    result = values * inverse_rms[:, None] * scale[None, :] * tl.sigmoid(logits)
    tl.store(y + offset, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gated_rms_norm_backward_kernel(
    x, gate, weight, dy, dx, dgate, dweight, R, V, eps, tiles, BR: tl.constexpr, BV: tl.constexpr
):
    """A program walks over `tiles` tiles of rows and leaves one partial sum of the weight gradient."""
    column = tl.arange(0, BV)
    scale = tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)
    partial = tl.zeros([BV], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles
    for tile in range(tiles):
        row = (first + tile) * BR + tl.arange(0, BR)
        mask = (row < R)[:, None] & (column < V)[None, :]
        offset = row[:, None] * V + column[None, :]
        values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        logits = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32)
        upstream = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(values * values, axis=1) / V + eps)
        normed = values * inverse_rms[:, None]
        sigmoid = tl.sigmoid(logits)
        gated = upstream * sigmoid
        partial += tl.sum(gated * normed, axis=0)
        scaled = gated * scale[None, :]  # gradient of the normed values
        dgate_tile = scaled * normed * (1.0 - sigmoid)
        mean = tl.sum(scaled * normed, axis=1) / V
        dx_tile = inverse_rms[:, None] * (scaled - normed * mean[:, None])
        tl.store(dx + offset, dx_tile.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + offset, dgate_tile.to(dgate.dtype.element_ty), mask=mask)
    tl.store(dweight + tl.program_id(0) * BV + column, partial)


def _tile(num_columns: int) -> tuple[int, int]:
    """Rows and columns of a tile: about 4096 values for four warps."""
    columns = triton.next_power_of_2(num_columns)
    return max(1, 4096 // columns), columns


def gated_rms_norm_forward(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`y` [..., V] in the dtype of `gate`; all inputs contiguous."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = x.numel() // x.shape[-1]
    if rows > 0:
        block_r, block_v = _tile(x.shape[-1])
        grid = (triton.cdiv(rows, block_r),)
        gated_rms_norm_forward_kernel[grid](
            x, gate, weight, y, rows, x.shape[-1], eps, BR=block_r, BV=block_v, num_warps=4
        )
    return y


def gated_rms_norm_backward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float
) -> list[torch.Tensor]:
    """Gradients of `x`, `gate` and `weight`; all inputs contiguous."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = x.numel() // x.shape[-1]
    if rows == 0:
        return [dx, dgate, torch.zeros_like(weight)]
    block_r, block_v = _tile(x.shape[-1])
    # Enough programs to fill a large chip, few enough that the partial sums are small beside the inputs. The count
    # depends on the shape alone, so that the order of summation is the same on every machine.
    total_tiles = triton.cdiv(rows, block_r)
    tiles = triton.cdiv(total_tiles, 2048)
    programs = triton.cdiv(total_tiles, tiles)
    partial = torch.empty(programs, block_v, dtype=torch.float32, device=x.device)
    gated_rms_norm_backward_kernel[(programs,)](
        x, gate, weight, dy, dx, dgate, partial, rows, x.shape[-1], eps, tiles, BR=block_r, BV=block_v, num_warps=4
    )
    return [dx, dgate, partial.sum(0)[: x.shape[-1]].to(weight.dtype)]

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the gated RMS norm, forward and backward.

Alphabet: R rows (all leading axes), V channels. A program holds BR rows; V fits one block.
"""

import torch
import triton
import triton.language as tl

from deltalatent.kernels.tiles import cdiv, next_power_of_2, on_its_device


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
    # One sum per place of the tile; the rows are added up once, at the end.
    partial = tl.zeros([BR, BV], tl.float32)
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
        partial += gated * normed
        scaled = gated * scale[None, :]  # gradient of the normed values
        dgate_tile = scaled * normed * (1.0 - sigmoid)
        mean = tl.sum(scaled * normed, axis=1) / V
        dx_tile = inverse_rms[:, None] * (scaled - normed * mean[:, None])
        tl.store(dx + offset, dx_tile.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + offset, dgate_tile.to(dgate.dtype.element_ty), mask=mask)
    tl.store(dweight + tl.program_id(0) * BV + column, tl.sum(partial, axis=0))


def _tile(num_columns: int, values: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of about `values` values, and warps (16 values for each thread)."""
    columns = next_power_of_2(num_columns)
    rows = max(1, values // columns)
    return rows, columns, min(8, max(1, rows * columns // 512))


@on_its_device
def gated_rms_norm_forward(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`y` [..., V] in the dtype of `gate`; all inputs contiguous."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = x.numel() // x.shape[-1]
    if rows > 0:
        block_r, block_v, num_warps = _tile(x.shape[-1], values=2048)
        grid = (cdiv(rows, block_r),)
        gated_rms_norm_forward_kernel[grid](
            x, gate, weight, y, rows, x.shape[-1], eps, BR=block_r, BV=block_v, num_warps=num_warps
        )
    return y


@on_its_device
def gated_rms_norm_backward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float
) -> list[torch.Tensor]:
    """Gradients of `x`, `gate` and `weight`; all inputs contiguous."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = x.numel() // x.shape[-1]
    if rows == 0:
        return [dx, dgate, torch.zeros_like(weight)]
    # One warp on its own where the row allows it: sums over a row then stay within the warp.
    block_r, block_v, num_warps = _tile(x.shape[-1], values=512)
    # Enough programs to fill a large chip, few enough that the partial sums are small beside the inputs. The count
    # depends on the shape alone, so that the order of summation is the same on every machine.
    total_tiles = cdiv(rows, block_r)
    tiles = cdiv(total_tiles, 4096)
    programs = cdiv(total_tiles, tiles)
    partial = torch.empty(programs, block_v, dtype=torch.float32, device=x.device)
    gated_rms_norm_backward_kernel[(programs,)](
        x, gate, weight, dy, dx, dgate, partial, rows, x.shape[-1], eps, tiles,
        BR=block_r, BV=block_v, num_warps=num_warps,
    )  # fmt: skip
    return [dx, dgate, partial.sum(0)[: x.shape[-1]].to(weight.dtype)]

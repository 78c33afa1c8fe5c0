# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the short convolution, backward.

A program walks over `chunk` tokens of one block of channels with the window of inputs and of gradients in registers,
so that every value is read once and every sigmoid is computed once. It recomputes the
convolution instead of reading it. Weight gradients leave as one partial sum per program and are added up afterwards in
a fixed order: no atomics, repeated runs are equal to the bit. Conventions as in `triton_fwd.py`.
"""

import torch
import triton
import triton.language as tl

from deltalatent.kernels.short_conv.triton_fwd import (
    TAPS,
    StreamLayout,
    load_first,
    load_row,
    load_tap,
    locate_documents,
    select_stream,
    stream_geometry,
    tokens_per_program,
    window,
)
from deltalatent.kernels.tiles import cdiv, on_its_device


@triton.jit
def activation_gradient(pre, SILU: tl.constexpr):
    """Derivative of the activation at `pre`."""
    derivative = tl.full(pre.shape, 1.0, tl.float32)
    if SILU:
        sigmoid = tl.sigmoid(pre)
        derivative = sigmoid * (1.0 + pre * (1.0 - sigmoid))
    return derivative


@triton.jit
def backward_row(
    x_0, x_1, x_2, x_3, g_1, g_2, g_3, dy_0, first, first_1, first_2,
    k0, k1, k2, k3, dx, state, document, row, t, begin, channel, in_stream, D, T,
    W: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Recompute token t; complete and store the input gradient of token t - 3.

    `g_1`, `g_2`, `g_3` are gradients before the activation of the tokens before t, `first_1`, `first_2` the first
    tokens of their documents: a token passes nothing back to another document.
    """
    v_1, v_2, v_3 = window(
        x_1, x_2, x_3, state, document, row, t, first, channel, in_stream, D, T, W, PACKED, HAS_STATE
    )
    g_0 = dy_0 * activation_gradient(k0 * v_3 + k1 * v_2 + k2 * v_1 + k3 * x_0, SILU)
    target = t - 3
    result = k3 * g_3 + k2 * g_2 + k1 * g_1
    if PACKED:
        # Starts never decrease: if t belongs to the document of t - 3 or an earlier one, so do those between.
        if first > target:
            g_0 = tl.where(t >= first, g_0, 0.0)
            result = k3 * g_3
            result += tl.where(first_2 <= target, k2 * g_2, 0.0)
            result += tl.where(first_1 <= target, k1 * g_1, 0.0)
        else:
            result += k0 * g_0
    else:
        result += k0 * g_0
    mask = in_stream & (target >= begin) & (target < T)
    tl.store(dx + target.to(tl.int64) * D + channel, result.to(dx.dtype.element_ty), mask=mask)
    return g_0, v_1, v_2, v_3


@triton.jit
def short_conv_backward_kernel(
    x0, x1, x2,
    weight0, weight1, weight2,
    dy0, dy1, dy2,
    dx0, dx1, dx2,
    state0, state1, state2,
    dweight, start, document,
    D0, D1, D2,
    first_of_1, first_of_2,
    stride_b0, stride_b1, stride_b2,
    stride_t0, stride_t1, stride_t2,
    T,
    chunk,
    W: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    x = select_stream(block, first_of_1, first_of_2, x0, x1, x2)
    weight = select_stream(block, first_of_1, first_of_2, weight0, weight1, weight2)
    dy = select_stream(block, first_of_1, first_of_2, dy0, dy1, dy2)
    dx = select_stream(block, first_of_1, first_of_2, dx0, dx1, dx2)
    state = select_stream(block, first_of_1, first_of_2, state0, state1, state2)
    D, stride_b, stride_t, channel, in_stream = stream_geometry(
        block, first_of_1, first_of_2, D0, D1, D2, stride_b0, stride_b1, stride_b2, stride_t0, stride_t1, stride_t2, BD
    )
    k0 = load_tap(weight, channel, in_stream, 0, W)
    k1 = load_tap(weight, channel, in_stream, 1, W)
    k2 = load_tap(weight, channel, in_stream, 2, W)
    k3 = load_tap(weight, channel, in_stream, 3, W)

    begin = tl.program_id(1) * chunk
    x += row * stride_b
    dy += row * T * D
    dx += row * T * D
    x_1 = load_row(x, begin - 1, stride_t, channel, in_stream, T)
    x_2 = load_row(x, begin - 2, stride_t, channel, in_stream, T)
    x_3 = load_row(x, begin - 3, stride_t, channel, in_stream, T)
    g_1 = tl.zeros([BD], tl.float32)
    g_2 = tl.zeros([BD], tl.float32)
    g_3 = tl.zeros([BD], tl.float32)
    first_1 = begin
    first_2 = begin
    dk0 = tl.zeros([BD], tl.float32)
    dk1 = tl.zeros([BD], tl.float32)
    dk2 = tl.zeros([BD], tl.float32)
    dk3 = tl.zeros([BD], tl.float32)
    for i in range(0, chunk, 4):
        t = begin + i
        x_a = load_row(x, t, stride_t, channel, in_stream, T)
        x_b = load_row(x, t + 1, stride_t, channel, in_stream, T)
        x_c = load_row(x, t + 2, stride_t, channel, in_stream, T)
        x_d = load_row(x, t + 3, stride_t, channel, in_stream, T)
        dy_a = load_row(dy, t, D, channel, in_stream, T)
        dy_b = load_row(dy, t + 1, D, channel, in_stream, T)
        dy_c = load_row(dy, t + 2, D, channel, in_stream, T)
        dy_d = load_row(dy, t + 3, D, channel, in_stream, T)
        first_a = load_first(start, t, T, PACKED)
        first_b = load_first(start, t + 1, T, PACKED)
        first_c = load_first(start, t + 2, T, PACKED)
        first_d = load_first(start, t + 3, T, PACKED)
        g_a, v_1, v_2, v_3 = backward_row(
            x_a, x_1, x_2, x_3, g_1, g_2, g_3, dy_a, first_a, first_1, first_2,
            k0, k1, k2, k3, dx, state, document, row, t, begin, channel, in_stream, D, T,
            W, SILU, PACKED, HAS_STATE,
        )  # fmt: skip
        dk0 += g_a * v_3
        dk1 += g_a * v_2
        dk2 += g_a * v_1
        dk3 += g_a * x_a
        g_b, v_1, v_2, v_3 = backward_row(
            x_b, x_a, x_1, x_2, g_a, g_1, g_2, dy_b, first_b, first_a, first_1,
            k0, k1, k2, k3, dx, state, document, row, t + 1, begin, channel, in_stream, D, T,
            W, SILU, PACKED, HAS_STATE,
        )  # fmt: skip
        dk0 += g_b * v_3
        dk1 += g_b * v_2
        dk2 += g_b * v_1
        dk3 += g_b * x_b
        g_c, v_1, v_2, v_3 = backward_row(
            x_c, x_b, x_a, x_1, g_b, g_a, g_1, dy_c, first_c, first_b, first_a,
            k0, k1, k2, k3, dx, state, document, row, t + 2, begin, channel, in_stream, D, T,
            W, SILU, PACKED, HAS_STATE,
        )  # fmt: skip
        dk0 += g_c * v_3
        dk1 += g_c * v_2
        dk2 += g_c * v_1
        dk3 += g_c * x_c
        g_d, v_1, v_2, v_3 = backward_row(
            x_d, x_c, x_b, x_a, g_c, g_b, g_a, dy_d, first_d, first_c, first_b,
            k0, k1, k2, k3, dx, state, document, row, t + 3, begin, channel, in_stream, D, T,
            W, SILU, PACKED, HAS_STATE,
        )  # fmt: skip
        dk0 += g_d * v_3
        dk1 += g_d * v_2
        dk2 += g_d * v_1
        dk3 += g_d * x_d
        x_1 = x_d
        x_2 = x_c
        x_3 = x_b
        g_1 = g_d
        g_2 = g_c
        g_3 = g_b
        first_1 = first_d
        first_2 = first_c

    # Three more tokens complete the gradients of the last ones; they count for the next program's weights.
    t = begin + chunk
    x_a = load_row(x, t, stride_t, channel, in_stream, T)
    x_b = load_row(x, t + 1, stride_t, channel, in_stream, T)
    x_c = load_row(x, t + 2, stride_t, channel, in_stream, T)
    dy_a = load_row(dy, t, D, channel, in_stream, T)
    dy_b = load_row(dy, t + 1, D, channel, in_stream, T)
    dy_c = load_row(dy, t + 2, D, channel, in_stream, T)
    first_a = load_first(start, t, T, PACKED)
    first_b = load_first(start, t + 1, T, PACKED)
    first_c = load_first(start, t + 2, T, PACKED)
    g_a, v_1, v_2, v_3 = backward_row(
        x_a, x_1, x_2, x_3, g_1, g_2, g_3, dy_a, first_a, first_1, first_2,
        k0, k1, k2, k3, dx, state, document, row, t, begin, channel, in_stream, D, T,
        W, SILU, PACKED, HAS_STATE,
    )  # fmt: skip
    g_b, v_1, v_2, v_3 = backward_row(
        x_b, x_a, x_1, x_2, g_a, g_1, g_2, dy_b, first_b, first_a, first_1,
        k0, k1, k2, k3, dx, state, document, row, t + 1, begin, channel, in_stream, D, T,
        W, SILU, PACKED, HAS_STATE,
    )  # fmt: skip
    g_c, v_1, v_2, v_3 = backward_row(
        x_c, x_b, x_a, x_1, g_b, g_a, g_1, dy_c, first_c, first_b, first_a,
        k0, k1, k2, k3, dx, state, document, row, t + 2, begin, channel, in_stream, D, T,
        W, SILU, PACKED, HAS_STATE,
    )  # fmt: skip

    # Partial sums [program, tap, channel of all blocks].
    part = row * tl.num_programs(1) + tl.program_id(1)
    width = tl.num_programs(0) * BD
    target_ = dweight + part * 4 * width + block * BD + tl.arange(0, BD)
    tl.store(target_, dk0)
    tl.store(target_ + width, dk1)
    tl.store(target_ + 2 * width, dk2)
    tl.store(target_ + 3 * width, dk3)


@triton.jit
def short_conv_reduce_kernel(
    partial,
    dweight0, dweight1, dweight2,
    D0, D1, D2,
    first_of_1, first_of_2,
    parts, width,
    W: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Add the partial sums [parts, 4, width] of one tap and block of channels up, always in the same order."""
    block = tl.program_id(0)
    tap = tl.program_id(1) + (4 - W)
    dweight = select_stream(block, first_of_1, first_of_2, dweight0, dweight1, dweight2)
    D = select_stream(block, first_of_1, first_of_2, D0, D1, D2)
    channel = (block - select_stream(block, first_of_1, first_of_2, 0, first_of_1, first_of_2)) * BD + tl.arange(0, BD)
    total = tl.zeros([BP, BD], tl.float32)
    for begin in range(0, parts, BP):
        part = begin + tl.arange(0, BP)
        source = (part.to(tl.int64) * 4 + tap)[:, None] * width + block * BD + tl.arange(0, BD)[None, :]
        total += tl.load(partial + source, mask=(part < parts)[:, None], other=0.0)
    result = tl.sum(total, axis=0).to(dweight.dtype.element_ty)
    tl.store(dweight + channel * W + tl.program_id(1), result, mask=channel < D)


@triton.jit
def short_conv_backward_state_kernel(
    x0, x1, x2,
    weight0, weight1, weight2,
    dy0, dy1, dy2,
    dx0, dx1, dx2,
    state0, state1, state2,
    dstate0, dstate1, dstate2,
    dfinal0, dfinal1, dfinal2,
    cu_seqlens,
    D0, D1, D2,
    first_of_1, first_of_2,
    stride_b0, stride_b1, stride_b2,
    stride_t0, stride_t1, stride_t2,
    T,
    W: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Gradient of the initial state, and what the final state passes back to the last tokens or the initial state."""
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    x = select_stream(block, first_of_1, first_of_2, x0, x1, x2)
    weight = select_stream(block, first_of_1, first_of_2, weight0, weight1, weight2)
    dy = select_stream(block, first_of_1, first_of_2, dy0, dy1, dy2)
    dx = select_stream(block, first_of_1, first_of_2, dx0, dx1, dx2)
    state = select_stream(block, first_of_1, first_of_2, state0, state1, state2)
    dstate = select_stream(block, first_of_1, first_of_2, dstate0, dstate1, dstate2)
    dfinal = select_stream(block, first_of_1, first_of_2, dfinal0, dfinal1, dfinal2)
    D, stride_b, stride_t, channel, in_stream = stream_geometry(
        block, first_of_1, first_of_2, D0, D1, D2, stride_b0, stride_b1, stride_b2, stride_t0, stride_t1, stride_t2, BD
    )
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = tl.load(cu_seqlens + n + 1).to(tl.int64) - begin
        x += begin * stride_t
        dy += begin * D
        dx += begin * D
    else:
        length = tl.zeros([], tl.int64) + T
        x += n * stride_b
        dy += n * T * D
        dx += n * T * D
    slot = (n * D + channel) * (W - 1) - (4 - W)

    ds0 = tl.zeros([BD], tl.float32)
    ds1 = tl.zeros([BD], tl.float32)
    ds2 = tl.zeros([BD], tl.float32)
    if HAS_STATE:
        k0 = load_tap(weight, channel, in_stream, 0, W)
        k1 = load_tap(weight, channel, in_stream, 1, W)
        k2 = load_tap(weight, channel, in_stream, 2, W)
        k3 = load_tap(weight, channel, in_stream, 3, W)
        s0 = tl.load(state + slot, mask=in_stream & (W > 3), other=0.0).to(tl.float32)
        s1 = tl.load(state + slot + 1, mask=in_stream & (W > 2), other=0.0).to(tl.float32)
        s2 = tl.load(state + slot + 2, mask=in_stream, other=0.0).to(tl.float32)
        zero = length * 0
        x_0 = load_row(x, zero, stride_t, channel, in_stream, length)
        x_1 = load_row(x, zero + 1, stride_t, channel, in_stream, length)
        x_2 = load_row(x, zero + 2, stride_t, channel, in_stream, length)
        g_0 = load_row(dy, zero, D, channel, in_stream, length)
        g_1 = load_row(dy, zero + 1, D, channel, in_stream, length)
        g_2 = load_row(dy, zero + 2, D, channel, in_stream, length)
        g_0 *= activation_gradient(k0 * s0 + k1 * s1 + k2 * s2 + k3 * x_0, SILU)
        g_1 *= activation_gradient(k0 * s1 + k1 * s2 + k2 * x_0 + k3 * x_1, SILU)
        g_2 *= activation_gradient(k0 * s2 + k1 * x_0 + k2 * x_1 + k3 * x_2, SILU)
        ds0 = k0 * g_0
        ds1 = k1 * g_0 + k0 * g_1
        ds2 = k2 * g_0 + k1 * g_1 + k0 * g_2
    if HAS_DFINAL:
        for p in tl.static_range(4 - W, 3):
            value = tl.load(dfinal + slot + p, mask=in_stream, other=0.0).to(tl.float32)
            # Place p of the final window is token length + p - 3, or place length + p of the initial window.
            ds0 += tl.where(length + p == 0, value, 0.0)
            ds1 += tl.where(length + p == 1, value, 0.0)
            ds2 += tl.where(length + p == 2, value, 0.0)
            target = dx + (length + p - 3) * D + channel
            mask = in_stream & (length + p >= 3)
            total = tl.load(target, mask=mask, other=0.0).to(tl.float32) + value
            tl.store(target, total.to(dx.dtype.element_ty), mask=mask)
    if HAS_STATE:
        tl.store(dstate + slot, ds0.to(dstate.dtype.element_ty), mask=in_stream & (W > 3))
        tl.store(dstate + slot + 1, ds1.to(dstate.dtype.element_ty), mask=in_stream & (W > 2))
        tl.store(dstate + slot + 2, ds2.to(dstate.dtype.element_ty), mask=in_stream)


@on_its_device
def short_conv_backward(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    dys: list[torch.Tensor],
    dfinals: list[torch.Tensor],
    silu: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of inputs, weights and initial states; `states` and `dfinals` may be empty lists."""
    batch_size, total, _ = xs[0].shape
    width = weights[0].shape[2]
    packed = cu_seqlens is not None
    num_documents = batch_size if cu_seqlens is None else cu_seqlens.numel() - 1
    dxs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    dstates = [torch.empty_like(state) for state in states]

    block_d = 128
    layout = StreamLayout(xs, block_d)
    empty = batch_size == 0 or total == 0
    dweights = [torch.zeros_like(weight) if empty else torch.empty_like(weight) for weight in weights]
    if not empty:
        chunk = tokens_per_program(total, layout.num_blocks * batch_size, shortest=32, longest=128)
        start = document = xs[0]
        if cu_seqlens is not None:
            start, document = locate_documents(cu_seqlens, total)
        parts = cdiv(total, chunk)
        partial = torch.empty(
            batch_size * parts, TAPS, layout.num_blocks * block_d, dtype=torch.float32, device=xs[0].device
        )
        short_conv_backward_kernel[(layout.num_blocks, parts, batch_size)](
            *layout.pad(xs), *layout.pad(weights), *layout.pad(dys), *layout.pad(dxs), *layout.pad(states or xs),
            partial, start, document, *layout.sizes_and_strides(xs), total, chunk,
            W=width, SILU=silu, PACKED=packed, HAS_STATE=bool(states), BD=block_d, num_warps=1,
        )  # fmt: skip
        short_conv_reduce_kernel[(layout.num_blocks, width)](
            partial, *layout.pad(dweights), *layout.pad([x.shape[2] for x in xs]),
            layout.first_of_1, layout.first_of_2, batch_size * parts, layout.num_blocks * block_d,
            W=width, BP=16, BD=block_d, num_warps=4,
        )  # fmt: skip

    if num_documents > 0 and (states or dfinals):
        short_conv_backward_state_kernel[(num_documents, layout.num_blocks)](
            *layout.pad(xs), *layout.pad(weights), *layout.pad(dys), *layout.pad(dxs),
            *layout.pad(states or xs), *layout.pad(dstates or xs), *layout.pad(dfinals or xs),
            cu_seqlens if packed else xs[0], *layout.sizes_and_strides(xs), total,
            W=width, SILU=silu, PACKED=packed, HAS_STATE=bool(states), HAS_DFINAL=bool(dfinals),
            BD=block_d, num_warps=1,
        )  # fmt: skip
    return dxs, dweights, dstates

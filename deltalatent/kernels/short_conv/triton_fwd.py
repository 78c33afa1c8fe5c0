# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the short convolution, forward: packed rows, final state, and the few-token update.

Alphabet: B rows, T tokens, D channels, W taps (2 to 4), N documents, S streams (1 to 3).

One launch handles all streams: a program belongs to one block of channels, and the blocks of the streams are laid out
behind one another. Weights are always held as four taps, `k0` (oldest) to `k3` (current); with W < 4 the leading ones
are zero. The state is likewise seen as the three window places 0 (oldest) to 2, of which the last W-1 exist.
"""

import torch
import triton
import triton.language as tl

TAPS = 4
MAX_STREAMS = 3


@triton.jit
def select_stream(block, first_of_1, first_of_2, p0, p1, p2):
    """The argument of the stream that owns a block of channels (a select keeps what is known about alignment)."""
    return tl.where(block >= first_of_2, p2, tl.where(block >= first_of_1, p1, p0))


@triton.jit
def load_tap(weight, channel, in_stream, j: tl.constexpr, W: tl.constexpr):
    """Tap j of four, float32 [BD]; zero where the stream has fewer."""
    return tl.load(weight + channel * W + (j - 4 + W), mask=in_stream & (j >= 4 - W), other=0.0).to(tl.float32)


@triton.jit
def locate_documents_kernel(cu_seqlens, start, document, T, N, steps, BT: tl.constexpr):
    """First token and index of the document of every token, by binary search. Slack: start T + 1, document N."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    low = tl.zeros([BT], tl.int32)
    high = tl.zeros([BT], tl.int32) + N
    # The number of documents that end at or before t; empty documents are passed over.
    for _ in range(steps):
        open_ = low < high
        middle = (low + high) // 2
        ended = tl.load(cu_seqlens + middle + 1, mask=open_, other=0) <= t
        low = tl.where(open_ & ended, middle + 1, low)
        high = tl.where(open_ & (ended == 0), middle, high)
    first = tl.load(cu_seqlens + low, mask=low < N, other=0).to(tl.int32)
    tl.store(start + t, tl.where(low < N, first, T + 1), mask=t < T)
    tl.store(document + t, low, mask=t < T)


@triton.jit
def short_conv_forward_kernel(
    x0, x1, x2,
    weight0, weight1, weight2,
    y0, y1, y2,
    state0, state1, state2,
    start, document,
    D0, D1, D2,
    first_of_1, first_of_2,
    stride_b0, stride_b1, stride_b2,
    stride_t0, stride_t1, stride_t2,
    T,
    num_blocks,
    W: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % num_blocks
    t = tl.program_id(0) // num_blocks * BT + tl.arange(0, BT)
    row = tl.program_id(1).to(tl.int64)
    x = select_stream(block, first_of_1, first_of_2, x0, x1, x2)
    weight = select_stream(block, first_of_1, first_of_2, weight0, weight1, weight2)
    y = select_stream(block, first_of_1, first_of_2, y0, y1, y2)
    state = select_stream(block, first_of_1, first_of_2, state0, state1, state2)
    D = select_stream(block, first_of_1, first_of_2, D0, D1, D2)
    stride_b = select_stream(block, first_of_1, first_of_2, stride_b0, stride_b1, stride_b2)
    stride_t = select_stream(block, first_of_1, first_of_2, stride_t0, stride_t1, stride_t2)

    channel = (block - select_stream(block, first_of_1, first_of_2, 0, first_of_1, first_of_2)) * BD + tl.arange(0, BD)
    in_stream = channel < D
    in_row = t < T
    first = tl.zeros([BT], tl.int32)
    if PACKED:
        first = tl.load(start + t, mask=in_row, other=0)

    x += row * stride_b
    accumulator = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(4 - W, 4):
        source = t + (j - 3)
        tap = load_tap(weight, channel, in_stream, j, W)
        present = in_row & (source >= first)
        value = tl.load(
            x + source.to(tl.int64)[:, None] * stride_t + channel[None, :],
            mask=present[:, None] & in_stream[None, :],
            other=0.0,
        )
        accumulator += value.to(tl.float32) * tap[None, :]

    if HAS_STATE:
        # Only tiles that hold one of the first W-1 tokens of a document look at the state.
        early = in_row & (t >= first) & (t - first < W - 1)
        if tl.max(early.to(tl.int32), axis=0) > 0:
            n = tl.zeros([BT], tl.int64) + row
            if PACKED:
                n = tl.load(document + t, mask=early, other=0).to(tl.int64)
            for j in tl.static_range(4 - W, 3):
                place = t - first + j  # window place seen from the start of the document
                tap = load_tap(weight, channel, in_stream, j, W)
                value = tl.load(
                    state + (n[:, None] * D + channel[None, :]) * (W - 1) + (place - 4 + W)[:, None],
                    mask=(early & (place < 3))[:, None] & in_stream[None, :],
                    other=0.0,
                )
                accumulator += value.to(tl.float32) * tap[None, :]

    if SILU:
        accumulator = accumulator * tl.sigmoid(accumulator)
    target = y + (row * T + t)[:, None] * D + channel[None, :]
    tl.store(target, accumulator.to(y.dtype.element_ty), mask=in_row[:, None] & in_stream[None, :])


@triton.jit
def short_conv_state_kernel(
    x0, x1, x2,
    state0, state1, state2,
    final0, final1, final2,
    cu_seqlens,
    D0, D1, D2,
    first_of_1, first_of_2,
    stride_b0, stride_b1, stride_b2,
    stride_t0, stride_t1, stride_t2,
    T,
    W: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Last W-1 inputs of each document; a document shorter than that reaches into its own initial state."""
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    x = select_stream(block, first_of_1, first_of_2, x0, x1, x2)
    state = select_stream(block, first_of_1, first_of_2, state0, state1, state2)
    final = select_stream(block, first_of_1, first_of_2, final0, final1, final2)
    D = select_stream(block, first_of_1, first_of_2, D0, D1, D2)
    stride_b = select_stream(block, first_of_1, first_of_2, stride_b0, stride_b1, stride_b2)
    stride_t = select_stream(block, first_of_1, first_of_2, stride_t0, stride_t1, stride_t2)

    channel = (block - select_stream(block, first_of_1, first_of_2, 0, first_of_1, first_of_2)) * BD + tl.arange(0, BD)
    in_stream = channel < D
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = tl.load(cu_seqlens + n + 1).to(tl.int64) - begin
        x += begin * stride_t
    else:
        length = tl.zeros([], tl.int64) + T
        x += n * stride_b
    slot = (n * D + channel) * (W - 1) - (4 - W)
    for p in tl.static_range(4 - W, 3):
        source = length + p - 3
        value = tl.load(x + source * stride_t + channel, mask=in_stream & (source >= 0), other=0.0)
        if HAS_STATE:
            before = tl.load(state + slot + (length + p), mask=in_stream & (source < 0), other=0.0)
            value = tl.where(source < 0, before.to(value.dtype), value)
        tl.store(final + slot + p, value, mask=in_stream)


@triton.jit
def short_conv_update_kernel(
    x0, x1, x2,
    weight0, weight1, weight2,
    y0, y1, y2,
    state0, state1, state2,
    final0, final1, final2,
    D0, D1, D2,
    first_of_1, first_of_2,
    stride_b0, stride_b1, stride_b2,
    stride_t0, stride_t1, stride_t2,
    T,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """A few tokens per row with the window in registers; `final` may be `state` itself."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    x = select_stream(block, first_of_1, first_of_2, x0, x1, x2)
    weight = select_stream(block, first_of_1, first_of_2, weight0, weight1, weight2)
    y = select_stream(block, first_of_1, first_of_2, y0, y1, y2)
    state = select_stream(block, first_of_1, first_of_2, state0, state1, state2)
    final = select_stream(block, first_of_1, first_of_2, final0, final1, final2)
    D = select_stream(block, first_of_1, first_of_2, D0, D1, D2)
    stride_b = select_stream(block, first_of_1, first_of_2, stride_b0, stride_b1, stride_b2)
    stride_t = select_stream(block, first_of_1, first_of_2, stride_t0, stride_t1, stride_t2)

    channel = (block - select_stream(block, first_of_1, first_of_2, 0, first_of_1, first_of_2)) * BD + tl.arange(0, BD)
    in_stream = channel < D
    k0 = load_tap(weight, channel, in_stream, 0, W)
    k1 = load_tap(weight, channel, in_stream, 1, W)
    k2 = load_tap(weight, channel, in_stream, 2, W)
    k3 = load_tap(weight, channel, in_stream, 3, W)
    slot = (row * D + channel) * (W - 1) - (4 - W)
    s0 = tl.load(state + slot, mask=in_stream & (W > 3), other=0.0).to(tl.float32)
    s1 = tl.load(state + slot + 1, mask=in_stream & (W > 2), other=0.0).to(tl.float32)
    s2 = tl.load(state + slot + 2, mask=in_stream, other=0.0).to(tl.float32)
    x += row * stride_b
    for t in range(T):
        value = tl.load(x + t * stride_t + channel, mask=in_stream, other=0.0).to(tl.float32)
        result = k0 * s0 + k1 * s1 + k2 * s2 + k3 * value
        if SILU:
            result = result * tl.sigmoid(result)
        tl.store(y + (row * T + t) * D + channel, result.to(y.dtype.element_ty), mask=in_stream)
        s0 = s1
        s1 = s2
        s2 = value
    # In place, no thread may overwrite a value that another has yet to read.
    tl.debug_barrier()
    tl.store(final + slot, s0.to(final.dtype.element_ty), mask=in_stream & (W > 3))
    tl.store(final + slot + 1, s1.to(final.dtype.element_ty), mask=in_stream & (W > 2))
    tl.store(final + slot + 2, s2.to(final.dtype.element_ty), mask=in_stream)


class StreamLayout:
    """How the channels of up to three streams share the first grid axis of one launch."""

    def __init__(self, xs: list[torch.Tensor], block: int):
        self.blocks = [triton.cdiv(x.shape[2], block) for x in xs]
        count = len(xs)
        beyond = sum(self.blocks)
        self.first_of_1 = self.blocks[0] if count > 1 else beyond
        self.first_of_2 = self.blocks[0] + self.blocks[1] if count > 2 else beyond
        self.num_blocks = beyond

    @staticmethod
    def pad(values: list) -> list:
        """Fill up to three; the kernels never select the fillers."""
        return values + [values[0]] * (MAX_STREAMS - len(values))

    def sizes_and_strides(self, xs: list[torch.Tensor]) -> list[int]:
        """The arguments from `D0` to `stride_t2`."""
        return [
            *self.pad([x.shape[2] for x in xs]),
            self.first_of_1,
            self.first_of_2,
            *self.pad([x.stride(0) for x in xs]),
            *self.pad([x.stride(1) for x in xs]),
        ]


def locate_documents(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First token and index of the document of every token of a packed row, int32 [T] each, in one launch."""
    num_documents = cu_seqlens.numel() - 1
    start = torch.empty(total, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.empty_like(start)
    block = 256
    if total > 0:
        locate_documents_kernel[(triton.cdiv(total, block),)](
            cu_seqlens.contiguous(), start, document, total, num_documents, num_documents.bit_length(), BT=block
        )
    return start, document


def short_conv_forward(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    silu: bool,
) -> list[torch.Tensor]:
    """`y` of every stream; `states` is empty or has one entry for each stream."""
    batch_size, total, _ = xs[0].shape
    ys = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    if ys[0].shape[0] == 0 or total == 0:
        return ys
    start = document = xs[0]
    if cu_seqlens is not None:
        start, document = locate_documents(cu_seqlens, total)
    block_t, block_d = 32, 128
    layout = StreamLayout(xs, block_d)
    grid = (layout.num_blocks * triton.cdiv(total, block_t), batch_size)
    short_conv_forward_kernel[grid](
        *layout.pad(xs), *layout.pad(weights), *layout.pad(ys), *layout.pad(states or xs), start, document,
        *layout.sizes_and_strides(xs), total, layout.num_blocks,
        W=weights[0].shape[2], SILU=silu, PACKED=cu_seqlens is not None, HAS_STATE=bool(states),
        BT=block_t, BD=block_d, num_warps=4,
    )  # fmt: skip
    return ys


def short_conv_final_state(
    xs: list[torch.Tensor],
    states: list[torch.Tensor],
    width: int,
    cu_seqlens: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Final state [N, D, W-1] of every stream."""
    batch_size, total, _ = xs[0].shape
    num_documents = batch_size if cu_seqlens is None else cu_seqlens.numel() - 1
    finals = [x.new_empty(num_documents, x.shape[2], width - 1) for x in xs]
    if num_documents == 0:
        return finals
    block_d = 256
    layout = StreamLayout(xs, block_d)
    short_conv_state_kernel[(num_documents, layout.num_blocks)](
        *layout.pad(xs), *layout.pad(states or xs), *layout.pad(finals), xs[0] if cu_seqlens is None else cu_seqlens,
        *layout.sizes_and_strides(xs), total,
        W=width, PACKED=cu_seqlens is not None, HAS_STATE=bool(states), BD=block_d, num_warps=4,
    )  # fmt: skip
    return finals


def short_conv_update(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    finals: list[torch.Tensor],
    silu: bool,
) -> list[torch.Tensor]:
    """`y` of a few tokens per row in one launch; writes the state after them to `finals`, which may be `states`."""
    batch_size, total, _ = xs[0].shape
    ys = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    if batch_size == 0:
        return ys
    block_d = 256
    layout = StreamLayout(xs, block_d)
    short_conv_update_kernel[(batch_size, layout.num_blocks)](
        *layout.pad(xs), *layout.pad(weights), *layout.pad(ys), *layout.pad(states), *layout.pad(finals),
        *layout.sizes_and_strides(xs), total,
        W=weights[0].shape[2], SILU=silu, BD=block_d, num_warps=4,
    )  # fmt: skip
    return ys

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

from deltalatent.kernels.tiles import cdiv, on_its_device

TAPS = 4
MAX_STREAMS = 3
# Programs of one warp that fill the largest current chips a few times.
FILLING_PROGRAMS = 16384


@triton.jit
def select_stream(block, first_of_1, first_of_2, p0, p1, p2):
    """The argument of the stream that owns a block of channels (a select keeps what is known about alignment)."""
    return tl.where(block >= first_of_2, p2, tl.where(block >= first_of_1, p1, p0))


@triton.jit
def stream_geometry(
    block, first_of_1, first_of_2, D0, D1, D2, stride_b0, stride_b1, stride_b2, stride_t0, stride_t1, stride_t2,
    BD: tl.constexpr,
):  # fmt: skip
    """Width and strides of the stream that owns a block of channels; the channels [BD], and which of them exist."""
    D = select_stream(block, first_of_1, first_of_2, D0, D1, D2)
    stride_b = select_stream(block, first_of_1, first_of_2, stride_b0, stride_b1, stride_b2)
    stride_t = select_stream(block, first_of_1, first_of_2, stride_t0, stride_t1, stride_t2)
    first_block = select_stream(block, first_of_1, first_of_2, 0, first_of_1, first_of_2)
    channel = (block - first_block) * BD + tl.arange(0, BD)
    return D, stride_b, stride_t, channel, channel < D


@triton.jit
def load_tap(weight, channel, in_stream, j: tl.constexpr, W: tl.constexpr):
    """Tap j of four, float32 [BD]; zero where the stream has fewer."""
    return tl.load(weight + channel * W + (j - 4 + W), mask=in_stream & (j >= 4 - W), other=0.0).to(tl.float32)


@triton.jit
def load_row(pointer, t, stride_t, channel, in_stream, T):
    """One token of a [T, D] tensor in float32 [BD]; zero outside the row."""
    present = in_stream & (t >= 0) & (t < T)
    return tl.load(pointer + t.to(tl.int64) * stride_t + channel, mask=present, other=0.0).to(tl.float32)


@triton.jit
def load_first(start, t, T, PACKED: tl.constexpr):
    """First token of the document of token t; behind the row, as in slack, one that t does not reach."""
    first = t * 0
    if PACKED:
        first = tl.load(start + t, mask=t < T, other=2147483647)
    return first


@triton.jit
def window(
    x_1, x_2, x_3, state, document, row, t, first, channel, in_stream, D, T,
    W: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Inputs one, two and three tokens before t: those of its document, before them the state, or zero."""
    age = t - first  # tokens of the document before this one; negative for slack
    v_1 = x_1
    v_2 = x_2
    v_3 = x_3
    if PACKED:
        # Few tokens are among the first of their document: a branch that all threads take together is cheap.
        if age < 3:
            v_1 = tl.where(age >= 1, x_1, 0.0)
            v_2 = tl.where(age >= 2, x_2, 0.0)
            v_3 = tl.where(age >= 3, x_3, 0.0)
    if HAS_STATE:
        if (age < 3) & (age >= 0) & (t < T):
            n = row
            if PACKED:
                n = tl.load(document + t).to(tl.int64)
            slot = state + (n * D + channel) * (W - 1) + (age + W - 4)
            v_1 += tl.load(slot + 2, mask=in_stream & (age < 1), other=0.0).to(tl.float32)
            v_2 += tl.load(slot + 1, mask=in_stream & (age < 2) & (W > 2), other=0.0).to(tl.float32)
            v_3 += tl.load(slot, mask=in_stream & (W > 3), other=0.0).to(tl.float32)
    return v_1, v_2, v_3


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
def forward_row(
    x_0, x_1, x_2, x_3, k0, k1, k2, k3, y, state, start, document, row, t, channel, in_stream, D, T,
    W: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Output of one token."""
    first = load_first(start, t, T, PACKED)
    v_1, v_2, v_3 = window(
        x_1, x_2, x_3, state, document, row, t, first, channel, in_stream, D, T, W, PACKED, HAS_STATE
    )
    result = k0 * v_3 + k1 * v_2 + k2 * v_1 + k3 * x_0
    if SILU:
        result *= tl.sigmoid(result)
    if PACKED:
        result = tl.where(t >= first, result, 0.0)
    tl.store(y + t.to(tl.int64) * D + channel, result.to(y.dtype.element_ty), mask=in_stream & (t < T))


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
    chunk,
    W: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """A program walks over `chunk` tokens (a multiple of 4) of a block of channels, the window in registers."""
    block = tl.program_id(0) % num_blocks
    begin = tl.program_id(0) // num_blocks * chunk
    row = tl.program_id(1).to(tl.int64)
    x = select_stream(block, first_of_1, first_of_2, x0, x1, x2)
    weight = select_stream(block, first_of_1, first_of_2, weight0, weight1, weight2)
    y = select_stream(block, first_of_1, first_of_2, y0, y1, y2)
    state = select_stream(block, first_of_1, first_of_2, state0, state1, state2)
    D, stride_b, stride_t, channel, in_stream = stream_geometry(
        block, first_of_1, first_of_2, D0, D1, D2, stride_b0, stride_b1, stride_b2, stride_t0, stride_t1, stride_t2, BD
    )
    k0 = load_tap(weight, channel, in_stream, 0, W)
    k1 = load_tap(weight, channel, in_stream, 1, W)
    k2 = load_tap(weight, channel, in_stream, 2, W)
    k3 = load_tap(weight, channel, in_stream, 3, W)

    x += row * stride_b
    y += row * T * D
    x_1 = load_row(x, begin - 1, stride_t, channel, in_stream, T)
    x_2 = load_row(x, begin - 2, stride_t, channel, in_stream, T)
    x_3 = load_row(x, begin - 3, stride_t, channel, in_stream, T)
    # Four tokens at a time: their loads are under way together, and the window moves on by renaming.
    for i in range(0, chunk, 4):
        t = begin + i
        x_a = load_row(x, t, stride_t, channel, in_stream, T)
        x_b = load_row(x, t + 1, stride_t, channel, in_stream, T)
        x_c = load_row(x, t + 2, stride_t, channel, in_stream, T)
        x_d = load_row(x, t + 3, stride_t, channel, in_stream, T)
        forward_row(
            x_a, x_1, x_2, x_3, k0, k1, k2, k3, y, state, start, document, row, t, channel, in_stream, D, T,
            W, SILU, PACKED, HAS_STATE,
        )  # fmt: skip
        forward_row(
            x_b, x_a, x_1, x_2, k0, k1, k2, k3, y, state, start, document, row, t + 1, channel, in_stream, D, T,
            W, SILU, PACKED, HAS_STATE,
        )  # fmt: skip
        forward_row(
            x_c, x_b, x_a, x_1, k0, k1, k2, k3, y, state, start, document, row, t + 2, channel, in_stream, D, T,
            W, SILU, PACKED, HAS_STATE,
        )  # fmt: skip
        forward_row(
            x_d, x_c, x_b, x_a, k0, k1, k2, k3, y, state, start, document, row, t + 3, channel, in_stream, D, T,
            W, SILU, PACKED, HAS_STATE,
        )  # fmt: skip
        x_1 = x_d
        x_2 = x_c
        x_3 = x_b


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
    D, stride_b, stride_t, channel, in_stream = stream_geometry(
        block, first_of_1, first_of_2, D0, D1, D2, stride_b0, stride_b1, stride_b2, stride_t0, stride_t1, stride_t2, BD
    )
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
    D, stride_b, stride_t, channel, in_stream = stream_geometry(
        block, first_of_1, first_of_2, D0, D1, D2, stride_b0, stride_b1, stride_b2, stride_t0, stride_t1, stride_t2, BD
    )
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
        self.blocks = [cdiv(x.shape[2], block) for x in xs]
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


def tokens_per_program(total: int, walks: int, shortest: int, longest: int) -> int:
    """Length of the walk of one program in tokens, a multiple of 4.

    Long walks re-read less of the window before them and write fewer partial sums; shorter ones fill the chip when
    there are few channels and rows. Depends on shapes only, so that the order of summation is always the same.
    """
    chunk = longest
    while chunk > shortest and walks * cdiv(total, chunk) < FILLING_PROGRAMS:
        chunk //= 2
    return min(chunk, cdiv(total, 4) * 4)


def locate_documents(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First token and index of the document of every token of a packed row, int32 [T] each, in one launch."""
    num_documents = cu_seqlens.numel() - 1
    start = torch.empty(total, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.empty_like(start)
    block = 256
    if total > 0:
        locate_documents_kernel[(cdiv(total, block),)](
            cu_seqlens.contiguous(), start, document, total, num_documents, num_documents.bit_length(), BT=block
        )
    return start, document


@on_its_device
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
    block_d = 128
    layout = StreamLayout(xs, block_d)
    chunk = tokens_per_program(total, layout.num_blocks * batch_size, shortest=16, longest=64)
    grid = (layout.num_blocks * cdiv(total, chunk), batch_size)
    short_conv_forward_kernel[grid](
        *layout.pad(xs), *layout.pad(weights), *layout.pad(ys), *layout.pad(states or xs), start, document,
        *layout.sizes_and_strides(xs), total, layout.num_blocks, chunk,
        W=weights[0].shape[2], SILU=silu, PACKED=cu_seqlens is not None, HAS_STATE=bool(states),
        BD=block_d, num_warps=1,
    )  # fmt: skip
    return ys


@on_its_device
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


@on_its_device
def short_conv_update(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    finals: list[torch.Tensor],
    ys: list[torch.Tensor],
    silu: bool,
) -> None:
    """A few tokens per row in one launch: writes outputs to `ys` and new states to `finals` (may be `states`)."""
    batch_size, total, _ = xs[0].shape
    if batch_size == 0:
        return
    block_d = 256
    layout = StreamLayout(xs, block_d)
    short_conv_update_kernel[(batch_size, layout.num_blocks)](
        *layout.pad(xs), *layout.pad(weights), *layout.pad(ys), *layout.pad(states), *layout.pad(finals),
        *layout.sizes_and_strides(xs), total,
        W=weights[0].shape[2], SILU=silu, BD=block_d, num_warps=4,
    )  # fmt: skip

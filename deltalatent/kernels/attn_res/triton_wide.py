# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the backward pass of depth mixing for wide streams.

A program that holds all channels of a token, as in `triton_kernels`, fills a multiprocessor with one token if they are
many, and nothing is read while its warps wait for one another. So here are two launches, at the price of reading the
sources once more. In the first a warp sums up what the channels of a token share; no warp waits for another. In the
second, channels have nothing to do with one another.

Alphabet: S sources, N tokens, D channels. Loops over the sources are unrolled: a thread has a few channels only.
"""

import torch
import triton
import triton.language as tl

from deltalatent.kernels.attn_res.triton_common import inverse_rms, load_query, padded
from deltalatent.kernels.tiles import cdiv, register_limit

WARP = 32
# Of the second launch: warps of a program, and bytes that a thread loads at a time.
NUM_WARPS = 4
LOAD_BYTES = 16
# Registers for each of its threads, by the length of the tuples: as few as hardly spill, so that warps are many.
REGISTERS = {4: 128, 9: 128, 16: 200}
# Tokens are dealt to so many groups, each with partial sums of the gradients of the weights: few enough that these are
# small beside the sources. The same on every machine, so that the order of summation is, too.
MAX_GROUPS = 512


@triton.jit
def empty():
    """A tuple to which others are added."""
    return ()


@triton.jit(do_not_specialize=["N", "S"])
def wide_scalars_kernel(
    sources, norm_weight, stats, doutput, scalars, N, D, S, norm_eps, T: tl.constexpr, V: tl.constexpr
):
    """For a token what its channels share: `scalars` [2 S + 2, N].

    With o = sum_i a_i s_i, u = dy g and rho = (|o|^2 / D + norm_eps)^-1/2:

        norm:     do = rho u - c o  with  c = rho^3 <u, o> / D
        softmax:  d score_i = a_i (<do, s_i> - <do, o>)
        scores:   d s_i = a_i do + d score_i (r_i w - r_i^2 score_i s_i / D)

    All of it follows from <u, s_i> and <o, s_i>, which a thread sums up over its channels. Left are the factors of w
    and of s_i for each source, then rho and c.
    """
    token = tl.program_id(0).to(tl.int64)
    rows = S.to(tl.int64)
    channel = tl.arange(0, T)[:, None] * V + tl.arange(0, V)[None, :]
    total = tl.load(stats + 2 * rows * N + token)
    shares = empty()
    along_u = empty()
    along_o = empty()
    for i in tl.static_range(len(sources)):
        score = tl.load(stats + i * N + token, mask=i < S, other=float("-inf"))
        shares += (tl.exp(score - total),)
        along_u += (tl.zeros([T], tl.float32),)
        along_o += (tl.zeros([T], tl.float32),)
    for first in range(0, D, T * V):
        column = first + channel
        mask = column < D
        place = token * D + column
        u = tl.load(doutput + place, mask=mask, other=0.0).to(tl.float32)
        if norm_weight is not None:
            u *= tl.load(norm_weight + column, mask=mask, other=0.0).to(tl.float32)
        tiles = empty()
        for i in tl.static_range(len(sources)):
            tiles += (tl.load(sources[i] + place, mask=mask & (i < S), other=0.0),)
        mixed = tl.zeros([T, V], tl.float32)
        for i in tl.static_range(len(sources)):
            mixed += tiles[i].to(tl.float32) * shares[i]
        more_u = empty()
        more_o = empty()
        for i in tl.static_range(len(sources)):
            x = tiles[i].to(tl.float32)
            more_u += (along_u[i] + tl.sum(x * u, axis=1),)
            more_o += (along_o[i] + tl.sum(x * mixed, axis=1),)
        along_u = more_u
        along_o = more_o

    sums_u = empty()
    sums_o = empty()
    product = 0.0
    square = 0.0
    for i in tl.static_range(len(sources)):
        sums_u += (tl.sum(along_u[i], axis=0),)
        sums_o += (tl.sum(along_o[i], axis=0),)
        product += shares[i] * sums_u[i]
        square += shares[i] * sums_o[i]
    rho = 1.0
    c = 0.0
    if norm_weight is not None:
        rho = inverse_rms(square, D, norm_eps)
        c = rho * rho * rho * product / D
    expected = rho * product - c * square
    for i in tl.static_range(len(sources)):
        if i < S:
            score = tl.load(stats + i * N + token)
            scale = tl.load(stats + (rows + i) * N + token)
            gain = rho * sums_u[i] - c * sums_o[i]
            # With one source there is nothing to choose.
            dscore = tl.where(S > 1, shares[i] * (gain - expected), 0.0)
            tl.store(scalars + i * N + token, dscore * scale)
            tl.store(scalars + (rows + i) * N + token, dscore * score * scale * scale / D)
    tl.store(scalars + 2 * rows * N + token, rho)
    tl.store(scalars + (2 * rows + 1) * N + token, c)


@triton.jit(do_not_specialize=["arrived", "N", "S", "steps"])
def wide_gradients_kernel(
    sources, dsources, arriving, arrived, query, key_weight, norm_weight, stats, scalars, doutput, dw, dnorm,
    N, D, S, steps, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of BC channels of a group of `steps` tokens, and the group's partial sums for those of the weights.

    Added to a source's is what `arriving` has for it, if its bit in `arrived` is set. Tokens come in the reverse of
    the order of the launch before: what that read last is still in the cache.
    """
    group = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    rows = S.to(tl.int64)
    w = load_query(query, key_weight, channel, D)
    if norm_weight is not None:
        g = tl.load(norm_weight + channel, mask=channel < D, other=0.0)
    partial_w = tl.zeros([BC], tl.float32)
    partial_norm = tl.zeros([BC], tl.float32)
    count = tl.minimum(steps, N - group * steps)
    for step in range(0, count):
        # Neither the minimum nor the shift changes anything. Without them the compiler keeps an address for every
        # source and channel from one token to the next, and is short of registers.
        token = tl.minimum(group * steps + count - 1 - step, N - 1)
        column = channel + tl.multiple_of((token >> 40).to(tl.int32), 16)
        mask = column < D
        start = token * D
        total = tl.load(stats + 2 * rows * N + token)
        dmixed = tl.load(doutput + start + column, mask=mask, other=0.0).to(tl.float32)
        mixed = tl.zeros([BC], tl.float32)
        shares = empty()
        for i in tl.static_range(len(sources)):
            present = mask & (i < S)
            tile = tl.load(sources[i] + start + column, mask=present, other=0.0, eviction_policy="evict_last")
            share = tl.exp(tl.load(stats + i * N + token, mask=i < S, other=float("-inf")) - total)
            mixed += tile.to(tl.float32) * share
            shares += (share,)
        if norm_weight is not None:
            rho = tl.load(scalars + 2 * rows * N + token)
            c = tl.load(scalars + (2 * rows + 1) * N + token)
            partial_norm += dmixed * mixed * rho
            dmixed = dmixed * g.to(tl.float32) * rho - mixed * c
        for i in tl.static_range(len(sources)):
            if i < S:
                # Again, from the cache: registers hold more tokens at a time if they hold no sources until here.
                x = tl.load(sources[i] + start + column, mask=mask, other=0.0, eviction_policy="evict_first")
                x = x.to(tl.float32)
                along_w = tl.load(scalars + i * N + token)
                along_x = tl.load(scalars + (rows + i) * N + token)
                partial_w += along_w * x
                dx = shares[i] * dmixed + along_w * w - along_x * x
                if arriving is not None:
                    if ((arrived >> i) & 1) != 0:
                        dx += tl.load(arriving[i] + start + column, mask=mask, other=0.0).to(tl.float32)
                tl.store(dsources[i] + start + column, dx.to(dsources[i].dtype.element_ty), mask=mask)
    place = group * D + channel
    tl.store(dw + place, partial_w, mask=channel < D)
    if norm_weight is not None:
        tl.store(dnorm + place, partial_norm, mask=channel < D)


def wide_gradients(
    sources: list[torch.Tensor],
    dsources: list[torch.Tensor],
    arriving: tuple[torch.Tensor, ...] | None,
    arrived: int,
    query: torch.Tensor,
    key_weight: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    stats: torch.Tensor,
    doutput: torch.Tensor,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fill `dsources`; returns partial sums [P, D] of the gradients of w = query * key_weight and of `norm_weight`."""
    count, width = len(sources), query.shape[0]
    rows = doutput.numel() // width
    pointers = padded(sources)
    vector = LOAD_BYTES // doutput.element_size()
    scalars = torch.empty(2 * count + 2, rows, dtype=torch.float32, device=query.device)
    wide_scalars_kernel[(rows,)](
        pointers, norm_weight, stats, doutput, scalars, rows, width, count, norm_eps, T=WARP, V=vector, num_warps=1
    )
    columns = NUM_WARPS * WARP * vector
    steps = cdiv(rows, MAX_GROUPS)
    groups = cdiv(rows, steps)
    dw = torch.empty(groups, width, dtype=torch.float32, device=query.device)
    dnorm = None if norm_weight is None else torch.empty_like(dw)
    wide_gradients_kernel[(cdiv(width, columns), groups)](
        pointers, padded(dsources), arriving, arrived, query, key_weight, norm_weight, stats, scalars, doutput,
        dw, dnorm, rows, width, count, steps,
        BC=columns, num_warps=NUM_WARPS, **register_limit(REGISTERS[len(pointers)]),
    )  # fmt: skip
    return dw, dnorm

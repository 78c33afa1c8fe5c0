# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of depth mixing, forward and backward, with the RMS norm that follows.

Alphabet: S sources, N tokens (all leading axes), D channels. A program works on one token at a time and on BS of its
sources at a time: a tile [BS, BD], all of D in one block. The sums over a tile's rows, for which the warps of a
program have to wait for one another, are made together.

A tile picks its pointers from a tuple (`triton_common`).
"""

import torch
import triton
import triton.language as tl

from deltalatent.kernels.attn_res.triton_common import inverse_rms, load_query, load_vector, padded
from deltalatent.kernels.attn_res.triton_wide import wide_gradients
from deltalatent.kernels.tiles import cdiv, next_power_of_2, on_its_device, register_limit

# Programs of the backward pass, or more until there are so many warps: enough to fill a large chip, few enough that
# their partial sums are small beside the sources. The same on every machine, so that the order of summation is, too.
MAX_PROGRAMS = 512
MAX_WARPS = 2048
# Streams with more channels have a backward pass of two launches (`triton_wide`).
WIDE_CHANNELS = 4096
# Registers for each thread: so few that several programs share a multiprocessor, and one loads while another waits.
MAX_REGISTERS = 128


@triton.jit
def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def pick(pointers, index):
    """Pointers of a tuple by index [BS] (selects keep what is known about alignment)."""
    chosen = tl.where(index == 0, pointers[0], pointers[0])
    for j in tl.static_range(1, len(pointers)):
        chosen = tl.where(index == j, pointers[j], chosen)
    return chosen


@triton.jit
def load_tile(sources, index, S, token, column, D):
    """Sources `index` [BS] of one token, [BS, BD] in their dtype; zero for those that do not exist."""
    pointer = pick(sources, index)[:, None] + (token * D + column)[None, :]
    mask = ((index >= 0) & (index < S))[:, None] & (column < D)[None, :]
    return tl.load(pointer, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["N", "S"])
def attn_res_forward_kernel(
    sources, query, key_weight, norm_weight, output, stats, N, D, S, eps, norm_eps,
    BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Scores, softmax, average and norm in one look at the sources; leaves `stats` [2 S + 1, N] for backward."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    index = tl.arange(0, BS)
    w = load_query(query, key_weight, column, D)

    mixed = tl.zeros([BD], tl.float32)
    highest = float("-inf")
    denominator = 0.0
    tile = load_tile(sources, index, S, token, column, D)
    for first in range(0, S, BS):
        present = first + index < S
        # The next tile is under way while this one is reduced.
        following = load_tile(sources, first + BS + index, S, token, column, D)
        x = tile.to(tl.float32)
        square, product = tl.reduce((x * x, x * w[None, :]), 1, add_pairs)
        scale = inverse_rms(square, D, eps)
        score = tl.where(present, product * scale, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=0))
        old_share = tl.exp(highest - new_highest)
        share = tl.exp(score - new_highest)
        mixed = mixed * old_share + tl.sum(x * share[:, None], axis=0)
        denominator = denominator * old_share + tl.sum(share, axis=0)
        highest = new_highest
        if stats is not None:
            place = stats + (first + index).to(tl.int64) * N + token
            tl.store(place, score, mask=present)
            tl.store(place + S.to(tl.int64) * N, scale, mask=present)
        tile = following
    mixed = mixed / denominator
    if norm_weight is not None:
        rho = inverse_rms(tl.sum(mixed * mixed, axis=0), D, norm_eps)
        mixed = mixed * rho * load_vector(norm_weight, column, D)
    tl.store(output + token * D + column, mixed.to(output.dtype.element_ty), mask=column < D)
    if stats is not None:
        tl.store(stats + 2 * S.to(tl.int64) * N + token, highest + tl.log(denominator))


@triton.jit
def load_stats(stats, index, S, token, N):
    """Scores and inverse root mean squares of sources `index` [BS] of a token; such that absent ones weigh nothing."""
    present = (index >= 0) & (index < S)
    place = stats + index.to(tl.int64) * N + token
    score = tl.load(place, mask=present, other=float("-inf"))
    return score, tl.load(place + S.to(tl.int64) * N, mask=present, other=0.0)


@triton.jit(do_not_specialize=["arrived", "N", "S", "steps"])
def attn_res_backward_kernel(
    sources, dsources, arriving, arrived, query, key_weight, norm_weight, stats, doutput, dw, dnorm,
    N, D, S, norm_eps, steps,
    BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A program walks over `steps` tokens and leaves one partial sum for each of the weights' gradients.

    It looks at the sources of a token twice: once for the mix, then, from the cache, for their gradients.
    With o = sum_i a_i s_i, u = dy g and rho = (|o|^2 / D + norm_eps)^-1/2:

        norm:     do = rho u - rho^3 <u, o> o / D
        softmax:  d score_i = a_i (<do, s_i> - <do, o>)
        scores:   d s_i = a_i do + d score_i (r_i w - r_i^2 score_i s_i / D)

    To which is added what `arriving` has for sources whose bit in `arrived` is set.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    index = tl.arange(0, BS)
    partial_w = tl.zeros([BD], tl.float32)
    partial_norm = tl.zeros([BD], tl.float32)
    last = tl.cdiv(S, BS) * BS - BS
    for token in range(program * steps, tl.minimum(program * steps + steps, N)):
        total = tl.load(stats + 2 * S.to(tl.int64) * N + token)
        mixed = tl.zeros([BD], tl.float32)
        for first in range(0, S, BS):
            x = load_tile(sources, first + index, S, token, column, D).to(tl.float32)
            score, scale = load_stats(stats, first + index, S, token, N)
            mixed += tl.sum(x * tl.exp(score - total)[:, None], axis=0)

        dmixed = tl.load(doutput + token * D + column, mask=column < D, other=0.0).to(tl.float32)
        if norm_weight is not None:
            scaled = dmixed * load_vector(norm_weight, column, D)
            mixed_square, mixed_product = tl.reduce((mixed * mixed, mixed * scaled), 0, add_pairs)
            rho = inverse_rms(mixed_square, D, norm_eps)
            partial_norm += dmixed * mixed * rho
            dmixed = scaled * rho - mixed * (mixed_product * rho * rho * rho / D)
        expected = tl.sum(dmixed * mixed, axis=0)

        w = load_query(query, key_weight, column, D)
        for before in range(0, S, BS):
            first = last - before
            x = load_tile(sources, first + index, S, token, column, D).to(tl.float32)
            score, scale = load_stats(stats, first + index, S, token, N)
            share = tl.exp(score - total)
            gain = tl.sum(x * dmixed[None, :], axis=1)
            dscore = tl.where(S > 1, share * (gain - expected), 0.0)  # with one source there is nothing to choose
            along_w = dscore * scale
            along_x = dscore * score * scale * scale / D
            partial_w += tl.sum(along_w[:, None] * x, axis=0)
            dx = share[:, None] * dmixed[None, :] + along_w[:, None] * w[None, :] - along_x[:, None] * x
            pointer = pick(dsources, first + index)[:, None] + (token * D + column)[None, :]
            mask = (first + index < S)[:, None] & (column < D)[None, :]
            if arriving is not None:
                later = pick(arriving, first + index)[:, None] + (token * D + column)[None, :]
                has_later = ((arrived >> (first + index)) & 1) != 0
                dx += tl.load(later, mask=mask & has_later[:, None], other=0.0).to(tl.float32)
            tl.store(pointer, dx.to(dsources[0].dtype.element_ty), mask=mask)

    place = program * D + column
    tl.store(dw + place, partial_w, mask=column < D)
    if norm_weight is not None:
        tl.store(dnorm + place, partial_norm, mask=column < D)


@triton.jit(do_not_specialize=["P"])
def attn_res_weights_kernel(
    dw, dnorm, query, key_weight, dquery, dkey_weight, dnorm_weight, P, D, BP: tl.constexpr, BD: tl.constexpr
):
    """Add P partial sums [P, D] of every gradient, in order; the query's is shared out to its two factors."""
    column = tl.program_id(0) * BD + tl.arange(0, BD)
    total_w = tl.zeros([BP, BD], tl.float32)
    total_norm = tl.zeros([BP, BD], tl.float32)
    for first in range(0, P, BP):
        row = first + tl.arange(0, BP)
        mask = (row < P)[:, None] & (column < D)[None, :]
        offset = row.to(tl.int64)[:, None] * D + column[None, :]
        total_w += tl.load(dw + offset, mask=mask, other=0.0)
        if dnorm_weight is not None:
            total_norm += tl.load(dnorm + offset, mask=mask, other=0.0)
    total = tl.sum(total_w, axis=0)
    if key_weight is not None:
        dkey = total * load_vector(query, column, D)
        tl.store(dkey_weight + column, dkey.to(dkey_weight.dtype.element_ty), mask=column < D)
        total *= load_vector(key_weight, column, D)
    tl.store(dquery + column, total.to(dquery.dtype.element_ty), mask=column < D)
    if dnorm_weight is not None:
        total = tl.sum(total_norm, axis=0)
        tl.store(dnorm_weight + column, total.to(dnorm_weight.dtype.element_ty), mask=column < D)


def _forward_tile(width: int) -> dict[str, int]:
    """Two sources at a time; of wide streams one, by half as many warps, so that two programs fit a multiprocessor."""
    columns = next_power_of_2(width)
    sources, channels_per_warp = (1, 1024) if columns > 4096 else (2, 512)
    num_warps = min(16, max(1, columns // channels_per_warp))
    return {"BS": sources, "BD": columns, "num_warps": num_warps, **register_limit(MAX_REGISTERS)}


def _backward_tile(width: int) -> dict[str, int]:
    """Two sources at a time, 16 channels for each thread."""
    columns = next_power_of_2(width)
    num_warps = min(16, max(1, columns // 512))
    return {"BS": 2, "BD": columns, "num_warps": num_warps, **register_limit(MAX_REGISTERS)}


@on_its_device
def attn_res_forward(
    sources: list[torch.Tensor],
    query: torch.Tensor,
    key_weight: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
) -> list[torch.Tensor]:
    """Output [..., D], and if `save` the stats [2 S + 1, N] float32. All inputs contiguous."""
    output = torch.empty_like(sources[0])
    width = output.shape[-1]
    rows = output.numel() // width
    stats = None
    if save:
        stats = torch.empty(2 * len(sources) + 1, rows, dtype=torch.float32, device=output.device)
    if rows > 0:
        attn_res_forward_kernel[(rows,)](
            padded(sources), query, key_weight, norm_weight, output, stats, rows, width, len(sources), eps, norm_eps,
            **_forward_tile(width),
        )  # fmt: skip
    return [output] if stats is None else [output, stats]


def _gradients(
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
    width = query.shape[0]
    rows = doutput.numel() // width
    tile = _backward_tile(width)
    steps = cdiv(rows, max(MAX_PROGRAMS, MAX_WARPS // tile["num_warps"]))
    programs = cdiv(rows, steps)
    dw = torch.empty(programs, width, dtype=torch.float32, device=query.device)
    dnorm = None if norm_weight is None else torch.empty_like(dw)
    attn_res_backward_kernel[(programs,)](
        padded(sources), padded(dsources), arriving, arrived, query, key_weight, norm_weight, stats, doutput,
        dw, dnorm, rows, width, len(sources), norm_eps, steps,
        **tile,
    )  # fmt: skip
    return dw, dnorm


@on_its_device
def attn_res_backward(
    sources: list[torch.Tensor],
    query: torch.Tensor,
    key_weight: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    stats: torch.Tensor,
    doutput: torch.Tensor,
    arriving: list[torch.Tensor | None],
    norm_eps: float,
) -> list[torch.Tensor]:
    """Gradients of the sources, of `query`, and of those of `key_weight` and `norm_weight` that there are.

    To the source's is added what arrives for it, before they are rounded. All inputs contiguous.
    """
    dsources = [torch.empty_like(source) for source in sources]
    weights = [weight for weight in (query, key_weight, norm_weight) if weight is not None]
    width = query.shape[0]
    if doutput.numel() == 0:
        return dsources + [torch.zeros_like(weight) for weight in weights]
    arrived = sum(1 << i for i, later in enumerate(arriving) if later is not None)
    later = padded([doutput if tensor is None else tensor for tensor in arriving]) if arrived else None
    gradients = wide_gradients if width > WIDE_CHANNELS else _gradients
    dw, dnorm = gradients(sources, dsources, later, arrived, query, key_weight, norm_weight, stats, doutput, norm_eps)
    dquery, dkey_weight, dnorm_weight = (
        None if weight is None else torch.empty_like(weight) for weight in (query, key_weight, norm_weight)
    )
    attn_res_weights_kernel[(cdiv(width, 16),)](
        dw, dnorm, query, key_weight, dquery, dkey_weight, dnorm_weight, dw.shape[0], width,
        BP=256, BD=16, num_warps=8,
    )  # fmt: skip
    return dsources + [grad for grad in (dquery, dkey_weight, dnorm_weight) if grad is not None]

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of depth mixing, forward and backward, with the RMS norm that follows.

Alphabet: S sources, N tokens (all leading axes), D channels. A program holds BN tokens; D fits one block, BD.

The sources are separate tensors. A kernel takes a tuple of pointers, padded to one of few lengths so that few kernels
are compiled, and loops over the first S of them.
"""

import torch
import triton
import triton.language as tl

# Lengths to which the tuple of sources is padded; the released model has up to 9.
SOURCE_COUNTS = (4, 9, 16)
# Programs of the backward pass: enough to fill a large chip several times, few enough that their partial sums are
# small beside the sources. The same on every machine, so that the order of summation is, too.
MAX_PROGRAMS = 1024


@triton.jit
def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add_triples(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def pick(pointers, i):
    """Pointer i of a tuple (selects keep what is known about alignment)."""
    chosen = pointers[0]
    for j in tl.static_range(1, len(pointers)):
        chosen = tl.where(i == j, pointers[j], chosen)
    return chosen


@triton.jit
def load_vector(pointer, column, D):
    return tl.load(pointer + column, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def load_query(query, key_weight, column, D):
    """The vector that scores are products with, [BD]."""
    w = load_vector(query, column, D)
    if key_weight is not None:
        w *= load_vector(key_weight, column, D)
    return w


@triton.jit(do_not_specialize=["N", "S"])
def attn_res_forward_kernel(
    sources, query, key_weight, norm_weight, output, weights, N, D, S, eps, norm_eps,
    BN: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Scores, softmax, average and norm in one look at the sources; leaves `weights` [S, N] for backward."""
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    column = tl.arange(0, BD)
    in_rows = row < N
    mask = in_rows[:, None] & (column < D)[None, :]
    offset = row[:, None] * D + column[None, :]
    w = load_query(query, key_weight, column, D)

    mixed = tl.zeros([BN, BD], tl.float32)
    highest = tl.full([BN], float("-inf"), tl.float32)
    denominator = tl.zeros([BN], tl.float32)
    # The loads of the next one or two sources are under way while a source is reduced.
    tile = tl.load(sources[0] + offset, mask=mask, other=0.0)
    if AHEAD == 2:
        tile_1 = tl.load(pick(sources, 1) + offset, mask=mask & (S > 1), other=0.0)
    for i in range(S):
        tile_ahead = tl.load(pick(sources, i + AHEAD) + offset, mask=mask & (i + AHEAD < S), other=0.0)
        x = tile.to(tl.float32)
        square, product = tl.reduce((x * x, x * w[None, :]), 1, add_pairs)
        score = product * tl.rsqrt(square / D + eps)
        new_highest = tl.maximum(highest, score)
        old_share = tl.exp(highest - new_highest)
        share = tl.exp(score - new_highest)
        mixed = mixed * old_share[:, None] + x * share[:, None]
        denominator = denominator * old_share + share
        highest = new_highest
        if weights is not None:
            tl.store(weights + i * N + row, score, mask=in_rows)
        if AHEAD == 2:
            tile = tile_1
            tile_1 = tile_ahead
        else:
            tile = tile_ahead
    mixed = mixed / denominator[:, None]
    if norm_weight is not None:
        inverse_rms = tl.rsqrt(tl.sum(mixed * mixed, axis=1) / D + norm_eps)
        mixed = mixed * inverse_rms[:, None] * load_vector(norm_weight, column, D)[None, :]
    tl.store(output + offset, mixed.to(output.dtype.element_ty), mask=mask)
    if weights is not None:
        # Behind the scores, what their exponentials sum to: a_i = exp(score_i - total).
        tl.store(weights + S * N + row, highest + tl.log(denominator), mask=in_rows)


@triton.jit
def load_share(scores, total, i, row, in_rows, N):
    """Weight of source i in the mix, [BN]."""
    return tl.exp(tl.load(scores + i * N + row, mask=in_rows, other=0.0) - total)


@triton.jit(do_not_specialize=["N", "S", "steps"])
def attn_res_backward_kernel(
    sources, dsources, query, key_weight, norm_weight, scores, doutput, dw, dnorm, N, D, S, eps, norm_eps, steps,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A program walks over `steps` tiles of tokens and leaves one partial sum for each of the weights' gradients.

    It looks at the sources of a tile twice: once for the mix, then backwards, from the cache, for their gradients.
    With o = sum_i a_i s_i of one token, u = dy g and rho = (|o|^2 / D + norm_eps)^-1/2:

        norm:     do = rho u - rho^3 <u, o> o / D
        softmax:  d score_i = a_i (<do, s_i> - <do, o>)
        scores:   d s_i = a_i do + d score_i (r_i w - r_i^3 <w, s_i> s_i / D)
    """
    column = tl.arange(0, BD)
    partial_w = tl.zeros([BN, BD], tl.float32)
    partial_norm = tl.zeros([BN, BD], tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps
    for step in range(steps):
        row = (first + step) * BN + tl.arange(0, BN)
        in_rows = row < N
        mask = in_rows[:, None] & (column < D)[None, :]
        offset = row[:, None] * D + column[None, :]
        total = tl.load(scores + S * N + row, mask=in_rows, other=0.0)

        mixed = tl.zeros([BN, BD], tl.float32)
        tile = tl.load(sources[0] + offset, mask=mask, other=0.0)
        for i in range(S):
            following = tl.load(pick(sources, i + 1) + offset, mask=mask & (i + 1 < S), other=0.0)
            mixed += load_share(scores, total, i, row, in_rows, N)[:, None] * tile.to(tl.float32)
            tile = following

        dmixed = tl.load(doutput + offset, mask=mask, other=0.0).to(tl.float32)
        if norm_weight is not None:
            scaled = dmixed * load_vector(norm_weight, column, D)[None, :]
            square, product = tl.reduce((mixed * mixed, mixed * scaled), 1, add_pairs)
            inverse_rms = tl.rsqrt(square / D + norm_eps)
            cubed = inverse_rms * inverse_rms * inverse_rms
            partial_norm += dmixed * mixed * inverse_rms[:, None]
            dmixed = scaled * inverse_rms[:, None] - mixed * (product * cubed / D)[:, None]
        expected = tl.sum(dmixed * mixed, axis=1)

        w = load_query(query, key_weight, column, D)
        tile = tl.load(pick(sources, S - 1) + offset, mask=mask, other=0.0)
        for j in range(S):
            i = S - 1 - j
            following = tl.load(pick(sources, i - 1) + offset, mask=mask & (i > 0), other=0.0)
            x = tile.to(tl.float32)
            share = load_share(scores, total, i, row, in_rows, N)
            square, product, gain = tl.reduce((x * x, x * w[None, :], x * dmixed), 1, add_triples)
            inverse_rms = tl.rsqrt(square / D + eps)
            dscore = tl.where(S > 1, share * (gain - expected), 0.0)  # with one source there is nothing to choose
            along_w = dscore * inverse_rms
            along_x = along_w * product * inverse_rms * inverse_rms / D
            dx = share[:, None] * dmixed + along_w[:, None] * w[None, :] - along_x[:, None] * x
            partial_w += along_w[:, None] * x
            dsource = pick(dsources, i)
            tl.store(dsource + offset, dx.to(dsource.dtype.element_ty), mask=mask)
            tile = following

    place = tl.program_id(0).to(tl.int64) * D + column
    tl.store(dw + place, tl.sum(partial_w, axis=0), mask=column < D)
    if norm_weight is not None:
        tl.store(dnorm + place, tl.sum(partial_norm, axis=0), mask=column < D)


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


def _tile(num_rows: int, num_columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: 16 values for each thread, no more than 16 warps."""
    columns = triton.next_power_of_2(num_columns)
    rows = min(max(1, 512 // columns), triton.next_power_of_2(num_rows))
    return rows, columns, min(16, max(1, rows * columns // 512))


def _padded(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    length = next(count for count in SOURCE_COUNTS if count >= len(tensors))
    return (*tensors, *(tensors[:1] * (length - len(tensors))))


def attn_res_forward(
    sources: list[torch.Tensor],
    query: torch.Tensor,
    key_weight: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
) -> list[torch.Tensor]:
    """Output [..., D], and if `save` the scores and their log-sum [S + 1, N] float32. All inputs contiguous."""
    output = torch.empty_like(sources[0])
    width = output.shape[-1]
    rows = output.numel() // width
    scores = None
    if save:
        scores = torch.empty(len(sources) + 1, rows, dtype=torch.float32, device=output.device)
    if rows > 0:
        block_n, block_d, num_warps = _tile(rows, width)
        attn_res_forward_kernel[(triton.cdiv(rows, block_n),)](
            _padded(sources), query, key_weight, norm_weight, output, scores, rows, width, len(sources), eps, norm_eps,
            BN=block_n, BD=block_d, AHEAD=1, num_warps=num_warps,
        )  # fmt: skip
    return [output] if scores is None else [output, scores]


def attn_res_backward(
    sources: list[torch.Tensor],
    query: torch.Tensor,
    key_weight: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    scores: torch.Tensor,
    doutput: torch.Tensor,
    eps: float,
    norm_eps: float,
) -> list[torch.Tensor]:
    """Gradients of the sources, of `query`, and of those of `key_weight` and `norm_weight` that there are."""
    dsources = [torch.empty_like(source) for source in sources]
    weights = [weight for weight in (query, key_weight, norm_weight) if weight is not None]
    width = query.shape[0]
    rows = doutput.numel() // width
    if rows == 0:
        return dsources + [torch.zeros_like(weight) for weight in weights]
    block_n, block_d, num_warps = _tile(rows, width)
    tiles = triton.cdiv(rows, block_n)
    steps = triton.cdiv(tiles, MAX_PROGRAMS)
    programs = triton.cdiv(tiles, steps)
    dw = torch.empty(programs, width, dtype=torch.float32, device=query.device)
    dnorm = None if norm_weight is None else torch.empty_like(dw)
    attn_res_backward_kernel[(programs,)](
        _padded(sources), _padded(dsources), query, key_weight, norm_weight, scores, doutput, dw, dnorm,
        rows, width, len(sources), eps, norm_eps, steps, BN=block_n, BD=block_d, num_warps=num_warps,
    )  # fmt: skip
    dquery, dkey_weight, dnorm_weight = (
        None if weight is None else torch.empty_like(weight) for weight in (query, key_weight, norm_weight)
    )
    attn_res_weights_kernel[(triton.cdiv(width, 32),)](
        dw, dnorm, query, key_weight, dquery, dkey_weight, dnorm_weight, programs, width, BP=128, BD=32, num_warps=8
    )
    return dsources + [grad for grad in (dquery, dkey_weight, dnorm_weight) if grad is not None]

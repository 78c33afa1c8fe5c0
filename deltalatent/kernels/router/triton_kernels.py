# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the router.

Alphabet: T tokens, E experts (EP: padded to a power of two), K chosen ones (KP: padded), B bins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltalatent.kernels.tiles import cdiv, next_power_of_2, on_its_device


@triton.jit(do_not_specialize=["T", "E"])
def logits_kernel(
    x, w, logits, T, E, D, BT: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, PER_PART: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """x [T, D], w [E, D] -> logits [T, E] float32.

    Tensor cores round sums down instead of to the nearest, which adds up over a long sum: so every PER_PART steps the
    partial sum moves to an accumulator that is added to in ordinary float32 arithmetic.
    """
    blocks = tl.cdiv(E, BE)
    token = (tl.program_id(0) // blocks).to(tl.int64) * BT + tl.arange(0, BT)
    expert = (tl.program_id(0) % blocks) * BE + tl.arange(0, BE)
    real, inside = (token < T)[:, None], (expert < E)[:, None]
    total = tl.zeros([BT, BE], tl.float32)
    part = tl.zeros([BT, BE], tl.float32)
    steps = 0
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        within = (d < D)[None, :]
        xs = tl.load(x + token[:, None] * D + d[None, :], mask=real if EVEN else real & within, other=0.0)
        ws = tl.load(w + expert[:, None] * D + d[None, :], mask=inside if EVEN else inside & within, other=0.0)
        part = tl.dot(xs, tl.trans(ws), part)
        steps += 1
        if steps == PER_PART:
            total += part
            part = tl.zeros([BT, BE], tl.float32)
            steps = 0
    place = logits + token[:, None] * E + expert[None, :]
    tl.store(place, total + part, mask=real & (expert < E)[None, :])


@triton.jit(do_not_specialize=["E"])
def choose_kernel(
    logits, bias, scores, index, weights, cutoff, E, scaling_factor, K: tl.constexpr, RENORMALIZE: tl.constexpr,
    EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """One token: K + 1 rounds of taking the largest; of equal ones the first."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    inside = expert < E
    score = tl.sigmoid(tl.load(logits + token * E + expert, mask=inside, other=0.0))
    tl.store(scores + token * E + expert, score, mask=inside)
    biased = score + tl.load(bias + expert, mask=inside, other=0.0)
    biased = tl.where(biased == biased, biased, float("inf"))  # NaN comes first, as in `torch.topk`
    biased = tl.where(inside, biased, float("-inf"))
    place = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.int32)
    weight = tl.zeros([KP], tl.float32)
    for j in range(K):
        best = tl.argmax(biased, axis=0)
        here = expert == best
        chosen = tl.where(place == j, best, chosen)
        weight = tl.where(place == j, tl.sum(tl.where(here, score, 0.0), axis=0), weight)
        biased = tl.where(here, float("-inf"), biased)
    tl.store(cutoff + token, tl.max(biased, axis=0))
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    tl.store(index + token * K + place, chosen.to(tl.int64), mask=place < K)
    tl.store(weights + token * K + place, weight * scaling_factor, mask=place < K)


@triton.jit(do_not_specialize=["E"])
def choose_backward_kernel(
    scores, index, weights, dscores, dweights, dlogits, E, scaling_factor, K: tl.constexpr,
    RENORMALIZE: tl.constexpr, HAS_DSCORES: tl.constexpr, EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """One token. With D the sum of its chosen scores: d score_j = (scaling dw_j - sum_i dw_i w_i) / D."""
    token = tl.program_id(0).to(tl.int64)
    if RENORMALIZE:
        place = tl.arange(0, KP)
        used = place < K
        chosen = tl.load(index + token * K + place, mask=used, other=0)
        dweight = tl.load(dweights + token * K + place, mask=used, other=0.0)
        weight = tl.load(weights + token * K + place, mask=used, other=0.0)
        common = tl.sum(dweight * weight, axis=0)
        total = tl.sum(tl.load(scores + token * E + chosen, mask=used, other=0.0), axis=0) + 1e-20
    else:
        common, total = 0.0, 1.0
    expert = tl.arange(0, EP)
    inside = expert < E
    score = tl.load(scores + token * E + expert, mask=inside, other=0.0)
    dscore = tl.zeros([EP], tl.float32)
    for j in range(K):
        gradient = (tl.load(dweights + token * K + j) * scaling_factor - common) / total
        dscore = tl.where(expert == tl.load(index + token * K + j), gradient, dscore)
    if HAS_DSCORES:
        dscore += tl.load(dscores + token * E + expert, mask=inside, other=0.0)
    tl.store(dlogits + token * E + expert, dscore * score * (1.0 - score), mask=inside)


@triton.jit
def find_counted(cutoff, mask, token, T, HAS_MASK: tl.constexpr):
    """Cutoffs of tokens, zero where they do not count, and whether they do."""
    real = token < T
    limit = tl.load(cutoff + token, mask=real, other=float("inf"))
    counted = real & (tl.abs(limit) < float("inf"))
    if HAS_MASK:
        counted = counted & (tl.load(mask + token, mask=real, other=0) != 0)
    return tl.where(counted, limit, 0.0), counted


@triton.jit(do_not_specialize=["T", "E", "blocks"])
def count_kernel(
    flat, scores, cutoff, bias, mask, selected, T, E, blocks, K: tl.constexpr, B: tl.constexpr, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, EP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Add to flat int32 [E B + E + 1]: counts, loads, tokens. Integers, so that the order does not matter.

    Programs below `blocks` count bins. The others count PAIRS pairs each on their own first: there are many of them to
    an expert, and additions to one address wait for each other.
    """
    every = tl.arange(0, EP)
    if tl.program_id(0) < blocks:
        token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
        limit, counted = find_counted(cutoff, mask, token, T, HAS_MASK)
        low = tl.min(tl.load(bias + every, mask=every < E, other=float("inf")), axis=0)
        high = tl.max(tl.load(bias + every, mask=every < E, other=float("-inf")), axis=0)
        scale = tl.div_rn(B * 1.0, high - low + 2.0)
        low = low - 1.0
        for first in range(tl.program_id(1) * BE, E, tl.num_programs(1) * BE):
            expert = first + tl.arange(0, BE)
            inside = counted[:, None] & (expert < E)[None, :]
            score = tl.load(scores + token[:, None] * E + expert[None, :], mask=inside, other=0.0)
            bins = ((limit[:, None] - score - low) * scale).to(tl.int32)
            bins = tl.minimum(tl.maximum(bins, 0), B - 1)
            tl.atomic_add(flat + expert[None, :] * B + bins, 1, mask=inside, sem="relaxed")
    elif tl.program_id(1) == 0:
        pair = (tl.program_id(0) - blocks).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
        _, counted = find_counted(cutoff, mask, pair // K, T, HAS_MASK)
        chosen = tl.load(selected + pair, mask=counted, other=0).to(tl.int32)
        loads = tl.histogram(chosen, EP, mask=counted)
        tl.atomic_add(flat + E * B + every, loads, mask=(every < E) & (loads > 0), sem="relaxed")
        tokens = tl.sum((counted & (pair % K == 0)).to(tl.int32), axis=0)
        tl.atomic_add(flat + E * B + E, tokens, sem="relaxed")


def _warps(columns: int) -> int:
    """One warp on its own up to 1024 columns: reductions then stay within it."""
    return 1 if columns <= 1024 else 4


@on_its_device
def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [T, E] of half-precision x [T, D] and weight [E, D], both contiguous."""
    (T, D), E = x.shape, weight.shape[0]
    result = torch.empty(T, E, dtype=torch.float32, device=x.device)
    BT, BE, BD, warps, stages = (16, 32, 128, 4, 4) if T <= 64 else (128, 128, 64, 8, 3)
    logits_kernel[(cdiv(T, BT) * cdiv(E, BE),)](
        x, weight, result, T, E, D,
        BT=BT, BE=BE, BD=BD, PER_PART=256 // BD, EVEN=D % BD == 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return result


@on_its_device
def choose_forward(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, renormalize: bool, scaling_factor: float
) -> list[torch.Tensor]:
    """Scores, index, weights, cutoff; inputs contiguous float32."""
    T, E = logits.shape
    scores = torch.empty_like(logits)
    index = torch.empty(T, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
    cutoff = torch.empty(T, dtype=torch.float32, device=logits.device)
    EP = next_power_of_2(E)
    choose_kernel[(T,)](
        logits, bias, scores, index, weights, cutoff, E, scaling_factor,
        K=top_k, RENORMALIZE=renormalize, EP=EP, KP=next_power_of_2(top_k), num_warps=_warps(EP),
    )  # fmt: skip
    return [scores, index, weights, cutoff]


@on_its_device
def choose_backward(
    scores: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    dscores: torch.Tensor | None,
    dweights: torch.Tensor,
    renormalize: bool,
    scaling_factor: float,
) -> torch.Tensor:
    """Gradient of the logits [T, E]; inputs contiguous."""
    T, E = scores.shape
    top_k = index.shape[1]
    dlogits = torch.empty_like(scores)
    EP = next_power_of_2(E)
    choose_backward_kernel[(T,)](
        scores, index, weights, dscores, dweights, dlogits, E, scaling_factor,
        K=top_k, RENORMALIZE=renormalize, HAS_DSCORES=dscores is not None, EP=EP, KP=next_power_of_2(top_k),
        num_warps=_warps(EP),
    )  # fmt: skip
    return dlogits


@on_its_device
def count(
    flat: torch.Tensor,
    scores: torch.Tensor,
    cutoff: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    selected: torch.Tensor,
    num_bins: int,
) -> None:
    """Add one micro-batch to `flat`; inputs contiguous."""
    T, E = scores.shape
    BT, BE, PAIRS = 32, 64, 4096
    blocks = cdiv(T, BT)
    # Many programs even for few tokens, each with some columns of its own.
    columns = min(cdiv(E, BE), 4)
    count_kernel[(blocks + cdiv(selected.numel(), PAIRS), columns)](
        flat, scores, cutoff, bias, mask, selected, T, E, blocks,
        K=selected.shape[1], B=num_bins, HAS_MASK=mask is not None, BT=BT, BE=BE, EP=next_power_of_2(E), PAIRS=PAIRS,
        num_warps=4,
    )  # fmt: skip

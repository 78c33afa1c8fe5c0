# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of the cross-entropy of logits: the losses, and the logits turned into their gradient in place.

Alphabet: N tokens, V words. A program works on the logits of one token, BV at a time; twice, the second time
backwards: what it has read last is still in the cache.
"""

import torch
import triton
import triton.language as tl

from deltalatent.kernels.tiles import next_power_of_2, on_its_device

BLOCK = 4096
# Below every logit; not minus infinity, whose difference to itself is no number.
LOWEST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["ignore_index"])
def softmax_cross_entropy_kernel(
    logits, targets, losses, V, stride, ignore_index, WITH_GRADIENT: tl.constexpr, BV: tl.constexpr
):
    """A target that is no word gives NaN."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    target = tl.load(targets + token)
    if target == ignore_index:
        tl.store(losses + token, 0.0)
        if WITH_GRADIENT:
            for first in range(0, V, BV):
                word = first + tl.arange(0, BV)
                tl.store(row + word, tl.zeros([BV], logits.dtype.element_ty), mask=word < V)
    else:
        # A running maximum for each place of the block: the places meet once, at the end.
        highest = tl.full([BV], LOWEST, tl.float32)
        total = tl.zeros([BV], tl.float32)
        for first in range(0, V, BV):
            word = first + tl.arange(0, BV)
            x = tl.load(row + word, mask=word < V, other=float("-inf")).to(tl.float32)
            new_highest = tl.maximum(highest, x)
            total = total * tl.exp(highest - new_highest) + tl.exp(x - new_highest)
            highest = new_highest
        peak = tl.max(highest, axis=0)
        log_sum = peak + tl.log(tl.sum(total * tl.exp(highest - peak), axis=0))
        is_word = (target >= 0) & (target < V)
        chosen = tl.load(row + target, mask=is_word, other=float("nan")).to(tl.float32)
        tl.store(losses + token, log_sum - chosen)
        if WITH_GRADIENT:
            # The gradient takes the place of logits: of the target's, not before every warp has read it.
            tl.debug_barrier()
            last = tl.cdiv(V, BV) * BV - BV
            for before in range(0, V, BV):
                word = last - before + tl.arange(0, BV)
                x = tl.load(row + word, mask=word < V, other=0.0).to(tl.float32)
                gradient = tl.exp(x - log_sum) - tl.where(word == target, 1.0, 0.0)
                tl.store(row + word, gradient.to(logits.dtype.element_ty), mask=word < V)


@on_its_device
def softmax_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, with_gradient: bool
) -> torch.Tensor:
    """Losses [N] in float32; `logits` [N, V] (rows contiguous) become their gradient if `with_gradient`."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    width = logits.shape[1]
    if logits.numel() > 0:
        block = min(BLOCK, next_power_of_2(width))
        softmax_cross_entropy_kernel[(logits.shape[0],)](
            logits, targets, losses, width, logits.stride(0), ignore_index,
            WITH_GRADIENT=with_gradient, BV=block, num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip
    return losses

# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch forms of the router's operators: readable, differentiable, float32 and float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Elements of the flat bin index built at a time (int64, so 32 MiB): 8192 tokens x 896 experts take two rounds.
_INDEX_ELEMENTS = 1 << 22


class Choice(NamedTuple):
    """What is chosen for T tokens among E experts; dtype of the logits unless said otherwise.

    Attributes:
        scores: [T, E], sigmoid of the logits.
        index: int64 [T, K], chosen experts, in no particular order.
        weights: [T, K], their weights.
        cutoff: [T], the (K+1)-th largest score plus bias (-inf if every expert is chosen), no gradient.
    """

    scores: Tensor
    index: Tensor  # type: ignore[assignment]  # hides the method of tuples
    weights: Tensor
    cutoff: Tensor


def choose_experts_reference(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> Choice:
    """See `choose_experts`."""
    scores = logits.sigmoid()
    with torch.no_grad():
        index, cutoff = _largest(scores + bias, top_k, num_groups, top_groups)
    weights = scores.gather(1, index)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Choice(scores, index, weights * scaling_factor, cutoff)


def _largest(biased: Tensor, top_k: int, num_groups: int, top_groups: int) -> tuple[Tensor, Tensor]:
    """[T, E] -> the K best [T, K] and the value of the best one left out [T]."""
    if num_groups > 1:
        grouped = biased.unflatten(1, (num_groups, -1))  # [T, G, E/G]
        rank = grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(top_groups, dim=-1).indices, True)
        biased = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    if top_k == biased.shape[1]:
        return biased.topk(top_k, dim=-1).indices, biased.new_full(biased.shape[:1], -torch.inf)
    values, index = biased.topk(top_k + 1, dim=-1)
    return index[:, :-1], values[:, -1]


def bin_range(bias: Tensor) -> tuple[Tensor, Tensor]:
    """Lower edge and width of the range `[min(b) - 1, max(b) + 1]` of the bins, each [...] for biases [..., E]."""
    low, high = torch.aminmax(bias, dim=-1)
    return low - 1, high - low + 2


def count_required_biases_reference(
    flat: Tensor,
    scores: Tensor,
    cutoff: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    selected: Tensor | None,
    num_bins: int,
) -> None:
    """See `count_required_biases`."""
    num_experts = scores.shape[1]
    num_counts = num_experts * num_bins
    low, width = bin_range(bias)
    counted = torch.isfinite(cutoff)
    if mask is not None:
        counted = counted & mask
    flat[-1] += counted.sum()
    loads = flat[num_counts:-1]
    if selected is not None:
        ones = counted.to(torch.int32)[:, None].expand_as(selected).reshape(-1)
        loads.scatter_add_(0, selected.reshape(-1), ones)

    first_bin = torch.arange(num_experts, device=scores.device) * num_bins
    rows = max(1, _INDEX_ELEMENTS // num_experts)
    for start in range(0, scores.shape[0], rows):
        piece = slice(start, start + rows)
        ones = counted[piece].to(torch.int32)[:, None].expand(-1, num_experts)  # [t, E]
        if selected is None:
            above = scores[piece] + bias > cutoff[piece, None]
            loads += (above & counted[piece, None]).sum(dim=0, dtype=torch.int32)
        required = cutoff[piece, None] - scores[piece]
        # The clamp comes after the cast: it also keeps the index of a NaN, whose count is 0, inside the tensor.
        bins = ((required - low) * (num_bins / width)).long().clamp_(0, num_bins - 1)
        flat[:num_counts].scatter_add_(0, bins.add_(first_bin).reshape(-1), ones.reshape(-1))

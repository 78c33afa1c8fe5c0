# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Depth mixing of block attention residuals in plain PyTorch (Kimi K3 report, arXiv 2607.24653; golden README).

Shapes: S sources of [..., D] each, D the width of the residual stream. Arithmetic is float32, or float64 if the
sources are. Neither direction ever holds the [S, ..., D] stack, or a float32 copy of more than one source.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_residual_mix_reference(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Forward pass; see `attention_residual_mix` for the equation and the arguments.

    Sources are folded in one after the other with a running maximum (online softmax).

    Returns:
        The mix [..., D] in the dtype of the sources, and for the backward pass the scores [S + 1, ...] in the dtype of
        the arithmetic: one per source, then the logarithm of the sum of their exponentials.
    """
    w = _score_vector(sources, query, key_weight)

    def scored(source: Tensor) -> tuple[Tensor, Tensor]:
        s = source.to(w.dtype)
        return s, (s @ w) * torch.rsqrt(s.square().mean(-1) + eps)

    mixed, highest = scored(sources[0])
    scores, denominator = [highest], torch.ones_like(highest)
    for source in sources[1:]:
        s, score = scored(source)
        new_highest = torch.maximum(highest, score)
        old_share, share = torch.exp(highest - new_highest), torch.exp(score - new_highest)
        mixed = torch.addcmul(mixed * old_share[..., None], s, share[..., None])
        denominator = denominator * old_share + share
        highest = new_highest
        scores.append(score)
    mixed = mixed / denominator[..., None]
    if norm_weight is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.to(w.dtype)
    scores.append(highest + denominator.log())
    return mixed.to(sources[0].dtype), torch.stack(scores)


def attention_residual_mix_backward_reference(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    scores: Tensor,
    doutput: Tensor,
    eps: float,
    norm_eps: float,
) -> list[Tensor]:
    """Gradients from the sources and the scores alone: the mix is made again.

    Returns:
        Gradients of the sources, of `query`, and of those of `key_weight` and `norm_weight` that there are.
    """
    w = _score_vector(sources, query, key_weight)
    weights = torch.exp(scores[:-1] - scores[-1])
    do = doutput.to(w.dtype)
    dweights = []
    if norm_weight is not None:
        mixed = torch.zeros_like(do)
        for source, weight in zip(sources, weights, strict=True):
            mixed.addcmul_(source.to(w.dtype), weight[..., None])
        inverse_rms = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + norm_eps)
        normed = mixed.mul_(inverse_rms)
        dweights.append((do * normed).flatten(0, -2).sum(0).to(norm_weight.dtype))
        do = do * norm_weight.to(w.dtype)
        do = inverse_rms * (do - normed * (do * normed).mean(-1, keepdim=True))

    gains = torch.stack([(do * source).sum(-1) for source in sources])  # d loss / d weight
    dscores = weights * (gains - (weights * gains).sum(0))
    dw = torch.zeros_like(w)
    dsources = []
    for source, weight, dscore in zip(sources, weights, dscores, strict=True):
        s = source.to(w.dtype)
        # score = r <w, s>:  d score / d s = r w - (r^3 <w, s> / D) s,  d score / d w = r s
        r = torch.rsqrt(s.square().mean(-1) + eps)
        along_w = dscore * r
        along_s = along_w * (s @ w) * r.square() / s.shape[-1]
        ds = weight[..., None] * do + along_w[..., None] * w - along_s[..., None] * s
        dsources.append(ds.to(source.dtype))
        dw += along_w.flatten() @ s.flatten(0, -2)
    if key_weight is None:
        return [*dsources, dw.to(query.dtype), *dweights]
    dquery, dkey_weight = dw * key_weight.to(w.dtype), dw * query.to(w.dtype)
    return [*dsources, dquery.to(query.dtype), dkey_weight.to(key_weight.dtype), *dweights]


def _score_vector(sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None) -> Tensor:
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    return query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)
